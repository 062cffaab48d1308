"""Sources of a model's bytes: the Source protocol, local files and bytes in memory."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.sync import on_event_loop
from webgemma.values import shown

Bytes = bytes | bytearray | memoryview
_MAX_READ_NBYTES = 1 << 30  # of one system call; macOS rejects reads of 2 GiB


class Source(Protocol):
    """A file that is read by offset, wherever it is stored."""

    name: str  # for messages: a file name or a URL
    nbytes: int

    async def read(self, offset: int, nbytes: int) -> Bytes:
        """Return exactly `nbytes` bytes from `offset` on, or raise GgufError."""
        ...

    async def sibling(self, name: str) -> Source:
        """Open the file `name` next to this one, another part of a split model."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def check_range(source: Source, offset: int, nbytes: int) -> None:
    """Raise GgufError unless the bytes are inside the file."""
    if not 0 <= offset <= offset + nbytes <= source.nbytes:
        raise GgufError(
            f"{source.name}: bytes {offset} to {offset + nbytes} were requested, "
            f"but it has {source.nbytes}."
        )


class BytesSource:
    """A file in memory; reads return views, not copies."""

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
        """Return a read-only view of the bytes, or raise GgufError."""
        check_range(self, offset, nbytes)
        if self._view is None:
            raise GgufError(f"{self.name} is closed.")
        return self._view[offset : offset + nbytes]

    async def sibling(self, name: str) -> Source:
        """Return the sibling with this name, or raise ModelNotFoundError."""
        if name not in self._siblings:
            raise ModelNotFoundError(f"There is no {name} beside {self.name}.")
        return BytesSource(self._siblings[name], name, self._siblings)

    def close(self) -> None:
        """Release the bytes; views returned earlier stay valid."""
        self._view = None


class FileSource:
    """A local file. It is read, not memory-mapped: truncating a mapped file kills the process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self._file = _open_file(self.path)
        self._close = weakref.finalize(self, self._file.close)
        self._stamp = _stamp(self._file)
        self.nbytes = self._stamp[0]
        self._lock = threading.Lock()

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes; raise GgufError if the file has changed since it was opened."""
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
                f"has {size}; restore the complete file, then load the model again."
            )
        if stamp != self._stamp:
            raise GgufError(f"{self.path} was written to while it was read: load the model again.")
        return data

    def _read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes, or fewer if the file ends: it may be truncated at any moment."""
        chunks = []
        while nbytes > 0 and (chunk := self._read_once(offset, min(nbytes, _MAX_READ_NBYTES))):
            chunks.append(chunk)
            offset, nbytes = offset + len(chunk), nbytes - len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _read_once(self, offset: int, nbytes: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), nbytes, offset)
        with self._lock:  # Windows has no pread
            self._file.seek(offset)
            return self._file.read(nbytes)

    async def sibling(self, name: str) -> Source:
        """Open the file `name` in the same folder."""
        if Path(name).name != name:
            raise GgufError(f"{self.name}: {name!r} is not a file name.")
        return FileSource(self.path.with_name(name))

    def close(self) -> None:
        """Close the file."""
        self._close()


def user_path(given: str | os.PathLike[str]) -> Path:
    """Return the path that a user gives; ModelNotFoundError for one that cannot be looked up."""
    try:
        path = Path(given).expanduser()
        path.is_file()  # it raises for a name that is too long and for a closed folder
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ModelNotFoundError(f"{shown(given)} cannot be opened: {reason}.") from None
    return path


def _open_file(path: Path) -> BinaryIO:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise GgufError(f"{path} is a folder: give the GGUF file in it.")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
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
    """Return the file's size and modification time in nanoseconds."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


class LoopSource:
    """A source that suspends, such as one over a network, read on the caller's event loop.

    The model itself is computed in another thread."""

    def __init__(self, source: Source) -> None:
        self.name, self.nbytes = source.name, source.nbytes
        self._source = source

    async def read(self, offset: int, nbytes: int) -> Bytes:
        """Return exactly `nbytes` bytes from `offset` on, or raise GgufError."""
        return await on_event_loop(self._source.read(offset, nbytes))

    async def sibling(self, name: str) -> Source:
        """Open the file `name` next to this one."""
        return LoopSource(await on_event_loop(self._source.sibling(name)))

    def close(self) -> None:
        """Close the file."""
        self._source.close()
