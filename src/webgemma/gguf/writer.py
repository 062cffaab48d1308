"""Writer of GGUF files, used for adapters, converted and merged models, and tests."""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

TEMPORARY_ENDING = ".part"  # of a file that is being written


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: its shape in ggml order, fastest first, and its bytes as stored.

    If `data` is a function, it is called when the tensor is written, so that not all tensors need
    to be in memory at once.
    """

    name: str
    shape: Sequence[int]
    format: str
    data: Bytes | Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class Typed:
    """A value and the type to store it as; of a list, the type of its elements."""

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
    """Write a file atomically: after a failure there is no incomplete file."""
    write_atomically(path, _chunks(metadata, tensors, alignment, version))


def write_atomically(path: str | os.PathLike[str], chunks: Iterable[Bytes]) -> None:
    """Write the chunks to a temporary file, then rename it; GgufError if that fails."""
    with written_beside(path, chunks) as rename:
        rename()


@contextmanager
def written_beside(
    path: str | os.PathLike[str], chunks: Iterable[Bytes]
) -> Iterator[Callable[[], None]]:
    """Write the chunks to a temporary file; give the function that renames it to its path.

    Files that belong together are written first, then renamed, when no disk can be full any more.
    GgufError if the writing or the renaming fails."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY_ENDING}")

    def rename() -> None:
        try:
            temporary.replace(target)
        except OSError as error:
            raise _cannot_write(target, error) from error
        _sync_folder(target.parent)

    try:
        try:
            with temporary.open("xb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(target, error) from error
        yield rename
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _cannot_write(target: Path, error: OSError) -> GgufError:
    return GgufError(f"{target} cannot be written: {error.strerror or error}.")


def _sync_folder(folder: Path) -> None:
    """Make a rename in it last through a power failure, where the system can."""
    with suppress(OSError):  # Windows opens no folders, some file systems do not sync them
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Iterable[NewTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    version: int = 3,
) -> bytes:
    """Return the bytes of the same file."""
    return b"".join(_chunks(metadata, tensors, alignment, version))


def _chunks(
    metadata: Mapping[str, object], tensors: Iterable[NewTensor], alignment: int, version: int
) -> Iterator[bytes | memoryview]:
    """Return the content of the file as chunks; tensor data are not copied."""
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
    return chain((head, bytes(-len(head) % alignment)), _data_chunks(tensors, sizes, alignment))


def _data_chunks(
    tensors: list[NewTensor], sizes: list[int], alignment: int
) -> Iterator[bytes | memoryview]:
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        data = tensor.data() if callable(tensor.data) else tensor.data
        yield _check_data(tensor, data, nbytes)
        yield bytes(-nbytes % alignment)


def _with_alignment(metadata: Mapping[str, object], alignment: int) -> dict[str, object]:
    key = "general.alignment"
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InputError(f"The alignment {alignment} is not a power of two up to {MAX_ALIGNMENT}.")
    stated = metadata.get(key, alignment)
    if alignment != (stated.value if isinstance(stated, Typed) else stated):
        raise InputError(
            f"{key} is {stated} but the file is written with an alignment of {alignment}."
        )
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
        raise InputError(f"The value of {key!r}: {kind!r} is not a valid type.")
    content = _content(key, kind, items)
    number = VALUE_TYPES.index(kind)
    if not is_array:
        return pack("<I", number) + content
    return pack("<IIQ", VALUE_TYPES.index("ARRAY"), number, len(items)) + content


def _kind_of(key: str, items: list[Any], is_array: bool) -> str:
    """Return the type that plain Python values are stored as."""
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
            return "INT32"  # also arrays without negative numbers: llama.cpp requires some signed
        if low < 0:
            return "INT64"
        return "UINT32" if high < 1 << 32 else "UINT64"
    if not items:
        raise InputError(f"The value of {key!r} is an empty list: state its type with Typed.")
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise InputError(f"The value of {key!r} ({names}) cannot be stored in GGUF.")


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
    """Check a tensor and return the size of its data in bytes."""
    what = f"Tensor {tensor.name!r}"
    shape, fmt = tuple(tensor.shape), FORMATS.get(tensor.format)
    if fmt is None:
        raise InputError(f"{what}: {tensor.format!r} is not a valid format.")
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
    """Return the data as a view; raise InputError unless it has `nbytes` contiguous bytes."""
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


def gguf_header(
    metadata: Mapping[str, object], tensors: Iterable[NewTensor], alignment: int
) -> list[bytes | memoryview]:
    """Return the chunks before the data, for callers that write the data themselves.

    The data of each tensor has as many bytes as its format takes, then zeros up to the alignment.
    """
    return list(islice(_chunks(metadata, tensors, alignment, 3), 2))
