"""Attention over the cache against the reference: for few queries in shares, for many in tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from tolerance import F16_ROUNDING, F32_KERNEL

from webgemma.device import Limits
from webgemma.gemma import text
from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Layer
from webgemma.gemma.record import loop_limits as loops
from webgemma.gemma.vision import Looks
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.reference.text import attend, rms, rope

POISON = np.float32(-77)
FULL = 1 << 30
EPS = 1e-6
CONFIG = SimpleNamespace(eps=EPS, window=FULL, images_attend_both_ways=False)


@dataclass(frozen=True)
class Case:
    """A batch at some position, and the cache it reads."""

    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 16
    kv: str = "kv_f32"
    first: int = 0
    batch: int = 5
    window: int = FULL
    ring: int = 160
    count: int | None = None  # tokens of the batch that are real

    @property
    def tokens(self) -> int:
        return self.batch if self.count is None else self.count


class Inputs:
    """Queries, keys and values; what a step has no business with is NaN."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.first)
        stored = np.float16 if case.kv == "kv_f16" else np.float32
        end = case.first + case.tokens
        self.case = case
        self.q = rng.standard_normal((case.batch, case.heads, case.head_dim), np.float32)
        self.q *= 4 / case.head_dim**0.5  # sharp enough that a wrong key shows
        self.q[case.tokens :] = np.nan
        kv = rng.standard_normal((2, end, case.kv_heads, case.head_dim), np.float32).astype(stored)
        held = np.full((2, case.ring, *kv.shape[2:]), np.nan, stored)
        for position in range(end):
            held[:, position % case.ring] = kv[:, position]
        self.kv = kv.astype(np.float32)
        self.tensors = (
            put(np.array([case.first, case.tokens], np.uint32)),
            *(put(self.q), put(held[0]), put(held[1])),
        )

    def expected(self) -> np.ndarray:
        case = self.case
        return attend(self.q[: case.tokens], *self.kv, case.first, case.window)


