"""Export a marimo notebook that chats with Gemma in the visitor's tab, from local files alone.

    python examples/marimo/build.py SITE [MODEL]

Run it with a Python that has webgemma. SITE is a new folder, for any web server; MODEL is a .gguf
that goes into it, by default the bundled one. marimo is installed into an environment of its own,
build/marimo. Nobody who opens the site requests anything from another server: the Pyodide that
marimo wants is fetched from npm now, and the wheels from PyPI."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from site_files import BUILD, Listing, build_plain, download, environment, exactly, site_and_model  # noqa: E402

from webgemma.web.wheel import NAME, Wheel  # noqa: E402

MARIMO = "0.25.2"
PYODIDE = "314.0.0"  # this marimo's page runs with no other
TOOLS = (f"marimo=={MARIMO}", "uv==0.13.8")  # marimo looks for local modules by uv
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
# What marimo's page loads, in the versions that Pyodide lists, and in those that it does not.
LISTED = ("micropip", "docutils", "jedi", "narwhals", "packaging", "pygments", "pyodide-http")
OTHERS = {
    "marimo-base": MARIMO,
    "itsdangerous": "2.2.0",
    "markdown": "3.11.3",
    "msgspec": "0.22.0",  # which Pyodide lists, too old for marimo
    "pymdown-extensions": "13.1",
    "python-multipart": "0.0.33",
    "tomlkit": "0.15.2",
}
PYYAML = "pyyaml==6.0.3"  # PyPI has none for Pyodide, and it can do without compiled parts
RUNTIME_ATTRIBUTES = (
    'data-pyodide-index-url="./pyodide/" data-pyodide-lockfile-url="./pyodide/pyodide-lock.json"'
)


def main() -> None:
    site, model = site_and_model(__doc__)
    export(site)
    add_pyodide(site / "pyodide")
    (site / "public").mkdir(exist_ok=True)  # marimo's place for a notebook's files
    shutil.copy(model, site / "public" / "gemma.gguf")
    print(f"python3 -m http.server --directory {site}")
    print("http://localhost:8000/")


def export(site: Path) -> None:
    """Have marimo write its page with the notebook, and point it to the Pyodide beside it."""
    programs, page = environment("marimo", TOOLS), site / "index.html"
    command = [programs / "marimo", "export", "html-wasm", HERE / "notebook.py", "--output", page]
    path = os.pathsep.join([str(programs), os.environ["PATH"]])  # with uv
    environ = os.environ | {"PATH": path}
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if made.returncode or not page.is_file():
        sys.exit(f"{made.stdout}\n{made.stderr}")
    (site / "CLAUDE.md").unlink(missing_ok=True)  # marimo's notes on its page; no part of it
    html, tag = page.read_text(), "<marimo-wasm "
    if tag not in html:
        sys.exit(f"marimo {MARIMO} wrote a page without {tag.strip()}>.")
    page.write_text(html.replace(tag, f"{tag}{RUNTIME_ATTRIBUTES} ", 1))


def add_pyodide(folder: Path) -> None:
    """Add Pyodide, and the wheels of all packages that the notebook has."""
    source = npm_package(f"pyodide@{PYODIDE}")
    folder.mkdir()
    for name in RUNTIME:
        shutil.copy(source / name, folder)
    listing = Listing(source / "pyodide-lock.json")
    versions = listing.needed(LISTED) | OTHERS
    wheels = [*download(exactly(versions)), build_plain(PYYAML)]
    for wheel in wheels:
        is_marimo = wheel.name.startswith("marimo_base-")
        needed = [*versions, "pyyaml"] if is_marimo else []
        listing.add(wheel, folder, [name for name in needed if name != "marimo-base"])
    with tempfile.TemporaryDirectory() as temporary:
        wheel = Path(temporary) / NAME
        wheel.write_bytes(Wheel().data())
        listing.add(wheel, folder)
    listing.write(folder / "pyodide-lock.json")


def npm_package(name: str) -> Path:
    """Return the folder of a package's files, which are fetched once."""
    folder = BUILD / name
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
            command = ["npm", "pack", "--silent", "--pack-destination", temporary, name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (archive,) = Path(temporary).iterdir()
            shutil.unpack_archive(archive, temporary, filter="data")
            (Path(temporary) / "package").rename(folder)
    return folder


if __name__ == "__main__":
    main()
