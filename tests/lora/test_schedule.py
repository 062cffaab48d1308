"""Learning rates and AdamW, against their definitions."""

from math import cos, pi

import numpy as np
import pytest

from webgemma.errors import InputError
from webgemma.lora.data import Example
from webgemma.lora.schedule import LearningRate, Schedule
from webgemma.reference.adamw import AdamW, clip_gradients


def test_the_warm_up_is_linear_and_reaches_the_peak() -> None:
    rates = LearningRate(0.01, 100, warmup=4)
    assert [rates.at(step) for step in range(5)] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01]
    )


@pytest.mark.parametrize(
    ("shape", "middle", "last"),
    [
        ("cosine", 0.1 + 0.9 * (1 + cos(pi / 2)) / 2, 0.1),
        ("linear", 0.55, 0.1),
        ("constant", 1, 1),
    ],
)
def test_the_decay_has_the_shape(shape: str, middle: float, last: float) -> None:
    rates = LearningRate(0.01, 101, shape=shape, floor=0.1)
    found = [rates.at(step) for step in (0, 50, 100, 1000)]
    assert found == pytest.approx([0.01, 0.01 * middle, 0.01 * last, 0.01 * last])


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"peak": 0.0}, "above 0"),
        ({"peak": float("nan")}, "above 0"),
        ({"warmup": 11}, "do not fit"),
        ({"shape": "round"}, "no schedule 'round'"),
        ({"floor": 2.0}, "floor"),
    ],
)
def test_invalid_learning_rates_raise_an_error(invalid: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LearningRate(**({"peak": 0.01, "steps": 10} | invalid))


def test_a_single_step_is_the_peak() -> None:
    assert LearningRate(0.01, 1, shape="linear").at(0) == 0.01


def test_adamw_agrees_with_its_sums() -> None:
    """Compare with the moments written out: m_t = (1 − β₁) Σ β₁^(t−i) g_i, v likewise."""
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(6, 5))
    w = rng.normal(size=5)
    expected, optimiser = w.copy(), AdamW(0.8, 0.9, 1e-8, decay=0.1)
    for t in range(1, 7):
        ages = np.arange(t)[::-1, None]
        m = 0.2 * (0.8**ages * gradients[:t]).sum(axis=0) / (1 - 0.8**t)
        v = 0.1 * (0.9**ages * gradients[:t] ** 2).sum(axis=0) / (1 - 0.9**t)
        expected = expected - 0.01 * (m / (np.sqrt(v) + 1e-8) + 0.1 * expected)
        optimiser.update([w], [gradients[t - 1]], 0.01)
    np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_clipping_keeps_the_direction() -> None:
    gradients = [np.array([3.0, 0.0]), np.array([[4.0]])]
    assert clip_gradients(gradients, 1.0) == pytest.approx(5)
    np.testing.assert_allclose(gradients[0], [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], [[0.8]], rtol=1e-6)
    assert clip_gradients(gradients, 2.0) == pytest.approx(1)
    np.testing.assert_allclose(gradients[1], [[0.8]], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "count", "message"),
    [
        (Schedule(epochs=10**12), 3, "3000000000000 steps are too many"),
        (Schedule(max_steps=10**12), 3, "steps are too many"),
        (Schedule(max_steps=5), 0, "no examples to train on"),
    ],
)
def test_schedules_without_an_end_raise_an_error(
    schedule: Schedule, count: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        schedule.steps([Example((2, 3), (False, True), 1)] * count, 1)
