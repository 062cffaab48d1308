"""Weights of a GGUF file as float32 arrays, dequantised on first use."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from webgemma.gemma.tensors import canonical_tensors, check_finite
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.reference.blas import blas
from webgemma.reference.dequantise import dequantise

Floats = NDArray[np.float32]

CHUNK_NBYTES = 64 << 20  # float32 bytes dequantised at a time for a tensor too large to cache


class Weights:
    """Tensors of a file by canonical name, cached as float32 up to `budget_nbytes` in total.

    The default budget is half of the machine's memory."""

    def __init__(self, gguf: Gguf, budget_nbytes: int | None = None) -> None:
        self.gguf = gguf
        self.tensors = canonical_tensors(gguf)
        self.budget_nbytes = _half_of_memory() if budget_nbytes is None else budget_nbytes
        self._cached: dict[str, Floats] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Floats:
        """Return the whole tensor in numpy's axis order (slowest axis first)."""
        values = self._cached.get(name)
        if values is None:
            tensor = self.tensors[name]
            values = self._dequantise(tensor, 0, tensor.rows).reshape(tensor.shape[::-1])
            if values.ndim == 1:
                with np.errstate(invalid="ignore"):  # both infinities
                    total = float(values.sum(dtype=np.float64))
                check_finite(self.gguf, tensor, total)
            if values.nbytes <= self.budget_nbytes:
                self.budget_nbytes -= values.nbytes
                self._cached[name] = values
        return values

    def rows(self, name: str, ids: Sequence[int]) -> Floats:
        """Return W[ids], single rows of a table: [len(ids), width]."""
        tensor = self.tensors[name]
        if name in self._cached:
            return self._cached[name].reshape(tensor.rows, -1)[list(ids)]
        return np.concatenate([self._dequantise(tensor, row, 1) for row in ids])

    def linear(self, x: Floats, name: str, expert: int = 0, expert_count: int = 1) -> Floats:
        """Return x Wᵀ for x [T, in] and W [out, in]: [T, out].

        A tensor of `expert_count` experts stacks their matrices; W is that of one `expert`."""
        tensor = self.tensors[name]
        count = tensor.rows // expert_count
        first = expert * count
        with blas().product(len(x), count * tensor.width):
            if self._fits(name, tensor):
                return x @ self[name].reshape(tensor.rows, -1)[first : first + count].T
            step = max(1, CHUNK_NBYTES // (4 * tensor.width))
            out = np.empty((len(x), count), np.float32)
            for start in range(0, count, step):
                stop = min(count, start + step)
                out[:, start:stop] = x @ self._dequantise(tensor, first + start, stop - start).T
            return out

    def weighted_rows(self, p: Floats, name: str) -> Floats:
        """Return p W for p [T, rows] and W [rows, width]: rows weighted and summed, [T, width]."""
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
        """Return `count` rows of a tensor from row `first` on: [count, width]."""
        row_nbytes = tensor.format.row_nbytes(tensor.width)
        data = self.gguf.data(tensor, first * row_nbytes, count * row_nbytes)
        return dequantise(data, tensor.format, (count, tensor.width), tensor.name)

    def _fits(self, name: str, tensor: TensorInfo) -> bool:
        return name in self._cached or 4 * tensor.weights <= self.budget_nbytes


def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 4 << 30
