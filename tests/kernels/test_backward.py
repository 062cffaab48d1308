"""The kernels of training against the reference's derivatives and numpy, one by one."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, hardware, put
from helpers.matrices import load, matrix, truth
from tolerance import F32_KERNEL

from webgemma.device import Device
from webgemma.gemma.record.matmul import LONG_ROW_THREADS, Matmul
from webgemma.gemma.record.matmul_backward import (
    KEYS_ALONG_K,
    KEYS_ALONG_N,
    QUERIES_ALONG_K,
    Mask,
    MatmulBackward,
    Matrix,
    Stack,
)
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Argument, Recorder, Tensor
from webgemma.kernels import host_struct
from webgemma.reference.backward import (
    cross_entropy,
    gelu_derivative,
    rms_backward,
    rope_backward,
    softmax_backward,
)
from webgemma.reference.text import gelu, rms, rope, softmax

USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]
EPS = 1e-6
EVERY_TILING = pytest.mark.parametrize("on", [device, hardware])


def numbers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float = F32_KERNEL) -> None:
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(device())


def products_on(on: Device, rows: int = 1) -> MatmulBackward:
    """Return a recorder of products for a batch of so many rows."""
    batch = put(np.array([0, rows], np.uint32), on)
    return MatmulBackward(Matmul(Recorder(on), batch, rows))


def ran(recorder: Recorder, *tensors: Tensor) -> Iterator[np.ndarray]:
    """Run what was recorded; return the values of some tensors."""
    recorder.device.run(recorder.plan())
    return (get(tensor, on=recorder.device) for tensor in tensors)


def training_step(loss_weight: float = 0.0, seed: int = 0) -> Tensor:
    """Upload the table of a step."""
    packed = host_struct("lib/training_step/struct", "TrainingStep").pack(
        loss_weight=loss_weight, seed=seed, rate=0.0, mean_correction=0.0, square_correction=0.0
    )
    return put(np.frombuffer(packed, np.uint8))


# Products


@EVERY_TILING
@pytest.mark.parametrize("format", USABLE)
def test_backward_through_a_matrix_of_any_format(format: str, on) -> None:
    tensor = matrix(format, 512, 67)
    model = load(tensor, on())
    dy, before = numbers(69, 70), numbers(69, 512, seed=2)  # three spare columns
    dx = put(before, on())
    products = products_on(on(), 69)
    products.backward(put(dy, on()), [model.matrices[format]], dx, add=True)
    (found,) = ran(products.recorder, dx)
    assert_close(found, before + dy[:, :67] @ truth(tensor))
    model.close()


def test_many_tokens_dequantise_the_matrix_first() -> None:
    on, tensor = hardware(), matrix("Q4_K", 256, 35)
    model, dy = load(tensor, on), numbers(260, 35)
    dx = put(np.zeros((260, 256), np.float32), on)
    products = products_on(on, 260)
    products.backward(put(dy, on), [model.matrices["Q4_K"]], dx)
    names = [call.kernel.name for call in products.recorder.calls]
    assert names == ["dequantise/Q4_K", "matmul_backward/F32"]
    (found,) = ran(products.recorder, dx)
    assert_close(found, dy @ truth(tensor))
    model.close()


@EVERY_TILING
@pytest.mark.parametrize(("rows", "add"), [(1100, False), (2600, True)])
def test_backward_through_long_matrices_in_splits_and_parts(rows: int, add: bool, on) -> None:
    limited = copy.copy(on())
    limited.limits = replace(limited.limits, binding_nbytes=132 * 4 * 700)
    tensor = matrix("F32", 132, rows)
    model = load(tensor, limited)
    dy, before = numbers(5, rows), numbers(5, 132, seed=2)
    dx = put(before)
    products = products_on(limited, 5)
    products.backward(put(dy), [model.matrices["F32"]], dx, add=add)
    (found,) = ran(products.recorder, dx)
    assert_close(found, dy @ truth(tensor) + add * before)
    model.close()


@EVERY_TILING
@pytest.mark.parametrize(("m", "n", "k"), [(3, 70, 18), (70, 5, 33), (67, 131, 17), (1, 1, 1)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_any_shape(transposed: tuple[bool, bool], m: int, n: int, k: int, on) -> None:
    a, b, c = numbers(m, k), numbers(k, n, seed=2), numbers(m, n, seed=3)
    stored = [x.T if flip else x for x, flip in zip((a, b), transposed, strict=True)]
    left, right = (Matrix(put(x, on()), x.shape[1]) for x in stored)
    out = put(c, on())
    products = products_on(on())
    products.product(
        left,
        right,
        Matrix(out, n),
        (m, n, k),
        a_transposed=transposed[0],
        b_transposed=transposed[1],
        scale=0.5,
        add=True,
    )
    (found,) = ran(products.recorder, out)
    assert_close(found, c + np.float32(0.5) * (a @ b))


@EVERY_TILING
@pytest.mark.parametrize("window", [1 << 30, 70])
@pytest.mark.parametrize("first_token", [0, 150])
def test_products_leave_out_what_is_not_attended_to(first_token: int, window: int, on) -> None:
    """Keys that come later, or are out of the window; what is left out may be anything finite."""
    tokens, group, size = 130, 2, 40
    rows, keys = tokens * group, first_token + tokens
    token = first_token + np.arange(rows)[:, None] // group
    attended = (np.arange(keys) <= token) & (np.arange(keys) > token - window)
    ds, q, k = numbers(rows, keys) * attended, numbers(rows, size), numbers(keys, size, seed=2)

    def product(kind: int, a: np.ndarray, b: np.ndarray, m: int, **forms: bool) -> np.ndarray:
        n = b.shape[0] if forms.get("b_transposed") else b.shape[1]
        inner = a.shape[0] if forms.get("a_transposed") else a.shape[1]
        products, out = products_on(on()), put(np.full((m, n), 7, np.float32), on())
        left, right = (Matrix(put(x, on()), x.shape[1]) for x in (a, b))
        mask = Mask(kind, group, first_token, window)
        products.product(left, right, Matrix(out, n), (m, n, inner), mask=mask, **forms)
        (found,) = ran(products.recorder, out)
        return found

    assert_close(product(KEYS_ALONG_K, ds, k, rows), ds @ k)
    assert_close(product(QUERIES_ALONG_K, ds, q, keys, a_transposed=True), ds.T @ q)
    scores = product(KEYS_ALONG_N, q, k, rows, b_transposed=True)
    assert_close(scores * attended, (q @ k.T) * attended)
    assert (scores[~attended] == 0).any()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("k", [1500, 2049])
def test_narrow_products_in_splits(k: int, add: bool) -> None:
    on = hardware()
    a, b, c = numbers(70, k), numbers(k, 4, seed=2), numbers(70, 4, seed=3)
    products, out = products_on(on), put(c, on)
    left, right = Matrix(put(a, on), k), Matrix(put(b, on), 4)
    products.product(left, right, Matrix(out, 4), (70, 4, k), scale=0.5, add=add)
    assert len(products.recorder.calls) == 2
    (found,) = ran(products.recorder, out)
    assert_close(found, add * c + np.float32(0.5) * (a @ b))


def test_products_too_long_for_one_invocation_of_software() -> None:
    a, b, out = numbers(2, 9000), numbers(9000, 3, seed=2), put(numbers(2, 3))
    products = products_on(device())
    products.product(Matrix(put(a), 9000), Matrix(put(b), 3), Matrix(out, 3), (2, 3, 9000))
    (found,) = ran(products.recorder, out)
    assert_close(found, a @ b)


@EVERY_TILING
def test_products_of_heads(on) -> None:
    """Two sequences of five tokens, four query heads of eight for two of keys."""
    q, k = numbers(2, 5, 4, 8), numbers(2, 5, 2, 8, seed=2)
    scores, dq = put(np.zeros((2, 2, 10, 5), np.float32), on()), put(0 * q, on())
    products, stack = products_on(on()), Stack(2, 2)
    queries, gradients = (Matrix(x, 32, 0, 2, 8, 160, 16) for x in (put(q, on()), dq))
    keys, out = Matrix(put(k, on()), 16, 0, 1, 0, 80, 8), Matrix(scores, 5, 0, 1, 0, 100, 50)
    products.product(queries, keys, out, (10, 5, 8), b_transposed=True, stack=stack)
    products.product(out, keys, gradients, (10, 8, 5), stack=stack)
    found, found_dq = ran(products.recorder, scores, dq)
    grouped = q.reshape(2, 5, 2, 2, 8)
    expected = np.einsum("stkgd,sukd->sktgu", grouped, k).reshape(2, 2, 10, 5)
    assert_close(found, expected)
    expected_dq = np.einsum("sktgu,sukd->stkgd", expected.reshape(2, 2, 5, 2, 5), k)
    assert_close(found_dq, expected_dq.reshape(q.shape))


# Norms, heads, gates


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_norm_backward(add: int, scale: float, recorder: Recorder) -> None:
    x, dy, w, before = numbers(6, 68), numbers(6, 68, seed=2), numbers(68, seed=3), numbers(6, 68)
    dx = put(before)
    recorder.call(
        "norm_backward",
        (3, 2),
        input=put(x),
        w=put(w),
        dy=put(dy),
        dx=dx,
        width=68,
        eps=EPS,
        scale=scale,
        add=add,
        THREADS=8,
    )
    (found,) = ran(recorder, dx)
    factor = np.float32(scale)
    assert_close(found, add * before + factor * rms_backward(factor * x, w, EPS, dy))


def test_add_norm(recorder: Recorder) -> None:
    x, y, w = numbers(3, 68), numbers(3, 68, seed=2), numbers(68, seed=3)
    out, scale = put(0 * x), np.array([0.3], np.float32)
    recorder.call(
        "add_norm",
        (3,),
        x=put(x),
        y=put(y),
        w=put(w),
        scale=put(scale),
        out=out,
        width=68,
        eps=EPS,
        THREADS=8,
    )
    (found,) = ran(recorder, out)
    assert_close(found, (x + rms(y, w, EPS)) * scale)


@pytest.mark.parametrize("rotated", [True, False])
def test_heads_rotated_and_backward(rotated: bool, recorder: Recorder) -> None:
    """Two heads of 16, the second and third of four; sequences of three tokens."""
    frequencies = 10000.0 ** (-np.arange(8) / 8)
    fractions = np.round(frequencies / (2 * np.pi) * 2**64).astype(object) % 2**64
    rotations = np.array([divmod(int(f), 2**32) for f in fractions], np.uint32)
    raw, dy, w = numbers(6, 4, 16), numbers(6, 2, 16, seed=2), numbers(20, seed=3)
    before = numbers(6, 4, 16, seed=4)
    out, draw = put(0 * dy), put(before)
    shared: dict[str, Argument] = {
        "raw": put(raw),
        "norms": put(w),
        "rotations": put(rotations),
        "heads": 2,
        "raw_heads": 4,
        "first_head": 1,
        "norm_vec4": 1,
        "length": 3,
        "eps": EPS,
        "HEAD_DIM": 16,
        "ROTATED": rotated,
        "THREADS": 8,
    }
    recorder.call("rope_heads", (2, 6), **shared, out=out)
    recorder.call("rope_heads_backward", (2, 6), **shared, dy=put(dy), draw=draw, add=1)
    found, found_draw = ran(recorder, out, draw)
    angles = (np.arange(6) % 3)[:, None] * frequencies
    weight, heads = w[4:] if rotated else None, raw[:, 1:3]
    normed = rms(heads, weight, EPS)
    assert_close(found, rope(normed, angles) if rotated else normed)
    dnormed = rope_backward(dy, angles) if rotated else dy
    before[:, 1:3] += rms_backward(heads, weight, EPS, dnormed)
    assert_close(found_draw, before)


def record_geglu_backward(
    recorder: Recorder, gate: np.ndarray, up: np.ndarray, dh: np.ndarray, d: Tensor, first: int
) -> None:
    """Record the gradients of gate and up, whose columns begin at 0 and at `first`."""
    recorder.call(
        "geglu_backward",
        (1, len(dh)),
        gate=put(gate),
        up=put(up),
        dh=put(dh),
        d=d,
        width=dh.shape[1],
        gate_stride=gate.shape[1],
        up_stride=up.shape[1],
        up_first=first,
    )


def test_geglu_backward(recorder: Recorder) -> None:
    gate, up, dh = 3 * numbers(5, 40), numbers(5, 90, seed=2), numbers(5, 36, seed=3)
    d = put(np.zeros((5, 72), np.float32))
    record_geglu_backward(recorder, gate, up, dh, d, 50)
    (found,) = ran(recorder, d)
    gate, up = gate[:, :36], up[:, 50:86]
    assert_close(found, np.concatenate([dh * up * gelu_derivative(gate), dh * gelu(gate)], axis=1))


def test_the_slope_of_gelu_far_from_zero_is_one_or_zero(recorder: Recorder) -> None:
    gate = np.array([[40.0, -40.0, 1e4, -1e4]], np.float32)
    d = put(np.zeros((1, 8), np.float32))
    record_geglu_backward(recorder, gate, np.ones_like(gate), np.ones_like(gate), d, 0)
    (found,) = ran(recorder, d)
    np.testing.assert_allclose(found[0], [1, 0, 1, 0, 40, 0, 1e4, 0], atol=1e-4)


# Softmaxes


@pytest.mark.parametrize("window", [4, 1 << 30])
@pytest.mark.parametrize("first", [0, 6])
def test_softmax_backward(first: int, window: int, recorder: Recorder) -> None:
    """Three queries a token, tokens up to the twelfth, two key-value heads."""
    rows = 3 * (12 - first)
    scores, dp = 3 * numbers(2, rows, 12), numbers(2, rows, 12, seed=2)
    both = {"s": put(scores), "dp": put(dp)}
    recorder.call(
        "softmax_backward",
        (rows, 2),
        **both,
        keys=12,
        group=3,
        rows=rows,
        first_token=first,
        window=window,
        THREADS=8,
    )
    p, ds = ran(recorder, *both.values())
    token, key = first + np.arange(rows)[:, None] // 3, np.arange(12)
    attended = (key <= token) & (key > token - window)
    expected = softmax(np.where(attended, scores, np.float32(-np.inf)))
    assert_close(p, expected)
    assert_close(ds, softmax_backward(expected, dp))


def record_cross_entropy(
    recorder: Recorder,
    step: Tensor,
    targets: np.ndarray,
    logits: Tensor,
    losses: Tensor,
    first: int,
    cap: float,
    threads: int = 64,
) -> None:
    """Record the losses of all rows of logits; the first row's target is at `first`."""
    rows, vocab = logits.shape
    recorder.call(
        "cross_entropy",
        (rows,),
        training_step=step,
        targets=put(targets),
        z=logits,
        losses=losses,
        vocab=vocab,
        first=first,
        cap=cap,
        nan=float("nan"),
        THREADS=threads,
    )


