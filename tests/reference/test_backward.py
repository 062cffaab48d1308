"""Gradients of adapters against finite differences of the loss, and batches against examples."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.tiny import GEMMA3, LARGE, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_adapter import tiny_pairs
from tolerance import FINITE_DIFFERENCES

from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.reference.backward import Backward, Example
from webgemma.reference.lora import AdaptedWeights, Pair
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

LARGE = replace(LARGE, suppressed=())  # training does not suppress tokens
MODELS = {
    "small": SMALL,
    "large": LARGE,
    "moe": MOE,
    "split experts": replace(MOE, fused=False),
    "gemma3": GEMMA3,
}
IDS = [2, *np.random.default_rng(4).integers(24, 310, 19).tolist()]
EXAMPLES = [
    Example(IDS, [t >= 6 for t in range(20)]),  # longer than the window of 8
    Example(IDS[4:10], [t in (1, 2, 5) for t in range(6)]),
]


def model_of(tiny: Tiny) -> TextModel:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return TextModel(Config.from_gguf(gguf), Weights(gguf))


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_equal_finite_differences_of_the_loss(kind: str) -> None:
    """Along a random direction of each pair, in float64."""
    model = model_of(MODELS[kind])
    pairs = tiny_pairs(model.weights.gguf, dtype=np.float64)
    _, gradients = Backward(model, pairs).gradients(EXAMPLES)
    rng, step = np.random.default_rng(2), 1e-6
    for name, (a, b, scale) in pairs.items():
        along = rng.normal(size=a.shape), rng.normal(size=b.shape)
        high, low = (
            Backward(
                model, pairs | {name: Pair(a + s * along[0], b + s * along[1], scale)}
            ).gradients(EXAMPLES)[0]
            for s in (step, -step)
        )
        slope = (high - low) / (2 * step)
        sums = [(x * y).sum() for x, y in zip(gradients[name], along, strict=True)]
        size = max(abs(slope), abs(sums[0]), abs(sums[1]))
        assert size > 1e-3, name
        assert abs(sum(sums) - slope) < FINITE_DIFFERENCES * size, name


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_is_that_of_the_adapted_model(kind: str) -> None:
    model = model_of(MODELS[kind])
    pairs = tiny_pairs(model.weights.gguf)
    loss, _ = Backward(model, pairs).gradients(EXAMPLES[:1])
    adapted = TextModel(model.config, AdaptedWeights(model.weights.gguf, [pairs]))
    logits = adapted.forward(IDS)[5:19].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert loss == pytest.approx(-logs[np.arange(14), IDS[6:]].mean(), abs=1e-4)


def test_a_batch_is_the_mean_over_its_supervised_tokens() -> None:
    model = model_of(SMALL)
    pairs = tiny_pairs(model.weights.gguf, ("attn_k", "ffn_down"))
    loss, both = Backward(model, pairs).gradients(EXAMPLES)
    single = [Backward(model, pairs).gradients([example]) for example in EXAMPLES]
    assert loss == pytest.approx((14 * single[0][0] + 3 * single[1][0]) / 17)
    for name, sums in both.items():
        for i in range(2):
            mean = (14 * single[0][1][name][i] + 3 * single[1][1][name][i]) / 17
            np.testing.assert_allclose(sums[i], mean, rtol=0, atol=1e-5 * np.abs(mean).max())


def test_an_unsupervised_batch_raises_an_error() -> None:
    model = model_of(SMALL)
    with pytest.raises(InputError, match="nothing to learn"):
        Backward(model, {}).gradients([Example([2, 30, 31], [True, False, False])])
