"""matmul.wgsl and matmul_lanes.wgsl against numpy: formats, tiles, and sizes that fill none."""

import numpy as np
import pytest
from helpers import matrices
from helpers.gpu import device, get, hardware, put
from helpers.tiny import random_tensor
from tolerance import F32_KERNEL

from webgemma.gemma.record.ops import Steps
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link, unit
from webgemma.reference.dequantise import dequantise
from webgemma.reference.text import gelu

POISON = np.float32(-77)

TILES = {  # THREADS, TILE_ROWS, TILE_TOKENS, ROWS_EACH, TOKENS_EACH, SLICE, BUFFERS
    "wide": (256, 64, 64, 8, 8, 32, 1),
    "narrow": (64, 32, 16, 4, 4, 32, 1),
    "long": (64, 32, 32, 4, 4, 64, 1),
    "tall": (128, 128, 32, 8, 8, 16, 1),
    "small": (128, 16, 16, 4, 4, 128, 1),
}
FOURS = {"fours": (128, 64, 64, 4, 8, 8, 2), "long fours": (128, 64, 64, 4, 8, 16, 2)}
NAMES = ("THREADS", "TILE_ROWS", "TILE_TOKENS", "ROWS_EACH", "TOKENS_EACH", "SLICE", "BUFFERS")
LANES = {"few lanes": (2, 1), "lanes": (4, 8)}  # EACH, TOKENS of matmul_lanes
EVERY_TILE = pytest.mark.parametrize("tile", [*TILES, *LANES])


class Matrix:
    """Random weights in a format: as numbers, and as the device holds them."""

    def __init__(self, name: str, rows: int, width: int) -> None:
        self.format, self.rows, self.width = FORMATS[name], rows, width
        data = random_tensor(rows, "w", (width, rows), name).data
        self.weights = dequantise(data, self.format, (rows, width))
        blocks = np.frombuffer(data, np.uint8).reshape(-1, self.format.nbytes)
        nbytes, self.planes = b"", [0, 0, 0, 0]
        for i, (offset, size) in enumerate(self.format.planes or [(0, self.format.nbytes)]):
            self.planes[i] = len(nbytes) // 4
            nbytes += blocks[:, offset : offset + size].tobytes()
            nbytes += bytes(-len(nbytes) % 16)
        self.data = put(np.frombuffer(nbytes, np.uint8))

    def times(self, x: np.ndarray) -> np.ndarray:
        """x Wᵀ, with sums in float64."""
        return x.astype(np.float64) @ self.weights.T.astype(np.float64)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).standard_normal(shape, np.float32)


def cut(tile: str) -> tuple[str, dict[str, int], int, int]:
    """The kernel that cuts a product so, its constants, and rows and tokens of a workgroup."""
    if tile in LANES:
        each, tokens = LANES[tile]
        threads = 8 if "shuffle8" in device().features else 4  # Chromium's software has four
        constants = {"THREADS": threads, "EACH": each, "TOKENS": tokens}
        return "matmul_lanes", constants, threads * each, tokens
    constants = dict(zip(NAMES, (TILES | FOURS)[tile], strict=True))
    return "matmul", constants, constants["TILE_ROWS"], constants["TILE_TOKENS"]


