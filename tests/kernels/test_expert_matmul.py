"""expert_sort.wgsl and expert_matmul.wgsl against numpy: formats, tiles, routings, parts."""

import copy
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
    truth,
)
from helpers.tiny import random_tensor
from tolerance import F32_KERNEL

from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.expert_matmul import MAX_EXPERTS
from webgemma.gemma.record.quantised import providers
from webgemma.gemma.record.tiling import MatmulTiling
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.writer import NewTensor
from webgemma.graph import Recorder, Tensor

POISON = np.float32(-77)
EXPERTS, ROWS = 5, 37  # of each expert
PRECISIONS = pytest.mark.parametrize("precision", ["exact", "int16", "int8"])


def stack(name: str, width: int) -> NewTensor:
    return random_tensor(width, "w", (width, EXPERTS * ROWS), name)


def routed(rows: int, used: int) -> np.ndarray:
    """Return experts for each token: the one before the last never, the first often."""
    ids = np.random.default_rng(rows).integers(0, 2 * EXPERTS, (rows, used))
    return np.where(ids >= EXPERTS, 0, np.where(ids == EXPERTS - 2, 1, ids)).astype(np.uint32)


def uploaded(x: np.ndarray, precision: str) -> tuple[Tensor, np.ndarray]:
    """Return x in the form that the kernel reads, and the values that this represents."""
    return (put(x), x.astype(np.float64)) if precision == "exact" else quantised(x, precision)


