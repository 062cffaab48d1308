"""Parser of the GGUF header: every number is checked against the file's size before it is used."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from math import prod
from struct import Struct

from webgemma.errors import GgufError
from webgemma.gguf.formats import FORMAT_BY_ID, Format
from webgemma.gguf.metadata import (
    DAMAGED,
    SCALARS,
    VALUE_TYPES,
    Entry,
    Metadata,
    decode_bools,
    decode_text,
    short,
)
from webgemma.gguf.sources import Bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEY_NBYTES = 65535
MAX_NAME_NBYTES = 64
MAX_DIMS = 4
_MAX_ENTRIES = 1 << 18  # keys, and tensors: five times as many as the largest known model has
_MAX_STRINGS = 1 << 24  # in all arrays: twenty times Gemma's vocabulary and merges
_MIN_KEY_NBYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_NBYTES = 8 + 1 + 4 + 4 + 8

_U32 = SCALARS["UINT32"]
_U64 = SCALARS["UINT64"]
_REMOVED_FORMATS = {4, 5, 31, 32, 33, 36, 37, 38}
_OTHER_FILES = {
    b"vers": "it looks like a Git LFS pointer: fetch the real file with `git lfs pull`",
    b"<!DO": "it looks like a web page: check the address it was downloaded from",
    b"<!do": "it looks like a web page: check the address it was downloaded from",
    b"<htm": "it looks like a web page: check the address it was downloaded from",
    b"PK\x03\x04": "it looks like a PyTorch or zip archive: convert the model to GGUF",
    b"lmgg": "it is in a format older than GGUF: convert the model again",
    b"tjgg": "it is in a format older than GGUF: convert the model again",
}


class MoreNeededError(Exception):
    """Raised when the buffer ends inside the header: at least `end` bytes are needed."""

    def __init__(self, end: int) -> None:
        self.end = end


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its name, shape and format, and where its bytes are."""

    name: str
    shape: tuple[int, ...]  # ggml order, fastest first; () is a scalar
    format: Format
    offset: int  # absolute in its source
    nbytes: int
    part: int = 0  # index of its file in a split model

    @property
    def width(self) -> int:
        """Weights in a row."""
        return self.shape[0] if self.shape else 1

    @property
    def rows(self) -> int:
        """Number of rows, over all outer dimensions."""
        return prod(self.shape[1:])

    @property
    def weights(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file before its tensor data."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A read position in the header; every read is checked to lie inside the buffer."""

    def __init__(self, buffer: Bytes, file: str, nbytes: int) -> None:
        self.buffer = buffer
        self.file = file
        self.nbytes = nbytes  # of the whole file
        self.at = 0
        self.strings_left = _MAX_STRINGS
        self.where = "the header"  # what is being read, for messages

    def fail(self, problem: str) -> GgufError:
        """Return the error for a problem at this position."""
        return GgufError(f"{self.file}: {self.where} (byte {self.at}) {problem}.")

    def reach(self, end: int) -> None:
        """Raise GgufError if the file ends before `end`, MoreNeededError if the buffer does."""
        if end > self.nbytes:
            raise self.fail(f"would end at byte {end}, the file ends at {self.nbytes}: {DAMAGED}")
        if end > len(self.buffer):
            raise MoreNeededError(end)

    def number(self, kind: Struct) -> int:
        """Read one number."""
        self.reach(self.at + kind.size)
        value: int = kind.unpack_from(self.buffer, self.at)[0]  # or a float, if `kind` is one
        self.at += kind.size
        return value

    def skip(self, nbytes: int) -> tuple[int, int]:
        """Skip `nbytes` bytes and return where they start and end."""
        start, end = self.at, self.at + nbytes
        self.reach(end)
        self.at = end
        return start, end

    def name(self, max_nbytes: int) -> str:
        """Read a key or the name of a tensor."""
        nbytes = self.number(_U64)
        if not 0 < nbytes <= max_nbytes:
            raise self.fail(f"has a name of {nbytes} bytes; 1 to {max_nbytes} are allowed")
        start, end = self.skip(nbytes)
        return decode_text(
            self.buffer[start:end], f"{self.file}: the name of {self.where} (byte {start})"
        )

    def skip_strings(self, count: int) -> int:
        """Skip an array of strings and return the length of the longest in bytes."""
        self.reach(self.at + 8 * count)
        if count > self.strings_left:
            raise self.fail(f"raises the strings above {_MAX_STRINGS}: too many to be real")
        self.strings_left -= count
        buffer, unpack_from = self.buffer, _U64.unpack_from
        at, longest = self.at, 0
        try:
            for _ in repeat(None, count):
                (nbytes,) = unpack_from(buffer, at)
                at += nbytes + 8
                if nbytes > longest:
                    longest = nbytes
        except (struct.error, OverflowError):
            at += 8  # the length at `at` is beyond the buffer
        self.reach(at)
        self.at = at
        return longest


def parse_header(buffer: Bytes, file: str, nbytes: int) -> Header:
    """Parse the header from `buffer`, the first bytes of a file of `nbytes` bytes.

    Raises MoreNeededError if the buffer is too short, GgufError if the header is not valid.
    """
    cursor = _Cursor(buffer, file, nbytes)
    version = _version(cursor)
    tensor_count = cursor.number(_U64)
    key_count = cursor.number(_U64)
    _check_count(cursor, "keys", key_count, _MIN_KEY_NBYTES)
    _check_count(cursor, "tensors", tensor_count, _MIN_TENSOR_NBYTES)
    metadata = Metadata(file)
    for index in range(key_count):
        cursor.where = f"key number {index}"
        _read_key(cursor, metadata)
    alignment = _alignment(file, metadata)
    tensors = _read_tensors(cursor, tensor_count)
    start = -(-cursor.at // alignment) * alignment
    located = {name: replace(info, offset=start + info.offset) for name, info in tensors.items()}
    _check_layout(file, nbytes, list(located.values()), alignment)
    return Header(version, alignment, metadata, located)


def _version(cursor: _Cursor) -> int:
    start, end = cursor.skip(min(4, cursor.nbytes))
    magic = bytes(cursor.buffer[start:end])
    if not magic:
        raise GgufError(f"{cursor.file} is empty: download it again.")
    if magic != MAGIC:
        hint = _OTHER_FILES.get(magic, "check that this is the model file")
        begins = (
            f"“{magic.decode()}”"
            if magic.isascii() and magic.decode().isprintable()
            else magic.hex(" ")
        )
        raise GgufError(f"{cursor.file} is not a GGUF file (it begins with {begins}): {hint}.")
    version = cursor.number(_U32)
    if version & 0xFFFF == 0 and version != 0:
        raise GgufError(f"{cursor.file} is a big-endian GGUF file: use the little-endian version.")
    if version not in VERSIONS:
        hint = "convert the model again" if version == 1 else "only versions 2 and 3 are supported"
        raise GgufError(f"{cursor.file} has GGUF version {version}: {hint}.")
    return version


def _check_count(cursor: _Cursor, what: str, count: int, entry_nbytes: int) -> None:
    if count > (cursor.nbytes - cursor.at) // entry_nbytes:
        raise cursor.fail(f"declares {count} {what}, more than the file can hold: {DAMAGED}")
    if count > _MAX_ENTRIES:
        raise cursor.fail(f"declares {count} {what}, more than {_MAX_ENTRIES}: too many to be real")


def _read_key(cursor: _Cursor, metadata: Metadata) -> None:
    key = cursor.name(MAX_KEY_NBYTES)
    if key in metadata:
        raise cursor.fail(f"is the second one named {short(key)}: the file is damaged")
    cursor.where = f"the value of {short(key)}"
    kind = _value_type(cursor)
    if kind == "ARRAY":
        metadata.add(key, _read_array(cursor))
    elif kind == "STRING":
        metadata.add(key, Entry(kind, *cursor.skip(cursor.number(_U64))))
    else:
        start = cursor.at
        value: int | bool = cursor.number(SCALARS[kind])
        if kind == "BOOL":
            (value,) = decode_bools([value], f"{cursor.file}: {cursor.where}")
        metadata.add(key, Entry(kind, start, cursor.at), value)


def _value_type(cursor: _Cursor) -> str:
    number = cursor.number(_U32)
    if number >= len(VALUE_TYPES):
        raise cursor.fail(f"has type number {number}, which does not exist: {DAMAGED}")
    return VALUE_TYPES[number]


def _read_array(cursor: _Cursor) -> Entry:
    kind = _value_type(cursor)
    if kind == "ARRAY":
        raise cursor.fail("is an array of arrays, which is not supported: no model uses one")
    count = cursor.number(_U64)
    if kind != "STRING":
        return Entry(kind, *cursor.skip(count * SCALARS[kind].size), count)
    start = cursor.at
    longest = cursor.skip_strings(count)
    return Entry(kind, start, cursor.at, count, longest)


def _alignment(file: str, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    kind = metadata.value_type(key)
    value = metadata[key] if kind == "UINT32" else None
    if not isinstance(value, int):
        raise GgufError(f"{file}: {key} has type {kind}, not UINT32: the file is damaged.")
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise GgufError(f"{file}: {key} is {value}, not a power of two up to {MAX_ALIGNMENT}.")
    return value


def _read_tensors(cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
    """Read the tensor table; its offsets are relative to the start of the data."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.where = f"tensor number {index}"
        info = _read_tensor(cursor)
        if info.name in tensors:
            raise cursor.fail(f"is the second one named {short(info.name)}: the file is damaged")
        tensors[info.name] = info
    return tensors


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.name(MAX_NAME_NBYTES)
    cursor.where = f"tensor {short(name)}"
    dims = cursor.number(_U32)
    if dims > MAX_DIMS:
        raise cursor.fail(f"has {dims} dimensions; at most {MAX_DIMS} are allowed")
    shape = tuple(cursor.number(_U64) for _ in range(dims))
    # Legal, but useless, and every division by a size would have to handle it.
    if 0 in shape:
        raise cursor.fail(f"is empty: its shape is {list(shape)}")
    format_id = cursor.number(_U32)
    fmt = FORMAT_BY_ID.get(format_id)
    if fmt is None:
        reason = "was removed" if format_id in _REMOVED_FORMATS else "is not known"
        raise cursor.fail(f"has type number {format_id}, which {reason}: convert the model again")
    info = TensorInfo(name, shape, fmt, cursor.number(_U64), 0)
    if info.width % fmt.block:
        raise cursor.fail(
            f"has rows of {info.width} weights, not a multiple of {fmt}'s {fmt.block}"
        )
    return replace(info, nbytes=fmt.row_nbytes(info.width) * info.rows)


def _check_layout(file: str, nbytes: int, tensors: list[TensorInfo], alignment: int) -> None:
    """Raise GgufError unless tensors are aligned, inside the file and do not overlap."""
    for info in tensors:
        if info.offset % alignment:
            raise GgufError(
                f"{file}: tensor {short(info.name)} starts at byte {info.offset}, "
                f"not at a multiple of the alignment {alignment}: the file is damaged."
            )
    last = max(tensors, key=lambda info: info.offset + info.nbytes, default=None)
    if last is not None and (missing := last.offset + last.nbytes - nbytes) > 0:
        raise GgufError(
            f"{file}: tensor {short(last.name)} ({last.format}, {list(last.shape)}) would end "
            f"{missing} bytes beyond the end of the file: {DAMAGED}."
        )
    for one, other in pairwise(sorted(tensors, key=lambda info: info.offset)):
        if one.offset + one.nbytes > other.offset:
            names = f"{short(one.name)} and {short(other.name)}"
            raise GgufError(f"{file}: tensors {names} overlap: the file is damaged.")
