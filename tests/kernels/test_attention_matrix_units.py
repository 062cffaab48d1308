"""Attention on matrix units against a softmax in float64: masks, windows, rings, heads, scores."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.matrix_units import poisoned
from tolerance import F16_ATTENTION

from webgemma.gemma.attention import NO_WINDOW, Heads, attend
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.record.matrix_tiling import AttentionTiling, MatrixUnits
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.graph import Recorder, Tensor

pytestmark = pytest.mark.usefixtures("matrix_units")

POISON = np.float32(-77)


@dataclass(frozen=True)
class Case:
    """A batch at some position, and the cache it reads."""

    heads: int = 4
    kv_heads: int = 1
    size: int = 64
    first: int = 0
    rows: int = 33
    count: int | None = None  # rows of the batch that are tokens
    window: int = NO_WINDOW
    ring: int = 160
    mask: str = "causal"
    images: tuple[tuple[int, int], ...] = ()  # tokens where images begin and end
    texts: tuple[int, ...] = ()  # their lengths
    strength: float = 4.0  # standard deviation of the scores
    growth: float = 0.0  # by which scores grow from key to key

    @property
    def tokens(self) -> int:
        return self.rows if self.count is None else self.count


class Inputs:
    """Queries, keys and values; whatever the batch must not read is NaN."""

    def __init__(self, case: Case) -> None:
        rng, end = np.random.default_rng(case.first), case.first + case.tokens
        self.case = case
        self.q = rng.standard_normal((case.rows, case.heads, case.size), np.float32)
        self.q *= case.strength / case.size**0.5
        shape = (2, end, case.kv_heads, case.size)
        self.kv = rng.standard_normal(shape, np.float32).astype(np.float16)
        if case.growth:
            self.q[:, :, 0] = 1
            self.kv[0, :, :, 0] = case.growth * np.arange(end)[:, None]
        self.q[case.tokens :] = np.nan
        self.cached = np.full((2, case.ring, *shape[2:]), np.nan, np.float16)
        for position in range(end):
            self.cached[:, position % case.ring] = self.kv[:, position]
        self.ends = np.zeros(case.rows, np.uint32)
        for begin, stop in case.images:
            self.ends[begin:stop] = case.first + stop

    @property
    def texts(self) -> np.ndarray:
        """Where the text of each token begins and ends: [tokens, 2]."""
        ends = np.cumsum(self.case.texts)
        bounds = np.stack([ends - self.case.texts, ends], axis=1)
        return np.repeat(bounds, self.case.texts, axis=0)

    def attended(self, out: Tensor) -> None:
        """Compute what the engine records for the batch."""
        case, recorder = self.case, Recorder(device())
        more = self.ends if case.mask != "texts" else self.texts.ravel()
        batch = put(np.array([case.first, case.tokens, 0, 0, *more], np.uint32))
        weights = SimpleNamespace(matrices={})
        ops = Ops(weights, recorder, batch, case.rows, 1e-6, "f16")
        cache = LayerCache(put(self.cached[0]), put(self.cached[1]), case.ring)
        heads = Heads(case.heads, case.kv_heads, case.size)
        q = put(self.q.reshape(case.rows, -1))
        attend(ops, q, cache, heads, case.window, "f16", case.mask, out)
        names = [call.kernel.name for call in recorder.calls]
        pair = "f16" if isinstance(out, HalfTensor) else "f32"
        assert names == [f"attention_matrix_units mask={case.mask} pair={pair}"]
        device().run(recorder.plan())

    def visible(self) -> np.ndarray:
        """Return which positions each token attends to: [tokens, positions]."""
        case = self.case
        end = case.first + case.tokens
        s, p = np.arange(end), np.arange(case.first, end)[:, None]
        if case.mask == "canvas":
            return np.broadcast_to(s > case.first - case.window, (case.tokens, end))
        if case.mask == "texts":
            begins, ends = self.texts.T[:, :, None]
            return (s >= begins) & (s < ends) & (np.abs(s - p) < case.window)
        ends = np.maximum(p + 1, self.ends[: case.tokens, None])
        return (s > p - case.window) & (s < ends)

    def expected(self) -> np.ndarray:
        """Return softmax(q kᵀ) v with q as float16, all else in float64."""
        case = self.case
        q = self.q[: case.tokens].astype(np.float16).astype(np.float64)
        k, v = np.repeat(self.kv.astype(np.float64), case.heads // case.kv_heads, axis=2)
        scores = np.einsum("thd,shd->hts", q, k)
        scores = np.where(self.visible(), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hts,shd->thd", shares / shares.sum(-1, keepdims=True), v)


def assert_right(case: Case) -> None:
    """Assert that the tokens' rows are right and the others are untouched."""
    inputs = Inputs(case)
    out = put(np.full_like(inputs.q, POISON))
    inputs.attended(out)
    found, expected = get(out), inputs.expected()
    error = np.abs(found[: case.tokens] - expected).max()
    assert error <= F16_ATTENTION * np.abs(expected).max()
    assert (found[case.tokens :] == POISON).all()


