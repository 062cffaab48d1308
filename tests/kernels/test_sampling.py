"""Sampling on the device against the reference: every setting, ties, steps without the host."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from helpers.gpu import device, get, put
from tolerance import LOGPROB, QUANTILE

from webgemma.device import Dispatch, Kernel, Plan
from webgemma.engine.batching import IMPOSSIBLE_LOGPROB
from webgemma.errors import InputError
from webgemma.gemma.gpu_sampler import (
    LOWEST,
    MAX_BIASES,
    MAX_SLOTS,
    Conversations,
    GpuSampler,
    Row,
)
from webgemma.graph import BufferPool, Recorder
from webgemma.kernels import read_file
from webgemma.reference.sampling import penalise, sample
from webgemma.sampler import SampledToken, draw
from webgemma.settings import MAX_TOP_LOGPROBS, Settings, is_greedy, resolve
from webgemma.sync import run_sync

CONTEXT = 200
SUPPRESSED = (3, 5, 300)


class Case:
    """A sampler with its plans, and the logits that it reads."""

    def __init__(self, vocab: int, softcap: float) -> None:
        self.vocab = vocab
        self.sampler = GpuSampler(device(), vocab, CONTEXT, SUPPRESSED, softcap)
        self.logits = put(np.zeros((1, vocab), np.float32))
        self.memory = BufferPool(device())
        self.table = Conversations(device(), self.memory)
        self.plans = {
            (greedy, top): self._record(greedy, top)
            for greedy in (False, True)
            for top in (False, True)
        }

    def _record(self, greedy: bool, top: bool) -> Plan:
        recorder = Recorder(device())
        self.sampler.record(
            recorder, self.logits, self.table.tensor, greedy=greedy, top_logprobs=top
        )
        return recorder.plan()

    def begin(self, logits: np.ndarray, settings: Settings, tokens: list[int], seed: int) -> None:
        device().write(self.logits.buffer, np.ascontiguousarray(logits, np.float32).tobytes())
        self.table.set_rows([Row(0)])
        self.table.set_next(0, (len(tokens) - 1) % 2**32)  # the first one follows nothing
        self.top_logprobs = settings["top_logprobs"]
        self.sampler.set(settings, seed)
        self.sampler.set_history(tokens)

    def next(self) -> tuple[int, int]:
        """Return the position and the token that the conversation reads next."""
        position, token = get(self.table.tensor, np.uint32)[4 + MAX_SLOTS :][:2].tolist()
        return position, token

    def step(self, greedy: bool) -> SampledToken:
        top = self.top_logprobs
        reading = device().run(self.plans[greedy, top > 0], self.sampler.result(1, top))
        assert reading is not None
        return self.sampler.parse(run_sync(reading.bytes()), 1, [top])[0]

    def sample(
        self,
        logits: np.ndarray,
        settings: Settings,
        tokens: list[int],
        seed: int,
        *,
        greedy: bool | None = None,
    ) -> SampledToken:
        self.begin(logits, settings, tokens, seed)
        return self.step(is_greedy(settings) if greedy is None else greedy)


@cache
def case(vocab: int, softcap: float) -> Case:
    return Case(vocab, softcap)


def own(logits: np.ndarray, softcap: float = 0.0) -> np.ndarray:
    """Return the model's own logits: capped, and without the suppressed tokens."""
    cap = np.float32(softcap)
    capped = cap * np.tanh(logits / cap) if softcap else logits.copy()
    capped[list(SUPPRESSED)] = -np.inf
    return capped


def check(
    logits: np.ndarray,
    settings: Settings,
    tokens: list[int],
    seed: int,
    softcap: float = 0.0,
    greedy: bool | None = None,
) -> int:
    """Assert that token and log-probability are the reference's; return the token."""
    settings = resolve(settings)
    token, logprob, _ = sample(own(logits, softcap), settings, tokens, seed)
    found = case(len(logits), softcap).sample(logits, settings, tokens, seed, greedy=greedy)
    assert found.token == token
    assert found.logprob == pytest.approx(logprob, abs=LOGPROB)
    return token


def history(rng: np.random.Generator, vocab: int, length: int = 60) -> list[int]:
    """Return tokens with many repeats."""
    return rng.choice(rng.integers(0, vocab, 20), length).tolist()


