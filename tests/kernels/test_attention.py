"""Attention over the KV cache against the reference: one query in splits, many in tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.matrix_units import poisoned
from tolerance import F16_ROUNDING, F32_KERNEL

from webgemma.device import Limits
from webgemma.gemma import text
from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Layer
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.patch_attention import PatchTiling
from webgemma.gemma.record import loop_limits
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gemma.weights import Model
from webgemma.graph import Argument, Recorder, Tensor
from webgemma.reference.text import attend, rms, rope

POISON = np.float32(-77)
NO_WINDOW = 1 << 30
EPS = 1e-6
CONFIG = SimpleNamespace(
    eps=EPS, window=NO_WINDOW, bidirectional_images=False, drafter=None, value_norm=True
)


@dataclass(frozen=True)
class Case:
    """A batch at some position, and the cache it reads."""

    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 16
    kv: str = "f32"
    first: int = 0
    rows: int = 5
    window: int = NO_WINDOW
    ring: int = 160
    count: int | None = None  # rows of the batch that are tokens

    @property
    def tokens(self) -> int:
        return self.rows if self.count is None else self.count


class Inputs:
    """Queries, keys and values; whatever the batch must not read is NaN."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.first)
        stored = np.float16 if case.kv == "f16" else np.float32
        end = case.first + case.tokens
        self.case = case
        self.q = rng.standard_normal((case.rows, case.heads, case.head_dim), np.float32)
        self.q *= 4 / case.head_dim**0.5  # sharp enough that a wrong key shows
        self.q[case.tokens :] = np.nan
        kv = rng.standard_normal((2, end, case.kv_heads, case.head_dim), np.float32).astype(stored)
        cached = np.full((2, case.ring, *kv.shape[2:]), np.nan, stored)
        for position in range(end):
            cached[:, position % case.ring] = kv[:, position]
        self.kv = kv.astype(np.float32)
        self.batch = put(np.array([case.first, case.tokens], np.uint32))
        self.queries = put(self.q)
        self.caches = put(cached[0]), put(cached[1])

    def expected(self) -> np.ndarray:
        case = self.case
        return attend(self.q[: case.tokens], *self.kv, case.first, case.window)