@pytest.mark.parametrize(
    ("cap", "threads"), [(30.0, 64), (4.0, 64), (0.0, 64), (30.0, LONG_ROW_THREADS)]
)
def test_cross_entropy(cap: float, threads: int, recorder: Recorder) -> None:
    if threads > device().limits.workgroup_threads:
        pytest.skip("a workgroup of this GPU has fewer threads")
    z = 12 * numbers(4, 301)
    if cap:
        z[1, 7], z[2, 0] = 1e6, -1e6  # a tanh that overflows
    targets = np.array([9, 9, 300, 7, 0xFFFFFFFF, 0], np.uint32)
    logits, losses = put(z), put(np.full(6, 5, np.float32))
    step = training_step(loss_weight=0.25)
    record_cross_entropy(recorder, step, targets, logits, losses, 2, cap, threads)
    dz, found = ran(recorder, logits, losses)
    supervised = [0, 1, 3]
    expected, gradients = cross_entropy(z[supervised], targets[2:][supervised], cap)
    np.testing.assert_array_equal(found[[0, 1, 4]], [5, 5, 0])
    assert_close(found[[2, 3, 5]], expected)
    assert_close(dz[supervised], gradients / 4)
    assert not dz[2].any()


def test_the_loss_of_a_row_that_is_not_finite_is_nan(recorder: Recorder) -> None:
    z = numbers(2, 40)
    z[1, 3] = np.nan
    losses, targets = put(np.zeros(2, np.float32)), np.array([1, 2], np.uint32)
    record_cross_entropy(recorder, training_step(), targets, put(z), losses, 0, 30.0)
    (found,) = ran(recorder, losses)
    assert np.isnan(found).tolist() == [False, True]