def test_draw_is_python_s_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    cases = rng.integers(0, 2**32, (1000, 4), np.uint32)  # seed low and high, step
    cases[:8, :3] = np.array(np.meshgrid([0, 2**32 - 1], [0, 2**32 - 1], [0, 1])).reshape(3, 8).T
    functions = "\n".join(d.text for d in read_file("lib/random/hash").declarations)
    kernel = Kernel(
        "draw",
        functions
        + """
        @group(0) @binding(0) var<storage, read> cases: array<vec4<u32>>;
        @group(0) @binding(1) var<storage, read_write> draws: array<u32>;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if (id.x < arrayLength(&draws)) {
                draws[id.x] = draw(cases[id.x].xy, cases[id.x].z);
            }
        }""",
        ("read", "write"),
    )
    draws = put(np.zeros(len(cases), np.uint32))
    pipeline = device().pipeline(kernel)
    bound = [(tensor.buffer, 0, tensor.nbytes) for tensor in (put(cases), draws)]
    grid = (-(-len(cases) // 64), 1, 1)
    dispatch = Dispatch(kernel.name, pipeline, device().bind(pipeline, bound), grid)
    device().run(Plan([dispatch]))
    expected = [draw(int(low) | int(high) << 32, int(step)) for low, high, step, _ in cases]
    assert (get(draws, np.uint32) / 2**24).tolist() == expected


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-30},
    {"temperature": 0.2, "top_k": 0, "top_p": 1.0},
    {"temperature": 3.0, "top_k": 1000, "top_p": 1.0},
    {"temperature": 100.0, "top_k": 40, "top_p": 1.0},
    {"top_k": 1, "temperature": 2.0},
    {"top_k": 2, "top_p": 1.0},
    {"top_p": 0.0, "temperature": 5.0},
    {"top_p": 0.5, "top_k": 0},
    {"top_p": 0.99, "top_k": 0, "temperature": 1.5},
    {"min_p": 0.05, "top_k": 0, "top_p": 1.0, "temperature": 2.0},
    {"min_p": 1.0, "temperature": 9.0},
    {"min_p": 0.02, "top_k": 50, "top_p": 0.9, "temperature": 1.3},
    {"repetition_penalty": 1.3, "temperature": 1.5},
    {"repetition_penalty": 0.5, "presence_penalty": -2.0, "recent": -1},
    {"presence_penalty": 3.0, "recent": 7, "temperature": 0.0},
    {"frequency_penalty": 1.5, "recent": -1, "temperature": 0.0},
    {"frequency_penalty": -0.7, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"repetition_penalty": 5.0, "presence_penalty": 1.0, "recent": 0},
    {"logit_bias": {0: 9.0, 17: 12.5, 319: 11.0}, "repetition_penalty": 1.1},
    {"logit_bias": {3: 1e9, 5: 100.0, 6: -1e9}, "temperature": 2.0},
    {"typical_p": 0.5, "top_k": 0, "top_p": 1.0, "temperature": 2.0},
    {"typical_p": 0.0, "top_k": 0, "top_p": 1.0},
    {"typical_p": 0.95, "top_k": 0, "top_p": 0.9},
    {"typical_p": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [320, 4096])
def test_same_token_as_the_reference(vocab: int, settings: Settings) -> None:
    rng = np.random.default_rng(vocab)
    for seed in (0, 1, 2**64 - 1, 0x123456789):
        logits = rng.normal(0, 4, vocab).astype(np.float32)
        check(logits, settings, history(rng, vocab), seed)


@pytest.mark.parametrize("settings", SETTINGS[::4], ids=str)
def test_the_whole_vocabulary(settings: Settings) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, 262144).astype(np.float32)
    check(logits, settings, history(rng, 262144), 7)


@pytest.mark.parametrize("spread", [5.0, 60.0, 1e5])
def test_softcap_comes_first(spread: float) -> None:
    rng = np.random.default_rng(4)
    logits = (spread * rng.normal(0, 1, 4096)).astype(np.float32)
    for seed in range(4):
        check(logits, {"temperature": 0.7}, history(rng, 4096), seed, softcap=30.0)
    check(logits, {"temperature": 0}, history(rng, 4096), 1, softcap=30.0)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 0, "top_p": 1.0}, {"top_k": 64}, {"top_p": 0.5}, {"top_k": 0, "typical_p": 0.6}],
)
@pytest.mark.parametrize("levels", [1, 3, 40])
@pytest.mark.parametrize("vocab", [320, 4096])
def test_ties_go_by_the_lowest_id(vocab: int, levels: int, settings: Settings) -> None:
    rng = np.random.default_rng(levels)
    logits = rng.integers(0, levels, vocab).astype(np.float32) / 4
    logits[::2] = np.where(logits[::2] == 0, np.float32(-0.0), logits[::2])
    for seed in range(6):
        check(logits, settings, [1, 2], seed)


