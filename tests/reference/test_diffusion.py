"""Reference DiffusionGemma against transformers, and the parts of a denoising step."""

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


def assert_close(found: Floats, recorded: Floats) -> None:
    assert found.shape == recorded.shape
    assert np.abs(found - recorded).max() <= CANVAS_OF_TRANSFORMERS


@needs_shared
def test_states_and_logits_agree_with_transformers() -> None:
    with opened() as gguf:
        model = model_of(gguf)
        cache = Cache(model.config)
        assert_close(model.encode(prompt(), cache), array("encoder_last_hidden"))
        canvas = array("canvas0").tolist()
        assert_close(model.logits(canvas, cache, None), array("logits_step1"))
        expected = model.expected_embedding(array("selfcond_logits"))
        assert_close(model.logits(canvas, cache, expected), array("logits_step2_selfcond"))


@needs_shared
def test_a_recorded_generation_is_reproduced_step_by_step() -> None:
    trace = Trace()
    steps = iter(trace.logits.reshape(-1, *trace.logits.shape[2:]))

    class Replay(DiffusionModel):
        def logits(self, canvas: Sequence[int], cache: Cache, expected: Floats | None) -> Floats:
            recorded = next(steps)
            assert_close(super().logits(canvas, cache, expected), recorded)
            return recorded

    with opened() as gguf:
        model = Replay(Config.from_gguf(gguf), Weights(gguf))
        cache = Cache(model.config)
        ids = prompt()
        for block in range(BLOCKS):
            model.encode(ids[cache.length :], cache)
            *_, last = model.denoise(cache, DENOISING, trace, block)
            assert (last.step, last.done) == (DENOISING.steps, True)
            ids += last.best
    assert ids == trace.ids
    assert next(steps, None) is None


def test_a_canvas_attends_to_itself_and_leaves_the_cache_unchanged() -> None:
    model = tiny_model()
    cache = Cache(model.config)
    model.encode([2, 30, 31, 40], cache)
    before = {i: x[:, :4].copy() for i, x in cache._stored.items()}
    ids = list(range(40, 40 + model.canvas))
    logits = model.logits(ids, cache, None)
    assert cache.length == 4
    assert all(np.array_equal(before[i], x[:, :4]) for i, x in cache._stored.items())
    changed = model.logits([*ids[:-1], 7], cache, None)
    assert np.abs(changed[0] - logits[0]).max() > 1e-3  # the first position attends to the last


def test_a_block_ends_early_when_it_is_stable() -> None:
    model = tiny_model()
    cache = Cache(model.config)
    model.encode([2, 30, 31, 40], cache)
    draws = SeededDraws(1, model.canvas, model.config.vocab)
    at_once = Denoising(steps=9, stability_threshold=0, confidence_threshold=1e9)
    assert [x.done for x in model.denoise(cache, at_once, draws)] == [True]
    never = Denoising(steps=3, confidence_threshold=0)
    assert [x.done for x in model.denoise(cache, never, draws)] == [False, False, True]


def test_a_seed_determines_the_canvases() -> None:
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
def test_positions_of_least_entropy_are_accepted(h: np.ndarray, bound: float) -> None:
    accepted = accept(h, bound)
    assert accepted[h.argmin()]
    order = np.argsort(h, kind="stable")
    count = int(accepted.sum())
    assert accepted[order[:count]].all()  # those of least entropy, and no others
    sums = np.cumsum(h[order], dtype=np.float64)
    assert count == 1 or sums[count - 2] <= bound
    assert count == len(h) or sums[count - 1] > bound


@given(z=arrays(np.float32, (3, 7), elements=st.floats(-90, 90, width=32)))
def test_entropy_equals_its_definition(z: np.ndarray) -> None:
    p = softmax(z.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = -np.where(p > 0, p * np.log(p), 0).sum(axis=-1)
    assert np.abs(entropy(z) - expected).max() <= 1e-5


def test_draws_follow_their_probabilities() -> None:
    canvas, vocab = 20000, 5
    z = np.log(np.array([0.5, 0.25, 0.15, 0.09, 0.01], np.float32))
    draws = SeededDraws(9, canvas, vocab)
    counts = np.bincount(draws.sample(0, 1, np.tile(z, (canvas, 1))), minlength=vocab)
    spread = np.sqrt(canvas * np.exp(z) * (1 - np.exp(z)))
    assert (np.abs(counts - canvas * np.exp(z)) <= 4 * spread).all()
    noise = np.bincount(draws.noise(0, 1), minlength=vocab)
    assert (np.abs(noise - canvas / vocab) <= 4 * np.sqrt(canvas * 0.16)).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be a whole number between 1"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"t_min": 0}, "t_min is 0; it must be a number between 0.001"),
        ({"entropy_bound": float("nan")}, "entropy_bound is nan"),
        ({"t_max": True}, "t_max is True"),
    ],
)
def test_invalid_schedules_raise_an_error(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Denoising(**settings)


def test_the_temperature_falls_step_by_step() -> None:
    temperatures = [Denoising(steps=4).temperature(step) for step in range(1, 5)]
    assert temperatures == pytest.approx([0.8, 0.7, 0.6, 0.5])
