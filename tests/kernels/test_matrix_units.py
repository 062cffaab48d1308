"""Products on matrix units against numpy: rounding, formats, tiles, parts, epilogues, experts."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers import matrices
from helpers.gpu import device, get, put
from helpers.matrix_units import half, half_weights, poisoned, scales_of, use_tiles
from helpers.tiny import random_tensor
from tolerance import F16_PRODUCT, F16_SUMS, F32_KERNEL, ROUNDING

from webgemma.gemma.lora_weights import AppliedLora, LoraWeight
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import matmul, matrix_tiling
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.expert_matmul import MAX_EXPERTS, ExpertMatmul, SortedSlots
from webgemma.gemma.record.matmul import Clamp, Matmul
from webgemma.gemma.record.matrix_tiling import (
    DECODING_TILES,
    MATRIX_TILES,
    MatrixTile,
    MatrixTiling,
    MatrixUnits,
)
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.reference.text import gelu

pytestmark = pytest.mark.usefixtures("matrix_units")
SMALL_TILES = pytest.mark.usefixtures("small_tiles")

POISON = np.float32(-77)
EXPERTS, EXPERT_ROWS = 5, 37
LORA_SCALE = 0.5
FORMAT_NAMES = [name for name, fmt in FORMATS.items() if fmt.usable]
ROUNDED_FORMATS = [name for name in FORMAT_NAMES if name != "F32"]
EVERY_TILE = pytest.mark.parametrize(
    "tile",
    sorted({*MATRIX_TILES, *DECODING_TILES}),
    ids=lambda tile: f"{tile.tokens}x{tile.rows} by {tile.shares}",
)


def numbers(*shape: int) -> np.ndarray:
    """Return rows whose sizes differ."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape, np.float32)
    return x * rng.choice([1e-3, 1, 300], (shape[0], 1)).astype(np.float32)


@pytest.fixture
def small_tiles(matrix_units: MatrixUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix for each subgroup: such kernels compile in less than a second on a CPU."""
    m, n, _ = matrix_units.shape
    use_tiles(monkeypatch, MatrixTile(2 * m, 4 * n, m, n, 1, 1, 10, 1))


def batch_of(count: int) -> Tensor:
    return put(np.array([0, count, 0, 0], np.uint32))


# Rounding


def rounded(x: np.ndarray, count: int | None = None, token_rows: int = 1) -> np.ndarray:
    """Return what round_f16 leaves in poisoned memory: bytes."""
    tokens = len(x) // token_rows
    h = poisoned(*x.shape)
    recorder = Recorder(device())
    recorder.call(
        "round_f16",
        (len(x),),
        row_source="plain",
        batch=batch_of(tokens if count is None else count),
        x=put(x),
        h=h,
        width=x.shape[1],
        stride=x.shape[1],
        rows=len(x),
        token_rows=token_rows,
        THREADS=128,
        SPLIT=False,
    )
    device().run(recorder.plan())
    return get(replace_shape(h, h.nbytes), np.uint8)


def replace_shape(tensor: HalfTensor, nbytes: int) -> HalfTensor:
    return HalfTensor((nbytes,), nbytes, tensor.buffer)


def parsed(data: np.ndarray, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the values [rows, width] and scales [rows] of a HalfTensor's bytes."""
    end = 2 * rows * width
    return data[:end].view(np.float16).reshape(rows, width), data[end:].view(np.float32)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 40), (7, 1032), (33, 256)])
def test_rows_are_rounded_with_a_power_of_two_each(rows: int, width: int) -> None:
    x = numbers(rows, width)
    values, scales = parsed(rounded(x), rows, width)
    np.testing.assert_array_equal(scales, scales_of(x))
    assert (np.log2(scales) % 1 == 0).all()
    peaks = np.abs(values.astype(np.float32)).max(1)
    assert ((peaks >= 2**14) & (peaks <= 2**15)).all()
    np.testing.assert_array_equal(values * scales[:, None].astype(np.float64), half(x))


