"""A wheel of the package as it runs here, for the Python in the browser to install.

The bundled model is not in it: the page fetches it by itself, past Python's memory."""

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
    """Built when it is first asked for, and again when a file of the package has changed."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._package = package
        self._stamp: list[tuple[str, int, int]] = []
        self._data = b""
        self._lock = threading.Lock()

    def data(self) -> bytes:
        """The whole wheel; from the same files always the same bytes."""
        with self._lock:
            paths = _package_files(self._package)
            stats = [(str(path), path.stat()) for path in paths]
            stamp = [(path, found.st_mtime_ns, found.st_size) for path, found in stats]
            if stamp != self._stamp:
                folder = self._package.parent
                files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
                self._data, self._stamp = _zip(files | _metadata()), stamp
            return self._data


def _package_files(package: Path) -> list[Path]:
    def wanted(path: Path) -> bool:
        parts = path.relative_to(package).parts
        left_out = any(part == "__pycache__" or part.startswith(".") for part in parts)
        left_out |= path.suffix == ".gguf"
        return path.is_file() and not path.is_symlink() and not left_out

    return sorted(filter(wanted, package.rglob("*")))


def _metadata() -> dict[str, bytes]:
    """The files of dist-info: those of the installed package if it is this version."""
    files = {"METADATA": _BARE_METADATA.encode(), "WHEEL": _WHEEL.encode()}
    try:
        installed = distribution("webgemma")
    except PackageNotFoundError:  # run from a bare checkout
        installed = None
    if installed is not None and installed.version == __version__:
        for file in installed.files or ():
            folder, _, name = str(file.as_posix()).partition("/")
            wanted = name in ("METADATA", "entry_points.txt") or name.startswith("licenses/")
            if wanted and folder.endswith(".dist-info"):
                files[name] = Path(str(file.locate())).read_bytes()
    return {f"{_DIST_INFO}/{name}": data for name, data in sorted(files.items())}


def _zip(files: dict[str, bytes]) -> bytes:
    """The archive, with the RECORD that installers check it by."""
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((f"{_DIST_INFO}/RECORD", "", ""))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in (files | {f"{_DIST_INFO}/RECORD": record.getvalue().encode()}).items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same files give the same archive
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()
