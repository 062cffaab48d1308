"""Our JavaScript, as Python in a browser finds it."""

from importlib.resources import files
from typing import Any

import js  # type: ignore[import-not-found]
from pyodide.code import run_js  # type: ignore[import-not-found]


def script(package: str, file: str, name: str) -> Any:
    """What a file of ours calls `name`; a page whose policy forbids eval has imported it."""
    if not hasattr(js, name):
        run_js(files(package).joinpath(file).read_text("utf-8"))
    return getattr(js, name)
