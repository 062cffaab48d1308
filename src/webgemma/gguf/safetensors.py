"""Reader and writer of safetensors, Hugging Face's format: a JSON header and plain tensors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from webgemma.errors import GgufError, InputError
from webgemma.gguf.metadata import short
from webgemma.gguf.sources import Bytes, FileSource, Source
from webgemma.gguf.writer import write_atomically
from webgemma.sync import run_sync

DTYPE_NBYTES = (
    dict.fromkeys(("F64", "I64", "U64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)
)
_MAX_HEADER_NBYTES = 100_000_000  # limit of the format
_MAX_DIMS = 8
_DAMAGED = "the file is damaged: get it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; its shape has the slowest dimension first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # absolute in the file
    nbytes: int


class Safetensors:
    """An open safetensors file; the bytes of a tensor are read on request."""

    def __init__(
        self, source: Source, tensors: dict[str, StoredTensor], metadata: dict[str, str]
    ) -> None:
        self.name = source.name
        self.tensors = tensors
        self.metadata = metadata
        self._source = source

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Safetensors:
        """Open a local file."""
        return run_sync(cls.aopen(FileSource(path)))

    @classmethod
    async def aopen(cls, source: Source) -> Safetensors:
        """Open any source and take ownership of it."""
        try:
            header, start = await _header(source)
            metadata = _metadata(source.name, header.pop("__metadata__", {}))
            tensors = {name: _tensor(source, name, entry, start) for name, entry in header.items()}
            _check_overlap(source.name, tensors)
        except BaseException:
            source.close()
            raise
        return cls(source, tensors, metadata)

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of the header."""
        return list(self.tensors)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor's elements: F32, BF16, …"""
        return self._find(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, slowest dimension first."""
        return self._find(name).shape

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Return the bytes of a tensor: all, or `nbytes` of them from `offset` on."""
        return run_sync(self.aread(name, offset, nbytes))

    async def aread(self, name: str, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Return the same bytes from an asynchronous source."""
        tensor = self._find(name)
        nbytes = tensor.nbytes - offset if nbytes is None else nbytes
        if not 0 <= offset <= offset + nbytes <= tensor.nbytes:
            raise GgufError(
                f"{self.name}: bytes {offset} to {offset + nbytes} of tensor {short(name)} "
                f"were requested, but it has {tensor.nbytes}."
            )
        return await self._source.read(tensor.offset + offset, nbytes)

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> Safetensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise GgufError(f"{self.name}: there is no tensor {short(name)}.")
        return self.tensors[name]


async def _header(source: Source) -> tuple[dict[str, Any], int]:
    """Return the parsed header and the offset of the data."""
    if source.nbytes < 8:
        raise GgufError(f"{source.name} has {source.nbytes} bytes: {_DAMAGED}.")
    (nbytes,) = struct.unpack("<Q", bytes(await source.read(0, 8)))
    if nbytes > min(_MAX_HEADER_NBYTES, source.nbytes - 8):
        raise GgufError(
            f"{source.name}: a header of {nbytes} bytes does not fit: this is not a "
            "safetensors file, or it was cut short."
        )
    text = bytes(await source.read(8, nbytes))
    try:
        header = json.loads(text, object_pairs_hook=_unique_dict)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError
        raise GgufError(f"{source.name}: its header is not JSON ({error}): {_DAMAGED}.") from None
    if not isinstance(header, dict):
        raise GgufError(f"{source.name}: its header is not a JSON object: {_DAMAGED}.")
    return header, 8 + nbytes


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _metadata(file: str, entry: object) -> dict[str, str]:
    if isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values()):
        return entry
    raise GgufError(f"{file}: its __metadata__ is not a map of strings: {_DAMAGED}.")


def _tensor(source: Source, name: str, entry: object, start: int) -> StoredTensor:
    what = f"{source.name}: tensor {short(name)}"
    if not isinstance(entry, dict):
        raise GgufError(f"{what} is not described by a JSON object: {_DAMAGED}.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_NBYTES:
        raise GgufError(f"{what} has the dtype {short(str(dtype))}, which is not supported.")
    if not _is_counts(shape) or len(shape) > _MAX_DIMS:
        raise GgufError(f"{what} has no valid shape: {_DAMAGED}.")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise GgufError(f"{what} has no valid data_offsets: {_DAMAGED}.")
    first, end = offsets
    if end > source.nbytes - start:
        raise GgufError(f"{what} ends after the end of the file: it was cut short, get it again.")
    if prod(shape) * DTYPE_NBYTES[dtype] != end - first:
        raise GgufError(
            f"{what} of shape {tuple(shape)} as {dtype} cannot have {end - first} bytes: "
            f"{_DAMAGED}."
        )
    return StoredTensor(name, dtype, tuple(shape), start + first, end - first)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    """Return whether a JSON value is a list of integers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_overlap(file: str, tensors: dict[str, StoredTensor]) -> None:
    """Raise GgufError if two tensors overlap."""
    last: StoredTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.offset + t.nbytes)):
        if last and tensor.offset < last.offset + last.nbytes:
            raise GgufError(
                f"{file}: the tensors {short(last.name)} and {short(tensor.name)} overlap: "
                f"{_DAMAGED}."
            )
        last = tensor


@dataclass(frozen=True, slots=True)
class NewSafetensor:
    """A tensor to write: its shape, slowest dimension first, and its bytes as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


def safetensors_chunks(
    tensors: Iterable[NewSafetensor], metadata: Mapping[str, str] | None = None
) -> list[Bytes]:
    """Return the content of a file as chunks; tensor data are not copied."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    chunks, at = [], 0
    for tensor in tensors:
        data = memoryview(tensor.data).cast("B")
        nbytes = prod(tensor.shape) * DTYPE_NBYTES.get(tensor.dtype, 0)
        if tensor.dtype not in DTYPE_NBYTES or data.nbytes != nbytes or tensor.name in header:
            raise InputError(
                f"Tensor {tensor.name!r} of shape {tensor.shape} as {tensor.dtype} cannot be "
                f"written with {data.nbytes} bytes, or occurs twice."
            )
        offsets = [at, at + nbytes]
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets,
        }  # fmt: skip
        chunks.append(data)
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data start at a multiple of 8
    return [struct.pack("<Q", len(text)), text, *chunks]


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Iterable[NewSafetensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file atomically: after a failure there is no incomplete file."""
    write_atomically(path, safetensors_chunks(tensors, metadata))