def test_ties_across_the_whole_vocabulary() -> None:
    logits = np.ones(262144, np.float32)
    assert check(logits, {"temperature": 0}, [], 0) == 0
    check(logits, {"top_k": 1000, "top_p": 1.0}, [], 0)
    # All in one bin and all bytes of the logit the same: the most steps that `sample` can take.
    check(logits, {"top_k": 1 << 17, "top_p": 0.5}, [], 0)


def test_tokens_at_the_lowest_are_never_drawn() -> None:
    logits = np.full(4096, LOWEST, np.float32)
    alive = [9, 2047, 2048, 4095]
    logits[alive] = [-100.0, -100.5, -101.0, -99.0]
    settings: Settings = {"temperature": 100.0, "top_k": 0, "top_p": 1.0}
    sampled = {check(logits, settings, [0, 1], seed) for seed in range(20)}
    assert sampled == set(alive)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_without_a_draw_both_plans_agree(settings: Settings) -> None:
    rng = np.random.default_rng(8)
    logits = rng.integers(-9, 9, 4096).astype(np.float32)
    settings = {**settings, "temperature": 0.0}
    tokens = history(rng, 4096)
    assert check(logits, settings, tokens, 1, greedy=True) == check(
        logits, settings, tokens, 1, greedy=False
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_steps_follow_each_other_without_the_host(temperature: float) -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1, 320).astype(np.float32)
    settings = resolve(
        {
            "temperature": temperature,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.3,
            "recent": 4,
            "top_k": 9,
        }
    )
    here = case(320, 0.0)
    tokens = [1, 2, 2]
    here.begin(logits, settings, tokens, 6)
    for _ in range(12):
        expected = sample(own(logits), settings, tokens, 6).token
        assert here.step(is_greedy(settings)).token == expected
        tokens.append(expected)
        assert here.next() == (len(tokens) - 1, expected)
    assert get(here.sampler.tokens, np.uint32)[0, : len(tokens)].tolist() == tokens


def test_the_last_token_of_the_context_is_stored() -> None:
    logits = np.arange(320, dtype=np.float32)
    tokens = [7] * CONTEXT
    check(logits, {"temperature": 0, "presence_penalty": 900.0, "recent": -1}, tokens, 1)
    assert get(case(320, 0.0).sampler.tokens, np.uint32)[0, CONTEXT] == 319


@pytest.mark.parametrize("vocab", [320, 262144])
def test_the_likeliest_tokens_are_the_models_own(vocab: int) -> None:
    rng = np.random.default_rng(12)
    logits = rng.normal(0, 4, vocab).astype(np.float32)
    logits[[vocab - 1, 11, 12]] = 40.0  # the best are equal
    settings = resolve(
        {
            "logit_bias": {11: -50.0},
            "presence_penalty": 9.0,
            "top_logprobs": MAX_TOP_LOGPROBS,
        }
    )
    mine = own(logits).astype(np.float64)
    order = np.argsort(-mine, kind="stable")[:MAX_TOP_LOGPROBS]
    logprobs = mine - mine.max() - np.log(np.exp(mine - mine.max()).sum())
    for greedy in (False, True):
        found = case(vocab, 0.0).sample(logits, settings, [12], 1, greedy=greedy)
        assert [token for token, _ in found.top] == order.tolist()
        np.testing.assert_allclose([x for _, x in found.top], logprobs[order], atol=LOGPROB)
        fewer = case(vocab, 0.0).sample(
            logits, {**settings, "top_logprobs": 3}, [12], 1, greedy=greedy
        )
        assert fewer == found._replace(top=found.top[:3])


@pytest.mark.parametrize("alive", [(9,), (4095, 9, 2048), (3, 300, 9)], ids=str)
def test_impossible_tokens_are_not_among_the_likeliest(alive: tuple[int, ...]) -> None:
    logits = np.full(4096, LOWEST, np.float32)
    logits[list(alive)] = 7.0
    settings = resolve({"top_logprobs": 5, "logit_bias": {3: 1e9, 8: 1e9}})
    possible = sorted(set(alive) - set(SUPPRESSED))
    for greedy in (False, True):
        found = case(4096, 0.0).sample(logits, settings, [1], 1, greedy=greedy)
        assert [token for token, _ in found.top] == possible
        assert found.top[0][1] == pytest.approx(-math.log(len(possible)), abs=LOGPROB)


