"""A model on a web server, read in ranges over kept connections."""

from __future__ import annotations

import asyncio
import re
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import NamedTuple
from urllib.parse import SplitResult, quote, urljoin, urlsplit, urlunsplit

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.sources import Bytes, check_range

_PIECE_NBYTES = 1 << 18
_WHOLE_NBYTES = 1 << 25  # up to this size a file is taken whole from a server without ranges
_PROGRESS_NBYTES = 1 << 16  # a try that brings this much was worth it: failures count anew
_SAFE = "/%:@!$&'()*+,;=~?"  # what is left as it stands in an address
_MAX_REDIRECTS = 5
_MAX_WAIT_SECONDS = 60.0
_REDIRECTS = {301, 302, 303, 307, 308}
_LOST = {404, 410}
_FORBIDDEN = {401, 403}
_BUSY = {408, 425, 429}
_CONTENT_RANGE = re.compile(r"bytes\s+([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)


class _PassingError(Exception):
    """A failure that may be gone at the next try."""

    def __init__(self, problem: str, wait_seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_seconds = wait_seconds


class _Call(NamedTuple):
    origin: str
    connection: HTTPConnection
    response: HTTPResponse


class HttpSource:
    """A file on a web server; what was received is never asked for again."""

    def __init__(
        self, url: str, retries: int, timeout_seconds: float, backoff_seconds: float
    ) -> None:
        parts = _parse_url(url)
        self.name = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self.nbytes = -1  # until the server has told
        self._url = url
        self._target = url  # where redirects led to
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self._backoff_seconds = backoff_seconds
        self._tag: str | None = None
        self._whole: bytes | None = None
        self._idle: list[tuple[str, HTTPConnection]] = []
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        retries: int = 4,
        timeout_seconds: float = 30.0,
        backoff_seconds: float = 0.5,
    ) -> HttpSource:
        """Learns the size of the file by asking for its first byte."""
        source = cls(url, retries, timeout_seconds, backoff_seconds)
        try:
            await source._fetch(0, 1)
        except BaseException:
            source.close()
            raise
        return source

    async def read(self, offset: int, nbytes: int) -> Bytes:
        """Fetches the bytes; after a failure it goes on where it stopped."""
        check_range(self, offset, nbytes)
        if self._closed:
            raise GgufError(f"{self.name} is closed.")
        if self._whole is not None:
            return memoryview(self._whole)[offset : offset + nbytes]
        return await self._fetch(offset, offset + nbytes)

    async def sibling(self, name: str) -> HttpSource:
        """The file `name` in the same folder of the server."""
        parts = urlsplit(self._url)
        folder = parts.path.rpartition("/")[0]
        url = urlunsplit(parts._replace(path=f"{folder}/{quote(name, safe='')}"))
        return await self.open(url, self._retries, self._timeout_seconds, self._backoff_seconds)

    def close(self) -> None:
        """Hangs up."""
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()

    async def _fetch(self, start: int, end: int) -> bytearray:
        received = bytearray()  # grows with what arrives: a server may promise anything
        failures = 0
        while len(received) < end - start and self._whole is None:
            before = len(received)
            try:
                await asyncio.to_thread(self._exchange, start, end, received)
            except _PassingError as error:
                failures = 1 if len(received) - before >= _PROGRESS_NBYTES else failures + 1
                if failures > self._retries:
                    tries = f"after {failures} tries"
                    raise GgufError(f"{self.name}: {error} {tries}; try again later.") from error
                wait_seconds = max(self._backoff_seconds * 2 ** (failures - 1), error.wait_seconds)
                await asyncio.sleep(min(wait_seconds, _MAX_WAIT_SECONDS))
        return received

    def _exchange(self, start: int, end: int, received: bytearray) -> None:
        """One request for those bytes from `start` to `end` that are still missing."""
        first = start + len(received)
        try:
            call = self._ask(first, end)
            try:
                if call.response.status == 200 and self.nbytes < 0:
                    self._take_whole(call.response)
                else:
                    self._check_status(call.response)
                    stop = self._check_answer(call.response, first, end)
                    _receive(call.response, received, stop - first)
            finally:
                self._hang_up(call)
        except (InvalidURL, ValueError) as error:  # also a certificate that cannot be trusted
            raise GgufError(f"{self.name} cannot be fetched: {error}.") from error
        except (OSError, HTTPException) as error:
            problem = str(error) or type(error).__name__
            raise _PassingError(f"the connection failed ({problem})") from error

    # Asking

    def _ask(self, first: int, end: int) -> _Call:
        """Asks for a range and follows redirects."""
        target = self._target
        for _ in range(_MAX_REDIRECTS + 1):
            call = self._request(urlsplit(target), f"bytes={first}-{end - 1}")
            if call.response.status not in _REDIRECTS:
                self._target = target
                return call
            self._hang_up(call)
            goal = urljoin(target, call.response.getheader("Location", ""))
            if _parse_url(goal).scheme == "http" and target.startswith("https:"):
                raise GgufError(f"{self.name} redirects from https to http, which is not safe.")
            target = goal
        raise GgufError(f"{self.name} is redirected more than {_MAX_REDIRECTS} times.")

    def _request(self, parts: SplitResult, byte_range: str) -> _Call:
        path = quote(parts.path or "/", safe=_SAFE)
        if parts.query:
            path += "?" + quote(parts.query, safe=_SAFE)
        origin = f"{parts.scheme}://{parts.netloc}"
        kept = self._take_idle(origin)
        if kept is not None:
            try:
                return _Call(origin, kept, _send(kept, path, byte_range))
            except (OSError, HTTPException):
                pass  # a server may hang up on a kept connection at any time
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        fresh = kind(parts.hostname or "", parts.port, timeout=self._timeout_seconds)
        return _Call(origin, fresh, _send(fresh, path, byte_range))

    def _take_idle(self, origin: str) -> HTTPConnection | None:
        for kept in [kept for kept in self._idle if kept[0] == origin]:
            try:
                self._idle.remove(kept)
                return kept[1]
            except ValueError:
                pass  # another thread was faster
        return None

    def _hang_up(self, call: _Call) -> None:
        # What is left unread of an answer would be taken for the next one.
        drained = call.response.length == 0
        call.response.close()
        if drained and not self._closed:
            self._idle.append((call.origin, call.connection))
        else:
            call.connection.close()

    # Judging the answer

    def _check_status(self, response: HTTPResponse) -> None:
        status = response.status
        if status == 206:
            return
        if status in _LOST | _FORBIDDEN and self._target != self._url:
            self._target = self._url  # a redirect may hold for some minutes only
            raise _PassingError(f"the server it redirects to answers {status}")
        if status in _BUSY or status >= 500:
            wait = response.getheader("Retry-After", "")
            wait_seconds = float(wait) if re.fullmatch("[0-9]{1,9}", wait) else 0.0
            raise _PassingError(f"the server answers {status}", wait_seconds)
        if status in (200, 416) and self.nbytes >= 0:
            raise self._changed()
        if status == 416:
            raise GgufError(f"{self.name} is empty.")
        if status in _LOST:
            raise ModelNotFoundError(f"{self.name} does not exist (the server answers {status}).")
        hint = ": it wants a login" if status in _FORBIDDEN else ""
        raise GgufError(f"{self.name} cannot be fetched: the server answers {status}{hint}.")

    def _check_answer(self, response: HTTPResponse, first: int, end: int) -> int:
        """Holds the answer against the question; returns the end of the bytes it brings."""
        said = response.getheader("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(said.strip())
        if match is None:
            raise GgufError(f"{self.name}: the server does not say what it sends ({said!r}).")
        start, stop, total = int(match[1]), int(match[2]) + 1, int(match[3])
        tag = _tag(response)
        if self.nbytes < 0:
            self.nbytes, self._tag = total, tag
        if total != self.nbytes or (tag and self._tag and tag != self._tag):
            raise self._changed()
        if start != first or not first < stop <= min(end, total):
            raise GgufError(f"{self.name}: bytes {first}-{end - 1} were asked for, {said!r} came.")
        if response.length not in (None, stop - start) or _is_packed(response):
            raise GgufError(f"{self.name}: the server announces {said!r} but sends something else.")
        return stop

    def _take_whole(self, response: HTTPResponse) -> None:
        """Keeps all of a small file that a server without ranges sends."""
        whole = bytearray()
        if _is_packed(response) or (response.length or 0) > _WHOLE_NBYTES:
            raise self._without_ranges()
        while piece := response.read1(_PIECE_NBYTES):
            whole += piece
            if len(whole) > _WHOLE_NBYTES:
                raise self._without_ranges()
        if response.length:
            raise _PassingError("the connection was cut")
        if not whole:
            raise GgufError(f"{self.name} is empty.")
        self.nbytes, self._whole = len(whole), bytes(whole)

    def _changed(self) -> GgufError:
        return GgufError(f"{self.name} was changed on the server while it was read: open it again.")

    def _without_ranges(self) -> GgufError:
        return GgufError(
            f"{self.name}: the server cannot send parts of a file, and this one is too large to "
            "take whole: download it and open the file."
        )


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise GgufError(f"{url!r} is not an http or https address.")


def _send(connection: HTTPConnection, path: str, byte_range: str) -> HTTPResponse:
    try:
        connection.request("GET", path, headers={"Range": byte_range, "User-Agent": "webgemma"})
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _receive(response: HTTPResponse, received: bytearray, nbytes: int) -> None:
    """Appends the next `nbytes` bytes; what has arrived stays, whatever happens."""
    end = len(received) + nbytes
    while len(received) < end:
        # read1 returns what is there, so that a time-out loses nothing
        piece = response.read1(min(end - len(received), _PIECE_NBYTES))
        if not piece:
            raise _PassingError("the connection was cut")
        received += piece


def _tag(response: HTTPResponse) -> str | None:
    tag = response.getheader("ETag") or response.getheader("Last-Modified")
    return tag and tag.removeprefix("W/")


def _is_packed(response: HTTPResponse) -> bool:
    return response.getheader("Content-Encoding", "identity").lower() != "identity"
