"""matmul.wgsl and matmul_software.wgsl against numpy: formats, tiles, sizes that fill none."""

import numpy as np
import pytest
from helpers import matrices
from helpers.gpu import device, get, hardware, put
from helpers.tiny import random_tensor
from tolerance import F32_KERNEL

from webgemma.gemma.record.matmul import Clamp, Matmul
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Argument, Recorder
from webgemma.kernels import unit
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
VEC4_TILES = {"vec4": (128, 64, 64, 4, 8, 8, 2), "long vec4": (128, 64, 64, 4, 8, 16, 2)}
NAMES = ("THREADS", "TILE_ROWS", "TILE_TOKENS", "ROWS_EACH", "TOKENS_EACH", "SLICE", "BUFFERS")
SOFTWARE = {"few in software": (2, 1), "software": (4, 8)}  # EACH, TOKENS of matmul_software
EVERY_TILE = pytest.mark.parametrize("tile", [*TILES, *SOFTWARE])


class Matrix:
    """Random weights in a format: their values, and their bytes on the device."""

    def __init__(self, name: str, rows: int, width: int) -> None:
        self.format, self.rows, self.width = FORMATS[name], rows, width
        data = random_tensor(rows, "w", (width, rows), name).data
        self.weights = dequantise(data, self.format, (rows, width))
        blocks = np.frombuffer(data, np.uint8).reshape(-1, self.format.nbytes)
        stored, starts = b"", []
        for offset, size in self.format.planes or [(0, self.format.nbytes)]:
            starts.append(len(stored) // 4)
            stored += blocks[:, offset : offset + size].tobytes()
            stored += bytes(-len(stored) % 16)
        self.units = width // unit(name)
        self.arguments: dict[str, Argument] = {
            "format": name,
            "W": put(np.frombuffer(stored, np.uint8)),
            "row_blocks": width // self.format.block,
            "units": self.units,
            "rows": rows,
            **{f"plane{number}": start for number, start in enumerate(starts[1:], 1)},
        }

    def times(self, x: np.ndarray) -> np.ndarray:
        """Return x Wᵀ, with sums in float64."""
        return x.astype(np.float64) @ self.weights.T.astype(np.float64)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).standard_normal(shape, np.float32)


def tiling(tile: str) -> tuple[str, dict[str, Argument], int, int]:
    """Return the op that divides a product so, its arguments, and its rows and tokens at once."""
    if tile in SOFTWARE:
        each, tokens = SOFTWARE[tile]
        threads = 8 if "shuffle8" in device().features else 4  # Chromium's software GPU has four
        constants = {"THREADS": threads, "EACH": each, "TOKENS": tokens}
        return "matmul_software", constants, threads * each, tokens
    constants = dict(zip(NAMES, (TILES | VEC4_TILES)[tile], strict=True))
    provider = {"tiled_product": "slices", "tile": "vec4" if tile in VEC4_TILES else "float"}
    return "matmul", constants | provider, constants["TILE_ROWS"], constants["TILE_TOKENS"]


