"""HTTP source: a model on a web server, read in ranges over persistent connections."""

from __future__ import annotations

import asyncio
import re
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import NamedTuple
from urllib.parse import SplitResult, quote, urljoin, urlsplit, urlunsplit

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.sources import Bytes, check_range

_CHUNK_NBYTES = 1 << 18
_MAX_WHOLE_NBYTES = 1 << 25  # of a file that a server without ranges sends whole
_PROGRESS_NBYTES = 1 << 16  # an attempt that receives this much resets the count of failures
_SAFE = "/%:@!$&'()*+,;=~?"  # characters of a URL that are not quoted
_MAX_REDIRECTS = 5
_MAX_WAIT_SECONDS = 60.0
_REDIRECTS = {301, 302, 303, 307, 308}
_NOT_FOUND = {404, 410}
_FORBIDDEN = {401, 403}
_BUSY = {408, 425, 429}
_CONTENT_RANGE = re.compile(r"bytes\s+([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)


class _TransientError(Exception):
    """A failure that a retry may not meet again."""

    def __init__(self, problem: str, wait_seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_seconds = wait_seconds


class _Exchange(NamedTuple):
    """A request that was sent, and its response."""

    origin: str
    connection: HTTPConnection
    response: HTTPResponse


class HttpSource:
    """A file on a web server; received bytes are never requested again."""

    def __init__(
        self, url: str, retries: int, timeout_seconds: float, backoff_seconds: float
    ) -> None:
        parts = _parse_url(url)
        self.name = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self.nbytes = -1  # until the server has reported it
        self._url = url
        self._target = url  # the URL after redirects
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self._backoff_seconds = backoff_seconds
        self._tag: str | None = None  # version of the file
        self._whole: bytes | None = None  # the file, if the server has sent all of it
        self._idle: list[tuple[str, HTTPConnection]] = []  # (origin, connection)
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        retries: int = 4,
        timeout_seconds: float = 30.0,
        backoff_seconds: float = 0.5,
    ) -> HttpSource:
        """Open a URL and request its first byte, which also gives the size of the file."""
        source = cls(url, retries, timeout_seconds, backoff_seconds)
        try:
            await source._fetch(0, 1)
        except BaseException:
            source.close()
            raise
        return source

    async def read(self, offset: int, nbytes: int) -> Bytes:
        """Fetch the bytes; a retry resumes where the failed request stopped."""
        check_range(self, offset, nbytes)
        if self._closed:
            raise GgufError(f"{self.name} is closed.")
        if self._whole is not None:
            return memoryview(self._whole)[offset : offset + nbytes]
        return await self._fetch(offset, offset + nbytes)

    async def sibling(self, name: str) -> HttpSource:
        """Open the file `name` in the same folder of the server."""
        parts = urlsplit(self._url)
        folder = parts.path.rpartition("/")[0]
        url = urlunsplit(parts._replace(path=f"{folder}/{quote(name, safe='')}"))
        return await self.open(url, self._retries, self._timeout_seconds, self._backoff_seconds)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()

    async def _fetch(self, start: int, end: int) -> bytearray:
        # It grows with what arrives: the length that a server announces may be wrong.
        received = bytearray()
        failures = 0
        while len(received) < end - start and self._whole is None:
            before = len(received)
            try:
                await asyncio.to_thread(self._request_missing, start, end, received)
            except _TransientError as error:
                failures = 1 if len(received) - before >= _PROGRESS_NBYTES else failures + 1
                if failures > self._retries:
                    tries = f"after {failures} tries"
                    raise GgufError(f"{self.name}: {error} {tries}; try again later.") from error
                wait_seconds = max(self._backoff_seconds * 2 ** (failures - 1), error.wait_seconds)
                await asyncio.sleep(min(wait_seconds, _MAX_WAIT_SECONDS))
        return received

    def _request_missing(self, start: int, end: int, received: bytearray) -> None:
        """Make one request for the bytes from `start` to `end` that are not received yet."""
        first = start + len(received)
        try:
            exchange = self._request_range(first, end)
            try:
                if exchange.response.status == 200 and self.nbytes < 0:
                    self._receive_whole(exchange.response)
                else:
                    self._check_status(exchange.response)
                    stop = self._check_range(exchange.response, first, end)
                    _receive(exchange.response, received, stop - first)
            finally:
                self._release(exchange)
        except (InvalidURL, ValueError) as error:  # also an untrusted certificate
            raise GgufError(f"{self.name} cannot be fetched: {error}.") from error
        except (OSError, HTTPException) as error:
            problem = str(error) or type(error).__name__
            raise _TransientError(f"the connection failed ({problem})") from error

    # Requests

    def _request_range(self, first: int, end: int) -> _Exchange:
        """Request a range and follow redirects."""
        target = self._target
        for _ in range(_MAX_REDIRECTS + 1):
            exchange = self._request(urlsplit(target), f"bytes={first}-{end - 1}")
            if exchange.response.status not in _REDIRECTS:
                self._target = target
                return exchange
            self._release(exchange)
            location = urljoin(target, exchange.response.getheader("Location", ""))
            if _parse_url(location).scheme == "http" and target.startswith("https:"):
                raise GgufError(f"{self.name} redirects from https to http, which is not safe.")
            target = location
        raise GgufError(f"{self.name} is redirected more than {_MAX_REDIRECTS} times.")

    def _request(self, parts: SplitResult, byte_range: str) -> _Exchange:
        path = quote(parts.path or "/", safe=_SAFE)
        if parts.query:
            path += "?" + quote(parts.query, safe=_SAFE)
        origin = f"{parts.scheme}://{parts.netloc}"
        idle = self._take_idle(origin)
        if idle is not None:
            try:
                return _Exchange(origin, idle, _send(idle, path, byte_range))
            except (OSError, HTTPException):
                pass  # a server may close an idle connection at any time
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        fresh = kind(parts.hostname or "", parts.port, timeout=self._timeout_seconds)
        return _Exchange(origin, fresh, _send(fresh, path, byte_range))

    def _take_idle(self, origin: str) -> HTTPConnection | None:
        for entry in [entry for entry in self._idle if entry[0] == origin]:
            try:
                self._idle.remove(entry)
                return entry[1]
            except ValueError:
                pass  # another thread has taken it
        return None

    def _release(self, exchange: _Exchange) -> None:
        # The unread rest of a response would be read as the start of the next one.
        drained = exchange.response.length == 0
        exchange.response.close()
        if drained and not self._closed:
            self._idle.append((exchange.origin, exchange.connection))
        else:
            exchange.connection.close()

    # Responses

    def _check_status(self, response: HTTPResponse) -> None:
        status = response.status
        if status == 206:
            return
        if status in _NOT_FOUND | _FORBIDDEN and self._target != self._url:
            self._target = self._url  # a redirect may be valid for a few minutes only
            raise _TransientError(f"the server it redirects to answers {status}")
        if status in _BUSY or status >= 500:
            wait = response.getheader("Retry-After", "")
            wait_seconds = float(wait) if re.fullmatch("[0-9]{1,9}", wait) else 0.0
            raise _TransientError(f"the server answers {status}", wait_seconds)
        if status in (200, 416) and self.nbytes >= 0:
            raise self._changed_error()
        if status == 416:
            raise GgufError(f"{self.name} is empty.")
        if status in _NOT_FOUND:
            raise ModelNotFoundError(f"{self.name} does not exist (the server answers {status}).")
        hint = ": it requires a login" if status in _FORBIDDEN else ""
        raise GgufError(f"{self.name} cannot be fetched: the server answers {status}{hint}.")

    def _check_range(self, response: HTTPResponse, first: int, end: int) -> int:
        """Check that a response has the requested bytes and return the end of those it has."""
        header = response.getheader("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(header.strip())
        if match is None:
            raise GgufError(f"{self.name}: the server sent no valid Content-Range ({header!r}).")
        start, stop, total = int(match[1]), int(match[2]) + 1, int(match[3])
        tag = _tag(response)
        if self.nbytes < 0:
            self.nbytes, self._tag = total, tag
        if total != self.nbytes or (tag and self._tag and tag != self._tag):
            raise self._changed_error()
        if start != first or not first < stop <= min(end, total):
            raise GgufError(
                f"{self.name}: bytes {first}-{end - 1} were requested, but {header!r} were sent."
            )
        if response.length not in (None, stop - start) or _is_compressed(response):
            raise GgufError(
                f"{self.name}: the server announces {header!r} but sends something else."
            )
        return stop

    def _receive_whole(self, response: HTTPResponse) -> None:
        """Receive all of a small file from a server without ranges."""
        whole = bytearray()
        if _is_compressed(response) or (response.length or 0) > _MAX_WHOLE_NBYTES:
            raise self._no_ranges_error()
        while chunk := response.read1(_CHUNK_NBYTES):
            whole += chunk
            if len(whole) > _MAX_WHOLE_NBYTES:
                raise self._no_ranges_error()
        if response.length:
            raise _TransientError("the connection was cut")
        if not whole:
            raise GgufError(f"{self.name} is empty.")
        self.nbytes, self._whole = len(whole), bytes(whole)

    def _changed_error(self) -> GgufError:
        return GgufError(f"{self.name} was changed on the server while it was read: open it again.")

    def _no_ranges_error(self) -> GgufError:
        return GgufError(
            f"{self.name}: the server cannot send parts of a file, and this one is too large to "
            "be read whole: download it and open the file."
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
    """Append the next `nbytes` bytes to `received`, which keeps what arrived before a failure."""
    end = len(received) + nbytes
    while len(received) < end:
        # read1 returns what has arrived, so that a time-out loses nothing
        chunk = response.read1(min(end - len(received), _CHUNK_NBYTES))
        if not chunk:
            raise _TransientError("the connection was cut")
        received += chunk


def _tag(response: HTTPResponse) -> str | None:
    tag = response.getheader("ETag") or response.getheader("Last-Modified")
    return tag and tag.removeprefix("W/")


def _is_compressed(response: HTTPResponse) -> bool:
    return response.getheader("Content-Encoding", "identity").lower() != "identity"
