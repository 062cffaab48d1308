"""Reads safetensors, the files of Hugging Face models: every length and offset is checked."""

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from webgemma.errors import GgufError

MAX_HEADER_NBYTES = 100_000_000  # as the format's own reader has it
MAX_DIMS = 4
ELEMENT_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}  # what models are made of
_OTHERS = {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is: its shape slowest first, its type, its bytes from `offset` on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    file: "SafetensorsFile"

    def read(self) -> bytes:
        """Its bytes, row after row."""
        return self.file.read(self.offset, self.nbytes)


class SafetensorsFile:
    """One open file and the tensors it lists."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self._file: BinaryIO = self.path.open("rb")
        try:
            self.nbytes = os.fstat(self._file.fileno()).st_size
            self.tensors = self._tensors()
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly so many bytes from an offset on."""
        self._file.seek(offset)
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise self._wrong("ends too early; download it again")
        return data

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _tensors(self) -> dict[str, StoredTensor]:
        if self.nbytes < 8:
            raise self._wrong("is too short to be a safetensors file")
        (length,) = struct.unpack("<Q", self.read(0, 8))
        if length > min(MAX_HEADER_NBYTES, self.nbytes - 8):
            raise self._wrong(f"has a header of {length} bytes, which cannot be")
        header = self._header(self.read(8, length))
        header.pop("__metadata__", None)
        return {name: self._tensor(name, facts, 8 + length) for name, facts in header.items()}

    def _header(self, data: bytes) -> dict[str, Any]:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            facts = dict(pairs)
            if len(facts) < len(pairs):
                raise self._wrong("names a tensor twice")
            return facts

        try:
            header = json.loads(data, object_pairs_hook=once)
        except (ValueError, RecursionError):
            raise self._wrong("has a header that is no JSON") from None
        if not isinstance(header, dict):
            raise self._wrong("has a header that lists no tensors")
        return header

    def _tensor(self, name: str, facts: Any, first: int) -> StoredTensor:
        what = f"has a tensor {name[:80]!r}"
        facts = facts if isinstance(facts, dict) else {}
        dtype, shape, place = (facts.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(place, 2)):
            raise self._wrong(f"{what} without a sound dtype, shape and place")
        element = (ELEMENT_NBYTES | _OTHERS).get(dtype)
        if element is None:
            raise self._wrong(f"{what} of the type {dtype[:20]!r}, which webgemma does not know")
        low, high = place
        if not low <= high <= self.nbytes - first:
            raise self._wrong(f"{what} outside the file; download it again")
        if len(shape) > MAX_DIMS or prod(shape) * element != high - low:
            raise self._wrong(f"{what} of the shape {shape[:8]}, which does not fit its bytes")
        return StoredTensor(name, tuple(shape), dtype, first + low, high - low, self)

    def _wrong(self, what: str) -> GgufError:
        return GgufError(f"{self.name} {what}.")


def _are_counts(values: Any, length: int | None = None) -> bool:
    """Whether it is a list of whole numbers from zero up, of that length."""
    return (
        isinstance(values, list)
        and length in (None, len(values))
        and all(type(value) is int and value >= 0 for value in values)
    )
