"""Products of training on matrix units against numpy: factors in two halves, sums over rows."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from helpers import matrices
from helpers.gpu import device, get, hardware, put
from helpers.matrix_units import half, half_weights, scales_of, small_tiles, use_tiles
from tolerance import F16_PRODUCT, F16_SUMS, F32_KERNEL, SPLIT_PRODUCT

from webgemma.device import Device
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import matrix_tiling
from webgemma.gemma.record.matmul import LONG_ROW, Matmul
from webgemma.gemma.record.matmul_backward import MatmulBackward
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder

ROUNDED_FORMATS = [name for name, fmt in FORMATS.items() if fmt.usable and name != "F32"]
EVERY_PRECISION = pytest.mark.parametrize("precision", ["f16", "split"])


@pytest.fixture(autouse=True)
def tiles(matrix_units: MatrixUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, *small_tiles(matrix_units))


def numbers(*shape: int, seed: int = 1) -> np.ndarray:
    """Return rows whose sizes differ, as gradients do."""
    rng = np.random.default_rng((seed, *shape))
    x = rng.standard_normal(shape, np.float32)
    return x * rng.choice([1e-6, 1, 300], (shape[0], 1)).astype(np.float32)


def products_of(rows: int, precision: str, on: Device | None = None) -> Matmul:
    batch = put(np.array([0, rows], np.uint32))
    return Matmul(Recorder(on or device()), batch, rows, precision)


def backward(
    weights: list[Weight],
    dy: np.ndarray,
    precision: str = "f16",
    before: np.ndarray | None = None,
    on: Device | None = None,
    names: list[str] | None = None,
) -> np.ndarray:
    """Return dy W, added to what was there before."""
    matmul = products_of(len(dy), precision, on)
    dx = put(np.full((len(dy), weights[0].width), 7.0, np.float32) if before is None else before)
    MatmulBackward(matmul).backward(put(dy), weights, dx, add=before is not None)
    found = [call.kernel.name for call in matmul.recorder.calls]
    if names is None:
        assert any(name.startswith("matmul_backward_matrix_units") for name in found)
    else:
        names.extend(found)
    device().run(matmul.recorder.plan())
    return get(dx)


def assert_close(found: np.ndarray, expected: np.ndarray, sizes: np.ndarray, bound: float) -> None:
    """Compare rows, each relative to its size."""
    np.testing.assert_array_less(np.abs(found - expected).max(1), bound * sizes + 1e-37)


def sizes_of(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return how large the products of each row with the columns of a matrix can be."""
    longest = np.linalg.norm(weights.astype(np.float64), axis=0).max()
    return np.linalg.norm(x.astype(np.float64), axis=1) * longest


def assert_product(found: np.ndarray, x: np.ndarray, weights: np.ndarray, precision: str) -> None:
    """Assert that it is x times weights in this precision."""
    sizes, exact = sizes_of(x, weights), x.astype(np.float64) @ weights.astype(np.float64)
    if precision == "split":
        assert_close(found, exact, sizes, SPLIT_PRODUCT)
        return
    assert_close(found, half(x) @ half_weights(weights), sizes, F16_SUMS)
    assert_close(found, exact, sizes, F16_PRODUCT)


# Two halves


@pytest.mark.parametrize("stride", [24, 40])
def test_rows_become_two_halves(stride: int) -> None:
    """Of rows that may be longer, the first columns; the rest may be larger, and does not count."""
    x = numbers(5, 24)
    longer = np.concatenate([x, np.full((5, stride - 24), 1e9, np.float32)], 1)
    matmul = products_of(5, "split")
    h = matmul.rounded(put(longer), width=24)
    device().run(matmul.recorder.plan())
    data = get(HalfTensor((h.nbytes,), h.nbytes, h.buffer), np.uint8)
    parts = data[: 4 * x.size].view(np.float16).reshape(5, 2, 24).astype(np.float64)
    scales = data[4 * x.size :].view(np.float32)
    np.testing.assert_array_equal(scales, scales_of(x))
    np.testing.assert_array_equal(parts[:, 0] * scales[:, None], half(x))
    errors = np.abs(parts.sum(1) * scales[:, None] - x)
    assert (errors <= 2**-22 * np.abs(x) + 2**-38 * np.abs(x).max(1)[:, None]).all()


def test_rows_of_a_vocabulary_are_rounded_by_many_threads() -> None:
    x = numbers(2, LONG_ROW)
    matmul = products_of(2, "f16", hardware())
    h = matmul.rounded(put(x))
    device().run(matmul.recorder.plan())
    data = get(HalfTensor((h.nbytes,), h.nbytes, h.buffer), np.uint8)
    values = data[: 2 * x.size].view(np.float16).reshape(x.shape).astype(np.float64)
    np.testing.assert_array_equal(values * scales_of(x)[:, None], half(x))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "F16"])
