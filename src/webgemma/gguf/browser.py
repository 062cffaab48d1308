"""Sources in a browser: a chosen file, an address, a stored file; files.js reads them."""

from __future__ import annotations

import asyncio
from inspect import isawaitable
from typing import Any

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.sources import Source, check_range

WAIT_SECONDS = (0.5, 1.0, 2.0, 4.0)  # before an address is asked again
LOST, FORBIDDEN, BUSY = {404, 410}, {401, 403}, {408, 425, 429}
UNREACHED = "the server is not reached, or does not let other sites' pages read it (CORS)"


class BrowserSource:
    """A file of files.js. Its bytes need not pass through Python: the device takes them `raw`."""

    def __init__(self, file: Any, name: str = "", unreached: str = UNREACHED) -> None:
        self.name: str = name or file.name
        self.nbytes: int = file.size
        self.tag: str | None = getattr(file, "tag", None) or None  # of its version on a server
        self._file = file
        self._unreached = unreached

    async def raw(self, offset: int, nbytes: int) -> Any:
        """The bytes as a JavaScript array, which lasts until the next read, or a GgufError."""
        check_range(self, offset, nbytes)
        for wait_seconds in (*WAIT_SECONDS, None):
            try:
                found = self._file.read(offset, offset + nbytes)
                data = await found if isawaitable(found) else found
                break
            except Exception as error:  # JavaScript's, whatever it is
                if wait_seconds is None or not may_pass(error):
                    raise file_error(self.name, error, self._unreached) from error
            await asyncio.sleep(wait_seconds)
        if len(data) != nbytes:
            raise GgufError(f"{self.name} became shorter while it was read; choose it again.")
        return data

    async def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes, or a GgufError."""
        data: bytes = (await self.raw(offset, nbytes)).to_bytes() if nbytes else b""
        return data

    async def sibling(self, name: str) -> Source:
        """A page is handed one file."""
        raise ModelNotFoundError(
            f"{self.name} is split and needs {name} beside it; a page takes whole files only."
        )

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


async def open_file(file: Any, files: Any = None) -> BrowserSource:
    """A File or Blob of JavaScript, or the handle of one."""
    return BrowserSource(await (files or browser_files()).blob(file))


async def open_address(
    url: str, files: Any = None, name: str = "", unreached: str = UNREACHED, *, whole: bool = False
) -> BrowserSource:
    """A file on a server, which must let this page read it (CORS) and send parts (ranges) of it.

    With `whole` it is fetched at once; the browser, not Python, has it in its memory."""
    files = files or browser_files()
    try:
        file = await (files.whole(url) if whole else files.address(url))
        return BrowserSource(file, name, unreached)
    except Exception as error:  # JavaScript's, whatever it is
        raise file_error(name or url, error, unreached) from error


def may_pass(error: Exception) -> bool:
    """Whether the next try may succeed: a server is busy, or a connection was cut."""
    name, status = getattr(error, "name", ""), getattr(error, "status", 0)
    return (name == "http" and (status in BUSY or status >= 500)) or name in ("TypeError", "Error")


def file_error(
    name: str, error: Exception, unreached: str = UNREACHED
) -> GgufError | ModelNotFoundError:
    """The sentence for what JavaScript says about a file."""
    kind, status = getattr(error, "name", ""), getattr(error, "status", 0)
    said = str(getattr(error, "message", "") or error).rstrip(".")
    if kind == "http" and status in LOST:
        return ModelNotFoundError(f"{name} does not exist (the server answers {status}).")
    if kind == "http" and status in FORBIDDEN:
        return GgufError(f"{name} cannot be fetched: {said}: it wants a login.")
    if kind == "changed":
        return GgufError(f"{name} was changed on the server while it was read: open it again.")
    if kind == "NotReadableError":
        return GgufError(f"{name} can no longer be read: it was moved or changed; choose it again.")
    if kind == "TypeError":
        return GgufError(f"{name} cannot be fetched ({said}): {unreached}.")
    return GgufError(f"{name} cannot be read: {said}.")


def browser_files() -> Any:
    """The functions of files.js."""
    from webgemma.javascript import script  # there is none natively

    return script(__package__, "files.js", "webgemmaFiles")