POSITIONS = {
    "first tokens": Case(rows=5),
    "beginning": Case(),
    "history": Case(first=100),
    "tiles of keys": Case(first=128, rows=16, ring=256),
    "window": Case(window=8),
    "window in a history": Case(first=90, rows=5, window=8),
    "window of tiles": Case(first=200, rows=40, window=130, ring=256),
    "ring": Case(first=100, window=8, ring=41),
    "ring wrapped many times": Case(first=10_003, rows=5, window=64, ring=69),
    "half a batch": Case(first=9, count=17, window=8, ring=40),
    "one of a batch": Case(first=70, count=1),
    "image": Case(rows=40, mask="image_blocks", images=((3, 30),)),
    "images in a history": Case(
        first=75, rows=60, mask="image_blocks", images=((0, 20), (21, 50)), window=30
    ),
    "image beyond the window": Case(
        first=20, rows=50, mask="image_blocks", images=((5, 45),), window=16, count=48
    ),
    "no image": Case(first=20, mask="image_blocks"),
    "one text": Case(rows=40, mask="texts", texts=(40,)),
    "texts": Case(rows=150, mask="texts", texts=(1, 70, 2, 40, 33), count=146),
    "texts and a window": Case(rows=150, mask="texts", texts=(1, 70, 2, 40, 37), window=9),
    "canvas": Case(first=70, rows=40, mask="canvas"),
    "canvas and a window": Case(first=70, rows=40, mask="canvas", window=20, ring=64),
}


@pytest.mark.parametrize("case", POSITIONS.values(), ids=POSITIONS)
def test_positions(case: Case) -> None:
    assert_right(case)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 1)])
def test_rounded_for_a_product(heads: int, kv_heads: int) -> None:
    """As float16 with scales of 1, of all tokens and of no others."""
    case = replace(POSITIONS["half a batch"], heads=heads, kv_heads=kv_heads)
    inputs, width = Inputs(case), heads * case.size
    out = poisoned(case.rows, width)
    inputs.attended(out)
    data = get(Tensor((out.nbytes,), out.nbytes, out.buffer), np.uint8)
    values = data[: 2 * case.rows * width].view(np.float16).reshape(case.rows, heads, case.size)
    scales = data[2 * case.rows * width :].view(np.float32)
    expected = inputs.expected()
    error = np.abs(values[: case.tokens].astype(np.float64) - expected).max()
    assert error <= F16_ATTENTION * np.abs(expected).max()
    assert (values[case.tokens :].view(np.uint16) == 0x7777).all()
    assert (scales[: case.tokens] == 1).all()
    assert (scales[case.tokens :].view(np.uint32) == 0x77777777).all()


@pytest.mark.parametrize("position", ["half a batch", "history", "window of tiles"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (8, 1), (12, 4), (3, 1)])
def test_heads_that_share_keys(heads: int, kv_heads: int, position: str) -> None:
    assert_right(replace(POSITIONS[position], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("position", ["history", "ring", "canvas and a window"])
@pytest.mark.parametrize("size", [128, 256, 512])
def test_sizes_of_heads(size: int, position: str, matrix_units: MatrixUnits) -> None:
    if AttentionTiling.for_heads(matrix_units, size, device().limits) is None:
        pytest.skip("does not fit into a workgroup of this GPU")
    assert_right(replace(POSITIONS[position], size=size))


@pytest.mark.parametrize("growth", [0.05, 0.25, -0.25, 4.0])
@pytest.mark.parametrize("size", [64, 256])
def test_scores_that_grow_along_the_keys(growth: float, size: int) -> None:
    """What was accumulated is scaled down whenever a tile exceeds it."""
    assert_right(Case(size=size, first=230, rows=20, ring=256, growth=growth))


@pytest.mark.parametrize("strength", [0.0, 50.0, 400.0])
def test_equal_and_large_scores(strength: float) -> None:
    """Scores of a thousand: only exponents relative to the best stay finite."""
    assert_right(Case(first=130, rows=20, strength=strength))


def test_sizes_that_matrices_do_not_divide_are_attended_to_otherwise() -> None:
    recorder, batch = Recorder(device()), put(np.array([0, 5], np.uint32))
    ops = Ops(SimpleNamespace(matrices={}), recorder, batch, 5, 1e-6, "f16")
    cache = LayerCache(*(put(np.zeros((8, 16), np.float16)) for _ in range(2)), 8)
    attend(ops, put(np.zeros((5, 16), np.float32)), cache, Heads(1, 1, 16), 8, "f16")
    assert [call.kernel.name.split()[0] for call in recorder.calls] == ["attention_prefill"]
