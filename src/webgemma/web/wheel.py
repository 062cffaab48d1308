"""The wheel of this package that Pyodide unpacks in the browser, built from the installed files.

It leaves out the bundled model, which the page fetches itself, without copying it into Python's
memory, and what only a server needs: the page, its scripts and its libraries."""

import base64
import csv
import hashlib
import io
import stat
import threading
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from webgemma import __version__

PACKAGE = Path(__file__).resolve().parents[1]
NAME = f"webgemma-{__version__}-py3-none-any.whl"
_DIST_INFO = f"webgemma-{__version__}.dist-info"
_BARE_METADATA = f"Metadata-Version: 2.1\nName: webgemma\nVersion: {__version__}\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: webgemma\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Wheel:
    """A wheel that is built on first use, and again after a file of the package has changed."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._package = package
        self._stamp: list[tuple[str, int, int]] = []
        self._data = b""
        self._lock = threading.Lock()

    def data(self) -> bytes:
        """Return the wheel's bytes, which depend on the package's files only."""
        with self._lock:
            paths = _package_files(self._package)
            stats = [(str(path), path.stat()) for path in paths]
            stamp = [(path, info.st_mtime_ns, info.st_size) for path, info in stats]
            if stamp != self._stamp:
                folder = self._package.parent
                files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
                self._data, self._stamp = _zip(files | _metadata()), stamp
            return self._data


def _package_files(package: Path) -> list[Path]:
    def included(path: Path) -> bool:
        parts = path.relative_to(package).parts
        if parts[:2] in (("web", "lib"), ("web", "static")):
            return False
        excluded = any(part == "__pycache__" or part.startswith(".") for part in parts)
        excluded |= path.suffix == ".gguf"
        return path.is_file() and not path.is_symlink() and not excluded

    return sorted(filter(included, package.rglob("*")))


def _metadata() -> dict[str, bytes]:
    """Return the dist-info files, those of the installed package if it has this version."""
    files = {"METADATA": _BARE_METADATA.encode(), "WHEEL": _WHEEL.encode()}
    try:
        installed = distribution("webgemma")
    except PackageNotFoundError:  # running from a checkout that is not installed
        installed = None
    if installed is not None and installed.version == __version__:
        for file in installed.files or ():
            folder, _, name = str(file.as_posix()).partition("/")
            copied = name in ("METADATA", "entry_points.txt") or name.startswith("licenses/")
            if copied and folder.endswith(".dist-info"):
                files[name] = Path(str(file.locate())).read_bytes()
    return {f"{_DIST_INFO}/{name}": data for name, data in sorted(files.items())}


def _zip(files: dict[str, bytes]) -> bytes:
    """Return a zip archive of the files and the RECORD that installers verify."""
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((f"{_DIST_INFO}/RECORD", "", ""))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in (files | {f"{_DIST_INFO}/RECORD": record.getvalue().encode()}).items():
            entry = zipfile.ZipInfo(name)  # dated 1980, so that equal files give equal archives
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()
