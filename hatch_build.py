"""Puts the JavaScript libraries of the page into the wheel, and into the source distribution.

They are files of npm packages, by the table in src/webgemma/web/libraries.py. Without npm, a wheel
is built that has none, and `webgemma web` says so; WEBGEMMA_LIBRARIES=required makes that an error,
as `make wheel` does. An editable installation reads node_modules itself."""

import os
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = {"wheel": "webgemma/web/lib", "sdist": "src/webgemma/web/lib"}


class LibrariesHook(BuildHookInterface):
    """Adds the files of the table to what is built."""

    _copies: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries, from node_modules or from an unpacked source distribution."""
        if version == "editable" or self.target_name not in FOLDERS:
            return
        table = runpy.run_path(str(Path(self.root, "src", "webgemma", "web", "libraries.py")))
        files = table["library_files"]()
        if missing := table["missing_message"](files):
            if files or os.environ.get("WEBGEMMA_LIBRARIES") == "required":
                raise SystemExit(f"error: {missing}")
            self.app.display_warning(f"{missing} Built without them, `webgemma web` cannot chat.")
        if not files:
            return
        self._copies = tempfile.TemporaryDirectory()  # one text is the licence of several libraries
        for name, path in {**files, **table["licence_files"]()}.items():
            copy = Path(self._copies.name, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        build_data["force_include"][self._copies.name] = FOLDERS[self.target_name]

    def finalize(self, *_: Any) -> None:
        """Delete the copies."""
        if self._copies:
            self._copies.cleanup()