def prefill(
    inputs: Inputs, threads: int = 256, queries: int = 32, keys: int = 64, at_once: int = 0
) -> np.ndarray:
    """out of attention_prefill, poisoned before; if told, `at_once` keys in a dispatch."""
    case = inputs.case
    shape = {"THREADS": threads, "QUERIES": queries, "KEYS": keys, "HEAD_DIM": case.head_dim}
    pieces = ("state", case.kv, "sees_past", "attend_some" if at_once else "attend_all")
    kernel = link("attention_prefill", device().features, constants=shape, pieces=pieces)
    group = case.heads // case.kv_heads
    grid = (case.kv_heads, -(-case.batch * group // queries))
    params = [case.heads, case.kv_heads, case.ring, case.window, case.batch]
    out = put(np.full_like(inputs.q, POISON))
    recorder = Recorder(device())
    left = [recorder.scratch(*grid, 2, queries)] if at_once else []
    for begin in range(0, case.first + case.batch, at_once or FULL):
        some = [*params, begin, begin + at_once]
        recorder.call(kernel, grid, some, *inputs.tensors, out, *left)
    device().run(recorder.plan())
    return get(out)


class OneToken:
    """Raw projections of the token after a history, and the cache: its own layer's or another's."""

    def __init__(self, case: Case, raw_kinds: int = 3) -> None:
        rng = np.random.default_rng(case.first)
        size = case.head_dim
        self.case = case
        self.own = raw_kinds > 1  # else the cache has the token already
        self.k_is_v = raw_kinds == 2
        heads = case.heads + (raw_kinds - 1) * case.kv_heads
        self.raw = rng.standard_normal((heads, size), np.float32)
        self.norms = rng.uniform(0.5, 2, (2, size)).astype(np.float32)
        self.norms[0] *= 4 / size**0.5
        self.turns = rng.integers(0, 1 << 64, size // 2, np.uint64)
        stored = np.float16 if case.kv == "kv_f16" else np.float32
        history = (2, case.first + (not self.own), case.kv_heads, size)
        self.history = rng.standard_normal(history, np.float32).astype(stored)
        held = np.full((2, case.ring, *history[2:]), np.nan, stored)
        for position in range(history[1]):
            held[:, position % case.ring] = self.history[:, position]
        self.state = put(np.array([case.first, 1], np.uint32))
        self.caches = put(held[0]), put(held[1])
        words = np.stack([self.turns >> np.uint64(32), self.turns & np.uint64(0xFFFFFFFF)], 1)
        self.given = put(self.raw), put(self.norms), put(words.astype(np.uint32))

    def turned(self, raw: np.ndarray, norm: np.ndarray) -> np.ndarray:
        part = [self.case.first * int(turn) % (1 << 64) / (1 << 64) for turn in self.turns]
        return rope(rms(raw[None], norm, EPS), 2 * np.pi * np.array([part]))

    def expected(self) -> np.ndarray:
        """With the key and value that the kernel has written, once those have been checked."""
        case = self.case
        keys, values = (part.astype(np.float32) for part in self.history)
        if self.own:
            k = self.raw[case.heads : case.heads + case.kv_heads]
            v = k if self.k_is_v else self.raw[-case.kv_heads :]
            wanted = self.turned(k, self.norms[1]), rms(v, None, EPS)[None]
            slot = case.first % case.ring
            close = F16_ROUNDING if case.kv == "kv_f16" else F32_KERNEL
            for cache, row in zip(self.caches, wanted, strict=True):
                written = get(cache, self.history.dtype.type)[slot]
                np.testing.assert_allclose(written, row[0], close, close)
            keys, values = (
                np.concatenate([past, get(cache, self.history.dtype.type)[slot][None]])
                for past, cache in zip((keys, values), self.caches, strict=True)
            )
        q = self.turned(self.raw[: case.heads], self.norms[0])
        return attend(q, *(x.astype(np.float32) for x in (keys, values)), case.first, case.window)

    def attended(self, shares: int) -> np.ndarray:
        """out of attention and attention_merge."""
        case, own = self.case, int(self.own)
        constants = {"THREADS": 64, "HEAD_DIM": case.head_dim, "OWN_CACHE": own}
        pieces, features = ("sum", "state", "rope", case.kv), device().features
        shared = link("attention", features, constants=constants, pieces=pieces)
        constants["SHARES"] = shares + own
        pieces = ("state", "put_float")
        merge = link("attention_merge", features, constants=constants, pieces=pieces)
        recorder = Recorder(device())
        parts = recorder.scratch(case.heads, shares + own, case.head_dim)
        sums = recorder.scratch(case.heads, shares + own, 2)
        out = put(np.full((1, case.heads, case.head_dim), POISON))
        params = [case.heads, case.kv_heads, len(self.raw), case.ring, case.window, EPS]
        tensors = (self.state, *self.given, *self.caches, parts, sums)
        recorder.call(shared, (case.heads, shares + own), params, *tensors)
        recorder.call(merge, (case.heads,), [case.heads], self.state, parts, sums, out)
        device().run(recorder.plan())
        return get(out)

    def assert_right(self, found: np.ndarray) -> None:
        expected = self.expected()
        assert np.abs(found - expected).max() <= F32_KERNEL * np.abs(expected).max()


def assert_right(found: np.ndarray, inputs: Inputs) -> None:
    """The tokens' rows agree with the reference; the others are untouched."""
    expected, count = inputs.expected(), inputs.case.tokens
    error = np.abs(found[:count] - expected).max()
    assert error <= F32_KERNEL * np.abs(expected).max()
    assert (found[count:] == POISON).all()


KINDS = [
    *(Case(heads, kv_heads, 16) for heads, kv_heads in ((4, 1), (4, 2), (2, 2), (8, 1))),
    Case(8, 1, 32, "kv_f16"),
    Case(4, 2, 64, "kv_f32"),
    Case(8, 2, 128, "kv_f16"),
    Case(2, 1, 512, "kv_f16"),
]
PLACES = {
    "first token": Case(batch=1),
    "first tokens": Case(batch=5),
    "beginning": Case(batch=33),
    "one in a history": Case(first=70, batch=1),
    "history": Case(first=100, batch=33),
    "window": Case(first=0, batch=33, window=8),
    "window in a history": Case(first=90, batch=5, window=8),
    "ring": Case(first=100, batch=33, window=8, ring=40),
    "ring after many turns": Case(first=10_003, batch=5, window=64, ring=68),
    "half a batch": Case(first=9, batch=33, count=17, window=8, ring=40),
}
EVERY_KIND = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda c: f"{c.heads}/{c.kv_heads}x{c.head_dim}-{c.kv}"
)
EVERY_PLACE = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def case(kind: Case, place: Case) -> Case:
    """The heads and cache of one, the position of the other."""
    shape = {name: getattr(kind, name) for name in ("heads", "kv_heads", "head_dim", "kv")}
    return replace(place, **shape)


@EVERY_KIND
@EVERY_PLACE
def test_many_queries(kind: Case, place: Case) -> None:
    inputs = Inputs(case(kind, place))
    assert_right(prefill(inputs), inputs)


@EVERY_KIND
@EVERY_PLACE
def test_many_queries_in_several_dispatches(kind: Case, place: Case) -> None:
    inputs = Inputs(case(kind, place))
    assert_right(prefill(inputs, at_once=64), inputs)


@EVERY_KIND
@EVERY_PLACE
@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("raw_kinds", [1, 2, 3], ids=["another's cache", "k is v", "own"])
def test_one_query(kind: Case, place: Case, shares: int, raw_kinds: int) -> None:
    token = OneToken(case(kind, place), raw_kinds)
    token.assert_right(token.attended(shares))


@pytest.mark.parametrize(
    ("threads", "queries", "keys"), [(256, 16, 64), (128, 16, 32), (64, 16, 16), (128, 8, 64)]
)
@pytest.mark.parametrize("place", ["history", "ring", "half a batch"])
def test_other_tiles_of_many_queries(threads: int, queries: int, keys: int, place: str) -> None:
    inputs = Inputs(replace(PLACES[place], head_dim=64, heads=6, kv_heads=2))
    assert_right(prefill(inputs, threads, queries, keys), inputs)


def test_a_query_that_prefers_one_far_key() -> None:
    inputs = Inputs(Case(first=200, batch=3, ring=256, heads=1))
    inputs.q[:] = 0
    inputs.q[:, :, 0] = 50  # scores of some hundreds: only shifted exponents stay finite
    state, _, keys, values = inputs.tensors
    inputs.tensors = (state, put(inputs.q), keys, values)
    assert_right(prefill(inputs), inputs)


def test_one_query_that_prefers_one_far_key() -> None:
    token = OneToken(Case(first=200, ring=256, heads=1))
    token.norms[0] *= 100
    token.given = (token.given[0], put(token.norms), token.given[2])
    token.assert_right(token.attended(3))


def layer_of(case: Case) -> Layer:
    return Layer(
        index=0,
        sliding=False,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        ffn=0,
        kv_donor=0,
        k_is_v=False,
        experts=False,
    )


def attention(case: Case, state: Tensor, caches: Sequence[Tensor]) -> Attention:
    """As a model of one layer records it."""
    k, v = caches
    inputs = text.Inputs(state, state, {0: (k, v)}, {0: case.ring})
    model = Model(CONFIG, device())
    recorder = text.TextRecorder(model, Recorder(device()), inputs, case.batch, case.kv)
    return Attention(recorder, layer_of(case))


def attended(inputs: Inputs) -> tuple[np.ndarray, int]:
    """out of attention as a model records it, and how many dispatches that takes."""
    state, q, *caches = inputs.tensors
    plan = attention(inputs.case, state, caches)
    plan.queries = lambda _: q  # type: ignore[method-assign]
    out = plan.attend_many(q)
    calls = plan.text.recorder
    device().run(calls.plan())
    return get(out).reshape(inputs.q.shape), len(calls.calls)


LONG = [
    *(Case(2, 1, 16, "kv_f32", first=100_000 - n, batch=n, ring=100_000) for n in (1, 5)),
    *(Case(2, 1, 512, "kv_f16", first=30_000 - n, batch=n, ring=30_000) for n in (1, 5)),
]
EVERY_LONG = {"ids": lambda c: f"{c.ring}x{c.head_dim}"}


@pytest.mark.parametrize("case", LONG[1::2], **EVERY_LONG)
def test_many_queries_beyond_what_the_loops_of_a_software_adapter_reach(case: Case) -> None:
    inputs = Inputs(case)
    found, dispatches = attended(inputs)
    assert_right(found, inputs)
    if device().software:
        most = loops.attention_prefill_keys(case.head_dim, 256, 32, 64)
        assert dispatches == -(-case.ring // most) > 1


@pytest.mark.parametrize("case", LONG[::2], **EVERY_LONG)
def test_one_query_beyond_what_the_loops_of_a_software_adapter_reach(case: Case) -> None:
    token = OneToken(case)
    plan = attention(case, token.state, token.caches)
    model = plan.text.model
    raw, model.head_norms[0], model.turns[False] = token.given
    raw.shape = (1, token.raw.size)
    out = plan.attend_one(raw)
    device().run(plan.text.recorder.plan())
    token.assert_right(get(out).reshape(1, case.heads, case.head_dim))


def test_the_same_dispatch_would_turn_too_often() -> None:
    """Else there is nothing to guard against, and the dispatches are many for nothing."""
    inputs = Inputs(LONG[1])
    if "llvmpipe" in device().name:  # Chromium's SwiftShader turns as often as it should
        assert np.abs(prefill(inputs) - inputs.expected()).max() > 0.1


@pytest.mark.parametrize("head_dim", [16, 24, 64, 72])
@pytest.mark.parametrize("patches", [1, 63, 150])
def test_patches_see_every_other(head_dim: int, patches: int) -> None:
    looks = Looks.within(head_dim, device().limits)
    assert looks is not None
    inputs = Inputs(Case(heads=2, kv_heads=2, head_dim=head_dim, batch=patches, ring=patches))
    kernel = link("sight_attention", frozenset(), constants=looks.constants, pieces=("state",))
    out = put(np.full((patches + 1, 2, head_dim), POISON, np.float32))
    recorder = Recorder(device())
    recorder.call(kernel, (2, -(-patches // looks.queries)), [2], *inputs.tensors, out)
    device().run(recorder.plan())
    scores = np.einsum("qhd,khd->hqk", inputs.q, inputs.kv[0], dtype=np.float64)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    truth = np.einsum("hqk,khd->qhd", shares, inputs.kv[1])
    error = np.abs(get(out)[:patches] - truth).max()
    assert error <= F32_KERNEL * np.abs(truth).max()
    assert (get(out)[patches:] == POISON).all()


def test_a_workgroup_takes_as_many_queries_as_fit() -> None:
    sizes = {
        nbytes: Looks.within(72, Limits(1 << 30, 1 << 30, nbytes, 256, 65535))
        for nbytes in (6 << 10, 16 << 10, 32 << 10)
    }
    assert sizes == {6 << 10: None, 16 << 10: Looks(72, 32), 32 << 10: Looks(72, 64)}
