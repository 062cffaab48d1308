"""The kernels of training against the reference's derivatives and numpy, one by one."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from helpers.gpu import device, get, hardware, put
from helpers.matrices import load, matrix, truth
from tolerance import F32_KERNEL

from webgemma.device import Device
from webgemma.gemma.record.ops import Steps
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.lora.backward.matmul import Matrix, Times, matmul_back, product
from webgemma.reference.gradients import (
    cross_entropy,
    gelu_slope,
    rms_back,
    rope_back,
    softmax_back,
)
from webgemma.reference.text import gelu, rms, rope, softmax

USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]
EPS = 1e-6


def numbers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(found: np.ndarray, wanted: np.ndarray, bound: float = F32_KERNEL) -> None:
    assert np.abs(found - wanted).max() <= bound * np.abs(wanted).max()


@cache
def empty(on: Device) -> object:
    return load(matrix("F32", 4, 4), on)


@pytest.fixture
def steps() -> Steps:
    return steps_on(device())


def steps_on(on: Device, model: object = None, batch: int = 1) -> Steps:
    state = put(np.array([0, batch], np.uint32), on)
    return Steps(model or empty(on), Recorder(on), state, batch, EPS)


def ran(steps: Steps, *tensors: Tensor) -> Iterator[np.ndarray]:
    steps.recorder.device.run(steps.recorder.plan())
    return (get(tensor, on=steps.recorder.device) for tensor in tensors)


# Products


@pytest.mark.parametrize("on", [device, hardware])
@pytest.mark.parametrize("format", USABLE)
def test_back_through_a_matrix_of_any_format(format: str, on) -> None:
    tensor = matrix(format, 512, 67)
    model = load(tensor, on())
    dy, before = numbers(69, 70), numbers(69, 512, seed=2)  # three columns to spare
    dx = put(before, on())
    steps = steps_on(on(), model, 69)
    matmul_back(steps, put(dy, on()), [model.matrices[format]], dx, add=True)
    (found,) = ran(steps, dx)
    assert_close(found, before + dy[:, :67] @ truth(tensor))
    model.close()


def test_back_through_a_matrix_that_many_tokens_unpack() -> None:
    on, tensor = hardware(), matrix("Q4_K", 256, 35)
    model, dy = load(tensor, on), numbers(260, 35)
    dx = put(np.zeros((260, 256), np.float32), on)
    steps = steps_on(on, model, 260)
    matmul_back(steps, put(dy, on), [model.matrices["Q4_K"]], dx)
    assert [call.kernel.name for call in steps.recorder.calls] == ["unpack/Q4_K", "matmul_back/F32"]
    (found,) = ran(steps, dx)
    assert_close(found, dy @ truth(tensor))
    model.close()


@pytest.mark.parametrize("on", [device, hardware])
@pytest.mark.parametrize(("rows", "add"), [(1100, False), (2600, True)])
def test_back_through_long_matrices_in_shares_and_parts(rows: int, add: bool, on) -> None:
    limited = copy.copy(on())
    limited.limits = replace(limited.limits, binding_nbytes=132 * 4 * 700)
    tensor = matrix("F32", 132, rows)
    model = load(tensor, limited)
    dy, before = numbers(5, rows), numbers(5, 132, seed=2)
    dx = put(before)
    steps = steps_on(limited, model, 5)
    matmul_back(steps, put(dy), [model.matrices["F32"]], dx, add=add)
    (found,) = ran(steps, dx)
    assert_close(found, dy @ truth(tensor) + add * before)
    model.close()


@pytest.mark.parametrize("on", [device, hardware])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 70, 18), (70, 5, 33), (67, 131, 17), (1, 1, 1)])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_any_shape(turned: tuple[bool, bool], m: int, n: int, k: int, on) -> None:
    a, b, c = numbers(m, k), numbers(k, n, seed=2), numbers(m, n, seed=3)
    given = [x.T if turn else x for x, turn in zip((a, b), turned, strict=True)]
    left, right = (Matrix(put(x, on()), x.shape[1]) for x in given)
    out = put(c, on())
    steps = steps_on(on())
    form = {"a_turned": turned[0], "b_turned": turned[1]}
    product(steps, left, right, Matrix(out, n), (m, n, k), scale=0.5, add=True, **form)
    (found,) = ran(steps, out)
    assert_close(found, c + np.float32(0.5) * (a @ b))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("k", [1500, 2049])
def test_narrow_products_in_shares(k: int, add: bool) -> None:
    on = hardware()
    a, b, c = numbers(70, k), numbers(k, 4, seed=2), numbers(70, 4, seed=3)
    steps, out = steps_on(on), put(c, on)
    left, right = Matrix(put(a, on), k), Matrix(put(b, on), 4)
    product(steps, left, right, Matrix(out, 4), (70, 4, k), scale=0.5, add=add)
    assert len(steps.recorder.calls) == 2
    (found,) = ran(steps, out)
    assert_close(found, add * c + np.float32(0.5) * (a @ b))


def test_products_too_long_for_one_invocation_of_software(steps: Steps) -> None:
    a, b, out = numbers(2, 9000), numbers(9000, 3, seed=2), put(numbers(2, 3))
    product(steps, Matrix(put(a), 9000), Matrix(put(b), 3), Matrix(out, 3), (2, 3, 9000))
    (found,) = ran(steps, out)
    assert_close(found, a @ b)


@pytest.mark.parametrize("on", [device, hardware])
def test_products_of_heads(on) -> None:
    """Two sequences of five tokens, four query heads of eight for two of keys."""
    q, k = numbers(2, 5, 4, 8), numbers(2, 5, 2, 8, seed=2)
    scores, back = put(np.zeros((2, 2, 10, 5), np.float32), on()), put(0 * q, on())
    steps, times = steps_on(on()), Times(2, 2)
    queries, to = (Matrix(x, 32, 0, 2, 8, 160, 16) for x in (put(q, on()), back))
    keys, out = Matrix(put(k, on()), 16, 0, 1, 0, 80, 8), Matrix(scores, 5, 0, 1, 0, 100, 50)
    product(steps, queries, keys, out, (10, 5, 8), b_turned=True, times=times)
    product(steps, out, keys, to, (10, 8, 5), times=times)
    found, again = ran(steps, scores, back)
    grouped = q.reshape(2, 5, 2, 2, 8)
    wanted = np.einsum("stkgd,sukd->sktgu", grouped, k).reshape(2, 2, 10, 5)
    assert_close(found, wanted)
    turned = np.einsum("sktgu,sukd->stkgd", wanted.reshape(2, 2, 5, 2, 5), k)
    assert_close(again, turned.reshape(q.shape))


# Norms, heads, gates


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_norm_back(add: int, scale: float, steps: Steps) -> None:
    x, dy, w, before = numbers(6, 68), numbers(6, 68, seed=2), numbers(68, seed=3), numbers(6, 68)
    dx, params = put(before), [68, EPS, scale, add]
    tensors = (put(x), put(w), put(dy), dx)
    steps.call("norm_back", (3, 2), params, *tensors, pieces=("sum",), THREADS=8)
    (found,) = ran(steps, dx)
    scale = np.float32(scale)
    assert_close(found, add * before + scale * rms_back(scale * x, w, EPS, dy))


def test_add_norm(steps: Steps) -> None:
    x, y, w = numbers(3, 68), numbers(3, 68, seed=2), numbers(68, seed=3)
    out, scale = put(0 * x), np.array([0.3], np.float32)
    tensors = (put(x), put(y), put(w), put(scale), out)
    steps.call("add_norm", (3,), [68, EPS], *tensors, pieces=("sum",), THREADS=8)
    (found,) = ran(steps, out)
    assert_close(found, (x + rms(y, w, EPS)) * scale)


@pytest.mark.parametrize("turned", [1, 0])
def test_heads_turned_and_turned_back(turned: int, steps: Steps) -> None:
    """Two heads of 16, the second and third of four; sequences of three tokens."""
    frequencies = 10000.0 ** (-np.arange(8) / 8)
    fractions = np.round(frequencies / (2 * np.pi) * 2**64).astype(object) % 2**64
    turns = np.array([divmod(int(f), 2**32) for f in fractions], np.uint32)
    raw, dy, w = numbers(6, 4, 16), numbers(6, 2, 16, seed=2), numbers(20, seed=3)
    before = numbers(6, 4, 16, seed=4)
    out, draw = put(0 * dy), put(before)
    vectors = (put(raw), put(w), put(turns))
    shape = {"HEAD_DIM": 16, "TURNED": turned, "THREADS": 8}
    params, pieces = [2, 4, 1, 1, 3, EPS], ("sum", "rope")
    steps.call("turn_heads", (2, 6), params, *vectors, out, pieces=pieces, **shape)
    tensors = (*vectors, put(dy), draw)
    steps.call("turn_heads_back", (2, 6), [*params, 1], *tensors, pieces=pieces, **shape)
    found, back = ran(steps, out, draw)
    angles = (np.arange(6) % 3)[:, None] * frequencies
    weight, some = w[4:] if turned else None, raw[:, 1:3]
    normed = rms(some, weight, EPS)
    assert_close(found, rope(normed, angles) if turned else normed)
    step = rope_back(dy, angles) if turned else dy
    before[:, 1:3] += rms_back(some, weight, EPS, step)
    assert_close(back, before)


def test_geglu_back(steps: Steps) -> None:
    gate, up, dh = 3 * numbers(5, 40), numbers(5, 90, seed=2), numbers(5, 36, seed=3)
    d = put(np.zeros((5, 72), np.float32))
    params, pieces = [36, 40, 90, 50], ("gelu_slope",)
    steps.call("geglu_back", (1, 5), params, put(gate), put(up), put(dh), d, pieces=pieces)
    (found,) = ran(steps, d)
    gate, up = gate[:, :36], up[:, 50:86]
    assert_close(found, np.concatenate([dh * up * gelu_slope(gate), dh * gelu(gate)], axis=1))


def test_a_slope_far_from_zero_is_one_or_nothing(steps: Steps) -> None:
    gate = np.array([[40.0, -40.0, 1e4, -1e4]], np.float32)
    d = put(np.zeros((1, 8), np.float32))
    tensors = (put(gate), put(np.ones_like(gate)), put(np.ones_like(gate)), d)
    steps.call("geglu_back", (1, 1), [4, 4, 4, 0], *tensors, pieces=("gelu_slope",))
    (found,) = ran(steps, d)
    np.testing.assert_allclose(found[0], [1, 0, 1, 0, 40, 0, 1e4, 0], atol=1e-4)


# Softmaxes


@pytest.mark.parametrize("window", [4, 1 << 30])
@pytest.mark.parametrize("first", [0, 6])
def test_softmax_back(first: int, window: int, steps: Steps) -> None:
    """Three queries a token, tokens up to the twelfth, two key-value heads."""
    rows = 3 * (12 - first)
    s, dp = 3 * numbers(2, rows, 12), numbers(2, rows, 12, seed=2)
    both = put(s), put(dp)
    params, pieces = [12, 3, rows, first, window], ("sum", "largest")
    steps.call("softmax_back", (rows, 2), params, *both, pieces=pieces, THREADS=8)
    p, ds = ran(steps, *both)
    token, key = first + np.arange(rows)[:, None] // 3, np.arange(12)
    seen = (key <= token) & (key > token - window)
    wanted = softmax(np.where(seen, s, np.float32(-np.inf)))
    assert_close(p, wanted)
    assert_close(ds, softmax_back(wanted, dp))


@pytest.mark.parametrize("cap", [30.0, 4.0])
def test_cross_entropy(cap: float, steps: Steps) -> None:
    z = 12 * numbers(4, 301)
    z[1, 7], z[2, 0] = 1e6, -1e6  # a tanh that overflows
    targets = np.array([9, 9, 300, 7, 0xFFFFFFFF, 0], np.uint32)
    losses, pace = put(np.full(6, 5, np.float32)), put(np.array([0.25, 0, 0, 0, 0], np.float32))
    logits = put(z)
    tensors = (pace, put(targets), logits, losses)
    pieces = ("sum", "largest", "pace", "finite")
    steps.call("cross_entropy", (4,), [301, 2, cap, float("nan")], *tensors, pieces=pieces)
    dz, found = ran(steps, logits, losses)
    live = [0, 1, 3]
    wanted, slopes = cross_entropy(z[live], targets[2:][live], cap)
    np.testing.assert_array_equal(found[[0, 1, 4]], [5, 5, 0])
    assert_close(found[[2, 3, 5]], wanted)
    assert_close(dz[live], slopes / 4)
    assert not dz[2].any()


def test_a_row_that_is_not_finite_loses_nan(steps: Steps) -> None:
    z = numbers(2, 40)
    z[1, 3] = np.nan
    losses, pace = put(np.zeros(2, np.float32)), put(np.zeros(5, np.float32))
    tensors = (pace, put(np.array([1, 2], np.uint32)), put(z), losses)
    pieces = ("sum", "largest", "pace", "finite")
    steps.call("cross_entropy", (2,), [40, 0, 30.0, float("nan")], *tensors, pieces=pieces)
    (found,) = ran(steps, losses)
    assert np.isnan(found).tolist() == [False, True]


# Experts


def test_experts_summed_and_back(steps: Steps) -> None:
    shares, parts, dy = numbers(5, 2), numbers(5, 2, 36, seed=2), numbers(5, 36, seed=3)
    dparts, dshares = put(0 * parts), put(0 * shares)
    tensors = (put(shares), put(parts), put(dy), dparts, dshares)
    steps.call("expert_sum_back", (2, 5), [36, 2], *tensors, pieces=("sum",), THREADS=8)
    found, slopes = ran(steps, dparts, dshares)
    assert_close(found, shares[..., None] * dy[:, None])
    assert_close(slopes, (parts * dy[:, None]).sum(axis=-1))


@pytest.mark.parametrize("scaled", [1, 0])
def test_route_back(scaled: int, steps: Steps) -> None:
    scores, dshares, scale = numbers(5, 7), numbers(5, 3, seed=2), numbers(7, seed=3)
    chosen = np.argsort(-scores)[:, :3].astype(np.uint32)
    dscores = put(scores)
    tensors = (put(scores), put(scale), put(chosen), put(dshares), dscores)
    steps.call("route_back", (1,), [7, 3, scaled, 5], *tensors)
    (found,) = ran(steps, dscores)
    factor = scale[chosen] if scaled else scale[0]
    wanted = np.zeros_like(scores)
    best = softmax(np.take_along_axis(scores, chosen.astype(int), axis=-1))
    slopes = softmax_back(best, dshares * factor)
    np.put_along_axis(wanted, chosen.astype(int), slopes, axis=-1)
    assert_close(found, wanted)


# Rows and columns


def test_rows_gathered_and_scattered(steps: Steps) -> None:
    """Ids that occur several times add up; rows of no id stay."""
    ids = np.array([4, 1, 4, 0, 4, 1], np.uint32)
    table, dy, before = numbers(6, 5), numbers(6, 5, seed=2), numbers(6, 5, seed=3)
    found, back = put(0 * dy), put(before)
    steps.call("gather_rows", (1,), [5, 6], put(ids), put(table), found)
    steps.call("scatter_rows", (1,), [5, 6], put(ids), put(dy), back)
    rows, sums = ran(steps, found, back)
    np.testing.assert_array_equal(rows, table[ids])
    np.add.at(before, ids, dy)
    assert_close(sums, before)


def test_columns_copied(steps: Steps) -> None:
    x, y = numbers(5, 9), numbers(5, 11, seed=2)
    to = put(y)
    steps.call("copy_columns", (1,), [4, 5, 9, 3, 11, 6], put(x), to)
    (found,) = ran(steps, to)
    y[:, 6:10] = x[:, 3:7]
    np.testing.assert_array_equal(found, y)


# Dropout


def test_dropout_keeps_the_mean_and_repeats(steps: Steps) -> None:
    x, base = np.ones(10_000, np.float32), numbers(10_000)
    paces = [put(np.array([0, seed, 0, 0, 0], np.uint32)) for seed in (1, 1, 2)]
    outs = [put(base) for _ in range(4)]
    for out, pace, adapter in zip(outs, (*paces, paces[0]), (3, 3, 3, 4), strict=True):
        params = [10_000, adapter, 0.3, 1]
        steps.call("dropout", (157,), params, pace, put(x), out, pieces=("pace",))
    one, again, other_step, other_adapter = (out - base for out in ran(steps, *outs))
    np.testing.assert_array_equal(one, again)
    kept = np.abs(one) > 0.5
    np.testing.assert_allclose(one[kept], 1 / 0.7, rtol=1e-4)
    assert abs(kept.mean() - 0.7) < 0.02
    for other in (other_step, other_adapter):
        assert 0.5 < (kept == (np.abs(other) > 0.5)).mean() < 0.66  # 0.58 by chance
