"""The page's engine as an npm package: webgemma.js, its worker, the wheel, Pyodide, a model.

It is also a folder to serve as it is: every file finds the others beside itself."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

from webgemma import __version__
from webgemma.errors import InputError
from webgemma.models import BUNDLED_PATH
from webgemma.web import libraries, wheel
from webgemma.web.site import STATIC

SCRIPTS = ("webgemma.js", "webgemma.d.ts", "worker.js", "python.js")  # of the page
PACKAGE_SCRIPTS = (
    *("constraints/xgrammar.js", "device/replay.js", "gguf/files.js", "media/browser.js"),
)
LIBRARIES = ("pyodide", "xgrammar")
README = """# webgemma

Gemma 4 in a web page, on its visitor's GPU: nothing leaves their machine.

```js
import { load } from "./webgemma/webgemma.js"; // this folder, served as it is

const model = await load("gemma.gguf", { progress: (done, total) => console.log(done / total) });
for await (const piece of model.chat("Why is the sky blue?")) document.body.append(piece.text);
model.close();
```

`load` takes the address of a .gguf, a File or Blob, or nothing: then it is the bundled model, a
tiny one to try things with (`package/demo/`; delete it if your page has its own). `webgemma.d.ts`
explains everything: images and audio, settings, schemas, tools, embeddings, AbortSignal, errors.

Copy this folder to where your page is served from, with a bundler too: the worker, Pyodide and the
wheel are found beside `webgemma.js`. The page needs https or localhost, a browser with WebGPU, and
no special headers. A Content-Security-Policy has to allow `'wasm-unsafe-eval'`.

webgemma is under the Apache License 2.0 (LICENSE), the libraries in `lib/` under those beside them.
Gemma models have terms of their own.
"""


def package_files() -> dict[str, bytes]:
    """Return the files of the package by their paths; the same sources give the same bytes.

    InputError if a library is not installed."""
    installed = libraries.library_files()
    own = {name: installed[name] for name in installed if name.split("/")[0] in LIBRARIES}
    wanted = [f"{name}/{file}" for name in LIBRARIES for file in libraries.LIBRARIES[name].files]
    if any(name not in own for name in wanted):
        raise InputError(libraries.missing_message(installed))
    wheel_data = wheel.Wheel().data()
    files = {name: (STATIC / name).read_bytes() for name in SCRIPTS}
    files |= {f"package/{name}": (wheel.PACKAGE / name).read_bytes() for name in PACKAGE_SCRIPTS}
    files |= {f"lib/{name}": path.read_bytes() for name, path in own.items()}
    files |= {f"lib/{name}": data for name, data in _library_licences().items()}
    build = hashlib.sha256(wheel_data)
    for name in sorted(own):
        build.update(files[f"lib/{name}"])
    about = {
        "version": __version__,
        "wheel": f"wheel/{wheel.NAME}",
        "pyodide": "lib/pyodide/",
        "build": build.hexdigest()[:16],
        "xgrammar": "lib/xgrammar/index.js",
    }
    files |= {
        f"package/demo/{BUNDLED_PATH.name}": BUNDLED_PATH.read_bytes(),
        f"wheel/{wheel.NAME}": wheel_data,
        "api/about": json.dumps(about).encode(),
        "README.md": README.encode(),
    }
    files |= _own_licences(wheel_data)
    return files | {"package.json": _manifest(files)}


def write_package(folder: Path) -> int:
    """Write the package into a new or empty folder; return the bytes of its files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: name a new folder.")
    files = package_files()
    try:
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return sum(map(len, files.values()))


def _manifest(files: dict[str, bytes]) -> bytes:
    """Return package.json for the files beside it."""
    manifest = {
        "name": "webgemma",
        "version": __version__,
        "description": "Gemma 4 in a web page, on its visitor's GPU.",
        "license": "Apache-2.0",
        "keywords": ["gemma", "llm", "webgpu", "gguf", "pyodide"],
        "type": "module",
        "main": "./webgemma.js",
        "types": "./webgemma.d.ts",
        "exports": {
            ".": {"types": "./webgemma.d.ts", "default": "./webgemma.js"},
            "./*": "./*",  # for tools that copy files
        },
        "files": sorted({name.split("/")[0] for name in files}),
    }
    return f"{json.dumps(manifest, indent=2)}\n".encode()


def _library_licences() -> dict[str, bytes]:
    """Return the texts of the libraries' licences, by their paths below lib/."""
    found = {}
    for name, path in libraries.licence_files().items():
        packaged = libraries.PACKAGED / name
        if name.split("/")[0] in LIBRARIES:
            found[name] = (packaged if packaged.is_file() else path).read_bytes()
    return found


def _own_licences(wheel_data: bytes) -> dict[str, bytes]:
    """Return LICENSE and what belongs to the bundled model, as the wheel has them."""
    with zipfile.ZipFile(io.BytesIO(wheel_data)) as archive:
        names = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
        return {name.rpartition("/")[2]: archive.read(name) for name in names}
