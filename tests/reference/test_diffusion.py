"""DiffusionGemma in numpy: as transformers, draw by draw; acceptance and draws as they should."""

from collections.abc import Sequence

import numpy as np
import pytest
from conftest import needs_shared
from helpers.recorded import BLOCKS, DENOISING, Trace, array, opened, prompt
from helpers.tiny import DIFFUSION, tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tolerance import CANVAS_OF_TRANSFORMERS

from webgemma.denoising import Denoising
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.reference.diffusion import DiffusionModel, SeededDraws, accept, entropy
from webgemma.reference.text import Cache, softmax
from webgemma.reference.weights import Floats, Weights
from webgemma.sync import run_sync


def model_of(gguf: Gguf) -> DiffusionModel:
    return DiffusionModel(Config.from_gguf(gguf), Weights(gguf))


def tiny_model() -> DiffusionModel:
    return model_of(run_sync(Gguf.aopen(BytesSource(tiny_gguf(DIFFUSION)))))


def assert_same(found: Floats, truth: Floats) -> None:
    assert found.shape == truth.shape
    assert np.abs(found - truth).max() <= CANVAS_OF_TRANSFORMERS


@needs_shared
def test_as_transformers() -> None:
    with opened() as gguf:
        model = model_of(gguf)
        cache = Cache(model.config)
        assert_same(model.encode(prompt(), cache), array("encoder_last_hidden"))
        canvas = array("canvas0").tolist()
        assert_same(model.logits(canvas, cache, None), array("logits_step1"))
        expected = model.expect(array("selfcond_logits"))
        assert_same(model.logits(canvas, cache, expected), array("logits_step2_selfcond"))


@needs_shared
def test_a_recorded_generation_draw_by_draw() -> None:
    trace = Trace()
    steps = iter(trace.logits.reshape(-1, *trace.logits.shape[2:]))

    class Replay(DiffusionModel):
        def logits(self, canvas: Sequence[int], cache: Cache, expected: Floats | None) -> Floats:
            truth = next(steps)
            assert_same(super().logits(canvas, cache, expected), truth)
            return truth

    with opened() as gguf:
        model = Replay(Config.from_gguf(gguf), Weights(gguf))
        cache = Cache(model.config)
        known = prompt()
        for block in range(BLOCKS):
            model.encode(known[cache.length :], cache)
            *_, last = model.denoise(cache, DENOISING, trace, block)
            assert (last.step, last.done) == (DENOISING.steps, True)
            known += last.best
    assert known == trace.ids
    assert next(steps, None) is None


def test_a_canvas_leaves_the_cache_alone_and_sees_all_of_itself() -> None:
    model = tiny_model()
    cache = Cache(model.config)
    model.encode([2, 30, 31, 40], cache)
    held = {i: x[:, :4].copy() for i, x in cache._held.items()}
    ids = list(range(40, 40 + model.canvas))
    logits = model.logits(ids, cache, None)
    assert cache.length == 4
    assert all(np.array_equal(held[i], x[:, :4]) for i, x in cache._held.items())
    changed = model.logits([*ids[:-1], 7], cache, None)
    assert np.abs(changed[0] - logits[0]).max() > 1e-3  # the first position sees the last


def test_blocks_end_early_when_nothing_changes() -> None:
    model = tiny_model()
    cache = Cache(model.config)
    model.encode([2, 30, 31, 40], cache)
    draws = SeededDraws(1, model.canvas, model.config.vocab)
    sure = Denoising(steps=9, stability_threshold=0, confidence_threshold=1e9)
    assert [x.done for x in model.denoise(cache, sure, draws)] == [True]
    never = Denoising(steps=3, confidence_threshold=0)
    assert [x.done for x in model.denoise(cache, never, draws)] == [False, False, True]


def test_a_seed_decides_everything() -> None:
    model = tiny_model()
    cache = Cache(model.config)
    model.encode([2, 30, 31, 40], cache)

    def canvases(seed: int) -> list[tuple[int, ...]]:
        draws = SeededDraws(seed, model.canvas, model.config.vocab)
        return [x.ids for x in model.denoise(cache, Denoising(steps=3), draws)]

    assert canvases(5) == canvases(5)
    assert canvases(5) != canvases(6)


entropies = arrays(np.float32, st.integers(1, 64), elements=st.floats(0, 12, width=32))


@given(h=entropies, bound=st.floats(0, 20))
def test_accepted_positions(h: np.ndarray, bound: float) -> None:
    accepted = accept(h, bound)
    assert accepted[h.argmin()]
    order = np.argsort(h, kind="stable")
    count = int(accepted.sum())
    assert accepted[order[:count]].all()  # the least uncertain, and no others
    sums = np.cumsum(h[order], dtype=np.float64)
    assert count == 1 or sums[count - 2] <= bound
    assert count == len(h) or sums[count - 1] > bound


@given(z=arrays(np.float32, (3, 7), elements=st.floats(-90, 90, width=32)))
def test_entropy_is_that_of_the_definition(z: np.ndarray) -> None:
    p = softmax(z.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        truth = -np.where(p > 0, p * np.log(p), 0).sum(axis=-1)
    assert np.abs(entropy(z) - truth).max() <= 1e-5


def test_draws_have_the_probabilities_they_should() -> None:
    canvas, vocab = 20000, 5
    z = np.log(np.array([0.5, 0.25, 0.15, 0.09, 0.01], np.float32))
    draws = SeededDraws(9, canvas, vocab)
    counts = np.bincount(draws.sample(0, 1, np.tile(z, (canvas, 1))), minlength=vocab)
    spread = np.sqrt(canvas * np.exp(z) * (1 - np.exp(z)))
    assert (np.abs(counts - canvas * np.exp(z)) <= 4 * spread).all()
    noise = np.bincount(draws.noise(0, 1), minlength=vocab)
    assert (np.abs(noise - canvas / vocab) <= 4 * np.sqrt(canvas * 0.16)).all()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"steps": 0}, "steps is 0; it must be a whole number between 1"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"t_min": 0}, "t_min is 0; it must be a number between 0.001"),
        ({"entropy_bound": float("nan")}, "entropy_bound is nan"),
        ({"t_max": True}, "t_max is True"),
    ],
)
def test_impossible_schedules_get_a_sentence(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Denoising(**wrong)


def test_temperature_falls() -> None:
    temperatures = [Denoising(steps=4).temperature(step) for step in range(1, 5)]
    assert temperatures == pytest.approx([0.8, 0.7, 0.6, 0.5])