# Experts


def test_expert_sum_backward(recorder: Recorder) -> None:
    shares, parts, dy = numbers(5, 2), numbers(5, 2, 36, seed=2), numbers(5, 36, seed=3)
    dparts, dshares = put(0 * parts), put(0 * shares)
    recorder.call(
        "expert_sum_backward",
        (2, 5),
        shares=put(shares),
        parts=put(parts),
        dy=put(dy),
        dparts=dparts,
        dshares=dshares,
        width=36,
        used=2,
        THREADS=8,
    )
    found, found_dshares = ran(recorder, dparts, dshares)
    assert_close(found, shares[..., None] * dy[:, None])
    assert_close(found_dshares, (parts * dy[:, None]).sum(axis=-1))


@pytest.mark.parametrize("scale_step", [1, 0])
def test_route_backward(scale_step: int, recorder: Recorder) -> None:
    scores, dshares, scale = numbers(5, 7), numbers(5, 3, seed=2), numbers(7, seed=3)
    routed = np.argsort(-scores)[:, :3].astype(np.uint32)
    dscores = put(scores)
    recorder.call(
        "route_backward",
        (1,),
        scores=put(scores),
        scale=put(scale),
        ids=put(routed),
        dshares=put(dshares),
        dscores=dscores,
        experts=7,
        used=3,
        scale_step=scale_step,
        tokens=5,
    )
    (found,) = ran(recorder, dscores)
    factor = scale[routed] if scale_step else scale[0]
    expected = np.zeros_like(scores)
    best = softmax(np.take_along_axis(scores, routed.astype(int), axis=-1))
    gradients = softmax_backward(best, dshares * factor)
    np.put_along_axis(expected, routed.astype(int), gradients, axis=-1)
    assert_close(found, expected)


