"""Build a JupyterLite site whose notebook chats with Gemma, from local files alone.

    python examples/jupyterlite/build.py SITE [MODEL]

Run it with a Python that has webgemma. SITE is a new folder, for any web server; MODEL is a .gguf
that goes into it, by default the bundled one. JupyterLite is installed into an environment of its
own, build/jupyterlite. Nobody who opens the site requests anything from another server: Pyodide is
that of webgemma's page, and the wheels that the kernel wants are downloaded now."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from webgemma.models import BUNDLED_PATH
from webgemma.web.libraries import library_files
from webgemma.web.wheel import NAME, Wheel

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / "build" / "jupyterlite"
# The kernel 0.8.6 is made for Pyodide 314.0.6; it runs on 314.0.7, which the page has.
PACKAGES = ("jupyterlite-core[contents]==0.8.6", "jupyterlite-pyodide-kernel==0.8.6")
WANTED = ("micropip", "ipython", "jedi")  # by the kernel, of Pyodide's own packages
UNLISTED = "comm==0.2.3"  # which the kernel wants, too, and Pyodide does not have
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
APPS = ("notebooks", "lab")
CONFIG = {
    "jupyter-lite-schema-version": 0,
    "jupyter-config-data": {
        "litePluginSettings": {
            "@jupyterlite/pyodide-kernel-extension:kernel": {"disablePyPIFallback": True}
        }
    },
}


def main() -> None:
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    site, model = Path(sys.argv[1]).resolve(), Path([*sys.argv, BUNDLED_PATH][2])
    if site.exists():
        sys.exit(f"{site} exists: name a new folder.")
    if "pyodide/pyodide.mjs" not in library_files():
        sys.exit("Pyodide is missing: run `npm ci` in the checkout.")
    jupyter = install()
    with tempfile.TemporaryDirectory() as temporary:
        lite = Path(temporary)
        add_pyodide(lite / "static" / "pyodide")
        (lite / "pypi").mkdir()  # its wheels are what `piplite.install` finds
        (lite / "pypi" / NAME).write_bytes(Wheel().data())
        shutil.copy(download([UNLISTED])[0], lite / "pypi")
        (lite / "files").mkdir()  # what the notebook server shows
        shutil.copy(HERE / "webgemma.ipynb", lite / "files")
        shutil.copy(model, lite / "files" / "gemma.gguf")
        (lite / "jupyter-lite.json").write_text(json.dumps(CONFIG))
        apps = [option for app in APPS for option in ("--apps", app)]
        command = [jupyter, "lite", "build", "--output-dir", site, "--no-sourcemaps", *apps]
        made = subprocess.run(command, cwd=lite, capture_output=True, text=True, check=False)
        if made.returncode or not (site / "static" / "pyodide").is_dir():
            sys.exit(f"{made.stdout}\n{made.stderr}")
    print(f"python3 -m http.server --directory {site}")
    print("http://localhost:8000/notebooks/index.html?path=webgemma.ipynb")


def install() -> Path:
    """Make the environment, unless it is there; return its program `jupyter`."""
    ready, wanted = TOOLS / "ready", " ".join(PACKAGES)
    if not ready.is_file() or ready.read_text() != wanted:
        venv.create(TOOLS / "venv", clear=True)
        python = TOOLS / "venv" / "bin" / "python"
        subprocess.run([*PIP, "--python", python, "install", *PACKAGES], check=True)
        ready.write_text(wanted)
    return TOOLS / "venv" / "bin" / "jupyter"


def add_pyodide(folder: Path) -> None:
    """Copy Pyodide and the wheels of its packages that the kernel wants.

    The wheels come from PyPI. Those of Pyodide's own server differ in some bytes, so the list of
    packages gets other checksums, and is left with those that are there."""
    folder.mkdir(parents=True)
    for name, path in library_files().items():
        if name.startswith("pyodide/"):
            shutil.copy(path, folder)
    listing = folder / "pyodide-lock.json"
    lock = json.loads(listing.read_text())
    packages = {normal(name): facts for name, facts in lock["packages"].items()}
    names = list(WANTED)
    for name in names:  # which grows meanwhile
        needed = map(normal, packages[name]["depends"])
        names += [need for need in needed if need not in names]
    wheels = download([f"{name}=={packages[name]['version']}" for name in names])
    for name in names:
        facts = packages[name]
        wheel = next(path for path in wheels if normal(path.name).startswith(f"{name}-"))
        data = wheel.read_bytes()
        facts |= {"file_name": wheel.name, "sha256": hashlib.sha256(data).hexdigest()}
        (folder / wheel.name).write_bytes(data)
    lock["packages"] = {name: facts for name, facts in packages.items() if name in names}
    listing.write_text(json.dumps(lock))


def download(requirements: list[str]) -> list[Path]:
    """Return wheels of these versions, which run on any machine."""
    key = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    folder = TOOLS / f"wheels-{key}"
    if not folder.is_dir():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        options = ["--no-deps", "--ignore-requires-python", "--only-binary", ":all:"]
        command = [*PIP, "download", *options, "--dest", unfinished, *requirements]
        subprocess.run(command, check=True)
        unfinished.rename(folder)
    return sorted(folder.iterdir())


def normal(name: str) -> str:
    """Return a package's name as PyPI writes it."""
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    main()
