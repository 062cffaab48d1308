"""The kernels of the way back against reference/gradients.py: formats, shapes, texts in a row."""

import numpy as np
import pytest
from gpu import device, get, put
from matrices import load, matrix, truth
from tolerance import F32_KERNEL

from webgemma.gemma import gradients
from webgemma.gemma.attention import Heads
from webgemma.gemma.optimiser import AdamW, Trained
from webgemma.gemma.steps import Steps
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.reference import gradients as reference
from webgemma.reference.adamw import AdamW as Reference
from webgemma.reference.adamw import clip
from webgemma.reference.text import gelu, rope

EPS = 1e-6
USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]


@pytest.fixture(scope="module")
def model() -> Model:
    return load(matrix("F32", 4, 4))


def steps_of(model: Model, batch: int, count: int | None = None) -> Steps:
    state = put(np.array([0, batch if count is None else count], np.uint32))
    return Steps(model, Recorder(device()), state, batch, EPS)


def run(steps: Steps, out: Tensor) -> np.ndarray:
    device().run(steps.recorder.plan())
    return get(out)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def assert_close(found: np.ndarray, wanted: np.ndarray, bound: float = F32_KERNEL) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * np.abs(wanted).max())


def back_of(name: str, width: int, rows: int, tokens: int) -> None:
    tensor = matrix(name, width, rows)
    held = load(tensor)
    dy = numbers(tokens + 1, rows + 5)
    dy[tokens] = np.nan  # beyond the count
    steps = steps_of(held, tokens + 1, tokens)
    dx = gradients.linear_back(steps, put(dy), held.matrices[name], 3)
    wanted = dy[:tokens, 3 : 3 + rows].astype(np.float64) @ truth(tensor).astype(np.float64)
    assert_close(run(steps, dx)[:tokens], wanted)
    held.close()


@pytest.mark.parametrize("name", USABLE)
def test_products_in_every_format(name: str) -> None:
    back_of(name, 256, 40, 5)


@pytest.mark.parametrize(("width", "rows", "tokens"), [(4, 1, 1), (100, 33, 32), (132, 70, 67)])
def test_products_need_not_fill_a_tile(width: int, rows: int, tokens: int) -> None:
    back_of("F32", width, rows, tokens)


def test_products_of_many_rows_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MOST_ROWS", 32)
    back_of("F32", 64, 100, 9)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("width", "size"), [(1536, 1536), (96, 32), (12, 4)])
def test_norms(model: Model, width: int, size: int, weighted: bool) -> None:
    x, dy, w = numbers(3, width), numbers(3, width, seed=1), numbers(size, seed=2)
    steps = steps_of(model, 3)
    before = numbers(3, width, seed=3)
    weight = put(w) if weighted else None
    out = gradients.rms_back(steps, put(x), put(dy), weight, size)
    added = gradients.rms_back(steps, put(x), put(dy), weight, size, put(before))
    device().run(steps.recorder.plan())
    rows = (x.reshape(-1, size), w if weighted else None, EPS, dy.reshape(-1, size))
    wanted = reference.rms_back(*rows).reshape(x.shape)
    assert_close(get(out), wanted)
    assert_close(get(added), wanted + before)


def test_geglu(model: Model) -> None:
    both, dh = 4 * numbers(3, 140), numbers(3, 70)
    both[0, :4] = [-1e4, 1e4, 0, -30]
    steps = steps_of(model, 3)
    out = run(steps, gradients.geglu_back(steps, put(both), put(both), 70, put(dh)))
    gate, up = both[:, :70].astype(np.float64), both[:, 70:]
    dgate = dh * up * reference.gelu_slope(gate)
    assert_close(out, np.concatenate([dgate, dh * gelu(gate)], axis=1))


SPANS = [(0, 5), (5, 6), (6, 37)]  # texts one after the other


def spans_of(rows: int) -> Tensor:
    spans = np.zeros((rows, 2), np.uint32)
    for first, end in SPANS:
        spans[first:end] = first, end
    return put(spans)


def test_rotations(model: Model) -> None:
    x, size = numbers(37, 3 * 16), 16
    speeds = 10000.0 ** (-np.arange(8) / 8) / (2 * np.pi)
    fractions = [divmod(round(speed * 2**64) % 2**64, 2**32) for speed in speeds]
    steps, out = steps_of(model, 37), put(x)
    gradients.rope_back(steps, out, spans_of(37), put(np.array(fractions, np.uint32)), size)
    got = run(steps, out)
    for first, end in SPANS:
        angles = np.arange(end - first)[:, None] * speeds * 2 * np.pi
        heads = x[first:end].reshape(-1, 3, size)
        assert_close(got[first:end].reshape(heads.shape), rope(heads, -angles), 1e-4)


