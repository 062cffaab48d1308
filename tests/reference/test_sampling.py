"""Sampling: each setting against its definition, and the random draw."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from webgemma import InputError
from webgemma.reference.sampling import choose, is_typical, penalise, sample
from webgemma.sampler import draw
from webgemma.settings import resolve

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))  # best first: 1, 3, 4, 0, 2


def chosen(**settings: float) -> set[int]:
    resolved = resolve({"top_k": 0, "top_p": 1.0, **settings})
    return {choose(LOGITS, resolved, u) for u in np.linspace(0, 0.9999, 401)}


def test_temperature_zero_takes_the_likeliest_token() -> None:
    token, logprob, top = sample(LOGITS, resolve({"temperature": 0}), [], seed=1)
    assert token == 1
    assert logprob == pytest.approx(np.log(0.4), abs=1e-6)
    assert top == ()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.84}, {1, 3, 4}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 0.26}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.4 of 0.65 is more than 0.6 of it
        # as llama.cpp's sampler
        ({"typical_p": 0.0}, {3}),
        ({"typical_p": 0.3}, {3, 4}),
        ({"typical_p": 0.7}, {1, 3, 4}),
        ({"typical_p": 0.9}, {0, 1, 3, 4}),
        ({"typical_p": 0.3, "top_k": 3}, {1, 3}),
        ({"typical_p": 0.9, "top_k": 3}, {1, 3, 4}),
    ],
    ids=str,
)
def test_filters_leave_the_expected_tokens(settings: dict[str, float], kept: set[int]) -> None:
    assert chosen(**settings) == kept


@pytest.mark.parametrize(
    ("typical_p", "kept"),
    [(0.1, {8}), (0.4, {8, 21, 23}), (0.8, {1, 8, 11, 14, 21, 23})],
)
def test_typical_p_keeps_what_llama_cpp_keeps(typical_p: float, kept: set[int]) -> None:
    logits = (4 * np.sin(np.arange(24) ** 2)).astype(np.float32)
    assert set(np.flatnonzero(is_typical(logits, typical_p))) == kept


def test_frequencies_follow_the_temperature() -> None:
    counts = {}
    for temperature in (0.5, 1.0, 2.0):
        settings = resolve({"temperature": temperature, "top_k": 0, "top_p": 1.0})
        picks = [choose(LOGITS, settings, u) for u in (np.arange(2000) + 0.5) / 2000]
        counts[temperature] = picks.count(1) / 2000
        expected = np.exp(LOGITS / temperature)
        assert counts[temperature] == pytest.approx(expected[1] / expected.sum(), abs=2e-3)


def test_the_repetition_penalty_divides_or_multiplies_by_sign() -> None:
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    changed = penalise(logits, resolve({"repetition_penalty": 2.0}), [0, 1, 1])
    np.testing.assert_allclose(changed, [1.0, -4.0, 1.0])
    np.testing.assert_allclose(logits, [2.0, -2.0, 1.0])  # the input is unchanged


def test_the_frequency_penalty_applies_each_time() -> None:
    logits = np.float32([1, 2, 3])
    settings = resolve({"frequency_penalty": 0.5, "presence_penalty": 1.0, "recent": -1})
    np.testing.assert_array_equal(
        penalise(logits, settings, [2, 1, 2, 2]), np.float32([1, 0.5, 0.5])
    )


def test_the_presence_penalty_applies_once_to_recent_tokens() -> None:
    logits = np.zeros(4, np.float32)
    settings = resolve({"presence_penalty": 0.5, "recent": 2})
    np.testing.assert_allclose(penalise(logits, settings, [3, 0, 0]), [-0.5, 0, 0, 0])
    everything = resolve({"presence_penalty": 0.5, "recent": -1})
    np.testing.assert_allclose(penalise(logits, everything, [3, 0, 0]), [-0.5, 0, 0, -0.5])
    nothing = resolve({"presence_penalty": 0.5, "recent": 0})
    np.testing.assert_allclose(penalise(logits, nothing, [3, 0, 0]), 0)


def test_bias_and_penalties_apply_at_temperature_zero() -> None:
    assert sample(LOGITS, resolve({"temperature": 0, "logit_bias": {2: 10.0}}), [], 1)[0] == 2
    assert sample(LOGITS, resolve({"temperature": 0, "presence_penalty": 5.0}), [1], 1)[0] == 3


def test_the_logprob_is_that_before_the_bias() -> None:
    logprob = sample(LOGITS, resolve({"temperature": 0, "logit_bias": {2: 10.0}}), [], 1).logprob
    assert logprob == pytest.approx(np.log(0.05), abs=1e-6)


LIKELIEST = [(1, 0.4), (3, 0.25), (4, 0.2), (0, 0.1), (2, 0.05)]


@pytest.mark.parametrize("count", [1, 3, 5, 20])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 9.0, "top_k": 2},
        {"logit_bias": {2: 10.0, 1: -1e9}},
        {"presence_penalty": 9.0, "repetition_penalty": 2.0},
    ],
    ids=str,
)
def test_top_logprobs_are_those_before_all_settings(settings: dict[str, float], count: int) -> None:
    found = sample(LOGITS, resolve({**settings, "top_logprobs": count}), [1, 3], 1).top
    expected = LIKELIEST[:count]
    assert [token for token, _ in found] == [token for token, _ in expected]
    np.testing.assert_allclose(np.exp([x for _, x in found]), [p for _, p in expected], rtol=1e-6)


def test_top_logprobs_are_finite_and_ties_are_ordered_by_id() -> None:
    logits = np.array([-np.inf, 1.0, 2.0, 1.0, -np.inf], np.float32)
    found = sample(logits, resolve({"top_logprobs": 4, "logit_bias": {0: 1e9}}), [], 1).top
    assert [token for token, _ in found] == [2, 1, 3]


def test_suppressed_tokens_are_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[1] = -np.inf
    settings = resolve({"temperature": 5.0, "top_k": 0, "top_p": 1.0})
    assert 1 not in {choose(logits, settings, u) for u in np.linspace(0, 0.9999999, 500)}


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**7))
def test_draws_are_in_range_and_reproducible(seed: int, step: int) -> None:
    assert 0 <= draw(seed, step) < 1
    assert draw(seed, step) == draw(seed, step)


def test_draws_are_uniform() -> None:
    """Check mean, variance and correlation of neighbours, over steps and over seeds."""
    for values in (
        [draw(7, step) for step in range(20000)],
        [draw(seed, 7) for seed in range(20000)],
    ):
        u = np.array(values) - 0.5
        assert abs(u.mean()) < 0.01
        assert abs((u[1:] * u[:-1]).mean()) < 0.003
        assert abs((u * u).mean() - 1 / 12) < 0.003


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("recent", -2),
        ("seed", -1),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("top_logprobs", True),
        ("top_logprobs", 2.0),
        ("top_logprobs", "5"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("inf")}),
    ],
)
def test_invalid_settings_raise_an_error(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        resolve({name: value})