def test_rows_of_any_size_stand_side_by_side() -> None:
    sizes = [0, 1e-30, 1e30, 2.0**127, 1e-3, 65504, 2.0**-100]
    x = np.array(sizes, np.float32)[:, None] * np.linspace(-1, 1, 16, dtype=np.float32)
    values, scales = parsed(rounded(x), *x.shape)
    represented = values * scales[:, None].astype(np.float64)
    assert (np.abs(represented - x) <= 2**-11 * np.abs(x)).all()
    assert (values[0] == 0).all()


def test_large_and_small_values_in_one_row() -> None:
    x = np.full((2, 8), 1e-30, np.float32)
    x[0, 3] = -1e30
    values, scales = parsed(rounded(x), 2, 8)
    represented = values * scales[:, None].astype(np.float64)
    assert represented[0, 3] == pytest.approx(-1e30, rel=2**-11)
    assert (np.delete(represented[0], 3) == 0).all()
    assert represented[1] == pytest.approx(x[1], rel=2**-11)


def test_what_is_not_finite_stays_so() -> None:
    x = numbers(4, 16)
    x[0, 3], x[1, 5], x[2, 7], x[2, 8] = np.inf, np.nan, -np.inf, np.nan
    values, scales = parsed(rounded(x), 4, 16)
    assert values[0, 3] == np.inf
    assert np.isnan(values[1, 5])
    assert values[2, 7] == -np.inf
    assert np.isnan(values[2, 8])
    assert np.isfinite(scales).all()
    assert np.isfinite(values).sum() == values.size - 4


@pytest.mark.parametrize(("count", "token_rows"), [(0, 1), (4, 1), (2, 3)])
def test_rows_beyond_the_count_are_left_alone(count: int, token_rows: int) -> None:
    rows, width = 5 * token_rows, 24
    x = numbers(rows, width)
    x[count * token_rows :] = np.nan
    data = rounded(x, count, token_rows)
    end = count * token_rows
    values, scales = parsed(data, rows, width)
    np.testing.assert_array_equal(values[:end] * scales[:end, None].astype(float), half(x[:end]))
    assert (values[end:].view(np.uint16) == 0x7777).all()
    assert (scales[end:].view(np.uint32) == 0x77777777).all()


# Dense products


def applied(weight: Weight, lora: LoraWeight | None) -> AppliedLora | None:
    """Return an adapter of one weight, applied with LORA_SCALE."""
    if lora is None:
        return None
    return AppliedLora({weight.name: lora}, None, put(np.array([[LORA_SCALE]], np.float32)))


@dataclass
class Product:
    """A product as a pass records it, with an output that is poisoned before."""

    weight: Weight
    x: np.ndarray
    count: int | None = None
    first: int = 0
    stride: int = 0
    lora: LoraWeight | None = None
    up: np.ndarray | None = None
    clamp: Clamp | None = None
    on_units: bool = True
    names: tuple[str, ...] = ()  # of the kernels, afterwards

    def compute(self) -> np.ndarray:
        rows, recorder = len(self.x), Recorder(device())
        batch = batch_of(rows if self.count is None else self.count)
        lora = applied(self.weight, self.lora)
        products = Matmul(recorder, batch, rows, "f16", lora)
        y = put(np.full((rows, self.stride or self.weight.rows), POISON))
        up = None if self.up is None else Columns(put(self.up), self.up.shape[1], 4)
        x = put(self.x)
        products.linear(x, self.weight, y, self.first, up=up, clamp=self.clamp)
        self.names = tuple(call.kernel.name for call in recorder.calls)
        assert any("matrix_units" in name for name in self.names) == self.on_units
        device().run(recorder.plan())
        return get(y)


def assert_close(
    found: np.ndarray, expected: np.ndarray, sizes: np.ndarray, bound: float = F16_SUMS
) -> None:
    """Compare rows, each relative to its size."""
    errors = np.abs(found - expected).reshape(len(expected), -1).max(1)
    np.testing.assert_array_less(errors, bound * sizes + 1e-37)


