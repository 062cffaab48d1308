"""The page with its real engine where the disk has little space, or none for a Blob."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import ControlledSite, visiting

# Chromium writes a Blob of some megabytes to the disk; this is what it reports if that fails.
NO_BLOBS = """
Response.prototype.blob = async () => { throw new TypeError("Failed to fetch"); };
"""


@contextmanager
def volume(folder: Path, size: str) -> Iterator[Path]:
    """Mount a volume of this size; skip the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a volume")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_page_starts_in_a_profile_on_a_small_volume(chromium: Any, tmp_path: Path) -> None:
    site = ControlledSite(tmp_path / "store")
    with (
        volume(tmp_path / "volume", "400m") as folder,
        storing(chromium, folder / "profile") as context,
        visiting(context, site) as person,
    ):
        person.open()
        person.set(Max_tokens="4")
        assert person.ask("Hello")
        person.open()


def test_the_page_starts_without_space_for_a_blob(chromium: Any, tmp_path: Path) -> None:
    context = chromium.new_context()
    with visiting(context, ControlledSite(tmp_path, {"files.js": NO_BLOBS})) as person:
        person.open()
        assert person.texts("#model-name") == ["Bundled model"]
    context.close()
