"""Model sources in a browser: chosen files, URLs and stored files, read through files.js."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.sources import Source, check_range

WAIT_SECONDS = (0.5, 1.0, 2.0, 4.0)  # before each retry of a failed read
NOT_FOUND, FORBIDDEN, BUSY = {404, 410}, {401, 403}, {408, 425, 429}  # HTTP statuses


@dataclass(frozen=True, slots=True)
class ServerAdvice:
    """What an error says about a server, and what to do."""

    unreachable: str = (
        "the server cannot be reached, or does not allow pages of other sites to read it (CORS)"
    )
    forbidden: str = "it requires a login"


ANY_SERVER = ServerAdvice()


class BrowserSource:
    """A file opened by files.js. The device can take its bytes with `raw`, bypassing Python."""

    def __init__(self, file: Any, name: str = "", advice: ServerAdvice = ANY_SERVER) -> None:
        self.name: str = name or file.name
        self.nbytes: int = file.size
        self.tag: str | None = getattr(file, "tag", None) or None  # version on the server
        self._file = file
        self._advice = advice

    async def raw(self, offset: int, nbytes: int) -> Any:
        """Return the bytes as a JavaScript array that stays valid until the next read.

        Raises GgufError or ModelNotFoundError if they cannot be read.
        """
        check_range(self, offset, nbytes)
        for wait_seconds in (*WAIT_SECONDS, None):
            try:
                result = self._file.read(offset, offset + nbytes)
                data = await result if isawaitable(result) else result
                break
            except Exception as error:  # any JavaScript error
                if wait_seconds is None or not is_transient(error):
                    raise file_error(self.name, error, self._advice) from error
            await asyncio.sleep(wait_seconds)
        if len(data) != nbytes:
            raise GgufError(f"{self.name} became shorter while it was read; choose it again.")
        return data

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on, or raise GgufError."""
        data: bytes = (await self.raw(offset, nbytes)).to_bytes() if nbytes else b""
        return data

    async def sibling(self, name: str) -> Source:
        """Raise ModelNotFoundError: a page is given one file, never its folder."""
        raise ModelNotFoundError(
            f"{self.name} is one part of a split model and needs {name} beside it; a page can "
            "open only models in one file."
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


async def open_file(file: Any, files: Any = None) -> BrowserSource:
    """Open a JavaScript File or Blob, or a handle of one."""
    return BrowserSource(await (files or browser_files()).blob(file))


async def open_address(
    url: str,
    files: Any = None,
    name: str = "",
    advice: ServerAdvice = ANY_SERVER,
    *,
    whole: bool = False,
) -> BrowserSource:
    """Open a file on a server, which must allow this page to read it (CORS) in ranges.

    With `whole` it is downloaded at once into the browser's memory, not into Python's.
    """
    files = files or browser_files()
    try:
        file = await (files.whole(url) if whole else files.address(url))
        return BrowserSource(file, name, advice)
    except Exception as error:  # any JavaScript error
        raise file_error(name or url, error, advice) from error


def is_transient(error: Exception) -> bool:
    """Return whether a retry may succeed: the server was busy, or the connection was lost."""
    name, status = getattr(error, "name", ""), getattr(error, "status", 0)
    return (name == "http" and (status in BUSY or status >= 500)) or name in ("TypeError", "Error")


def file_error(
    name: str, error: Exception, advice: ServerAdvice = ANY_SERVER
) -> GgufError | ModelNotFoundError:
    """Return the error to raise for a JavaScript error about a file."""
    kind, status = getattr(error, "name", ""), getattr(error, "status", 0)
    message = str(getattr(error, "message", "") or error).rstrip(".")
    if kind == "http" and status in NOT_FOUND:
        return ModelNotFoundError(f"{name} does not exist (the server answers {status}).")
    if kind == "http" and status in FORBIDDEN:
        return GgufError(f"{name} cannot be fetched: {message}: {advice.forbidden}.")
    if kind == "body":
        return GgufError(
            f"{name} was not received completely ({message}): the connection was interrupted, or "
            "there is not enough memory or disk space for it. Try again."
        )
    if kind == "changed":
        return GgufError(f"{name} was changed on the server while it was read: open it again.")
    if kind == "NotReadableError":
        return GgufError(f"{name} can no longer be read: it was moved or changed; choose it again.")
    if kind == "TypeError":
        return GgufError(f"{name} cannot be fetched ({message}): {advice.unreachable}.")
    return GgufError(f"{name} cannot be read: {message}.")


def browser_files() -> Any:
    """Return the functions of files.js."""
    from webgemma.javascript import script  # cannot be imported outside a browser

    return script(__package__, "files.js", "webgemmaFiles")