def prefill(
    inputs: Inputs, threads: int = 256, queries: int = 32, keys: int = 64, at_once: int = 0
) -> np.ndarray:
    """Return out of attention_prefill, poisoned before; `at_once` keys in a dispatch, or all."""
    case = inputs.case
    group = case.heads // case.kv_heads
    grid = (case.kv_heads, -(-case.rows * group // queries))
    out = put(np.full_like(inputs.q, POISON))
    recorder = Recorder(device())
    shared: dict[str, Argument] = {
        "batch": inputs.batch,
        "q": inputs.queries,
        "k_cache": inputs.caches[0],
        "v_cache": inputs.caches[1],
        "out": out,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "ring": case.ring,
        "window": case.window,
        "tokens": case.rows,
        "kv": case.kv,
        "mask": "causal",
        "key_range": "all",
        "THREADS": threads,
        "QUERIES": queries,
        "KEYS": keys,
        "HEAD_DIM": case.head_dim,
    }
    if at_once:
        shared |= {"key_range": "part", "suspended": recorder.scratch(*grid, 2, queries)}
    for begin in range(0, case.first + case.rows, at_once or NO_WINDOW):
        if at_once:
            shared |= {"begin": begin, "end": begin + at_once}
        recorder.call("attention_prefill", grid, **shared)
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
        self.rotations = rng.integers(0, 1 << 64, size // 2, np.uint64)
        stored = np.float16 if case.kv == "f16" else np.float32
        history = (2, case.first + (not self.own), case.kv_heads, size)
        self.history = rng.standard_normal(history, np.float32).astype(stored)
        cached = np.full((2, case.ring, *history[2:]), np.nan, stored)
        for position in range(history[1]):
            cached[:, position % case.ring] = self.history[:, position]
        words = np.stack([self.rotations >> np.uint64(32), self.rotations & np.uint64(2**32 - 1)])
        self.batch = put(np.array([case.first, 1], np.uint32))
        self.caches = put(cached[0]), put(cached[1])
        self.raw_tensor, self.norms_tensor = put(self.raw), put(self.norms)
        self.rotations_tensor = put(words.T.astype(np.uint32))

    def rotated(self, raw: np.ndarray, norm: np.ndarray) -> np.ndarray:
        fractions = [
            self.case.first * int(rotation) % (1 << 64) / (1 << 64) for rotation in self.rotations
        ]
        return rope(rms(raw[None], norm, EPS), 2 * np.pi * np.array([fractions]))

    def expected(self) -> np.ndarray:
        """Return attention over the key and value that the kernel wrote, after checking those."""
        case = self.case
        keys, values = (part.astype(np.float32) for part in self.history)
        if self.own:
            k = self.raw[case.heads : case.heads + case.kv_heads]
            v = k if self.k_is_v else self.raw[-case.kv_heads :]
            expected = self.rotated(k, self.norms[1]), rms(v, None, EPS)[None]
            slot = case.first % case.ring
            close = F16_ROUNDING if case.kv == "f16" else F32_KERNEL
            for cache, row in zip(self.caches, expected, strict=True):
                written = get(cache, self.history.dtype.type)[slot]
                np.testing.assert_allclose(written, row[0], close, close)
            keys, values = (
                np.concatenate([past, get(cache, self.history.dtype.type)[slot][None]])
                for past, cache in zip((keys, values), self.caches, strict=True)
            )
        q = self.rotated(self.raw[: case.heads], self.norms[0])
        return attend(q, *(x.astype(np.float32) for x in (keys, values)), case.first, case.window)

    def attended(
        self, splits: int, raw: np.ndarray | None = None, half: HalfTensor | None = None
    ) -> np.ndarray:
        """Return out of attention_decode and attention_merge, which may go into float16.

        The raw projections may be sums over parts of k."""
        case, own = self.case, int(self.own)
        recorder = Recorder(device())
        projections = self.raw_tensor if raw is None else put(raw)
        parts = recorder.scratch(case.heads, splits + own, case.head_dim)
        sums = recorder.scratch(case.heads, splits + own, 2)
        out = put(np.full((1, case.heads, case.head_dim), POISON))
        recorder.call(
            "attention_decode",
            (case.heads, splits + own),
            place="chunk",
            batch=self.batch,
            raw=projections,
            RAW_SPLITS=1 if raw is None else len(raw),
            norms=self.norms_tensor,
            rotations=self.rotations_tensor,
            k_cache=self.caches[0],
            v_cache=self.caches[1],
            parts=parts,
            sums=sums,
            heads=case.heads,
            kv_heads=case.kv_heads,
            raw_heads=len(self.raw),
            ring=case.ring,
            window=case.window,
            eps=EPS,
            kv=case.kv,
            THREADS=64,
            HEAD_DIM=case.head_dim,
            OWN_CACHE=own,
        )
        recorder.call(
            "attention_merge",
            (case.heads, -(-case.head_dim // 64)),
            batch=self.batch,
            parts=parts,
            sums=sums,
            h=half or out,
            heads=case.heads,
            **(half.unscaled if half else {"store": "float"}),
            THREADS=64,
            COLUMNS=16,
            HEAD_DIM=case.head_dim,
            SPLITS=splits + own,
        )
        device().run(recorder.plan())
        return get(out)

    def assert_right(self, found: np.ndarray) -> None:
        expected = self.expected()
        assert np.abs(found - expected).max() <= F32_KERNEL * np.abs(expected).max()


def assert_right(found: np.ndarray, inputs: Inputs) -> None:
    """Assert that the tokens' rows agree with the reference and the others are untouched."""
    expected, count = inputs.expected(), inputs.case.tokens
    error = np.abs(found[:count] - expected).max()
    assert error <= F32_KERNEL * np.abs(expected).max()
    assert (found[count:] == POISON).all()


KINDS = [
    *(Case(heads, kv_heads, 16) for heads, kv_heads in ((4, 1), (4, 2), (2, 2), (8, 1))),
    Case(8, 1, 32, "f16"),
    Case(4, 2, 64, "f32"),
    Case(8, 2, 128, "f16"),
    Case(2, 1, 512, "f16"),
]
POSITIONS = {
    "first token": Case(rows=1),
    "first tokens": Case(rows=5),
    "beginning": Case(rows=33),
    "one in a history": Case(first=70, rows=1),
    "history": Case(first=100, rows=33),
    "window": Case(first=0, rows=33, window=8),
    "window in a history": Case(first=90, rows=5, window=8),
    "ring": Case(first=100, rows=33, window=8, ring=40),
    "ring wrapped many times": Case(first=10_003, rows=5, window=64, ring=68),
    "half a batch": Case(first=9, rows=33, count=17, window=8, ring=40),
}
EVERY_KIND = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda c: f"{c.heads}/{c.kv_heads}x{c.head_dim}-{c.kv}"
)
EVERY_POSITION = pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)


def combined(kind: Case, position: Case) -> Case:
    """Return a case with the heads and cache of one and the position of the other."""
    shape = {name: getattr(kind, name) for name in ("heads", "kv_heads", "head_dim", "kv")}
    return replace(position, **shape)


@EVERY_KIND
@EVERY_POSITION
def test_many_queries(kind: Case, position: Case) -> None:
    inputs = Inputs(combined(kind, position))
    assert_right(prefill(inputs), inputs)


@EVERY_KIND
@EVERY_POSITION
def test_many_queries_in_several_dispatches(kind: Case, position: Case) -> None:
    inputs = Inputs(combined(kind, position))
    assert_right(prefill(inputs, at_once=64), inputs)


@EVERY_KIND
@EVERY_POSITION
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("raw_kinds", [1, 2, 3], ids=["another's cache", "k is v", "own"])
def test_one_query(kind: Case, position: Case, splits: int, raw_kinds: int) -> None:
    token = OneToken(combined(kind, position), raw_kinds)
    token.assert_right(token.attended(splits))


PARTS = np.random.default_rng(5).standard_normal((3, 6, 64), np.float32)  # of six heads


@pytest.mark.parametrize("raw_kinds", [1, 3])
def test_one_query_whose_projections_are_in_parts(raw_kinds: int) -> None:
    """Bit by bit what it is if they are added up before."""
    inputs = OneToken(Case(4, 1, 64, "f16", first=70, rows=1), raw_kinds)
    parts = np.ascontiguousarray(PARTS[:, : len(inputs.raw)])
    whole = (parts[0] + parts[1]) + parts[2]
    found = inputs.attended(4, parts)
    cached = [get(cache, np.uint16) for cache in inputs.caches]
    np.testing.assert_array_equal(found, inputs.attended(4, whole[None]))
    for cache, before in zip(inputs.caches, cached, strict=True):
        np.testing.assert_array_equal(get(cache, np.uint16), before)


def test_one_query_into_float16() -> None:
    """Each row with the scale 1, after the last one."""
    inputs = OneToken(Case(4, 1, 64, "f16", first=70, rows=1))
    expected, half = inputs.attended(4), poisoned(1, 4 * 64)
    inputs.attended(4, half=half)
    data = get(Tensor((half.nbytes,), half.nbytes, half.buffer), np.uint8).tobytes()
    assert np.frombuffer(data[-4:], np.float32) == 1
    found = np.frombuffer(data[:-4], np.float16).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected.astype(np.float16))


@pytest.mark.parametrize(
    ("threads", "queries", "keys"), [(256, 16, 64), (128, 16, 32), (64, 16, 16), (128, 8, 64)]
)
@pytest.mark.parametrize("position", ["history", "ring", "half a batch"])
def test_other_tiles_of_many_queries(threads: int, queries: int, keys: int, position: str) -> None:
    inputs = Inputs(replace(POSITIONS[position], head_dim=64, heads=6, kv_heads=2))
    assert_right(prefill(inputs, threads, queries, keys), inputs)


def test_a_query_that_prefers_one_far_key() -> None:
    inputs = Inputs(Case(first=200, rows=3, ring=256, heads=1))
    inputs.q[:] = 0
    inputs.q[:, :, 0] = 50  # scores of some hundreds: only shifted exponents stay finite
    inputs.queries = put(inputs.q)
    assert_right(prefill(inputs), inputs)


def test_one_query_that_prefers_one_far_key() -> None:
    token = OneToken(Case(first=200, ring=256, heads=1))
    token.norms[0] *= 100
    token.norms_tensor = put(token.norms)
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


def attention(case: Case, batch: Tensor, caches: Sequence[Tensor]) -> Attention:
    """Return the attention of a model of one layer."""
    cache = LayerCache(*caches, case.ring)
    inputs = text.Inputs(batch, batch, {0: cache})
    model = Model(CONFIG, device())
    recorder = text.TextRecorder(model, Recorder(device()), inputs, case.rows, case.kv)
    return Attention(recorder, model, layer_of(case), cache, case.kv)


def attended(inputs: Inputs) -> tuple[np.ndarray, int]:
    """Return out of attention as a model records it, and how many dispatches that takes."""
    layer = attention(inputs.case, inputs.batch, inputs.caches)
    layer.queries = lambda _: inputs.queries  # type: ignore[method-assign]
    out = layer.prefill(inputs.queries, "causal")
    recorder = layer.ops.recorder
    device().run(recorder.plan())
    return get(out).reshape(inputs.q.shape), len(recorder.calls)


LONG = [
    *(Case(2, 1, 16, "f32", first=100_000 - n, rows=n, ring=100_000) for n in (1, 5)),
    *(Case(2, 1, 512, "f16", first=30_000 - n, rows=n, ring=30_000) for n in (1, 5)),
]
EVERY_LONG = {"ids": lambda c: f"{c.ring}x{c.head_dim}"}


@pytest.mark.parametrize("case", LONG[1::2], **EVERY_LONG)
def test_many_queries_beyond_the_loop_limit_of_a_software_gpu(case: Case) -> None:
    inputs = Inputs(case)
    found, dispatches = attended(inputs)
    assert_right(found, inputs)
    if device().software:
        at_once = loop_limits.attention_prefill_keys(case.head_dim, 256, 32, 64)
        assert dispatches == -(-case.ring // at_once) > 1


@pytest.mark.parametrize("case", LONG[::2], **EVERY_LONG)
def test_one_query_beyond_the_loop_limit_of_a_software_gpu(case: Case) -> None:
    token = OneToken(case)
    layer = attention(case, token.batch, token.caches)
    layer.model.head_norms[0] = token.norms_tensor
    layer.model.rotations[False] = token.rotations_tensor
    token.raw_tensor.shape = (1, token.raw.size)
    out = layer.decode(token.raw_tensor)
    device().run(layer.ops.recorder.plan())
    token.assert_right(get(out).reshape(1, case.heads, case.head_dim))


def test_one_dispatch_alone_would_exceed_the_loop_limit() -> None:
    """Otherwise there is nothing to guard against, and several dispatches are wasted."""
    inputs = Inputs(LONG[1])
    if "llvmpipe" in device().name:  # Chromium's SwiftShader has no such limit
        assert np.abs(prefill(inputs) - inputs.expected()).max() > 0.1


@pytest.mark.parametrize("head_dim", [16, 24, 64, 72])
@pytest.mark.parametrize("patches", [1, 63, 150])
def test_patches_attend_to_each_other(head_dim: int, patches: int) -> None:
    tiling = PatchTiling.within(head_dim, device().limits)
    assert tiling is not None
    inputs = Inputs(Case(heads=2, kv_heads=2, head_dim=head_dim, rows=patches, ring=patches))
    out = put(np.full((patches + 1, 2, head_dim), POISON, np.float32))
    recorder = Recorder(device())
    recorder.call(
        "vision_attention",
        (2, -(-patches // tiling.queries)),
        batch=inputs.batch,
        q=inputs.queries,
        k=inputs.caches[0],
        v=inputs.caches[1],
        out=out,
        heads=2,
        **tiling.constants,
    )
    device().run(recorder.plan())
    scores = np.einsum("qhd,khd->hqk", inputs.q, inputs.kv[0], dtype=np.float64)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    expected = np.einsum("hqk,khd->qhd", shares, inputs.kv[1])
    error = np.abs(get(out)[:patches] - expected).max()
    assert error <= F32_KERNEL * np.abs(expected).max()
    assert (get(out)[patches:] == POISON).all()


def test_a_workgroup_takes_as_many_queries_as_fit() -> None:
    tilings = {
        nbytes: PatchTiling.within(72, Limits(1 << 30, 1 << 30, nbytes, 256, 65535))
        for nbytes in (6 << 10, 16 << 10, 32 << 10)
    }
    assert tilings == {
        6 << 10: None,
        16 << 10: PatchTiling(72, 32),
        32 << 10: PatchTiling(72, 64),
    }
