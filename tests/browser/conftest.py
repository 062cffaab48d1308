"""Collects the browser tests only if Chromium, playwright and the npm packages are installed.

With WEBGEMMA_BROWSER=1, which `make browser` sets, a missing one is an error."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM, launched

ROOT = Path(__file__).resolve().parents[2]
MISSING = [
    name
    for name, is_installed in {
        "chromium": bool(CHROMIUM),
        "the Python package playwright": importlib.util.find_spec("playwright") is not None,
        "the Python package micropip": importlib.util.find_spec("micropip") is not None,
        "node_modules/pyodide": (ROOT / "node_modules" / "pyodide" / "pyodide.mjs").is_file(),
        "node_modules/@mlc-ai": (ROOT / "node_modules" / "@mlc-ai" / "web-xgrammar").is_dir(),
        "node_modules/@pyscript": (ROOT / "node_modules" / "@pyscript" / "core").is_dir(),
    }.items()
    if not is_installed
]
if MISSING and os.environ.get("WEBGEMMA_BROWSER"):
    raise pytest.UsageError(f"The browser tests need {', '.join(MISSING)}.")
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium with WebGPU, a playwright Browser."""
    with launched() as browser:
        yield browser
