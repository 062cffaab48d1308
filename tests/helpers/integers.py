"""What tests of integer activations share: x as the kernels read it, matrices, recorders."""

import numpy as np
import pytest

from helpers import matrices
from helpers.gpu import hardware, put
from webgemma.device.native import NativeDevice
from webgemma.gemma.record.quantised import Integers
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.writer import NewTensor
from webgemma.graph import Recorder
from webgemma.reference.dequantise import dequantise

LARGEST = {"int16": 32512, "int8": 127}

FORMATS_IN_TURN = [name for name, fmt in FORMATS.items() if fmt.usable and fmt.block > 1]
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS_IN_TURN)
EVERY_PRECISION = pytest.mark.parametrize("precision", ["int16", "int8"])


def numbers(*shape: int) -> np.ndarray:
    """Values whose size differs from group to group; some groups are all zeros."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape, np.float32).reshape(-1, 32)
    x *= rng.choice([0, 1e-3, 1, 40], len(x), p=[0.1, 0.2, 0.6, 0.1]).astype(np.float32)[:, None]
    return x.reshape(shape)


def integers(x: np.ndarray, precision: str) -> tuple[Integers, np.ndarray]:
    """x as the kernels read it, and the values that this stands for."""
    groups = x.reshape(-1, 32).astype(np.float64)
    scales = (np.abs(groups).max(1) / LARGEST[precision]).astype(np.float32)
    v = np.round(groups / np.where(scales == 0, 1, scales)[:, None]).astype(np.int32)
    meant = v * scales[:, None].astype(np.float64)
    sums = meant.reshape(-1, 2, 16).sum(2)
    sizes = np.concatenate([scales[:, None], sums, 0 * scales[:, None]], 1).astype(np.float32)
    halves = [v] if precision == "int8" else [(v + 128) >> 8, v]
    parts = [*(half.astype(np.int8) for half in halves), sizes.view(np.int8)]
    tensor = put(np.concatenate(parts, 1))
    made = Integers(x.shape, tensor.nbytes, tensor.placed, precision=precision)
    return made, meant.reshape(x.shape)


def load(tensor: NewTensor, on: NativeDevice | None = None) -> Model:
    """A model of this matrix alone, cut up as for a real GPU unless told."""
    return matrices.load(tensor, on or hardware())


def truth(tensor: NewTensor) -> np.ndarray:
    """The weights of a matrix: [rows, width]."""
    width, rows = tensor.shape
    return dequantise(tensor.data, FORMATS[tensor.format], (rows, width)).astype(np.float64)


def inputs_of(count: int, on: NativeDevice | None = None) -> Inputs:
    """A batch of so many tokens at the beginning."""
    return Inputs(put(np.array([0, count], np.uint32), on), put(np.zeros(4, np.uint32), on), {}, {})


def recorder(model: Model, batch: int = 1, count: int = 1) -> TextRecorder:
    """Records over a batch that has so many tokens."""
    return TextRecorder(model, Recorder(model.device), inputs_of(count), batch, "kv_f32")


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
