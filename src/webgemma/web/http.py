"""HTTP/1.1 for the page's server: strict request parsing, responses in full or as a byte range."""

import re
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote_to_bytes

_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f/\\]")  # in a decoded path segment
_RANGE = re.compile(r"bytes=([0-9]{0,1000})-([0-9]{0,1000})")


class RefusalError(Exception):
    """A refused request: the HTTP status, and the reason as the message."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body, the only kind that is accepted."""

    method: str
    segments: tuple[str, ...]  # of the path, decoded once; () is the root
    headers: dict[str, str]  # names in lower case; values of repeated headers joined by ", "
    keep_alive: bool
    query: str = ""  # what follows "?", as it was sent

    @classmethod
    def parse(cls, head: bytes) -> "Request":
        """Parse everything before the empty line; RefusalError if it is malformed."""
        first, *lines = head.decode("latin-1").split("\r\n")
        request_line = _REQUEST_LINE.fullmatch(first)
        if not request_line:
            raise RefusalError(HTTPStatus.BAD_REQUEST, "The request line is not valid HTTP/1.1.")
        method, target, minor = request_line.groups()
        headers: dict[str, str] = {}
        for line in lines:
            header = _HEADER.fullmatch(line)
            if not header:
                raise RefusalError(HTTPStatus.BAD_REQUEST, "A header of the request is malformed.")
            name, value = header[1].lower(), header[2]
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise RefusalError(HTTPStatus.BAD_REQUEST, "Requests with a body are not accepted.")
        closing = minor == "0" or "close" in headers.get("connection", "").lower()
        path, _, query = target.partition("?")
        return cls(method, _segments(path), headers, not closing, query)


def _segments(path: str) -> tuple[str, ...]:
    """Return the decoded segments of a request's path; RefusalError if it is unsafe."""
    decoded = []
    for raw in path[1:].split("/"):
        try:
            segment = unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            segment = "\0"
        if _BAD_ESCAPE.search(raw) or _FORBIDDEN.search(segment) or segment in (".", ".."):
            path = ""
        decoded.append(segment)
    if not path.startswith("/") or "#" in path:
        raise RefusalError(HTTPStatus.BAD_REQUEST, "The path of the request is not valid.")
    return () if path == "/" else tuple(decoded)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A byte range of a file: `nbytes` bytes from offset `first`."""

    path: Path
    first: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Response:
    """A response without the headers that the server adds to every response."""

    status: HTTPStatus
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | FileRange = b""

    @classmethod
    def plain_text(cls, status: HTTPStatus, text: str) -> "Response":
        """Return a response whose body is one line of text, such as the reason of a refusal."""
        headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        return cls(status, headers, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Content:
    """Content to serve, in memory or in a file; byte ranges are served if it has a tag."""

    mime: str
    data: bytes | Path
    nbytes: int
    tag: str = ""  # the ETag without its quotes; it changes with the bytes
    cache: str = "no-cache"  # the Cache-Control header; no-cache revalidates before each use

    def respond(self, request: Request) -> Response:
        """Return all of it, the requested range, or 304 if the client has this version."""
        headers = {"Content-Type": self.mime, "Cache-Control": self.cache}
        if not self.tag:
            return Response(HTTPStatus.OK, headers, self._range(0, self.nbytes))
        tag = f'"{self.tag}"'
        headers |= {"ETag": tag, "Accept-Ranges": "bytes"}
        known_tags = request.headers.get("if-none-match", "")
        if known_tags == "*" or tag in re.split(r"[, ]+|W/", known_tags):
            return Response(HTTPStatus.NOT_MODIFIED, headers)
        requested = request.headers.get("range") if request.method == "GET" else None
        if requested is None or request.headers.get("if-range", tag) != tag:
            return Response(HTTPStatus.OK, headers, self._range(0, self.nbytes))
        span = parse_range(requested, self.nbytes)
        if span is None:
            return Response(HTTPStatus.OK, headers, self._range(0, self.nbytes))
        first, end = span
        if first >= end:
            return Response(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                {"Content-Range": f"bytes */{self.nbytes}", "Cache-Control": "no-store"},
            )
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{self.nbytes}"
        return Response(HTTPStatus.PARTIAL_CONTENT, headers, self._range(first, end))

    def _range(self, first: int, end: int) -> bytes | FileRange:
        if isinstance(self.data, bytes):
            return self.data[first:end]
        return FileRange(self.data, first, end - first)


def parse_range(header: str, nbytes: int) -> tuple[int, int] | None:
    """Return (first, end) of the one range that a Range header requests of `nbytes` bytes.

    The range is empty if it lies outside. None for several ranges and for malformed headers, which
    HTTP requires to be ignored."""
    match = _RANGE.fullmatch(header)
    if not match or match[0] == "bytes=-":
        return None
    if not match[1]:
        return max(0, nbytes - int(match[2])), nbytes
    first = int(match[1])
    if not match[2]:
        return first, nbytes
    last = int(match[2])
    return None if last < first else (first, min(last + 1, nbytes))
