"""Where the bytes of a model come from: a file, memory, or a web server that answers ranges."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from webgemma.errors import GgufError, ModelNotFoundError

if TYPE_CHECKING:
    from webgemma.gguf.http import HttpSource

__all__ = ["Bytes", "BytesSource", "FileSource", "HttpSource", "Source", "check_range"]

Bytes = bytes | bytearray | memoryview
_PIECE_NBYTES = 1 << 30  # that one call of the system reads at most; macOS refuses two of them


class Source(Protocol):
    """A file that can be read anywhere, without saying where it is."""

    name: str  # for messages: a file name or a URL
    nbytes: int

    async def read(self, offset: int, nbytes: int) -> Bytes:
        """Exactly `nbytes` bytes from `offset` on, or a GgufError."""
        ...

    async def sibling(self, name: str) -> Source:
        """The file `name` that stands beside this one (split models)."""
        ...

    def close(self) -> None:
        """Lets go of the file."""
        ...


def check_range(source: Source, offset: int, nbytes: int) -> None:
    """Refuses to read outside the file."""
    if not 0 <= offset <= offset + nbytes <= source.nbytes:
        raise GgufError(
            f"{source.name}: bytes {offset} to {offset + nbytes} were asked for, "
            f"but it has {source.nbytes}."
        )


class BytesSource:
    """A file in memory; reading it copies nothing."""

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        name: str = "<bytes>",
        siblings: Mapping[str, bytes] | None = None,
    ) -> None:
        view = memoryview(data).cast("B").toreadonly()
        self.name = name
        self.nbytes = view.nbytes
        self._view: memoryview | None = view
        self._siblings = siblings or {}

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """A view of the bytes."""
        check_range(self, offset, nbytes)
        if self._view is None:
            raise GgufError(f"{self.name} is closed.")
        return self._view[offset : offset + nbytes]

    async def sibling(self, name: str) -> Source:
        """The one of the siblings that has this name."""
        if name not in self._siblings:
            raise ModelNotFoundError(f"There is no {name} beside {self.name}.")
        return BytesSource(self._siblings[name], name, self._siblings)

    def close(self) -> None:
        """Forgets the bytes; views handed out before stay valid."""
        self._view = None


class FileSource:
    """A local file. It is read, not mapped: a map of a file that is cut kills the process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self._file = _open_file(self.path)
        self._close = weakref.finalize(self, self._file.close)
        self._stamp = _stamp(self._file)
        self.nbytes = self._stamp[0]
        self._lock = threading.Lock()

    async def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes, if the file is still as it was when it was opened."""
        check_range(self, offset, nbytes)
        if not self._close.alive:
            raise GgufError(f"{self.name} is closed.")
        try:
            data = self._read(offset, nbytes)
            size, _ = stamp = _stamp(self._file)
        except OSError as error:
            raise GgufError(
                f"{self.path}: bytes {offset} to {offset + nbytes} cannot be read: {error}; "
                "check the drive, then load the model again."
            ) from error
        if size < self.nbytes or len(data) < nbytes:
            raise GgufError(
                f"{self.path} became shorter while it was read: it had {self.nbytes} bytes and "
                f"has {size}; bring the whole file back, then load the model again."
            )
        if stamp != self._stamp:
            raise GgufError(f"{self.path} was written to while it was read: load the model again.")
        return data

    def _read(self, offset: int, nbytes: int) -> bytes:
        """So many bytes, or fewer where the file ends; it may be cut at any moment."""
        pieces = []
        while nbytes > 0 and (piece := self._piece(offset, min(nbytes, _PIECE_NBYTES))):
            pieces.append(piece)
            offset, nbytes = offset + len(piece), nbytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, offset: int, nbytes: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), nbytes, offset)
        with self._lock:  # Windows
            self._file.seek(offset)
            return self._file.read(nbytes)

    async def sibling(self, name: str) -> Source:
        """The file `name` in the same folder."""
        if Path(name).name != name:
            raise GgufError(f"{self.name}: {name!r} is not a file name.")
        return FileSource(self.path.with_name(name))

    def close(self) -> None:
        """Closes the file."""
        self._close()


def _open_file(path: Path) -> BinaryIO:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise GgufError(f"{path} is a folder: name the GGUF file in it.")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise GgufError(f"{path} is not a regular file.")
        if status.st_size == 0:
            raise GgufError(f"{path} is empty: download it again.")
        return path.open("rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"There is no file {path}.") from None
    except PermissionError:
        raise GgufError(f"{path} may not be read: check its permissions.") from None
    except (OSError, ValueError, OverflowError) as error:
        raise GgufError(f"{path} cannot be opened: {error}.") from error


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """The file's size and the time of its last change."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def __getattr__(name: str) -> object:
    # asyncio and http.client take longer to import than a local model to open.
    if name == "HttpSource":
        from webgemma.gguf.http import HttpSource

        return HttpSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
