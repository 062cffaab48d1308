"""One matrix in any format: its values, a model that has only it, and its products."""

from dataclasses import replace

import numpy as np
from tolerance import F32_KERNEL

from helpers.blank import e2b
from helpers.gpu import device, get, put
from helpers.tiny import random_tensor
from webgemma.device.native import NativeDevice
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.graph import Recorder, Tensor
from webgemma.reference.dequantise import DEQUANTISERS, dequantise
from webgemma.sync import run_sync


def matrix(name: str, width: int, rows: int) -> NewTensor:
    """Return random weights in a format, every block with its own scales."""
    made = random_tensor(1, name, (width, rows), name)
    blocks = np.frombuffer(made.data, DEQUANTISERS[name][0]).copy()
    rng = np.random.default_rng(rows)
    for scale in {"d", "m"} & set(blocks.dtype.names):
        blocks[scale] *= rng.uniform(0.5, 2, len(blocks)).astype(np.float16)
    if "e" in blocks.dtype.names:
        blocks["e"] += rng.integers(0, 4, len(blocks), np.uint8)
    return replace(made, data=blocks.tobytes())


def truth(tensor: NewTensor) -> np.ndarray:
    """Return the weights of a matrix: [rows, width]."""
    width, rows = tensor.shape
    return dequantise(tensor.data, FORMATS[tensor.format], (rows, width))


def load(tensor: NewTensor, on: NativeDevice | None = None) -> Model:
    """Return a model that has only this matrix."""
    gguf = run_sync(Gguf.aopen(BytesSource(gguf_bytes({}, [tensor]))))
    model = Model(e2b(), on or device())
    stack = [gguf.tensors[tensor.name]]
    model.allocate(tensor.name, stack)
    run_sync(model.load_tensors(gguf, tensor.name, stack))
    return model


def recorder(model: Model, ids: list[int]) -> TextRecorder:
    """Return a recorder of one row more than the batch has tokens."""
    batch = put(np.array([0, len(ids)], np.uint32))
    inputs = Inputs(batch, put(np.array([*ids, 0], np.uint32)), {})
    return TextRecorder(model, Recorder(model.device), inputs, len(ids) + 1, "f32")


def result(text: TextRecorder, out: Tensor) -> np.ndarray:
    """Run what was recorded; return the rows of `out` that belong to tokens."""
    text.model.device.run(text.recorder.plan())
    return get(out)[: text.rows - 1]


def embedded(model: Model, name: str, ids: list[int], scale: float = 1.0) -> np.ndarray:
    text = recorder(model, ids)
    return result(text, text.embed(name, scale))


def product(model: Model, name: str, x: np.ndarray) -> np.ndarray:
    text = recorder(model, [0] * len(x))
    padded = np.concatenate([x, np.full_like(x[:1], np.nan)])
    return result(text, text.linear(put(padded), model.matrices[name]))


def assert_product(tensor: NewTensor, model: Model, tokens: int) -> None:
    x = np.random.default_rng(5).standard_normal((tokens, tensor.shape[0])).astype(np.float32)
    expected = x.astype(np.float64) @ truth(tensor).T.astype(np.float64)
    error = np.abs(product(model, tensor.name, x) - expected).max()
    assert error <= F32_KERNEL * np.abs(expected).max()
