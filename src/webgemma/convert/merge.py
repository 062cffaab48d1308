"""Merging: a new model file whose weights have adapters in them, W + scale · B A."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.tensors import canonical_tensors
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.gguf.sources import Bytes
from webgemma.gguf.writer import NewTensor, Typed, gguf_head, write_whole
from webgemma.lora.adapter import EMBEDDING, HEAD, Choices, fitted_adapters
from webgemma.reference.dequantise import dequantise
from webgemma.reference.lora import Pair
from webgemma.reference.quantise import QUANTISERS, quantise

CHUNK_NBYTES = 16 << 20  # of float32 that are in memory at a time
SAME = "same"
_FALLBACK = "Q8_0"  # for what we read but do not write; F16 where its blocks do not fit


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the new file: what it comes from, what is added, how it is stored."""

    name: str
    source: TensorInfo
    pairs: tuple[Pair, ...]
    flipped: bool  # the embedding's A has a row for each token
    format: str


def merge(
    gguf: Gguf,
    lora: Choices,
    path: str | os.PathLike[str],
    *,
    format: str = SAME,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """Write the model with the adapters in it; gives the formats of the matrices that changed.

    They keep their format if webgemma can write it, else become Q8_0, or all what `format` says.
    Everything else is copied byte for byte. A head that was the embedding's table becomes a tensor
    of its own where the two now differ."""
    if format != SAME and format not in QUANTISERS:
        names = ", ".join((SAME, *QUANTISERS))
        raise InputError(f"Weights cannot be written as {format!r}; choose one of {names}.")
    target = Path(path)
    if target.exists() and not overwrite:
        raise InputError(f"{target} is there already: name another file, or say --force.")
    adapters = fitted_adapters(lora, Config.from_gguf(gguf))
    made = [
        {name: Pair.of_bytes(name, pair, scale) for name, pair in pairs.items()}
        for pairs, scale in adapters
    ]
    targets = _targets(gguf, made, format)
    changed = {each.name: each.format for each in targets if each.pairs}
    if not changed:
        raise InputError("The adapters change nothing of this model.")
    write_whole(target, _pieces(gguf, targets, progress or (lambda _: None)))
    return changed


def _targets(gguf: Gguf, adapters: list[dict[str, Pair]], format: str) -> list[_Target]:
    canonical = {tensor.name: name for name, tensor in canonical_tensors(gguf).items()}
    sources = [(canonical[tensor.name], tensor) for tensor in gguf.tensors.values()]
    adapted = {name for pairs in adapters for name in pairs}
    if adapted & {EMBEDDING, HEAD} and HEAD not in canonical.values():
        sources.append((HEAD, gguf.tensors[EMBEDDING]))
    targets = []
    for name, source in sources:
        pairs = tuple(adapter[name] for adapter in adapters if name in adapter)
        stored = _format(source, format) if pairs else source.format.name
        label = name if name == HEAD else source.name
        targets.append(_Target(label, source, pairs, name == EMBEDDING, stored))
    return targets


def _format(source: TensorInfo, format: str) -> str:
    asked = source.format.name if format == SAME else format
    if asked not in QUANTISERS:
        asked = _FALLBACK
    return asked if source.width % FORMATS[asked].block == 0 else "F16"


def _pieces(gguf: Gguf, targets: list[_Target], progress: Callable[[int], None]) -> Iterator[Bytes]:
    promised = [
        NewTensor(each.name, each.source.shape, each.format, lambda: b"") for each in targets
    ]
    yield from gguf_head(_metadata(gguf), promised, gguf.alignment)
    done = 0
    for each in targets:
        nbytes = 0
        for piece in _merged(gguf, each) if each.pairs else _copied(gguf, each.source):
            nbytes += len(piece)
            yield piece
            progress(done + nbytes)
        yield bytes(-nbytes % gguf.alignment)
        done += nbytes


def _metadata(gguf: Gguf) -> dict[str, object]:
    """As it was, but in one file."""
    found: dict[str, object] = {}
    for key in gguf.metadata:
        kind = gguf.value_type(key).partition("[")[0]
        if kind == "ARRAY":
            raise GgufError(f"{gguf.name}: {key} is a list of lists, which cannot be written.")
        if not key.startswith("split."):
            found[key] = Typed(gguf.metadata[key], kind)
    return found


def _copied(gguf: Gguf, source: TensorInfo) -> Iterator[Bytes]:
    for at in range(0, source.nbytes, CHUNK_NBYTES):
        yield gguf.data(source, at, min(CHUNK_NBYTES, source.nbytes - at))


def _merged(gguf: Gguf, target: _Target) -> Iterator[Bytes]:
    """Some rows at a time: read, dequantised, added to, stored again."""
    source = target.source
    row_nbytes = source.format.row_nbytes(source.width)
    step = max(1, CHUNK_NBYTES // (4 * source.width))
    for first, count in _row_runs(source, step):
        data = gguf.data(source, first * row_nbytes, count * row_nbytes)
        rows = dequantise(data, source.format, (count, source.width), source.name).copy()
        for pair in target.pairs:
            rows += np.float32(pair.scale) * _delta(pair, target.flipped, source, first, count)
        if not np.isfinite(rows).all():
            raise GgufError(f"{target.name} becomes NaN or infinity: the adapter is damaged.")
        yield quantise(rows, target.format)


def _row_runs(source: TensorInfo, step: int) -> Iterator[tuple[int, int]]:
    """(first row, rows), none of them of two experts."""
    rows = source.shape[1]
    for start in range(0, source.rows, rows):
        for first in range(0, rows, step):
            yield start + first, min(step, rows - first)


def _delta(pair: Pair, flipped: bool, source: TensorInfo, first: int, count: int) -> np.ndarray:
    """B A, of these rows of the matrix."""
    if flipped:
        return pair.a[first : first + count] @ pair.b.T
    expert, row = divmod(first, source.shape[1])
    a, b = pair.of(expert)
    return b[row : row + count] @ a
