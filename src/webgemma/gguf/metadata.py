"""The keys and values of a GGUF file, decoded when they are asked for."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

from webgemma.errors import GgufError
from webgemma.gguf.sources import Bytes

Scalar = int | float | bool | str
Value = Scalar | Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[str]

# In the order of their numbers in the file, each with its struct code.
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
    """Also a KeyError, as a Mapping owes its callers."""

    __str__ = Exception.__str__


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the value of a key stands, not yet decoded."""

    type: str  # of the value, or of the array's elements
    start: int
    end: int
    count: int | None = None  # elements of an array
    longest: int = 0  # bytes of the longest string of an array


class Metadata(Mapping[str, Value]):
    """Keys and values of a file; strings and arrays are decoded at first use and then kept."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._entries: dict[str, Entry] = {}
        self._values: dict[str, Value] = {}
        self._head: memoryview | None = None

    def attach(self, head: memoryview | None) -> None:
        """Gives the bytes of the header to decode from, or takes them away."""
        self._head = head

    def add(self, key: str, entry: Entry, value: Value | None = None) -> None:
        """Notes where the value of a key stands and, where it costs nothing, the value."""
        self._entries[key] = entry
        if value is not None:
            self._values[key] = value

    def value_type(self, key: str) -> str:
        """The type as the file has it: UINT32, STRING, FLOAT32[262144]."""
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
    """A name from the file, quoted and cut for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _decode(entry: Entry, data: bytes, what: str) -> Value:
    if entry.type == "STRING":
        if entry.count is None:
            return text_of(data, what)
        # All lengths 1 to 127 and no text with a NUL: the NULs alone tell where each text ends.
        if entry.longest < 128 and data.count(0) == 7 * entry.count:
            try:
                return _strings_between_nuls(data)
            except UnicodeDecodeError:
                pass  # the plain way says which one it is
        return _strings(data, entry.count, what)
    numbers = list(struct.unpack(f"<{entry.count}{VALUE_CODES[entry.type]}", data))
    return bools_of(numbers, what) if entry.type == "BOOL" else numbers


def bools_of(numbers: list[int], what: str) -> list[bool]:
    """The truth values; `what` begins the message about a number that is neither."""
    if numbers and max(numbers) > 1:
        raise GgufError(f"{what} holds {max(numbers)} where only 0 or 1 may stand: {DAMAGED}.")
    return [number == 1 for number in numbers]


def text_of(data: Bytes, what: str) -> str:
    """The text; `what` begins the message about bytes that are none."""
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
            text_of(data[start:end], f"{what}, element {index},")
    return texts


def _strings_between_nuls(data: bytes, chunk_nbytes: int = 1 << 15) -> list[str]:
    # A short chunk decodes to a narrow str, and its pieces are cut without a call for each.
    texts: list[str] = []
    at = 0
    while at < len(data):
        gap = data.find(bytes(7), at + chunk_nbytes)
        end = len(data) if gap < 0 else gap - 1
        *pieces, last = data[at + 8 : end].decode().split("\0" * 7)
        texts += [piece[:-1] for piece in pieces]  # the last character is the next length
        texts.append(last)
        at = end
    return texts
