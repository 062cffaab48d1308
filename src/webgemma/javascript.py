"""Access from Python in a browser to the JavaScript files of this package."""

from importlib.resources import files
from typing import Any

import js  # type: ignore[import-not-found]
from pyodide.code import run_js  # type: ignore[import-not-found]


def script(package: str, file: str, name: str) -> Any:
    """Return the global `name` that a JavaScript file of a package defines.

    The file is run unless the global exists: a page whose policy forbids eval imports it."""
    if not hasattr(js, name):
        run_js(files(package).joinpath(file).read_text("utf-8"))
    return getattr(js, name)