def matmul(
    matrix: Matrix,
    x: np.ndarray,
    *,
    tile: str = "wide",
    count: int | None = None,
    first_row: int = 0,
    stride: int | None = None,
    widest: int = 32768,
    splits: int = 1,
    up: np.ndarray | None = None,
    up_first: int = 0,
) -> np.ndarray:
    """Return y [splits * tokens, stride] after the kernel, poisoned before."""
    op, arguments, rows_at_once, tokens_at_once = tiling(tile)
    tokens, stride = len(x), stride or matrix.rows
    epilogue: dict[str, Argument] = {"epilogue": "none"}
    if up is not None:
        epilogue = {"epilogue": "geglu", "up": put(up)}
        epilogue |= {"up_stride": up.shape[1], "up_first": up_first}
    tiles = -(-matrix.rows // rows_at_once)
    columns = min(tiles, widest)
    layers = -(-tiles // columns)
    if op == "matmul":
        slices = -(-matrix.weights.shape[1] // arguments["SLICE"])
        arguments["split_slices"], layers = -(-slices // splits), splits
    y = put(np.full((splits * tokens, stride), POISON))
    recorder = Recorder(device())
    recorder.call(
        op,
        (columns, -(-tokens // tokens_at_once), layers),
        **matrix.arguments,
        **arguments,
        **epilogue,
        batch=put(np.array([0, tokens if count is None else count], np.uint32)),
        x=put(x),
        y=y,
        first_row=first_row,
        stride=stride,
        tokens=tokens,
    )
    device().run(recorder.plan())
    return get(y)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=F32_KERNEL * np.abs(expected).max())


@pytest.mark.parametrize("tile", ["wide", *SOFTWARE])
@pytest.mark.parametrize("rows", [1, 5, 64, 100, 257])
@pytest.mark.parametrize("tokens", [2, 3, 17, 64, 65])
def test_rows_and_tokens_need_not_fill_a_tile(rows: int, tokens: int, tile: str) -> None:
    matrix, x = Matrix("F32", rows, 36), numbers(tokens, 36)
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
@pytest.mark.parametrize("tile", VEC4_TILES)
def test_vec4_tiles(name: str, tile: str) -> None:
    for rows, tokens, width in ((1, 3, 4), (70, 19, 36), (129, 130, 20), (257, 128, 68)):
        matrix, x = Matrix(name, rows, width), numbers(tokens, width)
        assert_close(matmul(matrix, x, tile=tile), matrix.times(x))


@pytest.mark.parametrize("tile", [*TILES, *SOFTWARE, *VEC4_TILES])
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


def test_many_rows_fold_into_the_third_axis() -> None:
    matrix, x = Matrix("F32", 257, 36), numbers(65, 36)
    assert_close(matmul(matrix, x, tile="software", widest=3), matrix.times(x))


def test_splits_of_k_are_apart() -> None:
    matrix, x = Matrix("F32", 70, 200), numbers(19, 200)
    y = matmul(matrix, x, splits=3).reshape(3, 19, 70)
    first = 3 * TILES["wide"][NAMES.index("SLICE")]  # seven slices: three, three and one
    for split, begin in zip(y, (0, first, 2 * first), strict=True):
        k = np.s_[:, begin : begin + first]
        assert_close(split, x[k].astype(np.float64) @ matrix.weights[k].T.astype(np.float64))


@pytest.mark.parametrize("tile", ["wide", "software"])
def test_a_gate_over_a_slice_of_longer_rows(tile: str) -> None:
    matrix, x, up = Matrix("F32", 70, 36), numbers(19, 36), numbers(19, 200)
    y = matmul(matrix, x, tile=tile, up=up, up_first=90)
    assert_close(y, gelu(matrix.times(x)) * up[:, 90:160])


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.usable])
def test_dequantised(name: str) -> None:
    matrix = Matrix(name, 37, 256)
    out = put(np.full((38, 256), POISON))
    recorder = Recorder(device())
    grid = (3, -(-37 * matrix.units // (3 * 64)))
    recorder.call("dequantise", grid, **matrix.arguments, out=out, THREADS=64)
    device().run(recorder.plan())
    assert_close(get(out)[:37], matrix.weights)
    assert (get(out)[37:] == POISON).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_many_tokens_are_multiplied_with_a_dequantised_matrix(name: str) -> None:
    tokens, rows = 300, 520
    tensor = random_tensor(1, "w", (256, rows), name)
    x = numbers(tokens, 256)
    with matrices.load(tensor, hardware()) as model:
        batch = put(np.array([0, tokens], np.uint32))
        products = Matmul(Recorder(hardware()), batch, tokens)
        y = put(np.full((tokens, rows + 8), POISON))
        (weight,) = model.matrices.values()
        products.linear(put(x), weight, y, 8, clamp=Clamp(-1.0, 1.5))
        names = [call.kernel.name for call in products.recorder.calls]
        device().run(products.recorder.plan())
    expected = x.astype(np.float64) @ dequantise(tensor.data, FORMATS[name], (rows, 256)).T
    assert names == [
        f"dequantise/{name}",
        "matmul/F32 epilogue=clamp tile=float tiled_product=slices",
    ]
    error = np.abs(get(y)[:, 8:] - np.clip(expected, -1.0, 1.5)).max()
    assert error <= F32_KERNEL * np.abs(expected).max()
    assert (get(y)[:, :8] == POISON).all()
