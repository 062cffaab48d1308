"""Fake of files.js without a browser: the same functions over a dictionary, with failures."""

from typing import Any


class Bytes(bytes):
    """Bytes with the method of a JavaScript buffer."""

    def to_bytes(self, *_: Any, **__: Any) -> bytes:  # type: ignore[override]
        return bytes(self)


class JsError(Exception):
    """Error of JavaScript, identified by its name."""

    def __init__(self, name: str, message: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.name, self.message, self.status = name, message, status


class PretendFile:
    """File or address; each read first raises the next of `failures`."""

    tag = None

    def __init__(self, name: str, data: bytes | bytearray, size: int | None = None) -> None:
        self.name = name
        self.data = data
        self.size = len(data) if size is None else size
        self.reads: list[tuple[int, int]] = []
        self.failures: list[JsError] = []
        self.closed = False

    async def read(self, begin: int, end: int) -> Bytes:
        self.reads.append((begin, end))
        if self.failures:
            raise self.failures.pop(0)
        return Bytes(self.data[begin:end])

    def close(self) -> None:
        self.closed = True


class PretendStored:
    """File of the origin-private file system, open in a worker."""

    def __init__(self, files: "PretendFiles", path: str) -> None:
        self.name = path.split("/")[-1]
        self.path = path
        self._files = files

    @property
    def data(self) -> bytearray:
        return self._files.disk[self.path]

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, begin: int, end: int) -> Bytes:
        return Bytes(self.data[begin:end])

    def write(self, data: bytes, at: int) -> None:
        if self._files.full_at is not None and at + len(data) > self._files.full_at:
            raise JsError("QuotaExceededError")
        assert at <= self.size, "a hole"
        self.data[at : at + len(data)] = bytes(data)

    def truncate(self, size: int) -> None:
        if self._files.quota is not None and size > self._files.quota:
            raise JsError("QuotaExceededError")
        self.data[:] = self.data[:size].ljust(size, b"\0")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._files.locked.discard(self.path)
        if self in self._files.reading:
            self._files.reading.remove(self)


class PretendFiles:
    """Functions of files.js."""

    def __init__(self) -> None:
        self.disk: dict[str, bytearray] = {}
        self.servers: dict[str, PretendFile] = {}
        self.locked: set[str] = set()
        self.reading: list[PretendStored] = []  # open files, which cannot be removed
        self.full_at: int | None = None  # size at which the disk is full
        self.quota: int | None = None  # size limit of one file
        self.free: int | None = None

    async def blob(self, file: PretendFile) -> PretendFile:
        return file

    async def address(self, url: str) -> PretendFile:
        if url not in self.servers:
            raise JsError("http", "the server answers 404", 404)
        return self.servers[url]

    whole = address

    async def stored(self, path: str, write: bool) -> PretendStored:
        if write and path in self.locked:
            raise JsError("NoModificationAllowedError")
        if write:
            self.locked.add(path)
            self.disk.setdefault(path, bytearray())
        elif path not in self.disk:
            raise JsError("NotFoundError")
        file = PretendStored(self, path)
        if not write:
            self.reading.append(file)
        return file

    async def list(self, folder: str) -> list[tuple[str, int]]:
        inside = {path: data for path, data in self.disk.items() if path.startswith(folder + "/")}
        return [(path.split("/")[-1], len(data)) for path, data in inside.items()]

    async def remove(self, path: str) -> None:
        if path in self.locked or any(file.path == path for file in self.reading):
            raise JsError("NoModificationAllowedError")
        if self.disk.pop(path, None) is None:
            raise JsError("NotFoundError")

    async def available(self) -> int | None:
        return self.free