def sizes_of(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return how large a product of each row of x can be."""
    longest = np.linalg.norm(weights.astype(np.float64), axis=1).max()
    return np.linalg.norm(x.astype(np.float64), axis=1) * longest


def assert_product(found: np.ndarray, x: np.ndarray, weights: np.ndarray) -> None:
    """Assert that it is the product of the rounded factors, and near that of the exact ones."""
    sizes = sizes_of(x, weights)
    assert_close(found, half(x) @ half_weights(weights).T, sizes)
    assert_close(found, x.astype(np.float64) @ weights.T.astype(np.float64), sizes, F16_PRODUCT)


@SMALL_TILES
@pytest.mark.parametrize("name", ROUNDED_FORMATS)
def test_every_format(name: str) -> None:
    """Rows and tokens that fill no tile; a width of one block, and one whose last slice is part."""
    block = FORMATS[name].block
    for width in sorted({max(block, 8), max(3 * block, 72)}):
        tensor, x = matrices.matrix(name, width, 70), numbers(21, width)
        with matrices.load(tensor) as model:
            product = Product(model.matrices[tensor.name], x)
            found = product.compute()
        rounding, multiplication = product.names
        assert rounding.startswith("round_f16 row_source=plain")
        assert multiplication == f"matmul/{name} epilogue=none tiled_product=matrix_units"
        assert_product(found, x, matrices.truth(tensor))


@EVERY_TILE
@pytest.mark.parametrize(("rows", "tokens"), [(1, 3), (65, 17), (130, 129), (257, 130)])
def test_every_tile(
    tile: MatrixTile,
    rows: int,
    tokens: int,
    matrix_units: MatrixUnits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not it would be chosen for such a product."""
    if not MatrixTiling.sized(matrix_units, tile).fits(device().limits):
        pytest.skip("does not fit into a workgroup of this GPU")
    use_tiles(monkeypatch, tile)
    width = 104 * tile.shares
    tensor, x = matrices.matrix("F16", width, rows), numbers(tokens, width)
    with matrices.load(tensor) as model:
        found = Product(model.matrices[tensor.name], x).compute()
    assert_product(found, x, matrices.truth(tensor))


@SMALL_TILES
@pytest.mark.parametrize(("splits", "rows", "stride"), [(2, 72, 72), (3, 72, 80), (1, 70, 70)])
def test_k_is_split_among_workgroups(
    splits: int, rows: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into columns of longer rows, too; splits are added four rows at a time, or not made."""
    monkeypatch.setattr(matrix_tiling, "SUM_MICROSECONDS", -99)
    monkeypatch.setattr(matmul, "MAX_SPLITS", splits)
    tensor, x = matrices.matrix("Q8_0", 800, rows), numbers(19, 800)
    first = stride - rows
    with matrices.load(tensor) as model:
        product = Product(model.matrices[tensor.name], x, first=first, stride=stride)
        found = product.compute()
    assert ("sum_splits" in product.names) == (splits > 1)
    assert_product(found[:, first:], x, matrices.truth(tensor))
    assert (found[:, :first] == POISON).all()


@pytest.mark.parametrize("tokens", [3, 16, 17, 33, 65])
def test_any_number_of_tokens(tokens: int) -> None:
    """With the tiles that are chosen for it."""
    tensor, x = matrices.matrix("Q4_K", 256, 70), numbers(tokens, 256)
    with matrices.load(tensor) as model:
        found = Product(model.matrices[tensor.name], x).compute()
    assert_product(found, x, matrices.truth(tensor))


@pytest.mark.parametrize(
    ("name", "width", "tokens"), [("F32", 64, 20), ("F16", 20, 20), ("Q8_0", 64, 2)]
)
def test_what_is_not_multiplied_on_matrix_units(name: str, width: int, tokens: int) -> None:
    """A file's float32 stays float32; rows of eights only; few tokens are multiplied singly."""
    tensor, x = matrices.matrix(name, width, 33), numbers(tokens, width)
    with matrices.load(tensor) as model:
        product = Product(model.matrices[tensor.name], x, on_units=False)
        found = product.compute()
    assert not any("round_f16" in name for name in product.names)
    weights = matrices.truth(tensor)
    exact = x.astype(np.float64) @ weights.T.astype(np.float64)
    assert_close(found, exact, sizes_of(x, weights), ROUNDING["int16"])


@SMALL_TILES
def test_tokens_beyond_the_count_are_neither_used_nor_stored() -> None:
    tensor, x = matrices.matrix("Q8_0", 96, 70), numbers(40, 96)
    x[18:] = np.nan
    with matrices.load(tensor) as model:
        found = Product(model.matrices[tensor.name], x, count=18).compute()
    assert_product(found[:18], x[:18], matrices.truth(tensor))
    assert (found[18:] == POISON).all()


@SMALL_TILES
def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    tensor, x = matrices.matrix("Q8_0", 64, 33), numbers(12, 64)
    x[5, 7], x[6, 7] = np.nan, np.inf
    with matrices.load(tensor) as model:
        found = Product(model.matrices[tensor.name], x).compute()
    assert np.isnan(found[5]).all()
    assert not np.isfinite(found[6]).any()
    others = np.delete(np.arange(12), (5, 6))
    assert_product(found[others], x[others], matrices.truth(tensor))


@SMALL_TILES
def test_rows_of_extreme_sizes() -> None:
    tensor, x = matrices.matrix("Q8_0", 64, 33), numbers(12, 64)
    x *= np.tile(np.array([1e30, 1e-25, 0, 1, 1e5, 1e-5], np.float32), 2)[:, None]
    with matrices.load(tensor) as model:
        found = Product(model.matrices[tensor.name], x).compute()
    assert_product(found, x, matrices.truth(tensor))


@SMALL_TILES
@pytest.mark.parametrize("rows", [5, 16, 64])
def test_a_weight_in_parts_into_columns_of_a_wider_output(rows: int) -> None:
    small = copy.copy(device())  # with its compiled kernels
    nbytes = rows * FORMATS["Q4_0"].row_nbytes(96) + 64
    small.limits = replace(small.limits, binding_nbytes=nbytes)
    tensor, x = matrices.matrix("Q4_0", 96, 100), numbers(19, 96)
    with matrices.load(tensor, small) as model:
        weight = model.matrices[tensor.name]
        assert len(weight.parts) > 1
        found = Product(weight, x, first=7, stride=120).compute()
    assert_product(found[:, 7:107], x, matrices.truth(tensor))
    assert (np.delete(found, np.s_[7:107], axis=1) == POISON).all()


@SMALL_TILES
def test_epilogues() -> None:
    tensor, x = matrices.matrix("F16", 64, 70), numbers(19, 64)
    x /= np.abs(x).max(1)[:, None]
    up = np.random.default_rng(1).standard_normal((19, 80), np.float32)
    exact = half(x) @ half_weights(matrices.truth(tensor)).T
    with matrices.load(tensor) as model:
        weight = model.matrices[tensor.name]
        gated = Product(weight, x, up=up)
        found = gated.compute()
        clamped = Product(weight, x, clamp=Clamp(-0.25, 0.5)).compute()
    assert gated.names[-1] == "matmul/F16 epilogue=geglu tiled_product=matrix_units"
    expected, sizes = gelu(exact) * up[:, 4:74], sizes_of(x, matrices.truth(tensor))
    assert_close(found, expected, sizes, F32_KERNEL)
    assert_close(clamped, np.clip(exact, -0.25, 0.5), sizes)
    assert {-0.25, 0.5} <= set(clamped.ravel().tolist())


@SMALL_TILES
@pytest.mark.parametrize("gated", [False, True])
def test_adapters_are_added_in_float32(gated: bool) -> None:
    tensor, x = matrices.matrix("F16", 64, 72), numbers(19, 64)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((4, 64), np.float32), rng.standard_normal((72, 4), np.float32)
    up = rng.standard_normal((19, 80), np.float32) if gated else None
    lora = LoraWeight(put(a), put(b), put(np.zeros(1, np.uint32)), 4, (0,))
    with matrices.load(tensor) as model:
        weight = model.matrices[tensor.name]
        found = Product(weight, x, lora=lora, up=up).compute()
    added = (x.astype(np.float64) @ a.T * LORA_SCALE) @ b.T
    expected = half(x) @ half_weights(matrices.truth(tensor)).T + added
    sizes = sizes_of(x, matrices.truth(tensor)) + np.abs(added).max(1)
    if up is not None:
        expected = gelu(expected) * up[:, 4:76]
    assert_close(found, expected, sizes, F32_KERNEL)


# Experts


def routed(rows: int, used: int) -> np.ndarray:
    """Return experts for each token: the one before the last never, the first often."""
    ids = np.random.default_rng(rows).integers(0, 2 * EXPERTS, (rows, used))
    return np.where(ids >= EXPERTS, 0, np.where(ids == EXPERTS - 2, 1, ids)).astype(np.uint32)


@dataclass
class ExpertProduct:
    """W[e] x of every slot's expert, sorted, into columns of an output poisoned before."""

    weight: Weight
    ids: np.ndarray
    x: np.ndarray  # [rows, slots / fan, width]
    slots: int  # of a tile
    count: int | None = None
    stride: int = EXPERT_ROWS
    column: int = 0
    lora: LoraWeight | None = None

    def compute(self) -> np.ndarray:
        recorder, (rows, used) = Recorder(device()), self.ids.shape
        batch, ids = batch_of(rows if self.count is None else self.count), put(self.ids)
        lora = applied(self.weight, self.lora)
        products = ExpertMatmul(Matmul(recorder, batch, rows, "f16", lora))
        assert self.slots in products.matrix_slots(self.weight)
        slots, tiles = recorder.scratch(rows, used), recorder.scratch(rows * used, 4)
        order = SortedSlots(slots, tiles, self.slots, on_units=True)
        recorder.call(
            "expert_sort",
            (1,),
            batch=batch,
            ids=ids,
            slots=order.slots,
            tiles=order.tiles,
            experts=EXPERTS,
            used=used,
            tile_count=order.tiles.shape[0],
            THREADS=64,
            TOKENS=self.slots,
            MAX_EXPERTS=MAX_EXPERTS["MAX_EXPERTS"],
        )
        y = put(np.full((rows, used, self.stride), POISON))
        out = Columns(y, self.stride, self.column)
        x, fan = put(self.x.reshape(rows, -1)), used // self.x.shape[1]
        if fan == used:
            x = products.expert_input(order, x, self.weight)
        products.expert_linear(order, self.weight, EXPERTS, ids, x, fan, out)
        names = [call.kernel.name for call in recorder.calls]
        expected = f"expert_matmul/{self.weight.format.name} tiled_product=matrix_units"
        assert expected in names
        device().run(recorder.plan())
        return get(y)


def expert_products(weights: np.ndarray, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return W[e] x for every slot; x is [rows, used or 1, width]."""
    stacked = weights.reshape(EXPERTS, -1, weights.shape[1])
    return np.einsum("tsnk,tsk->tsn", stacked[ids], np.broadcast_to(x, (*ids.shape, x.shape[2])))


def assert_expert_products(
    found: np.ndarray, weights: np.ndarray, ids: np.ndarray, x: np.ndarray
) -> None:
    flat = x.reshape(-1, x.shape[2])
    tight = expert_products(half_weights(weights), ids, half(flat).reshape(x.shape))
    exact = expert_products(weights.astype(np.float64), ids, x.astype(np.float64))
    sizes = np.repeat(sizes_of(flat, weights), ids.size // len(flat))
    found = found.reshape(ids.size, -1)
    assert_close(found, tight.reshape(found.shape), sizes)
    assert_close(found, exact.reshape(found.shape), sizes, F16_PRODUCT)


def tile_slots(units: MatrixUnits) -> list[int]:
    """Return how many slots a tile may have on this GPU."""
    tilings = [MatrixTiling.for_experts(units, slots) for slots in (16, 32, 64)]
    return [t.tokens for t in tilings if t.fits(device().limits)]


@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_experts_in_a_format(name: str, matrix_units: MatrixUnits) -> None:
    """A token's slots share its row of x."""
    ids, width = routed(30, 3), max(FORMATS[name].block, 96)
    tensor = random_tensor(width, "w", (width, EXPERTS * EXPERT_ROWS), name)
    x = numbers(30, width).reshape(30, 1, width)
    with matrices.load(tensor) as model:
        found = ExpertProduct(model.matrices["w"], ids, x, tile_slots(matrix_units)[0]).compute()
    assert_expert_products(found, matrices.truth(tensor), ids, x)


@pytest.mark.parametrize("slots", [16, 32, 64])
def test_experts_with_a_row_for_each_slot(slots: int, matrix_units: MatrixUnits) -> None:
    if slots not in tile_slots(matrix_units):
        pytest.skip("does not fit into a workgroup of this GPU")
    ids, tensor = routed(60, 2), random_tensor(1, "w", (96, EXPERTS * EXPERT_ROWS), "F16")
    x = numbers(120, 96).reshape(60, 2, 96)
    with matrices.load(tensor) as model:
        found = ExpertProduct(model.matrices["w"], ids, x, slots).compute()
    assert_expert_products(found, matrices.truth(tensor), ids, x)


@pytest.mark.parametrize("count", [0, 1, 17])
def test_slots_beyond_the_count(count: int, matrix_units: MatrixUnits) -> None:
    ids, tensor = routed(20, 2), random_tensor(1, "w", (96, EXPERTS * EXPERT_ROWS), "F16")
    x = numbers(20, 96).reshape(20, 1, 96)
    x[count:], ids[count:] = np.nan, 1 << 30
    with matrices.load(tensor) as model:
        weight = model.matrices["w"]
        found = ExpertProduct(weight, ids, x, tile_slots(matrix_units)[0], count=count).compute()
    assert (found[count:] == POISON).all()
    if count:
        assert_expert_products(found[:count], matrices.truth(tensor), ids[:count], x[:count])


@pytest.mark.parametrize("rows", [5, 16, 80])
def test_parts_hold_some_rows_of_some_experts(rows: int, matrix_units: MatrixUnits) -> None:
    """Also into some columns of a wider y, whose other columns stay as they are."""
    small = copy.copy(device())  # with its compiled kernels
    nbytes = rows * FORMATS["F16"].row_nbytes(96) + 64
    small.limits = replace(small.limits, binding_nbytes=nbytes)
    ids, tensor = routed(20, 2), random_tensor(1, "w", (96, EXPERTS * EXPERT_ROWS), "F16")
    x = numbers(20, 96).reshape(20, 1, 96)
    with matrices.load(tensor, small) as model:
        weight = model.matrices["w"]
        assert len(weight.parts) > 1
        slots = tile_slots(matrix_units)[0]
        found = ExpertProduct(weight, ids, x, slots, stride=90, column=41).compute()
    assert_expert_products(found[..., 41:78], matrices.truth(tensor), ids, x)
    assert (np.delete(found, np.s_[41:78], axis=2) == POISON).all()


@pytest.mark.parametrize("own_rows", [False, True])
def test_adapters_of_experts(own_rows: bool, matrix_units: MatrixUnits) -> None:
    ids, tensor = routed(20, 2), random_tensor(1, "w", (96, EXPERTS * EXPERT_ROWS), "F16")
    x = numbers(40 if own_rows else 20, 96).reshape(20, -1, 96)
    rng = np.random.default_rng(2)
    a = rng.standard_normal((EXPERTS, 4, 96), np.float32)
    b = rng.standard_normal((EXPERTS, EXPERT_ROWS, 4), np.float32)
    stored = put(a.reshape(-1, 96)), put(b.reshape(-1, 4)), put(np.zeros(1, np.uint32))
    with matrices.load(tensor) as model:
        lora = LoraWeight(*stored, 4, (0,))
        weight = model.matrices["w"]
        found = ExpertProduct(weight, ids, x, tile_slots(matrix_units)[0], lora=lora).compute()
    rows = half(x.reshape(-1, 96)).reshape(x.shape)
    expected = expert_products(half_weights(matrices.truth(tensor)), ids, rows)
    low = expert_products(a.reshape(-1, 96).astype(np.float64), ids, x) * LORA_SCALE
    added = np.einsum("tsnr,tsr->tsn", b[ids], low)
    sizes = np.abs(added).max(2).ravel()
    assert_close(found.reshape(40, -1), (expected + added).reshape(40, -1), sizes, F32_KERNEL)
