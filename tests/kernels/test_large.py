"""Products, embeddings and softcap at the largest shapes: 262 144 rows, rows of 21 504 and more."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, hardware, put
from helpers.matrices import assert_product, embedded, load, matrix, product, recorder, truth
from tolerance import DECODED, F32_KERNEL

from webgemma.device.native import NativeDevice
from webgemma.gemma.record.loop_limits import MAX_ROW
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.writer import NewTensor
from webgemma.graph import Recorder, folded
from webgemma.reference.text import gelu

VOCAB = 262_144
LONGEST = 21_504  # of any Gemma 4
DIFFERENT = 1021  # rows of a large matrix; a prime, so that no power of two hides a mistake
FAMILIES = ["F32", "BF16", "Q8_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"]
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)
EVERY_TILING = pytest.mark.parametrize("on", [device, hardware])


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=F32_KERNEL * np.abs(expected).max())


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).standard_normal(shape, np.float32)


def repeated(small: NewTensor, rows: int) -> NewTensor:
    """Return a matrix of so many rows: those of the small matrix, repeated."""
    width, count = small.shape
    row_nbytes = FORMATS[small.format].row_nbytes(width)
    data = small.data * (rows // count) + small.data[: rows % count * row_nbytes]
    return replace(small, shape=(width, rows), data=data)


@EVERY_TILING
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "F16"])
def test_a_row_for_each_token_of_the_vocabulary(name: str, on: Callable[[], NativeDevice]) -> None:
    small = matrix(name, 256, DIFFERENT)
    model = load(repeated(small, VOCAB), on())
    narrow = on().limits.binding_nbytes <= 128 << 20  # lavapipe's; the table is as large in F16
    assert (len(model.matrices[name].parts) > 1) == (name == "F16" and narrow)
    x = numbers(1, 256)
    rows = np.arange(VOCAB) % DIFFERENT
    expected = (x.astype(np.float64) @ truth(small).T)[:, rows]
    assert_close(product(model, name, x), expected)
    ids = [0, VOCAB - 1, 131_071, 131_072, 65_535, 65_536, 200_003]
    found = embedded(model, name, ids)
    np.testing.assert_allclose(found, truth(small)[rows[ids]], rtol=DECODED, atol=0)
    model.close()


def test_more_workgroups_than_one_axis_has_fold() -> None:
    small = matrix("Q8_0", 32, DIFFERENT)
    model = load(repeated(small, VOCAB), hardware())
    weight, x, y = model.matrices["Q8_0"], numbers(1, 32), put(np.zeros(VOCAB, np.float32))
    calls = Recorder(device())
    grid = folded(VOCAB)
    assert grid == (32_768, 8)
    calls.call(
        "matvec",
        grid,
        **weight.arguments(weight.parts[0]),
        batch=put(np.array([0, 1], np.uint32)),
        x=put(x),
        y=y,
        first_row=0,
        rows=VOCAB,
        stride=VOCAB,
        input="float",
        row_products="two_units",
        operand="buffer",
        live="counted",
        epilogue="none",
        THREADS=8,  # a workgroup for a row
        LANES=8,
        EACH=1,
    )
    device().run(calls.plan())
    expected = (x.astype(np.float64) @ truth(small).T)[0, np.arange(VOCAB) % DIFFERENT]
    assert_close(get(y), expected)
    model.close()


def test_softcap_of_many_logits() -> None:
    model = load(matrix("F32", 32, 1))
    assert model.config.softcap == 30
    text = recorder(model, [0])
    values = 40 * numbers(32, VOCAB)
    logits = text.softcap(put(values))
    device().run(text.recorder.plan())
    assert_close(get(logits), 30 * np.tanh(values / 30))


@EVERY_TILING
@EVERY_FAMILY
@pytest.mark.parametrize("tokens", [1, 3])
def test_product_over_the_longest_rows(
    name: str, tokens: int, on: Callable[[], NativeDevice]
) -> None:
    tensor = matrix(name, LONGEST, 5)
    assert_product(tensor, load(tensor, on()), tokens)


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_product_over_the_longest_rows_that_software_supports(name: str, tokens: int) -> None:
    tensor = matrix(name, MAX_ROW, 3)
    assert_product(tensor, load(tensor), tokens)


@EVERY_FAMILY
def test_gate_and_up_over_the_longest_rows(name: str) -> None:
    tensor = matrix(name, LONGEST, 10)
    model = load(tensor, hardware())
    x = numbers(1, LONGEST) / np.float32(LONGEST**0.5)
    inputs = Inputs(put(np.array([0, 1], np.uint32)), put(np.zeros(1, np.uint32)), {})
    text = TextRecorder(model, Recorder(device()), inputs, 1, "f32")
    out = put(np.zeros((1, 5), np.float32))
    text.matmul.gate_up(put(x), model.matrices[name], out)
    device().run(text.recorder.plan())
    gate, up = np.split(x.astype(np.float64) @ truth(tensor).T, 2, axis=1)
    assert_close(get(out), gelu(gate) * up)
    model.close()
