"""HTTP as far as a page needs it: requests read strictly, answers whole, in part or not at all."""

import re
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote_to_bytes

_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f/\\]")  # in a segment, once decoded
_RANGE = re.compile(r"bytes=([0-9]{0,1000})-([0-9]{0,1000})")


class RefusalError(Exception):
    """A request is not answered with what it asks for; the sentence says why."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body: the only kind that is served."""

    method: str
    segments: tuple[str, ...]  # of the path, decoded once; () is the root
    headers: dict[str, str]  # names in lower case; of one that is repeated, values joined by ", "
    keeps_connection: bool

    @classmethod
    def parse(cls, head: bytes) -> "Request":
        """Read everything before the empty line."""
        first, *lines = head.decode("latin-1").split("\r\n")
        request_line = _REQUEST_LINE.fullmatch(first)
        if not request_line:
            raise RefusalError(HTTPStatus.BAD_REQUEST, "This is not a request of HTTP/1.1.")
        method, target, minor = request_line.groups()
        headers: dict[str, str] = {}
        for line in lines:
            header = _HEADER.fullmatch(line)
            if not header:
                raise RefusalError(HTTPStatus.BAD_REQUEST, "A header of the request is malformed.")
            name, value = header[1].lower(), header[2]
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise RefusalError(HTTPStatus.BAD_REQUEST, "A request with a body is not answered.")
        closing = minor == "0" or "close" in headers.get("connection", "").lower()
        return cls(method, _segments(target), headers, not closing)


def _segments(target: str) -> tuple[str, ...]:
    path = target.partition("?")[0]
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
        raise RefusalError(HTTPStatus.BAD_REQUEST, "The path of the request cannot be used.")
    return () if path == "/" else tuple(decoded)


@dataclass(frozen=True, slots=True)
class FilePart:
    """So many bytes of a file, from `first` on."""

    path: Path
    first: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back, but for the headers that every answer has."""

    status: HTTPStatus
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | FilePart = b""

    @classmethod
    def sentence(cls, status: HTTPStatus, text: str) -> "Answer":
        """A plain sentence for people."""
        headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        return cls(status, headers, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Content:
    """Something to serve, in memory or in a file; with a tag also in part."""

    mime: str
    data: bytes | Path
    nbytes: int
    tag: str = ""  # what stands between the quotes of the ETag; another one for other bytes
    cache: str = "no-cache"  # keep it, but ask each time whether it is still the same

    def answer(self, request: Request) -> Answer:
        """All of it, the range that was asked for, or that nothing has changed."""
        headers = {"Content-Type": self.mime, "Cache-Control": self.cache}
        if not self.tag:
            return Answer(HTTPStatus.OK, headers, self._part(0, self.nbytes))
        tag = f'"{self.tag}"'
        headers |= {"ETag": tag, "Accept-Ranges": "bytes"}
        known = request.headers.get("if-none-match", "")
        if known == "*" or tag in re.split(r"[, ]+|W/", known):
            return Answer(HTTPStatus.NOT_MODIFIED, headers)
        wanted = request.headers.get("range") if request.method == "GET" else None
        if wanted is None or request.headers.get("if-range", tag) != tag:
            return Answer(HTTPStatus.OK, headers, self._part(0, self.nbytes))
        span = parse_range(wanted, self.nbytes)
        if span is None:
            return Answer(HTTPStatus.OK, headers, self._part(0, self.nbytes))
        first, end = span
        if first >= end:
            return Answer(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                {"Content-Range": f"bytes */{self.nbytes}", "Cache-Control": "no-store"},
            )
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{self.nbytes}"
        return Answer(HTTPStatus.PARTIAL_CONTENT, headers, self._part(first, end))

    def _part(self, first: int, end: int) -> bytes | FilePart:
        if isinstance(self.data, bytes):
            return self.data[first:end]
        return FilePart(self.data, first, end - first)


def parse_range(header: str, nbytes: int) -> tuple[int, int] | None:
    """(first, end) of one range of `nbytes`, empty if none of it is there.

    None, which means the whole, for several ranges and for what is no range, as HTTP wants it."""
    found = _RANGE.fullmatch(header)
    if not found or found[0] == "bytes=-":
        return None
    if not found[1]:
        return max(0, nbytes - int(found[2])), nbytes
    first = int(found[1])
    if not found[2]:
        return first, nbytes
    last = int(found[2])
    return None if last < first else (first, min(last + 1, nbytes))