def shares(logits: np.ndarray, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that remain, the likeliest first, and their probabilities, in float64.

    top_k is not applied."""
    changed = penalise(own(logits), settings, []).astype(np.float64)
    order = np.argsort(-changed, kind="stable")
    p = np.exp(changed[order] - changed.max())
    p /= p.sum()
    kept = (np.cumsum(p) - p < settings["top_p"]) & (p >= settings["min_p"] * p[0])
    share = p[kept] ** (1 / settings["temperature"])
    return order[kept], share / share.sum()


FLAT = [
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 8.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 1.0, "min_p": 0.01},
]


@pytest.mark.parametrize("settings", FLAT, ids=str)
def test_any_number_of_candidates_keeps_the_order(settings: Settings) -> None:
    rng = np.random.default_rng(13)
    logits = rng.normal(0, 1, 262144).astype(np.float32)
    settings = resolve({**settings, "top_k": 0})
    order, p = shares(logits, settings)
    assert len(order) > 10000
    end = np.cumsum(p)
    for seed in range(3):
        token = case(262144, 0.0).sample(logits, settings, [4, 4], seed).token
        (index,) = np.flatnonzero(order == token)
        u = draw(seed, 2)
        assert end[index] - p[index] - QUANTILE <= u < end[index] + QUANTILE


def test_a_flat_distribution_is_drawn_evenly() -> None:
    """Counts over 16 groups of tokens, by id and likeliest first, by chi-square."""
    rng = np.random.default_rng(14)
    logits = rng.normal(0, 0.5, 4096).astype(np.float32)
    settings = resolve({"top_k": 0, "top_p": 0.95})
    order, p = shares(logits, settings)
    here = case(4096, 0.0)
    steps = Plan(here.plans[False, False].dispatches * 64)
    tokens: list[int] = []
    for seed in range(24):
        here.begin(logits, settings, [1] * 64, seed)
        device().run(steps)
        tokens += get(here.sampler.tokens, np.uint32)[0, 64:128].tolist()
    probability = np.zeros(4096)
    probability[order] = p
    assert probability[tokens].min() > 0
    likeliest = np.argsort(-probability, kind="stable")
    for arranged in (np.arange(4096), likeliest):
        expected = probability[arranged].reshape(16, -1).sum(1) * len(tokens)
        counts = np.bincount(np.argsort(arranged)[tokens] // 256, minlength=16)
        assert counts[expected == 0].sum() == 0
        chi_square = ((counts - expected) ** 2 / expected.clip(1e-9)).sum()
        assert chi_square < 45  # 15 degrees of freedom: 1 in 10,000


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, "has 1025 tokens"),
        ({"logit_bias": {320: 1.0}}, "token 320; the last of this model is 319"),
    ],
    ids=["too many", "no such token"],
)
def test_biases_that_are_not_supported(settings: Settings, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        case(320, 0.0).sampler.set(resolve(settings), 1)


def test_sizes_that_are_not_supported() -> None:
    with pytest.raises(InputError, match="at most"):
        GpuSampler(device(), 1 << 20, 8, (), 30.0)
    with pytest.raises(InputError, match="the context holds 201"):
        case(320, 0.0).sampler.set_history([1] * 202)


def test_logits_that_are_all_nan_still_give_a_token() -> None:
    logits = np.full(320, math.nan, np.float32)
    for greedy in (False, True):
        settings = resolve({"top_logprobs": 2})
        sampled = case(320, 0.0).sample(logits, settings, [1], 1, greedy=greedy)
        assert all(token < 320 for token in (sampled.token, *dict(sampled.top)))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000], ids=hex)
@pytest.mark.parametrize("indices", [[0], [4095], [2047, 2048], range(4096)], ids=str)
def test_a_logit_that_is_not_finite(indices: Sequence[int], bits: int, greedy: bool) -> None:
    """NaN and infinity of both signs: the log-probability is an impossible one."""
    logits = np.linspace(-90, 90, 4096).astype(np.float32)
    logits.view(np.uint32)[list(indices)] = bits
    settings = resolve({"temperature": 1.0, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1})
    for softcap in (0.0, 30.0):
        sampled = case(4096, softcap).sample(logits, settings, [0, 1], 7, greedy=greedy)
        assert sampled.logprob > IMPOSSIBLE_LOGPROB
        assert 0 <= sampled.token < 4096
