"""Attention among patches on matrix units against a softmax in float64."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from tolerance import F16_ATTENTION, F16_ROUNDING

from webgemma.gemma import patch_attention
from webgemma.gemma.patch_attention import PatchAttention, PatchHeads, PatchMatrixTiling
from webgemma.gemma.record.matmul import UNBOUNDED, Clamp
from webgemma.gemma.record.ops import Ops
from webgemma.graph import Recorder

pytestmark = pytest.mark.usefixtures("matrix_units")


@dataclass(frozen=True)
class Case:
    """An image of some patches."""

    size: int = 64
    heads: int = 2
    patches: int = 70
    strength: float = 4.0  # standard deviation of the scores
    growth: float = 0.0  # by which scores grow from key to key
    rounded: Clamp | None = None  # the bounds of a result that is rounded, too


class Inputs:
    """Queries, keys and values in float16."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.patches)
        self.case = case
        shape = (3, case.patches, case.heads, case.size)
        self.qkv = rng.standard_normal(shape, np.float32)
        self.qkv[0] *= case.strength / case.size**0.5
        if case.growth:
            self.qkv[0, :, :, 0] = 1
            self.qkv[1, :, :, 0] = case.growth * np.arange(case.patches)[:, None]
        self.qkv = self.qkv.astype(np.float16)

    def attended(self) -> np.ndarray:
        """Return what the engine records."""
        case, recorder = self.case, Recorder(device())
        batch = put(np.array([0, case.patches, 0, 0], np.uint32))
        weights = SimpleNamespace(matrices={})
        ops = Ops(weights, recorder, batch, case.patches, 1e-6, "f16")
        attention = PatchAttention(ops, case.heads, case.size, halves=True)
        heads = PatchHeads(*(put(each.reshape(case.patches, -1)) for each in self.qkv))
        out = attention.record(heads, case.rounded)
        (call,) = recorder.calls
        assert call.kernel.name.startswith("vision_attention_matrix_units")
        out.allocated = device().buffer(out.nbytes, "attended")
        plan = recorder.plan()
        device().run(plan)
        shape = (case.patches, case.heads, case.size)
        if not case.rounded:
            return get(out).reshape(shape)
        out.shape = (out.nbytes,)
        data = get(out, np.uint8).tobytes()
        values = np.frombuffer(data[: -4 * case.patches], np.float16).astype(np.float64)
        scales = np.frombuffer(data[-4 * case.patches :], np.float32)
        return values.reshape(shape) * scales[:, None, None]

    def expected(self) -> np.ndarray:
        """Return softmax(q kᵀ) v in float64."""
        q, k, v = self.qkv.astype(np.float64)
        scores = np.einsum("thd,shd->hts", q, k)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hts,shd->thd", shares / shares.sum(-1, keepdims=True), v)


def assert_right(case: Case) -> None:
    inputs = Inputs(case)
    found, expected = inputs.attended(), inputs.expected()
    largest, bound = np.abs(expected).max(), F16_ATTENTION
    if case.rounded:
        expected, bound = np.clip(expected, *case.rounded), F16_ATTENTION + F16_ROUNDING
    assert np.abs(found - expected).max() <= bound * largest


@pytest.mark.parametrize("patches", [3, 64, 161])
@pytest.mark.parametrize("size", [64, 72])
def test_numbers_of_patches(size: int, patches: int) -> None:
    assert_right(Case(size=size, patches=patches))


def test_heads_that_zeros_lengthen_to_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 72 are 80 where matrices have 16 columns; here, where they have 8, 24 become 32."""
    monkeypatch.setattr(PatchMatrixTiling, "dimensions", 32)
    assert_right(Case(size=24, heads=3))


@pytest.mark.parametrize("growth", [0.05, 0.5, -0.5, 4.0])
@pytest.mark.parametrize("size", [64, 72])
def test_scores_that_grow_along_the_keys(growth: float, size: int) -> None:
    """What was accumulated is scaled down whenever a tile exceeds it."""
    assert_right(Case(size=size, patches=150, growth=growth))


@pytest.mark.parametrize("strength", [0.0, 50.0, 400.0])
def test_equal_and_large_scores(strength: float) -> None:
    """Scores of a thousand: only exponents relative to the best stay finite."""
    assert_right(Case(strength=strength))


def test_the_smallest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_attention, "MATRIX_TILES", patch_attention.MATRIX_TILES[-1:])
    assert_right(Case(size=72, patches=75, growth=0.3))


@pytest.mark.parametrize("bounds", [UNBOUNDED, Clamp(-0.25, 0.5)])
def test_results_may_be_clamped_and_rounded(bounds: Clamp) -> None:
    assert_right(Case(size=24, rounded=bounds))


def test_heads_that_are_too_large_are_attended_to_otherwise() -> None:
    ops = Ops(SimpleNamespace(matrices={}), Recorder(device()), put(np.zeros(4)), 8, 1e-6, "f16")
    assert PatchAttention(ops, 1, 1024, halves=True).on_units is None
    assert PatchAttention(ops, 1, 64, halves=False).on_units is None