def multiply(
    weight: Weight,
    ids: np.ndarray,
    x: Tensor,
    tiling: MatmulTiling,
    *,
    fan: int = 1,
    count: int | None = None,
    stride: int = ROWS,
    column: int = 0,
) -> np.ndarray:
    """Return y [rows, used, stride] after the product, poisoned before."""
    recorder, (rows, used) = Recorder(device()), ids.shape
    slots, tiles = recorder.scratch(rows, used), recorder.scratch(rows * used, 4)
    recorder.call(
        "expert_sort",
        (1,),
        batch=put(np.array([0, rows if count is None else count], np.uint32)),
        ids=put(ids),
        slots=slots,
        tiles=tiles,
        experts=EXPERTS,
        used=used,
        tile_count=tiles.shape[0],
        THREADS=64,
        TOKENS=tiling.tokens,
        MAX_EXPERTS=MAX_EXPERTS["MAX_EXPERTS"],
    )
    y = put(np.full((rows, used, stride), POISON))
    for part in weight.parts:
        recorder.call(
            "expert_matmul",
            (-(-ROWS // tiling.rows), tiles.shape[0]),
            **weight.arguments(part),
            **providers("tile", x),
            tiles=tiles,
            x=x,
            y=y,
            slots=slots,
            first_row=part.first_row,
            rows=part.rows,
            expert_rows=ROWS,
            stride=stride,
            column=column,
            fan=fan,
            **tiling.constants,
        )
    device().run(recorder.plan())
    return get(y)


def expected(tensor: NewTensor, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return W[e] x for every slot; x is [rows, used or 1, width]."""
    weights = truth(tensor).reshape(EXPERTS, ROWS, -1)
    return np.einsum("tsnk,tsk->tsn", weights[ids], np.broadcast_to(x, (*ids.shape, x.shape[2])))


def tiling_of(slots: int, precision: str, software: bool = False) -> MatmulTiling:
    return MatmulTiling.for_experts(slots, precision != "exact", software)


@EVERY_FORMAT
@EVERY_PRECISION
def test_every_format(name: str, precision: str) -> None:
    """Rows of one block and of several slices; a token's slots share its row of x."""
    ids = routed(9, 3)
    for width in {FORMATS[name].block, 768}:
        tensor = stack(name, width)
        x, represented = uploaded(numbers(9, width), precision)
        y = multiply(load(tensor).matrices["w"], ids, x, tiling_of(8, precision), fan=3)
        assert_close(y, expected(tensor, ids, represented[:, None]), F32_KERNEL)


@PRECISIONS
@pytest.mark.parametrize("slots", [8, 16, 32])
@pytest.mark.parametrize("software", [False, True])
def test_every_tile(software: bool, slots: int, precision: str) -> None:
    """Every slot has its own row of x."""
    tensor, ids = stack("Q5_1", 320), routed(50, 2)
    x, represented = uploaded(numbers(100, 320), precision)
    y = multiply(load(tensor).matrices["w"], ids, x, tiling_of(slots, precision, software))
    assert_close(y, expected(tensor, ids, represented.reshape(50, 2, 320)), F32_KERNEL)


@pytest.mark.parametrize("slots", [8, 16, 32])
@pytest.mark.parametrize("name", ["F32", "Q4_K"])
def test_a_long_row_in_software(name: str, slots: int) -> None:
    """Loops of a software GPU have a limit: see loop_limits.py."""
    tensor, ids = stack(name, 8192), routed(3, 1)
    x, represented = uploaded(numbers(3, 8192), "exact")
    y = multiply(load(tensor).matrices["w"], ids, x, tiling_of(slots, "exact", software=True))
    assert_close(y, expected(tensor, ids, represented[:, None]), F32_KERNEL)


ROUTINGS = {
    "all to the first": np.zeros((40, 1), np.uint32),
    "all to the last": np.full((40, 1), EXPERTS - 1, np.uint32),
    "one each": np.arange(EXPERTS, dtype=np.uint32)[:, None],
    "both ends": np.tile(np.array([[EXPERTS - 1, 0]], np.uint32), (16, 1)),  # full tiles
    "one to another": np.where(np.arange(33) == 20, 3, 1).astype(np.uint32)[:, None],
}


@PRECISIONS
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_uneven_routings(ids: np.ndarray, precision: str) -> None:
    tensor, (rows, used) = stack("Q4_K", 256), ids.shape
    x, represented = uploaded(numbers(rows, 256), precision)
    y = multiply(load(tensor).matrices["w"], ids, x, tiling_of(16, precision), fan=used)
    assert_close(y, expected(tensor, ids, represented[:, None]), F32_KERNEL)


@PRECISIONS
@pytest.mark.parametrize("count", [0, 1, 17])
def test_tokens_beyond_the_count(count: int, precision: str) -> None:
    tensor, ids, values = stack("Q8_0", 96), routed(20, 2), numbers(20, 96)
    represented = uploaded(values, precision)[1]
    values[count:] = np.inf
    with np.errstate(invalid="ignore"):
        x = uploaded(values, precision)[0]
    ids[count:] = 1 << 30
    weight = load(tensor).matrices["w"]
    y = multiply(weight, ids, x, tiling_of(8, precision), fan=2, count=count)
    assert (y[count:] == POISON).all()
    if count:
        assert_close(
            y[:count], expected(tensor, ids[:count], represented[:count, None]), F32_KERNEL
        )


@PRECISIONS
@pytest.mark.parametrize("rows", [5, 16, 64, 80])
def test_parts_hold_some_rows_of_some_experts(rows: int, precision: str) -> None:
    """Also into some columns of a wider y, whose other columns stay as they are."""
    tensor, ids = stack("Q4_0", 96), routed(20, 2)
    small = copy.copy(device())  # with its compiled kernels
    row_nbytes = FORMATS["Q4_0"].row_nbytes(96)
    small.limits = replace(small.limits, binding_nbytes=rows * row_nbytes + 64)
    weight = load(tensor, small).matrices["w"]
    assert max(part.rows for part in weight.parts) <= rows
    x, represented = uploaded(numbers(20, 96), precision)
    y = multiply(weight, ids, x, tiling_of(16, precision), fan=2, stride=90, column=41)
    assert_close(y[..., 41:78], expected(tensor, ids, represented[:, None]), F32_KERNEL)
    assert (np.delete(y, np.s_[41:78], axis=2) == POISON).all()
