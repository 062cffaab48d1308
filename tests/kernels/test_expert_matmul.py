"""expert_sort.wgsl and expert_matmul.wgsl against numpy: formats, tiles, who asks whom, parts."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.integers import (
    EVERY_FORMAT,
    EVERY_PRECISION,
    assert_close,
    integers,
    load,
    numbers,
    truth,
)
from helpers.tiny import random_tensor
from tolerance import F32_KERNEL

from webgemma.gemma.matrices import Weight
from webgemma.gemma.moe import MOST
from webgemma.gemma.record.quantised import pieces_of
from webgemma.gemma.record.tiling import Tile
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.writer import NewTensor
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link, unit

POISON = np.float32(-77)
EXPERTS, ROWS = 5, 37  # of each expert
PRECISIONS = pytest.mark.parametrize("precision", ["exact", "int16", "int8"])


def stack(name: str, width: int) -> NewTensor:
    return random_tensor(width, "w", (width, EXPERTS * ROWS), name)


def asked(batch: int, used: int) -> np.ndarray:
    """Some experts for each token; the one before the last is never asked, the first often."""
    ids = np.random.default_rng(batch).integers(0, 2 * EXPERTS, (batch, used))
    return np.where(ids >= EXPERTS, 0, np.where(ids == EXPERTS - 2, 1, ids)).astype(np.uint32)


def given(x: np.ndarray, precision: str) -> tuple[Tensor, np.ndarray]:
    """x as the kernel reads it, and the values that this stands for."""
    return (put(x), x.astype(np.float64)) if precision == "exact" else integers(x, precision)


def multiply(
    weight: Weight,
    ids: np.ndarray,
    x: Tensor,
    tile: Tile,
    *,
    fan: int = 1,
    count: int | None = None,
    stride: int = ROWS,
    column: int = 0,
) -> np.ndarray:
    """What y [batch, used, stride] holds afterwards, poisoned before."""
    recorder, (batch, used) = Recorder(device()), ids.shape
    places, tiles = recorder.scratch(batch, used), recorder.scratch(batch * used, 4)
    state = put(np.array([0, batch if count is None else count], np.uint32))
    constants = {"THREADS": 64, "TOKENS": tile.tokens, **MOST}
    sort = link("expert_sort", device().features, constants=constants, pieces=("state",))
    params = [EXPERTS, used, tiles.shape[0]]
    recorder.call(sort, (1,), params, state, put(ids), places, tiles)
    y = put(np.full((batch, used, stride), POISON))
    name, pieces = weight.format.name, ("tile", *pieces_of("tile", x))
    constants = tile.constants
    op = link("expert_matmul", device().features, format=name, constants=constants, pieces=pieces)
    for part in weight.parts:
        params = [
            *(weight.width // weight.format.block, *part.planes, part.first_row, part.rows),
            *(weight.width // unit(name), ROWS, stride, column, fan),
        ]
        grid = (-(-ROWS // tile.rows), tiles.shape[0])
        recorder.call(op, grid, params, part.data, tiles, x, y, places)
    device().run(recorder.plan())
    return get(y)


def expected(tensor: NewTensor, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
    """W[e] x for every place; x is [batch, used or 1, width]."""
    weights = truth(tensor).reshape(EXPERTS, ROWS, -1)
    return np.einsum("tsnk,tsk->tsn", weights[ids], np.broadcast_to(x, (*ids.shape, x.shape[2])))


def tile_of(tokens: int, precision: str, software: bool = False) -> Tile:
    return Tile.for_places(tokens, precision != "exact", software)


@EVERY_FORMAT
@EVERY_PRECISION
def test_every_format(name: str, precision: str) -> None:
    """Rows of one block and of several steps; a token's places share its row of x."""
    ids = asked(9, 3)
    for width in {FORMATS[name].block, 768}:
        tensor = stack(name, width)
        x, meant = given(numbers(9, width), precision)
        y = multiply(load(tensor).matrices["w"], ids, x, tile_of(8, precision), fan=3)
        assert_close(y, expected(tensor, ids, meant[:, None]), F32_KERNEL)


