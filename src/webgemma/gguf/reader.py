"""Reader of a GGUF file, or of all files of a split model: metadata, tensors and their bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.header import Header, MoreNeededError, TensorInfo, parse_header
from webgemma.gguf.metadata import Value, short
from webgemma.gguf.sources import Bytes, BytesSource, FileSource, Source
from webgemma.sync import run_sync

__all__ = ["Gguf", "TensorInfo", "Value"]

_FIRST_WINDOW_NBYTES = 1 << 20
_LOCAL_WINDOW_NBYTES = 20 << 20  # more than the header of a Gemma, which is then parsed once
_MAX_FETCHED_HEADER_NBYTES = 1 << 28  # sixteen times as long as the header of a Gemma
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of a model."""

    source: Source
    head: memoryview  # the first bytes of the file; all of them if it is in memory
    header: Header


class Gguf:
    """An open GGUF model. The metadata of a split model is that of its first file."""

    def __init__(self, parts: list[_Part]) -> None:
        first = parts[0]
        self._parts = parts
        self._metadata = first.header.metadata
        self.name = first.source.name
        self.version = first.header.version
        self.alignment = first.header.alignment
        self.nbytes = sum(part.source.nbytes for part in parts)
        self.metadata: Mapping[str, Value] = self._metadata
        self.tensors = _merge_tensors(parts)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Gguf:
        """Open a local file; of a split model the first, with the others in the same folder."""
        return run_sync(cls.aopen(FileSource(path)))

    @classmethod
    async def aopen(cls, source: Source) -> Gguf:
        """Open any source and take ownership of it; only the header of a remote file is fetched."""
        sources = [source]
        try:
            first = await _open_part(source)
            parts = [first]
            for number, name in enumerate(_other_names(first), start=1):
                sources.append(await _find_sibling(first, number, name))
                parts.append(await _open_sibling(first, number, sources[-1]))
            return cls(parts)
        except BaseException:
            for opened in sources:
                opened.close()
            raise

    async def read(self, tensor: TensorInfo, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Return the bytes of a tensor: all, or `nbytes` of them from `offset` on."""
        part, start, end = self._locate(tensor, offset, nbytes)
        if end <= len(part.head):
            return part.head[start:end]
        return await part.source.read(start, end - start)

    async def read_raw(self, tensor: TensorInfo, offset: int, nbytes: int) -> Any:
        """Return the same bytes in the source's cheapest form, for a device that accepts it.

        In a browser that is a JavaScript array that stays valid until the next read.
        """
        part, start, end = self._locate(tensor, offset, nbytes)
        raw = getattr(part.source, "raw", None)
        if raw is None or end <= len(part.head):
            return await self.read(tensor, offset, nbytes)
        return await raw(start, nbytes)

    def data(self, tensor: TensorInfo, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Return the same bytes synchronously; GgufError unless the file is local or in memory."""
        part, start, end = self._locate(tensor, offset, nbytes)
        local = isinstance(part.source, BytesSource | FileSource)
        if not local:
            raise GgufError(
                f"{part.source.name} is not on this machine: load it on a GPU, or download it."
            )
        return run_sync(part.source.read(start, end - start))

    def value_type(self, key: str) -> str:
        """Return the type of a value as stored in the file: UINT32, STRING, FLOAT32[262144]."""
        return self._metadata.value_type(key)

    def close(self) -> None:
        """Close the files; bytes returned earlier stay valid."""
        self._metadata.attach(None)
        while self._parts:
            self._parts.pop().source.close()

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(
        self, tensor: TensorInfo, offset: int, nbytes: int | None
    ) -> tuple[_Part, int, int]:
        """Return the file that has these bytes of a tensor, and where they start and end in it."""
        if tensor.part >= len(self._parts):
            raise GgufError(f"{self.name} is closed, or {short(tensor.name)} is not in this file.")
        if nbytes is None:
            nbytes = tensor.nbytes - offset
        if not 0 <= offset <= offset + nbytes <= tensor.nbytes:
            raise GgufError(
                f"{self.name}: bytes {offset} to {offset + nbytes} of tensor {short(tensor.name)} "
                f"were requested, but it has {tensor.nbytes}."
            )
        start = tensor.offset + offset
        return self._parts[tensor.part], start, start + nbytes


async def _open_part(source: Source) -> _Part:
    """Read a file in growing windows, no byte twice, until they contain the header."""
    head = await source.read(0, min(_first_window(source), source.nbytes))
    while True:
        try:
            header = parse_header(head, source.name, source.nbytes)
            break
        except MoreNeededError as more:
            end = more.end
        if end > _MAX_FETCHED_HEADER_NBYTES:
            raise GgufError(
                f"{source.name}: its header extends to byte {end}: too long to be real."
            )
        end = min(max(end, 2 * len(head)), source.nbytes)
        head = bytes(head) + bytes(await source.read(len(head), end - len(head)))
    view = memoryview(head).toreadonly()
    if isinstance(source, FileSource):  # its tensors are read from the file when they are needed
        view = view[: min((info.offset for info in header.tensors.values()), default=len(view))]
    header.metadata.attach(view)
    return _Part(source, view, header)


def _first_window(source: Source) -> int:
    if isinstance(source, BytesSource):
        return source.nbytes
    return _LOCAL_WINDOW_NBYTES if isinstance(source, FileSource) else _FIRST_WINDOW_NBYTES


# Split models: NAME-00001-of-00003.gguf and the other parts


def _other_names(part: _Part) -> list[str]:
    """Return the names of the other files of a split model; `part` must be the first file."""
    file = part.source.name
    count = _split_number(part, "split.count", default=1)
    number = _split_number(part, "split.no", default=0)
    if count <= 1:
        return []
    match = _SPLIT_NAME.fullmatch(re.split(r"[/\\]", file)[-1])
    fits = match is None or (int(match[2]), int(match[3])) == (number + 1, count)
    if not (0 <= number < count and fits):
        raise GgufError(f"{file} is marked as part {number + 1} of {count}: rename it accordingly.")
    stem = match[1] if match else "NAME"
    first = f"{stem}-00001-of-{count:05}.gguf"
    if number > 0:
        raise GgufError(f"{file} is part {number + 1} of {count}: open {first} instead.")
    if match is None:
        raise GgufError(f"{file} is part 1 of {count}: rename it to {first} to find the others.")
    return [f"{stem}-{index:05}-of-{count:05}.gguf" for index in range(2, count + 1)]


async def _find_sibling(first: _Part, number: int, name: str) -> Source:
    try:
        return await first.source.sibling(name)
    except ModelNotFoundError as error:
        raise GgufError(
            f"{first.source.name}: part {number + 1} is missing: {name} must be in the same folder."
        ) from error


async def _open_sibling(first: _Part, number: int, source: Source) -> _Part:
    part = await _open_part(source)
    count = _split_number(first, "split.count", default=1)
    marked = (
        _split_number(part, "split.no", default=-1),
        _split_number(part, "split.count", default=0),
    )
    if marked != (number, count):
        raise GgufError(
            f"{source.name} should be part {number + 1} of {count} but is marked as "
            f"{marked[0] + 1} of {marked[1]}: the parts do not belong together."
        )
    return part


def _split_number(part: _Part, key: str, *, default: int) -> int:
    file, metadata = part.source.name, part.header.metadata
    if key not in metadata:
        return default
    if not re.fullmatch(r"U?INT\d+", metadata.value_type(key)):
        raise GgufError(f"{file}: {key} has type {metadata.value_type(key)}, not an integer.")
    value = metadata[key]
    assert isinstance(value, int)
    return value


def _merge_tensors(parts: list[_Part]) -> dict[str, TensorInfo]:
    if len(parts) == 1:
        return parts[0].header.tensors
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        for name, info in part.header.tensors.items():
            if name in tensors:
                other = parts[tensors[name].part].source.name
                raise GgufError(f"{part.source.name}: tensor {short(name)} is in {other} already.")
            tensors[name] = replace(info, part=number)
    first = parts[0]
    key = "split.tensors.count"
    expected = _split_number(first, key, default=len(tensors))
    if expected != len(tensors):
        raise GgufError(
            f"{first.source.name}: {key} is {expected}, but the {len(parts)} parts have "
            f"{len(tensors)} tensors: they do not belong together."
        )
    return tensors
