"""Activations and weights as matrix units read them: float16, with a power of two for each row."""

import numpy as np
import pytest

from helpers.gpu import put
from webgemma.gemma.record import matrix_tiling
from webgemma.gemma.record.matrix_tiling import MatrixTile, MatrixUnits
from webgemma.gemma.record.quantised import HalfTensor


def scales_of(x: np.ndarray) -> np.ndarray:
    """Return the powers of two that bring the largest values of rows between 2^14 and 2^15."""
    peaks = np.fmax.reduce(np.abs(x), axis=1).astype(np.float32)
    exponents = np.maximum(peaks.view(np.uint32) >> 23, 27) - 14
    return (exponents << 23).astype(np.uint32).view(np.float32)


def half(x: np.ndarray) -> np.ndarray:
    """Return the values that x [rows, width] has after round_f16, in float64."""
    scales = scales_of(x)[:, None]
    return (x / scales).astype(np.float16).astype(np.float64) * scales


def half_weights(weights: np.ndarray) -> np.ndarray:
    """Return weights rounded to float16, in float64."""
    return weights.astype(np.float16).astype(np.float64)


def poisoned(rows: int, width: int) -> HalfTensor:
    """Return a tensor whose bytes are all 0x77."""
    tensor = HalfTensor.scratch(rows, width)
    uploaded = put(np.full(tensor.nbytes, 0x77, np.uint8))
    return HalfTensor(tensor.shape, tensor.nbytes, uploaded.buffer)


def small_tiles(units: MatrixUnits) -> tuple[MatrixTile, ...]:
    """Return tiles with a matrix for each subgroup: such kernels compile fastest on a CPU.

    They have as many rows as the longest unit of a format has weights."""
    m, n, _ = units.shape
    return (MatrixTile(2 * m, 64, m, n, 1, 1, 10, 1),)


def use_tiles(monkeypatch: pytest.MonkeyPatch, *tiles: MatrixTile) -> None:
    """Let all products on matrix units be divided into these tiles."""
    for table in ("MATRIX_TILES", "DECODING_TILES"):
        monkeypatch.setattr(matrix_tiling, table, tiles)
