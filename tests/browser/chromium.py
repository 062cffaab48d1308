"""Debian's Chromium, headless, with WebGPU: on a software adapter where there is no GPU."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
FLAGS = [
    "--enable-unsafe-webgpu",
    "--no-sandbox",  # it does not work for root, as in CI
    # Workgroup memory is zeroed by a loop of Tint's, as for Metal and Direct3D: SwiftShader would
    # compile one store for every word, which took it most of the time of all tests.
    "--disable-dawn-features=use_vulkan_zero_initialize_workgroup_memory_extension",
]


@contextmanager
def launched() -> Iterator[Any]:
    """A browser, of playwright's type Browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def storing(browser: Any, folder: Path) -> Iterator[Any]:
    """A second browser that stores in a folder, not in memory: a playwright BrowserContext."""
    start = browser.browser_type.launch_persistent_context
    context = start(folder, executable_path=CHROMIUM, args=FLAGS)
    yield context
    context.close()