def test_forward_in_two_halves_is_a_product_of_float32(name: str) -> None:
    width = max(FORMATS[name].block, 104)
    tensor, x = matrices.matrix(name, width, 70), numbers(21, width)
    with matrices.load(tensor) as model:
        matmul = products_of(21, "split")
        y = matmul.linear(put(x), model.matrices[tensor.name])
        assert "matrix_units" in matmul.recorder.calls[-1].kernel.name
        device().run(matmul.recorder.plan())
        found = get(y)
    assert_product(found, x, matrices.truth(tensor).T, "split")


# Sums over rows


@pytest.mark.parametrize("name", ROUNDED_FORMATS)
def test_backward_through_every_format(name: str) -> None:
    """Rows and tokens that fill no tile, and columns of one that is not full."""
    tensor, dy = matrices.matrix(name, max(FORMATS[name].block, 96), 72), numbers(21, 72)
    with matrices.load(tensor) as model:
        found = backward([model.matrices[tensor.name]], dy)
    assert_product(found, dy, matrices.truth(tensor), "f16")


@EVERY_PRECISION
@pytest.mark.parametrize(("rows", "tokens"), [(8, 3), (64, 16), (136, 37)])
def test_backward_of_any_size(rows: int, tokens: int, precision: str) -> None:
    """Beside what was there before, and with spare columns of dy that are not finite."""
    tensor, dy = matrices.matrix("Q4_0", 160, rows), numbers(tokens, rows)
    spare = np.concatenate([dy, np.full((tokens, 8), np.nan, np.float32)], 1)
    before = numbers(tokens, 160, seed=2)
    with matrices.load(tensor) as model:
        found = backward([model.matrices[tensor.name]], spare, precision, before)
    weights = matrices.truth(tensor)
    scale = sizes_of(dy, weights) + np.abs(before).max(1)
    exact = before + dy.astype(np.float64) @ weights.astype(np.float64)
    assert_close(found, exact, scale, F16_PRODUCT if precision == "f16" else SPLIT_PRODUCT)


@EVERY_PRECISION
def test_backward_through_stacked_matrices_in_splits(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two formats; splits end within a slice, and none is left out."""
    monkeypatch.setattr(matrix_tiling, "MATRIX_SPLIT_ROWS", 60)
    first, second = matrices.matrix("Q4_0", 96, 200), matrices.matrix("F16", 96, 136)
    dy, names = numbers(18, 336), list[str]()
    with matrices.load(first) as one, matrices.load(second) as other:
        weights = [one.matrices[first.name], other.matrices[second.name]]
        found = backward(weights, dy, precision, names=names)
    assert [name.split("/")[0].split()[0] for name in names] == [
        "round_f16",
        *("matmul_backward_matrix_units",) * 2,
        "sum_splits",
    ]
    stacked = np.concatenate([matrices.truth(first), matrices.truth(second)])
    assert_product(found, dy, stacked, precision)


@pytest.mark.parametrize(("rows", "on_units"), [(16, True), (20, False)])
def test_backward_through_a_matrix_in_parts(rows: int, on_units: bool) -> None:
    """Parts that do not begin at a multiple of eight rows are multiplied as float32."""
    small = copy.copy(hardware())  # with its compiled kernels
    small.limits = replace(small.limits, binding_nbytes=rows * FORMATS["Q4_0"].row_nbytes(96) + 64)
    tensor, dy, names = matrices.matrix("Q4_0", 96, 72), numbers(19, 72), list[str]()
    with matrices.load(tensor, small) as model:
        weight = model.matrices[tensor.name]
        assert len(weight.parts) > 1
        aligned = all(part.first_row % 8 == 0 for part in weight.parts)
        found = backward([weight], dy, on=small, names=names)
    assert aligned == on_units == any("matrix_units" in name for name in names)
    weights = matrices.truth(tensor)
    exact = dy.astype(np.float64) @ weights.astype(np.float64)
    bound = F16_PRODUCT if on_units else F32_KERNEL
    assert_close(found, exact, sizes_of(dy, weights), bound)


@pytest.mark.parametrize(("name", "rows"), [("F32", 32), ("Q8_0", 33)])
def test_what_is_not_multiplied_on_matrix_units(name: str, rows: int) -> None:
    """A file's float32 stays float32; eight values of dy are read at once."""
    tensor, dy, names = matrices.matrix(name, 64, rows), numbers(20, rows), list[str]()
    with matrices.load(tensor) as model:
        found = backward([model.matrices[tensor.name]], dy, names=names)
    assert not any("matrix_units" in each or "round" in each for each in names)
    weights = matrices.truth(tensor)
    exact = dy.astype(np.float64) @ weights.astype(np.float64)
    assert_close(found, exact, sizes_of(dy, weights), F32_KERNEL)