# Rows and columns


def test_rows_gathered_and_scattered(recorder: Recorder) -> None:
    """Rows of an id that occurs several times add up; rows without an id stay as they are."""
    ids = np.array([4, 1, 4, 0, 4, 1], np.uint32)
    table, dy, before = numbers(6, 5), numbers(6, 5, seed=2), numbers(6, 5, seed=3)
    gathered, scattered = put(0 * dy), put(before)
    recorder.call("gather_rows", (1,), ids=put(ids), x=put(table), y=gathered, width=5, tokens=6)
    recorder.call("scatter_rows", (1,), ids=put(ids), x=put(dy), y=scattered, width=5, tokens=6)
    rows, sums = ran(recorder, gathered, scattered)
    np.testing.assert_array_equal(rows, table[ids])
    np.add.at(before, ids, dy)
    assert_close(sums, before)


def test_columns_copied(recorder: Recorder) -> None:
    x, y = numbers(5, 9), numbers(5, 11, seed=2)
    to = put(y)
    recorder.call(
        "copy_columns",
        (1,),
        x=put(x),
        y=to,
        width=4,
        tokens=5,
        x_stride=9,
        x_first=3,
        y_stride=11,
        y_first=6,
    )
    (found,) = ran(recorder, to)
    y[:, 6:10] = x[:, 3:7]
    np.testing.assert_array_equal(found, y)


# Dropout


def test_dropout_keeps_the_mean_and_repeats(recorder: Recorder) -> None:
    x, base = np.ones(10_000, np.float32), numbers(10_000)
    steps = [training_step(seed=seed) for seed in (1, 1, 2)]
    outs = [put(base) for _ in range(4)]
    for out, step, adapter in zip(outs, (*steps, steps[0]), (3, 3, 3, 4), strict=True):
        recorder.call(
            "dropout",
            (157,),
            training_step=step,
            x=put(x),
            y=out,
            count=10_000,
            adapter=adapter,
            dropped=0.3,
            add=1,
        )
    one, repeated, other_step, other_adapter = (out - base for out in ran(recorder, *outs))
    np.testing.assert_array_equal(one, repeated)
    kept = np.abs(one) > 0.5
    np.testing.assert_allclose(one[kept], 1 / 0.7, rtol=1e-4)
    assert abs(kept.mean() - 0.7) < 0.02
    for other in (other_step, other_adapter):
        assert 0.5 < (kept == (np.abs(other) > 0.5)).mean() < 0.66  # 0.58 by chance
