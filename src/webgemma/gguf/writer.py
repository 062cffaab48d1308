"""Writes GGUF: adapters, small models, and the files of the tests."""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pathlib import Path
from struct import pack
from typing import Any

from webgemma.errors import GgufError, InputError
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.header import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DIMS,
    MAX_KEY_NBYTES,
    MAX_NAME_NBYTES,
    VERSIONS,
)
from webgemma.gguf.metadata import VALUE_CODES, VALUE_TYPES
from webgemma.gguf.sources import Bytes


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: its shape in ggml order, fastest first, and its bytes as stored.

    A function is asked for the bytes when they are written, so that not all need be in memory."""

    name: str
    shape: Sequence[int]
    format: str
    data: Bytes | Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with the type to store it as; that of the elements, if the value is a list."""

    value: object
    type: str


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Iterable[NewTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    version: int = 3,
) -> None:
    """Writes a file: whole and under its name, or not at all."""
    write_whole(path, _pieces(metadata, tensors, alignment, version))


def write_whole(path: str | os.PathLike[str], pieces: Iterable[Bytes]) -> None:
    """Writes the pieces one after the other: all under this name, or nothing."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise GgufError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        draft.unlink(missing_ok=True)


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Iterable[NewTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    version: int = 3,
) -> bytes:
    """The same file in memory."""
    return b"".join(_pieces(metadata, tensors, alignment, version))


def _pieces(
    metadata: Mapping[str, object], tensors: Iterable[NewTensor], alignment: int, version: int
) -> Iterator[bytes | memoryview]:
    """The file in pieces, none of the tensor data copied."""
    if version not in VERSIONS:
        raise InputError(f"GGUF version {version} cannot be written, only 2 and 3.")
    values = _with_alignment(metadata, alignment)
    tensors = list(tensors)
    sizes = [_check_tensor(tensor) for tensor in tensors]
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise InputError("Two tensors have the same name.")
    header = [MAGIC, pack("<IQQ", version, len(tensors), len(values))]
    header += [_string(key, "key", MAX_KEY_NBYTES) + _value(key, values[key]) for key in values]
    offset = 0
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        header.append(_tensor_info(tensor, offset))
        offset += nbytes + -nbytes % alignment
    head = b"".join(header)
    return chain((head, bytes(-len(head) % alignment)), _datas(tensors, sizes, alignment))


def _datas(
    tensors: list[NewTensor], sizes: list[int], alignment: int
) -> Iterator[bytes | memoryview]:
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        data = tensor.data() if callable(tensor.data) else tensor.data
        yield _check_data(tensor, data, nbytes)
        yield bytes(-nbytes % alignment)


def _with_alignment(metadata: Mapping[str, object], alignment: int) -> dict[str, object]:
    key = "general.alignment"
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InputError(f"alignment={alignment} is not a power of two up to {MAX_ALIGNMENT}.")
    said = metadata.get(key, alignment)
    if alignment != (said.value if isinstance(said, Typed) else said):
        raise InputError(f"{key} is {said} but the file is written with alignment={alignment}.")
    values = dict(metadata)
    if key in metadata or alignment != DEFAULT_ALIGNMENT:
        values[key] = Typed(alignment, "UINT32")
    return values


def _string(text: str, what: str, max_nbytes: int | None = None) -> bytes:
    try:
        data = text.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InputError(f"The {what} {text!r} cannot be written as UTF-8.") from None
    if max_nbytes is not None and not 0 < len(data) <= max_nbytes:
        raise InputError(f"The {what} {text[:80]!r} has {len(data)} bytes, not 1 to {max_nbytes}.")
    return pack("<Q", len(data)) + data


# Values


def _value(key: str, value: Any) -> bytes:
    plain: Any = value.value if isinstance(value, Typed) else value
    is_array = isinstance(plain, Sequence) and not isinstance(plain, str | bytes | bytearray)
    items = list(plain) if is_array else [plain]
    kind = value.type if isinstance(value, Typed) else _kind_of(key, items, is_array)
    if kind not in VALUE_CODES or kind == "ARRAY":
        raise InputError(f"The value of {key!r}: there is no type {kind!r}.")
    content = _content(key, kind, items)
    number = VALUE_TYPES.index(kind)
    if not is_array:
        return pack("<I", number) + content
    return pack("<IIQ", VALUE_TYPES.index("ARRAY"), number, len(items)) + content


def _kind_of(key: str, items: list[Any], is_array: bool) -> str:
    """The type that plain Python values are stored as."""
    kinds = {type(item) for item in items}
    if kinds == {bool}:
        return "BOOL"
    if kinds == {str}:
        return "STRING"
    if kinds in ({float}, {int, float}):
        return "FLOAT32"
    if kinds == {int}:
        low, high = min(items), max(items)
        if low >= -(1 << 31) and high < 1 << 31 and (low < 0 or is_array):
            return "INT32"  # also arrays from zero up: llama.cpp wants some of them signed
        if low < 0:
            return "INT64"
        return "UINT32" if high < 1 << 32 else "UINT64"
    if not items:
        raise InputError(f"The value of {key!r} is an empty list: give its type with Typed.")
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise InputError(f"The value of {key!r} ({names}) has no type in GGUF.")


def _content(key: str, kind: str, items: list[Any]) -> bytes:
    what = f"value of {key!r}"
    if kind == "STRING":
        return b"".join(_string(item, what) for item in items)
    if kind == "BOOL" and not all(isinstance(item, bool) for item in items):
        raise InputError(f"The {what} must be true or false to be stored as BOOL.")
    try:
        return pack(f"<{len(items)}{VALUE_CODES[kind]}", *items)
    except (struct.error, OverflowError) as error:
        raise InputError(f"The {what} does not fit {kind}: {error}.") from None


# Tensors


def _check_tensor(tensor: NewTensor) -> int:
    """How many bytes its data has, or is to have."""
    what = f"Tensor {tensor.name!r}"
    shape, fmt = tuple(tensor.shape), FORMATS.get(tensor.format)
    if fmt is None:
        raise InputError(f"{what}: there is no format {tensor.format!r}.")
    if len(shape) > MAX_DIMS or any(dim <= 0 for dim in shape):
        raise InputError(f"{what}: the shape {shape} is not 0 to {MAX_DIMS} positive numbers.")
    width = shape[0] if shape else 1
    if width % fmt.block:
        raise InputError(f"{what}: rows of {width} are not a multiple of {fmt}'s {fmt.block}.")
    nbytes = fmt.row_nbytes(width) * prod(shape[1:])
    if not callable(tensor.data):
        _check_data(tensor, tensor.data, nbytes)
    return nbytes


def _check_data(tensor: NewTensor, given: Bytes, nbytes: int) -> memoryview:
    what = f"Tensor {tensor.name!r}"
    try:
        data = memoryview(given).cast("B")
    except TypeError as error:
        raise InputError(f"{what}: its data cannot be used: {error}.") from None
    if data.nbytes != nbytes:
        shape = tuple(tensor.shape)
        raise InputError(
            f"{what}: {tensor.format} {shape} takes {nbytes} bytes, not {data.nbytes}."
        )
    return data


def _tensor_info(tensor: NewTensor, offset: int) -> bytes:
    name = _string(tensor.name, "tensor name", MAX_NAME_NBYTES)
    dims, fmt = len(tensor.shape), FORMATS[tensor.format]
    return name + pack(f"<I{dims}QIQ", dims, *tensor.shape, fmt.id, offset)


def gguf_head(
    metadata: Mapping[str, object], tensors: Iterable[NewTensor], alignment: int
) -> list[bytes | memoryview]:
    """All that stands before the data, for one who writes that himself, piece by piece: each
    tensor's as many bytes as its format takes, then zeros up to the alignment."""
    return list(islice(_pieces(metadata, tensors, alignment, 3), 2))
