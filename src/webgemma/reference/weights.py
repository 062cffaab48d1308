"""The weights of a file as float32 arrays, dequantised when they are asked for."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from webgemma.gemma.tensors import canonical_tensors
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.reference.dequantise import dequantise

Floats = NDArray[np.float32]

CHUNK_NBYTES = 64 << 20  # of float32: how much of a tensor too big to keep is dequantised at a time


class Weights:
    """Tensors by their canonical names. What fits into `budget_nbytes` of float32 is kept."""

    def __init__(self, gguf: Gguf, budget_nbytes: int | None = None) -> None:
        self.gguf = gguf
        self.tensors = canonical_tensors(gguf)
        self.budget_nbytes = _half_the_memory() if budget_nbytes is None else budget_nbytes
        self._kept: dict[str, Floats] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Floats:
        """The whole tensor, in numpy's order (slowest axis first)."""
        kept = self._kept.get(name)
        if kept is None:
            tensor = self.tensors[name]
            kept = self._dequantise(tensor, 0, tensor.rows).reshape(tensor.shape[::-1])
            self._keep(name, kept)
        return kept

    def rows(self, name: str, ids: Sequence[int]) -> Floats:
        """Single rows of a table: [len(ids), width]."""
        tensor = self.tensors[name]
        if name in self._kept:
            return self._kept[name].reshape(tensor.rows, -1)[list(ids)]
        return np.concatenate([self._dequantise(tensor, row, 1) for row in ids])

    def linear(self, x: Floats, name: str, part: int = 0, parts: int = 1) -> Floats:
        """x [T, in] Wᵀ for W [out, in]: [T, out]; or for one of `parts` blocks of W's rows."""
        tensor = self.tensors[name]
        count = tensor.rows // parts
        first = part * count
        if self._fits(name, tensor):
            return x @ self[name].reshape(tensor.rows, -1)[first : first + count].T
        step = max(1, CHUNK_NBYTES // (4 * tensor.width))
        out = np.empty((len(x), count), np.float32)
        for start in range(0, count, step):
            stop = min(count, start + step)
            out[:, start:stop] = x @ self._dequantise(tensor, first + start, stop - start).T
        return out

    def blend(self, p: Floats, name: str) -> Floats:
        """p [T, rows] W for W [rows, width]: rows of a table in these shares, [T, width]."""
        tensor = self.tensors[name]
        if self._fits(name, tensor):
            return p @ self[name]
        step = max(1, CHUNK_NBYTES // (4 * tensor.width))
        out = np.zeros((len(p), tensor.width), np.float32)
        for start in range(0, tensor.rows, step):
            stop = min(tensor.rows, start + step)
            out += p[:, start:stop] @ self._dequantise(tensor, start, stop - start)
        return out

    def _dequantise(self, tensor: TensorInfo, first: int, count: int) -> Floats:
        row_nbytes = tensor.format.row_nbytes(tensor.width)
        data = self.gguf.data(tensor, first * row_nbytes, count * row_nbytes)
        return dequantise(data, tensor.format, (count, tensor.width), tensor.name)

    def _fits(self, name: str, tensor: TensorInfo) -> bool:
        return name in self._kept or 4 * tensor.weights <= self.budget_nbytes

    def _keep(self, name: str, values: Floats) -> None:
        if values.nbytes <= self.budget_nbytes:
            self.budget_nbytes -= values.nbytes
            self._kept[name] = values


def _half_the_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 4 << 30