@PRECISIONS
@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("software", [False, True])
def test_every_tile(software: bool, tokens: int, precision: str) -> None:
    """Every place has its own row of x."""
    tensor, ids = stack("Q5_1", 320), asked(50, 2)
    x, meant = given(numbers(100, 320), precision)
    y = multiply(load(tensor).matrices["w"], ids, x, tile_of(tokens, precision, software))
    assert_close(y, expected(tensor, ids, meant.reshape(50, 2, 320)), F32_KERNEL)


@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("name", ["F32", "Q4_K"])
def test_a_long_row_in_software(name: str, tokens: int) -> None:
    """Loops of a software adapter may not turn too often: see loops.py."""
    tensor, ids = stack(name, 8192), asked(3, 1)
    x, meant = given(numbers(3, 8192), "exact")
    y = multiply(load(tensor).matrices["w"], ids, x, tile_of(tokens, "exact", software=True))
    assert_close(y, expected(tensor, ids, meant[:, None]), F32_KERNEL)


WHOM = {
    "the first": np.zeros((40, 1), np.uint32),
    "the last": np.full((40, 1), EXPERTS - 1, np.uint32),
    "one each": np.arange(EXPERTS, dtype=np.uint32)[:, None],
    "both ends": np.tile(np.array([[EXPERTS - 1, 0]], np.uint32), (16, 1)),  # full tiles
    "one of all": np.where(np.arange(33) == 20, 3, 1).astype(np.uint32)[:, None],
}


@PRECISIONS
@pytest.mark.parametrize("ids", WHOM.values(), ids=WHOM)
def test_whom_everybody_asks(ids: np.ndarray, precision: str) -> None:
    tensor, (batch, used) = stack("Q4_K", 256), ids.shape
    x, meant = given(numbers(batch, 256), precision)
    y = multiply(load(tensor).matrices["w"], ids, x, tile_of(16, precision), fan=used)
    assert_close(y, expected(tensor, ids, meant[:, None]), F32_KERNEL)


@PRECISIONS
@pytest.mark.parametrize("count", [0, 1, 17])
def test_tokens_beyond_the_count(count: int, precision: str) -> None:
    tensor, ids, numbers_of = stack("Q8_0", 96), asked(20, 2), numbers(20, 96)
    meant = given(numbers_of, precision)[1]
    numbers_of[count:] = np.inf
    with np.errstate(invalid="ignore"):
        x = given(numbers_of, precision)[0]
    ids[count:] = 1 << 30
    weight = load(tensor).matrices["w"]
    y = multiply(weight, ids, x, tile_of(8, precision), fan=2, count=count)
    assert (y[count:] == POISON).all()
    if count:
        assert_close(y[:count], expected(tensor, ids[:count], meant[:count, None]), F32_KERNEL)


@PRECISIONS
@pytest.mark.parametrize("rows", [5, 16, 64, 80])
def test_parts_hold_some_rows_of_some_experts(rows: int, precision: str) -> None:
    """Also into some columns of a wider y, whose others are left alone."""
    tensor, ids = stack("Q4_0", 96), asked(20, 2)
    small = copy.copy(device())  # with its compiled kernels
    row_nbytes = FORMATS["Q4_0"].row_nbytes(96)
    small.limits = replace(small.limits, binding_nbytes=rows * row_nbytes + 64)
    weight = load(tensor, small).matrices["w"]
    assert max(part.rows for part in weight.parts) <= rows
    x, meant = given(numbers(20, 96), precision)
    y = multiply(weight, ids, x, tile_of(16, precision), fan=2, stride=90, column=41)
    assert_close(y[..., 41:78], expected(tensor, ids, meant[:, None]), F32_KERNEL)
    assert (np.delete(y, np.s_[41:78], axis=2) == POISON).all()
