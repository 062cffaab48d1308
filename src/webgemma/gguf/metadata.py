"""Metadata of a GGUF file: a mapping of keys to values that are decoded at first use."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

from webgemma.errors import GgufError
from webgemma.gguf.sources import Bytes

Scalar = int | float | bool | str
Value = Scalar | Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[str]

# The value types in the order of their numbers in the file, each with its struct code.
VALUE_CODES = {
    "UINT8": "B",
    "INT8": "b",
    "UINT16": "H",
    "INT16": "h",
    "UINT32": "I",
    "INT32": "i",
    "FLOAT32": "f",
    "BOOL": "B",
    "STRING": "",
    "ARRAY": "",
    "UINT64": "Q",
    "INT64": "q",
    "FLOAT64": "d",
}
VALUE_TYPES = tuple(VALUE_CODES)
SCALARS = {name: Struct("<" + code) for name, code in VALUE_CODES.items() if code}
DAMAGED = "the file is cut short or damaged; download it again"


class _MissingKeyError(GgufError, KeyError):
    """A GgufError that is also a KeyError, as callers of a Mapping expect."""

    __str__ = Exception.__str__


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of an undecoded value in the file."""

    type: str  # of the value, or of the array's elements
    start: int
    end: int
    count: int | None = None  # elements; None if it is not an array
    longest: int = 0  # bytes of the longest string in an array of strings


class Metadata(Mapping[str, Value]):
    """Keys and values of a file; strings and arrays are decoded at first use, then cached."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._entries: dict[str, Entry] = {}
        self._values: dict[str, Value] = {}
        self._head: memoryview | None = None

    def attach(self, head: memoryview | None) -> None:
        """Set the header bytes to decode from; None if the file is closed."""
        self._head = head

    def add(self, key: str, entry: Entry, value: Value | None = None) -> None:
        """Add a key with the position of its value and, for scalars, the value itself."""
        self._entries[key] = entry
        if value is not None:
            self._values[key] = value

    def value_type(self, key: str) -> str:
        """Return the type as stored in the file: UINT32, STRING, FLOAT32[262144]."""
        entry = self._entry(key)
        return entry.type if entry.count is None else f"{entry.type}[{entry.count}]"

    def __getitem__(self, key: str) -> Value:
        if key not in self._values:
            entry = self._entry(key)
            if self._head is None:
                raise GgufError(f"{self._file} is closed: read {short(key)} before closing it.")
            data = bytes(self._head[entry.start : entry.end])
            self._values[key] = _decode(entry, data, f"{self._file}: the value of {short(key)}")
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _entry(self, key: str) -> Entry:
        if key not in self._entries:
            raise _MissingKeyError(f"{self._file} has no key {short(key)}.")
        return self._entries[key]


def short(text: str) -> str:
    """Return a name from a file, quoted and cut to 80 characters for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _decode(entry: Entry, data: bytes, what: str) -> Value:
    if entry.type == "STRING":
        if entry.count is None:
            return decode_text(data, what)
        # If every length is 1 to 127 and no string has a NUL, the only NULs are the upper seven
        # bytes of the lengths, and these separate the strings.
        if entry.longest < 128 and data.count(0) == 7 * entry.count:
            try:
                return _strings_between_nuls(data)
            except UnicodeDecodeError:
                pass  # decoding one by one finds the string to report
        return _strings(data, entry.count, what)
    numbers = list(struct.unpack(f"<{entry.count}{VALUE_CODES[entry.type]}", data))
    return decode_bools(numbers, what) if entry.type == "BOOL" else numbers


def decode_bools(numbers: list[int], what: str) -> list[bool]:
    """Return 0 and 1 as booleans; raise GgufError, which begins with `what`, for other numbers."""
    if numbers and max(numbers) > 1:
        raise GgufError(f"{what} holds {max(numbers)} where only 0 and 1 are valid: {DAMAGED}.")
    return [number == 1 for number in numbers]


def decode_text(data: Bytes, what: str) -> str:
    """Decode UTF-8; raise GgufError, which begins with `what`, if it is not valid."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise GgufError(
            f"{what} is not UTF-8 (byte {error.start} of it): the file is damaged."
        ) from None


def _strings(data: bytes, count: int, what: str) -> list[str]:
    texts: list[str] = []
    end = 0
    for index in range(count):
        start = end + 8
        end = start + SCALARS["UINT64"].unpack_from(data, end)[0]
        try:
            texts.append(data[start:end].decode())
        except UnicodeDecodeError:
            decode_text(data[start:end], f"{what}, element {index},")
    return texts


def _strings_between_nuls(data: bytes, chunk_nbytes: int = 1 << 15) -> list[str]:
    # Splitting a decoded chunk avoids a call for each string. Short chunks keep the str narrow: one
    # wide character makes all characters of a str wide.
    texts: list[str] = []
    at = 0
    while at < len(data):
        gap = data.find(bytes(7), at + chunk_nbytes)
        end = len(data) if gap < 0 else gap - 1
        *fields, last = data[at + 8 : end].decode().split("\0" * 7)
        texts += [field[:-1] for field in fields]  # the last character is the next length
        texts.append(last)
        at = end
    return texts
