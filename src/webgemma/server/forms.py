"""Forms with files (multipart/form-data), which clients send where JSON cannot hold a file.

A whole body is read first, within its limit; here it is cut into parts, nothing is written to disk,
and the name that a client gives a file is not used."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from webgemma.server.protocol import RequestError
from webgemma.values import shown

MAX_PARTS = 64
MAX_HEAD_NBYTES = 4096  # of a part
MAX_TEXT_NBYTES = 1 << 16  # of a field that is no file

_KIND = re.compile(r"\s*([\w/-]+)\s*")  # of a header, before its parameters
_PARAMETER = re.compile(r'\s*;\s*([\w*-]+)=(?:"((?:\\.|[^"\\])*)"|([^\s";]*))')
_BOUNDARY = re.compile(r"[\w'()+,./:=? -]{0,69}[\w'()+,./:=?-]", re.ASCII)
_ENCODINGS = ("", "7bit", "8bit", "binary")


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form; a RequestError names the one that is wrong."""

    values: dict[str, list[bytes]] = field(default_factory=dict)

    def data(self, name: str) -> bytes:
        """Return a file, which must be there and not be empty."""
        given = self.values.get(name, [])
        if len(given) != 1 or not given[0]:
            what = "is missing or empty" if len(given) < 2 else "is there more than once"
            raise RequestError(f"{name} {what}; it must be one file.", param=name)
        return given[0]

    def text(self, name: str, default: str = "") -> str:
        """Return a text."""
        given = self.texts(name)
        if len(given) > 1:
            raise RequestError(f"{name} is there more than once.", param=name)
        return given[0] if given else default

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, whose name may end with []."""
        return [
            _text(value, name) for key in (name, f"{name}[]") for value in self.values.get(key, ())
        ]

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.text(name).lower()
        if value not in ("", "true", "false", "1", "0"):
            raise RequestError(f"{name} is {shown(value)}; it must be true or false.", param=name)
        return value in ("true", "1")

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of some words, by default the first."""
        value = self.text(name) or choices[0]
        if value not in choices:
            listed = ", ".join(choices)
            raise RequestError(f"{name} is {shown(value)}; it must be one of {listed}.", param=name)
        return value

    def number(self, name: str) -> float | int | None:
        """Return a number; whether it is in range is for others to say."""
        text = self.text(name).strip()
        if not text:
            return None
        try:
            return int(text) if len(text) < 20 and text.lstrip("-").isdecimal() else float(text)
        except ValueError:
            raise RequestError(
                f"{name} is {shown(text)}; it must be a number.", param=name
            ) from None


def parse_form(data: bytes, content_type: str) -> Form:
    """Return the form of a body; RequestError if it is none."""
    kind, parameters = _header(content_type)
    boundary = parameters.get("boundary", "")
    if kind != "multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
        raise RequestError("The body must be a form: multipart/form-data with a boundary.")
    form = Form()
    for head, value in _parts(data, boundary.encode("ascii")):
        form.values.setdefault(_name(head), []).append(value)
    return form


def _parts(data: bytes, boundary: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the head and the content of each part; what is around them is ignored."""
    delimiter = b"--" + boundary
    line = b"\r\n" + delimiter
    at = len(delimiter) if data.startswith(delimiter) else _find(data, line, 0) + len(line)
    for number in count():
        if data.startswith(b"--", at):
            return
        if number == MAX_PARTS:
            raise RequestError(f"The form has more than {MAX_PARTS} parts.")
        at = _find(data, b"\r\n", at, at + 80) + 2  # blanks may follow a delimiter
        end = _find(data, b"\r\n\r\n", at, at + MAX_HEAD_NBYTES)
        after = _find(data, line, end + 4)
        yield data[at:end], data[end + 4 : after]
        at = after + len(line)


def _find(data: bytes, wanted: bytes, start: int, end: int | None = None) -> int:
    found = data.find(wanted, start, end)
    if found < 0:
        raise RequestError("The body is no complete form: a part does not end.")
    return found


def _name(head: bytes) -> str:
    """Return the name of a part's field."""
    headers = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        headers[key.strip().lower()] = value.strip()
    kind, parameters = _header(headers.get("content-disposition", ""))
    if kind != "form-data" or not parameters.get("name"):
        raise RequestError("A part of the form has no name.")
    if headers.get("content-transfer-encoding", "").lower() not in _ENCODINGS:
        raise RequestError("A part of the form is encoded; send its bytes as they are.")
    return parameters["name"]


def _header(text: str) -> tuple[str, dict[str, str]]:
    """Return the value of a header and its parameters, as far as they can be read."""
    kind = _KIND.match(text)
    if not kind:
        return "", {}
    parameters: dict[str, str] = {}
    at = kind.end()
    while found := _PARAMETER.match(text, at):
        parameters.setdefault(found[1].lower(), found[3] if found[2] is None else found[2])
        at = found.end()
    return kind[1].lower(), parameters


def _text(value: bytes, name: str) -> str:
    if len(value) > MAX_TEXT_NBYTES:
        raise RequestError(f"{name} is longer than {MAX_TEXT_NBYTES >> 10} KiB.", param=name)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{name} is not UTF-8 text.", param=name) from None