@pytest.mark.parametrize("window", [1 << 30, 4])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(2, 1, 512), Heads(3, 3, 64)], ids=str)
def test_attention(model: Model, heads: Heads, window: int) -> None:
    rows, wide, narrow = 40, heads.queries * heads.size, heads.keys * heads.size
    q, dout = numbers(rows, wide) / heads.size**0.5, numbers(rows, wide, seed=1)
    k, v, before = (numbers(rows, narrow, seed=seed) for seed in (2, 3, 4))
    steps = steps_of(model, rows)
    owed = put(before), put(2 * before)
    inputs = put(q), put(k), put(v)
    dq = run(
        steps, gradients.attend_back(steps, heads, window, spans_of(rows), inputs, put(dout), owed)
    )
    dk, dv = get(owed[0]) - before, get(owed[1]) - 2 * before
    for first, end in SPANS:
        part = slice(first, end)
        shaped = [x[part].reshape(end - first, -1, heads.size) for x in (q, k, v, dout)]
        wanted = reference.attend_back(*shaped[:3], min(window, end - first), shaped[3])
        for got, expected in zip((dq, dk, dv), wanted, strict=True):
            assert_close(got[part].reshape(expected.shape), expected, 2e-5)
    np.testing.assert_array_equal(get(owed[0])[37:], before[37:])


def test_cross_entropy(model: Model) -> None:
    z, targets = 20 * numbers(5, 700), np.array([3, 699, 0, 5, 9], np.uint32)
    z[1, 699] = 4000
    z[2, 0] = -4000
    steps, out, losses = steps_of(model, 5, 4), put(z), put(np.zeros(5, np.float32))
    weights = put(np.full(5, 0.25, np.float32))
    gradients.cross_entropy(steps, out, put(targets), weights, losses, 30.0)
    device().run(steps.recorder.plan())
    wanted, dz = reference.cross_entropy(z.astype(np.float64), targets, 30.0)
    assert_close(get(losses)[:4], wanted[:4])
    assert_close(get(out)[:4], 0.25 * dz[:4])
    np.testing.assert_array_equal(get(out)[4], z[4])
    assert get(losses)[4] == 0


@pytest.mark.parametrize(("rows", "columns"), [(3, 70), (100, 16), (33, 1)])
def test_outer_products(model: Model, rows: int, columns: int) -> None:
    a, b, before = numbers(21, rows + 9), numbers(21, columns + 4, seed=1), numbers(rows, columns)
    a[20:], b[20:] = np.nan, np.nan  # beyond the count
    steps, out = steps_of(model, 21, 20), put(before)
    gradients.outer(steps, (put(a), 5, rows), (put(b), 2, columns), 0.5, out)
    left, right = a[:20, 5 : 5 + rows], b[:20, 2 : 2 + columns]
    assert_close(run(steps, out), before + 0.5 * left.T @ right)


@pytest.mark.parametrize("longest", [1.0, 1e9])
def test_adamw(longest: float) -> None:
    sizes, rng = (1000, 3, 256), np.random.default_rng(6)
    weights = [rng.normal(size=size).astype(np.float32) for size in sizes]
    mine, reference_adamw = AdamW(0.9, 0.99, 1e-8, 0.1, longest), Reference(0.9, 0.99, 1e-8, 0.1)
    trained = [
        Trained(put(w), put(np.zeros_like(w)), put(np.zeros((len(w), 2), np.float32)))
        for w in weights
    ]
    pace, squares = put(np.zeros(4, np.float32)), put(np.zeros(3, np.float32))
    recorder = Recorder(device())
    mine.record(recorder, pace, trained, squares)
    plan = recorder.plan()
    for step in range(1, 5):
        slopes = [rng.normal(size=size).astype(np.float32) for size in sizes]
        for each, slope in zip(trained, slopes, strict=True):
            device().write(each.gradients.buffer, slope.tobytes())
        numbers_of_step = np.array([*mine.pace(step, 0.01 * step), 0], np.float32)
        device().write(pace.buffer, numbers_of_step.tobytes())
        device().run(plan)
        length = clip(slopes, longest)
        assert np.sqrt(get(squares).sum()) == pytest.approx(length, rel=1e-5)
        reference_adamw.update(weights, slopes, 0.01 * step)
    for each, wanted in zip(trained, weights, strict=True):
        assert_close(get(each.weights), wanted)
        assert not get(each.gradients).any()
    plan.close(device())
