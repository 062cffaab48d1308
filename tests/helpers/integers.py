"""Integer activations for tests: x in the form that kernels read, matrices, recorders."""

import numpy as np
import pytest

from helpers import matrices
from helpers.gpu import hardware, put
from webgemma.device.native import NativeDevice
from webgemma.gemma.record.quantised import QuantisedTensor
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.writer import NewTensor
from webgemma.graph import Recorder
from webgemma.reference.dequantise import dequantise

LARGEST = {"int16": 32512, "int8": 127}

BLOCK_FORMATS = [name for name, fmt in FORMATS.items() if fmt.usable and fmt.block > 1]
EVERY_FORMAT = pytest.mark.parametrize("name", BLOCK_FORMATS)
EVERY_PRECISION = pytest.mark.parametrize("precision", ["int16", "int8"])


def numbers(*shape: int) -> np.ndarray:
    """Return values whose scale differs from group to group; some groups are all zeros."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape, np.float32).reshape(-1, 32)
    x *= rng.choice([0, 1e-3, 1, 40], len(x), p=[0.1, 0.2, 0.6, 0.1]).astype(np.float32)[:, None]
    return x.reshape(shape)


def placed(groups: np.ndarray) -> np.ndarray:
    """Return the bytes of groups, [n, nbytes], where the kernels expect them: see group_place."""
    vec4s = groups.reshape(len(groups), -1, 16)
    eights = -(-len(groups) // 8)
    out = np.zeros((eights, vec4s.shape[1], 8, 16), groups.dtype)
    for group, own in enumerate(vec4s):
        out[group // 8, :, group % 8 ^ group // 8 % 2] = own
    return out.reshape(-1)


def unplaced(data: np.ndarray, nbytes: int) -> np.ndarray:
    """Return groups of so many bytes, [n, nbytes], from where the kernels have them."""
    eights = data.reshape(-1, nbytes // 16, 8, 16)
    numbers = range(8 * len(eights))
    groups = [eights[number // 8, :, number % 8 ^ number // 8 % 2] for number in numbers]
    return np.stack(groups).reshape(len(groups), nbytes)


def quantised(x: np.ndarray, precision: str) -> tuple[QuantisedTensor, np.ndarray]:
    """Return x in the form that kernels read, and the values that this represents."""
    groups = x.reshape(-1, 32).astype(np.float64)
    scales = (np.abs(groups).max(1) / LARGEST[precision]).astype(np.float32)
    v = np.round(groups / np.where(scales == 0, 1, scales)[:, None]).astype(np.int32)
    represented = v * scales[:, None].astype(np.float64)
    sums = represented.reshape(-1, 2, 16).sum(2)
    sizes = np.concatenate([scales[:, None], sums, 0 * scales[:, None]], 1).astype(np.float32)
    halves = [v] if precision == "int8" else [(v + 128) >> 8, v]
    parts = [*(half.astype(np.int8) for half in halves), sizes.view(np.int8)]
    tensor = put(placed(np.concatenate(parts, 1)))
    uploaded = QuantisedTensor(x.shape, tensor.nbytes, tensor.buffer, precision=precision)
    return uploaded, represented.reshape(x.shape)


def load(tensor: NewTensor, on: NativeDevice | None = None) -> Model:
    """Return a model of this matrix alone, divided as for a hardware GPU by default."""
    return matrices.load(tensor, on or hardware())


def truth(tensor: NewTensor) -> np.ndarray:
    """Return the weights of a matrix: [rows, width]."""
    width, rows = tensor.shape
    return dequantise(tensor.data, FORMATS[tensor.format], (rows, width)).astype(np.float64)


def inputs_of(count: int, on: NativeDevice | None = None) -> Inputs:
    """Return a batch of so many tokens at position zero."""
    return Inputs(put(np.array([0, count], np.uint32), on), put(np.zeros(4, np.uint32), on), {})


def recorder(model: Model, rows: int = 1, count: int = 1) -> TextRecorder:
    """Return a recorder of so many rows, for a batch that has so many tokens."""
    return TextRecorder(model, Recorder(model.device), inputs_of(count), rows, "f32")


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
