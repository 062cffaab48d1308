"""Where the bytes of a model come from: a file, memory, or a web server that answers ranges."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from webgemma.errors import GgufError, ModelNotFoundError

if TYPE_CHECKING:
    from webgemma.gguf.http import HttpSource

__all__ = ["Bytes", "BytesSource", "FileSource", "HttpSource", "Source", "check_range"]

Bytes = bytes | bytearray | memoryview


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
        data: bytes | bytearray | memoryview | mmap.mmap,
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


class FileSource(BytesSource):
    """A local file, mapped to memory: its bytes are views of the page cache."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        super().__init__(self._map, self.path.name)

    async def sibling(self, name: str) -> Source:
        """The file `name` in the same folder."""
        if Path(name).name != name:
            raise GgufError(f"{self.name}: {name!r} is not a file name.")
        return FileSource(self.path.with_name(name))

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last view of it."""
        super().close()
        with suppress(BufferError):  # somebody holds a view: the map goes when the view goes
            self._map.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise GgufError(f"{path} is a folder: name the GGUF file in it.")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise GgufError(f"{path} is not a regular file.")
        if status.st_size == 0:
            raise GgufError(f"{path} is empty: download it again.")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"There is no file {path}.") from None
    except PermissionError:
        raise GgufError(f"{path} may not be read: check its permissions.") from None
    except (OSError, ValueError, OverflowError) as error:
        raise GgufError(f"{path} cannot be opened: {error}.") from error


def __getattr__(name: str) -> object:
    # asyncio and http.client take longer to import than a local model to open.
    if name == "HttpSource":
        from webgemma.gguf.http import HttpSource

        return HttpSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