def matmul(
    matrix: Matrix,
    x: np.ndarray,
    *,
    tile: str = "wide",
    count: int | None = None,
    first_row: int = 0,
    stride: int | None = None,
    widest: int = 32768,
    up: np.ndarray | None = None,
    up_first: int = 0,
) -> np.ndarray:
    """What y [batch, stride] holds after the kernel, poisoned before."""
    op, constants, rows_at_once, tokens_at_once = cut(tile)
    batch, stride = len(x), stride or matrix.rows
    finish = ("linear", *(("finish_plain",) if up is None else ("gelu", "finish_gated")))
    form = "tile_four" if tile in FOURS else "tile_float"
    pieces = ("state", *(("tile", form) if op == "matmul" else ()), *finish)
    name = matrix.format.name
    kernel = link(op, device().features, format=name, constants=constants, pieces=pieces)
    tiles = -(-matrix.rows // rows_at_once)
    columns = min(tiles, widest)
    grid = (columns, -(-batch // tokens_at_once), -(-tiles // columns))
    units = matrix.width // unit(name)
    params = [
        *(matrix.width // matrix.format.block, *matrix.planes[1:3], first_row, matrix.rows),
        *(units, stride, 0 if up is None else up.shape[1], up_first, batch),
    ]
    y = put(np.full((batch, stride), POISON))
    state = put(np.array([0, batch if count is None else count], np.uint32))
    others: tuple[Tensor, ...] = () if up is None else (put(up),)
    recorder = Recorder(device())
    recorder.call(kernel, grid, params, matrix.data, state, put(x), y, *others)
    device().run(recorder.plan())
    return get(y)


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=F32_KERNEL * np.abs(wanted).max())


@pytest.mark.parametrize("tile", ["wide", *LANES])
@pytest.mark.parametrize("rows", [1, 5, 64, 100, 257])
@pytest.mark.parametrize("batch", [2, 3, 17, 64, 65])
def test_rows_and_tokens_need_not_fill_a_tile(rows: int, batch: int, tile: str) -> None:
    matrix, x = Matrix("F32", rows, 36), numbers(batch, 36)
    assert_close(matmul(matrix, x, tile=tile), matrix.times(x))


@EVERY_TILE
@pytest.mark.parametrize(
    ("name", "width"),
    [
        *(("F32", width) for width in (4, 36, 256)),
        *(("Q8_0", width) for width in (32, 96, 160)),
        *(("Q4_K", width) for width in (256, 768)),
    ],
)
def test_every_length_of_row_in_every_tile(name: str, width: int, tile: str) -> None:
    matrix, x = Matrix(name, 70, width), numbers(19, width)
    assert_close(matmul(matrix, x, tile=tile), matrix.times(x))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tile", FOURS)
def test_fours_of_weights(name: str, tile: str) -> None:
    for rows, batch, width in ((1, 3, 4), (70, 19, 36), (129, 130, 20), (257, 128, 68)):
        matrix, x = Matrix(name, rows, width), numbers(batch, width)
        assert_close(matmul(matrix, x, tile=tile), matrix.times(x))


@pytest.mark.parametrize("tile", [*TILES, *LANES, *FOURS])
def test_tokens_beyond_the_count_are_neither_used_nor_stored(tile: str) -> None:
    matrix, x = Matrix("F32", 70, 36), numbers(65, 36)
    expected = matrix.times(x)
    x[18:] = np.nan
    y = matmul(matrix, x, tile=tile, count=18)
    assert_close(y[:18], expected[:18])
    assert (y[18:] == POISON).all()


def test_columns_of_a_wider_output() -> None:
    matrix, x = Matrix("Q8_0", 100, 96), numbers(17, 96)
    y = matmul(matrix, x, first_row=7, stride=120)
    assert_close(y[:, 7:107], matrix.times(x))
    assert (np.delete(y, np.s_[7:107], axis=1) == POISON).all()


@pytest.mark.parametrize("tile", ["wide", "lanes"])
def test_many_rows_fold_into_the_third_axis(tile: str) -> None:
    matrix, x = Matrix("F32", 257, 36), numbers(65, 36)
    assert_close(matmul(matrix, x, tile=tile, widest=3), matrix.times(x))


@pytest.mark.parametrize("tile", ["wide", "lanes"])
def test_a_gate_over_a_slice_of_longer_rows(tile: str) -> None:
    matrix, x, up = Matrix("F32", 70, 36), numbers(19, 36), numbers(19, 200)
    y = matmul(matrix, x, tile=tile, up=up, up_first=90)
    assert_close(y, gelu(matrix.times(x)) * up[:, 90:160])


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.usable])
def test_unpacked(name: str) -> None:
    matrix = Matrix(name, 37, 256)
    kernel = link("unpack", frozenset(), format=name, constants={"THREADS": 64})
    out, units = put(np.full((38, 256), POISON)), 256 // unit(name)
    params = [256 // matrix.format.block, *matrix.planes[1:3], 37, units]
    recorder = Recorder(device())
    recorder.call(kernel, (3, -(-37 * units // (3 * 64))), params, matrix.data, out)
    device().run(recorder.plan())
    assert_close(get(out)[:37], matrix.weights)
    assert (get(out)[37:] == POISON).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_many_tokens_are_multiplied_with_an_unpacked_matrix(name: str) -> None:
    tokens, rows = 300, 520
    tensor = random_tensor(1, "w", (256, rows), name)
    x = numbers(tokens, 256)
    with matrices.load(tensor, hardware()) as model:
        state = put(np.array([0, tokens], np.uint32))
        steps = Steps(model, Recorder(hardware()), state, tokens, eps=1e-6)
        y = put(np.full((tokens, rows + 8), POISON))
        steps.linear(put(x), next(iter(model.matrices.values())), y, 8, between=(-1.0, 1.5))
        called = [call.kernel.name for call in steps.recorder.calls]
        device().run(steps.recorder.plan())
    truth = x.astype(np.float64) @ dequantise(tensor.data, FORMATS[name], (rows, 256)).T
    assert called == [f"unpack/{name}", "matmul/F32"]
    found, held = get(y)[:, 8:], np.clip(truth, -1.0, 1.5)
    assert np.abs(found - held).max() <= F32_KERNEL * np.abs(truth).max()
    assert (get(y)[:, :8] == POISON).all()
