"""Safetensors, the files of Hugging Face: a JSON header and plain tensors, read and written."""

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
from webgemma.gguf.writer import write_whole
from webgemma.sync import run_sync

DTYPE_NBYTES = (
    dict.fromkeys(("F64", "I64", "U64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)
)
_MAX_HEADER_NBYTES = 100_000_000  # the limit of the format
_MAX_DIMS = 8
_DAMAGED = "the file is damaged: get it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its shape has the slowest dimension first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # absolute in the file
    nbytes: int


class Safetensors:
    """What a safetensors file says; the bytes of a tensor are read when they are asked for."""

    def __init__(
        self, source: Source, tensors: dict[str, StoredTensor], metadata: dict[str, str]
    ) -> None:
        self.name = source.name
        self.tensors = tensors
        self.metadata = metadata
        self._source = source

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Safetensors:
        """Opens a local file."""
        return run_sync(cls.aopen(FileSource(path)))

    @classmethod
    async def aopen(cls, source: Source) -> Safetensors:
        """Opens any source and owns it from then on."""
        try:
            header, start = await _header(source)
            metadata = _metadata(source.name, header.pop("__metadata__", {}))
            tensors = {name: _tensor(source, name, entry, start) for name, entry in header.items()}
            _check_apart(source.name, tensors)
        except BaseException:
            source.close()
            raise
        return cls(source, tensors, metadata)

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of the header."""
        return list(self.tensors)

    def dtype(self, name: str) -> str:
        """What the elements of a tensor are: F32, BF16, …"""
        return self._find(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, its slowest dimension first."""
        return self._find(name).shape

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Bytes of a tensor: all, or `nbytes` of them from `offset` on."""
        return run_sync(self.aread(name, offset, nbytes))

    async def aread(self, name: str, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """The same for a source that makes us wait."""
        tensor = self._find(name)
        nbytes = tensor.nbytes - offset if nbytes is None else nbytes
        if not 0 <= offset <= offset + nbytes <= tensor.nbytes:
            raise GgufError(
                f"{self.name}: bytes {offset} to {offset + nbytes} of tensor {short(name)} "
                f"were asked for, but it has {tensor.nbytes}."
            )
        return await self._source.read(tensor.offset + offset, nbytes)

    def close(self) -> None:
        """Lets go of the file."""
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
    """The header as JSON has it, and where the data starts."""
    if source.nbytes < 8:
        raise GgufError(f"{source.name} has {source.nbytes} bytes: {_DAMAGED}.")
    (nbytes,) = struct.unpack("<Q", bytes(await source.read(0, 8)))
    if nbytes > min(_MAX_HEADER_NBYTES, source.nbytes - 8):
        raise GgufError(
            f"{source.name}: a header of {nbytes} bytes does not fit; it is no safetensors file, "
            "or was cut short."
        )
    text = bytes(await source.read(8, nbytes))
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError
        raise GgufError(f"{source.name}: its header is no JSON ({error}): {_DAMAGED}.") from None
    if not isinstance(header, dict):
        raise GgufError(f"{source.name}: its header is no JSON object: {_DAMAGED}.")
    return header, 8 + nbytes


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _metadata(file: str, entry: object) -> dict[str, str]:
    if isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values()):
        return entry
    raise GgufError(f"{file}: its __metadata__ is no map of texts: {_DAMAGED}.")


def _tensor(source: Source, name: str, entry: object, start: int) -> StoredTensor:
    what = f"{source.name}: tensor {short(name)}"
    if not isinstance(entry, dict):
        raise GgufError(f"{what} is not described by a JSON object: {_DAMAGED}.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_NBYTES:
        raise GgufError(f"{what} has the dtype {short(str(dtype))}, which webgemma does not know.")
    if not _counts(shape) or len(shape) > _MAX_DIMS:
        raise GgufError(f"{what} has no usable shape: {_DAMAGED}.")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise GgufError(f"{what} does not say where it begins and ends: {_DAMAGED}.")
    first, end = offsets
    if end > source.nbytes - start:
        raise GgufError(f"{what} would end after the file does: it was cut short, get it again.")
    if prod(shape) * DTYPE_NBYTES[dtype] != end - first:
        raise GgufError(
            f"{what} of shape {tuple(shape)} as {dtype} cannot have {end - first} bytes: "
            f"{_DAMAGED}."
        )
    return StoredTensor(name, dtype, tuple(shape), start + first, end - first)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_apart(file: str, tensors: dict[str, StoredTensor]) -> None:
    last: StoredTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.offset + t.nbytes)):
        if last and tensor.offset < last.offset + last.nbytes:
            raise GgufError(
                f"{file}: the tensors {short(last.name)} and {short(tensor.name)} overlap: "
                f"{_DAMAGED}."
            )
        last = tensor


@dataclass(frozen=True, slots=True)
class NewStored:
    """A tensor to write: its shape with the slowest dimension first, its bytes as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


def safetensors_pieces(
    tensors: Iterable[NewStored], metadata: Mapping[str, str] | None = None
) -> list[Bytes]:
    """A file in pieces, none of the tensor data copied."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    datas, at = [], 0
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
        datas.append(data)
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is to start at a multiple of 8
    return [struct.pack("<Q", len(text)), text, *datas]


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Iterable[NewStored],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file: whole and under its name, or not at all."""
    write_whole(path, safetensors_pieces(tensors, metadata))
