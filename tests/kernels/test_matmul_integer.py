"""matmul.wgsl with integers against numpy: every format, tile shapes, sizes that fill no tile."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.integers import (
    EVERY_FORMAT,
    EVERY_PRECISION,
    assert_close,
    load,
    numbers,
    quantised,
    recorder,
    truth,
)
from helpers.tiny import random_tensor
from tolerance import F32_KERNEL

from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.tiling import MatmulTiling
from webgemma.gemma.text import TextRecorder
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Tensor
from webgemma.reference.text import gelu

POISON = np.float32(-77)


def poisoned(rows: int, columns: int) -> Tensor:
    return put(np.full((rows, columns), POISON))


def run(text: TextRecorder) -> None:
    device().run(text.recorder.plan())


@EVERY_FORMAT
@EVERY_PRECISION
def test_every_format(name: str, precision: str) -> None:
    """Rows of one block, of several slices, and of a slice and a half."""
    block = FORMATS[name].block
    for width in {block, 768, 96 if block == 32 else 512}:
        tensor = random_tensor(width, "w", (width, 37), name)
        model = load(tensor)
        uploaded, represented = quantised(numbers(5, width), precision)
        text = recorder(model, 5, 5)
        y = text.linear(uploaded, model.matrices["w"])
        run(text)
        assert_close(get(y), represented @ truth(tensor).T, F32_KERNEL)


@pytest.mark.parametrize(
    ("name", "precision"), [("Q8_0", "int16"), ("Q4_K", "int8"), ("Q6_K", "int16")]
)
@pytest.mark.parametrize("rows", [17, 65])
def test_rows_and_tokens_need_not_fill_a_tile(name: str, rows: int, precision: str) -> None:
    """In tiles of both larger shapes; tokens beyond the count are neither used nor stored."""
    for matrix_rows in (1, 64, 70):
        tensor = random_tensor(matrix_rows, "w", (256, matrix_rows), name)
        model = load(tensor)
        x = numbers(rows, 256)
        expected = quantised(x, precision)[1] @ truth(tensor).T
        x[rows - 2 :] = np.inf
        with np.errstate(invalid="ignore"):
            uploaded = quantised(x, precision)[0]
        text = recorder(model, rows, rows - 2)
        y = poisoned(rows, matrix_rows + 9)
        text.linear(uploaded, model.matrices["w"], y, 7)
        run(text)
        found = get(y)
        assert_close(found[:-2, 7:-2], expected[:-2], F32_KERNEL)
        assert (found[-2:] == POISON).all()
        assert (found[:, :7] == POISON).all()
        assert (found[:, -2:] == POISON).all()


TILINGS = {
    "four threads share k": MatmulTiling(128, 32, 16, 4, 4, 128),
    "eight rows": MatmulTiling(64, 64, 32, 8, 4, 64),
    "three warps": MatmulTiling(96, 48, 64, 4, 8, 64),
}


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_other_tilings(tiling: MatmulTiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatmulTiling, "for_product", lambda *_: tiling)
    tensor = random_tensor(8, "w", (320, 70), "Q5_1")
    model = load(tensor)
    uploaded, represented = quantised(numbers(65, 320), "int16")
    text = recorder(model, 65, 65)
    y = text.linear(uploaded, model.matrices["w"])
    run(text)
    assert_close(get(y), represented @ truth(tensor).T, F32_KERNEL)


@EVERY_PRECISION
def test_the_largest_possible_sums_do_not_overflow(precision: str) -> None:
    tensor = random_tensor(6, "w", (64, 5), "Q8_0")
    blocks = np.frombuffer(tensor.data, np.uint8).reshape(-1, 34).copy()
    blocks[:, 2:] = 0x80  # -128
    tensor = replace(tensor, data=blocks.tobytes())
    model, x = load(tensor), np.full((3, 64), 3, np.float32)
    text = recorder(model, 3, 3)
    y = text.linear(quantised(-x, precision)[0], model.matrices["w"])
    run(text)
    assert_close(get(y), -x @ truth(tensor).T, F32_KERNEL)


@EVERY_PRECISION
def test_a_gate_over_floats_that_become_integers(precision: str) -> None:
    tensor = random_tensor(7, "w", (96, 70), "Q4_0")
    model = load(tensor)
    x, up = numbers(19, 96), np.random.default_rng(1).standard_normal((19, 200), np.float32)
    text = recorder(model, 19, 19)
    text.matmul.precision = precision
    y = text.linear(put(x), model.matrices["w"], up=Columns(put(up), 200, 90))
    run(text)
    products = quantised(x, precision)[1] @ truth(tensor).T
    assert_close(get(y), gelu(products) * up[:, 90:160], F32_KERNEL)
