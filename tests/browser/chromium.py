"""Headless Chromium with WebGPU, on a software GPU where there is no other."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
PROGRAM = Path(CHROMIUM or ".").resolve()
# Its own software GPU as a Vulkan driver: beside the program, or where Debian puts it.
DRIVERS = [
    folder / "vk_swiftshader_icd.json"
    for folder in (PROGRAM.parent, PROGRAM.parent.parent / "lib" / "chromium")
]
SWIFTSHADER = next((str(path) for path in DRIVERS if path.is_file()), "")
FLAGS = [
    "--host-resolver-rules=MAP *.test 127.0.0.1",  # for pages that are not secure, or another's
    "--enable-unsafe-webgpu",
    "--no-sandbox",  # the sandbox does not work for root, as in CI
    # Tint then zeroes workgroup memory in a loop, as for Metal and Direct3D: with the extension
    # SwiftShader compiles one store per word, which took most of the time of all tests.
    "--disable-dawn-features=use_vulkan_zero_initialize_workgroup_memory_extension",
]


@contextmanager
def launched() -> Iterator[Any]:
    """Launch a browser, a playwright Browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def storing(browser: Any, folder: Path) -> Iterator[Any]:
    """Launch a second browser with a profile on disk, a playwright BrowserContext."""
    start = browser.browser_type.launch_persistent_context
    context = start(folder, executable_path=CHROMIUM, args=FLAGS)
    yield context
    context.close()
