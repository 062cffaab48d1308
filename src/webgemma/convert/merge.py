"""Merging LoRA adapters into a new model file: W + scale · B A."""

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
from webgemma.gguf.writer import NewTensor, Typed, gguf_header, write_atomically
from webgemma.lora.adapter import EMBEDDING, HEAD
from webgemma.lora.loading import Lora, fitted_adapters
from webgemma.reference.dequantise import dequantise
from webgemma.reference.lora import Pair, scaled_pairs
from webgemma.reference.quantise import QUANTISERS, quantise

CHUNK_NBYTES = 16 << 20  # of float32 weights in memory at a time
SAME = "same"
_FALLBACK = "Q8_0"  # for formats that can be read but not written; F16 if rows do not fit it


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the new file: its source, what is added to it, and its format."""

    name: str
    source: TensorInfo
    pairs: tuple[Pair, ...]
    flipped: bool  # the embedding's A has one row per token
    format: str


def merge(
    gguf: Gguf,
    lora: Lora,
    path: str | os.PathLike[str],
    *,
    format: str = SAME,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """Write the model merged with the adapters and return the formats of the changed matrices.

    They keep their format if webgemma can write it, else become Q8_0; all become `format` if it is
    given. Everything else is copied byte for byte. A head that shares the embedding table becomes
    a separate tensor if the two differ after merging. `progress` is called with the bytes done.
    """
    if format != SAME and format not in QUANTISERS:
        names = ", ".join((SAME, *QUANTISERS))
        raise InputError(f"Weights cannot be written as {format!r}; choose one of {names}.")
    target = Path(path)
    if target.exists() and not overwrite:
        raise InputError(f"{target} already exists: choose another file, or use --force.")
    adapters = fitted_adapters(lora, Config.from_gguf(gguf))
    targets = _targets(gguf, scaled_pairs(adapters), format)
    changed = {each.name: each.format for each in targets if each.pairs}
    if not changed:
        raise InputError("The adapters change nothing in this model.")
    write_atomically(target, _chunks(gguf, targets, progress or (lambda _: None)))
    return changed


def _targets(gguf: Gguf, adapters: list[dict[str, Pair]], format: str) -> list[_Target]:
    """Return the tensors of the new file, in the order of the model."""
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
    """Return the format to store a changed matrix in."""
    stored = source.format.name if format == SAME else format
    if stored not in QUANTISERS:
        stored = _FALLBACK
    return stored if source.width % FORMATS[stored].block == 0 else "F16"


def _chunks(gguf: Gguf, targets: list[_Target], progress: Callable[[int], None]) -> Iterator[Bytes]:
    declared = [
        NewTensor(each.name, each.source.shape, each.format, lambda: b"") for each in targets
    ]
    yield from gguf_header(_metadata(gguf), declared, gguf.alignment)
    done = 0
    for each in targets:
        nbytes = 0
        for chunk in _merged(gguf, each) if each.pairs else _copied(gguf, each.source):
            nbytes += len(chunk)
            yield chunk
            progress(done + nbytes)
        yield bytes(-nbytes % gguf.alignment)
        done += nbytes


def _metadata(gguf: Gguf) -> dict[str, object]:
    """Return the model's metadata without the keys of a split model."""
    metadata: dict[str, object] = {}
    for key in gguf.metadata:
        kind = gguf.value_type(key).partition("[")[0]
        if kind == "ARRAY":
            raise GgufError(f"{gguf.name}: {key} is a list of lists, which cannot be written.")
        if not key.startswith("split."):
            metadata[key] = Typed(gguf.metadata[key], kind)
    return metadata


def _copied(gguf: Gguf, source: TensorInfo) -> Iterator[Bytes]:
    for at in range(0, source.nbytes, CHUNK_NBYTES):
        yield gguf.data(source, at, min(CHUNK_NBYTES, source.nbytes - at))


def _merged(gguf: Gguf, target: _Target) -> Iterator[Bytes]:
    """Yield the merged tensor, some rows at a time: read, dequantised, added to, quantised."""
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
    """Yield runs of at most `step` rows as (first row, rows), each within one expert."""
    rows = source.shape[1]
    for start in range(0, source.rows, rows):
        for first in range(0, rows, step):
            yield start + first, min(step, rows - first)


def _delta(pair: Pair, flipped: bool, source: TensorInfo, first: int, count: int) -> np.ndarray:
    """Return these rows of B A, [count, width]."""
    if flipped:
        return pair.a[first : first + count] @ pair.b.T
    expert, row = divmod(first, source.shape[1])
    a, b = pair.of_expert(expert)
    return b[row : row + count] @ a
