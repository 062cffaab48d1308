"""Build a JupyterLite site whose notebook chats with Gemma, from local files alone.

    python examples/jupyterlite/build.py SITE [MODEL]

Run it with a Python that has webgemma. SITE is a new folder, for any web server; MODEL is a .gguf
that goes into it, by default the bundled one. JupyterLite is installed into an environment of its
own, build/jupyterlite. Nobody who opens the site requests anything from another server: Pyodide is
that of webgemma's page, and the wheels that the kernel wants are downloaded now."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from site_files import Listing, download, environment, exactly, site_and_model  # noqa: E402

from webgemma.web.libraries import library_files  # noqa: E402
from webgemma.web.wheel import NAME, Wheel  # noqa: E402

# The kernel 0.8.6 is made for Pyodide 314.0.6; it runs on 314.0.7, which the page has.
TOOLS = ("jupyterlite-core[contents]==0.8.6", "jupyterlite-pyodide-kernel==0.8.6")
WANTED = ("micropip", "ipython", "jedi")  # by the kernel, of Pyodide's own packages
UNLISTED = "comm==0.2.3"  # which the kernel wants, too, and Pyodide does not have
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
    site, model = site_and_model(__doc__)
    if "pyodide/pyodide.mjs" not in library_files():
        sys.exit("Pyodide is missing: run `npm ci` in the checkout.")
    programs = environment("jupyterlite", TOOLS)
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
        command = ["lite", "build", "--output-dir", site, "--no-sourcemaps", *apps]
        command = [programs / "jupyter", *command]
        made = subprocess.run(command, cwd=lite, capture_output=True, text=True, check=False)
        if made.returncode or not (site / "static" / "pyodide").is_dir():
            sys.exit(f"{made.stdout}\n{made.stderr}")
    print(f"python3 -m http.server --directory {site}")
    print("http://localhost:8000/notebooks/index.html?path=webgemma.ipynb")


def add_pyodide(folder: Path) -> None:
    """Add Pyodide, and the wheels of its packages that the kernel wants."""
    folder.mkdir(parents=True)
    for name, path in library_files().items():
        if name.startswith("pyodide/"):
            shutil.copy(path, folder)
    listing = Listing(folder / "pyodide-lock.json")
    for wheel in download(exactly(listing.needed(WANTED))):
        listing.add(wheel, folder)
    listing.write(folder / "pyodide-lock.json")


if __name__ == "__main__":
    main()
