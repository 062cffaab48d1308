"""Sampling on the device against the reference: every setting, ties, steps without the host."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import pytest
from helpers.gpu import device, get, put
from tolerance import LOGPROB, QUANTILE

from webgemma import InputError
from webgemma.device import Kernel, Plan
from webgemma.engine.session import IMPOSSIBLE
from webgemma.gemma.gpu_sampler import BIASES, LOWEST, RESULTS, GpuSampler
from webgemma.graph import Recorder
from webgemma.reference.sampling import penalise, sample
from webgemma.sampler import TOP_LOGPROBS, Chosen, Sampling, draw
from webgemma.sync import run_sync

CONTEXT = 200
SUPPRESSED = (3, 5, 300)


class Bench:
    """A sampler with its plans, and logits to write to."""

    def __init__(self, vocab: int, softcap: float) -> None:
        self.vocab = vocab
        self.sampler = GpuSampler(device(), vocab, CONTEXT, SUPPRESSED, softcap)
        self.logits = put(np.zeros((1, vocab), np.float32))
        self.state = put(np.zeros(4, np.uint32))
        self.ids = put(np.zeros(4, np.uint32))
        self.plans = {
            (greedy, top): self._record(greedy, top)
            for greedy in (False, True)
            for top in (False, True)
        }

    def _record(self, greedy: bool, top: bool) -> Plan:
        recorder = Recorder(device())
        self.sampler.record(recorder, self.logits, self.state, self.ids, greedy=greedy, top=top)
        return recorder.plan()

    def begin(self, logits: np.ndarray, sampling: Sampling, tokens: list[int], seed: int) -> None:
        device().write(self.logits.buffer, np.ascontiguousarray(logits, np.float32).tobytes())
        first = len(tokens) // 2  # as if the second half had been the batch
        device().write(self.state.buffer, struct.pack("<2I", first, len(tokens) - first))
        self.sampler.set(sampling, seed)
        self.sampler.tell(tokens)

    def step(self, length: int, greedy: bool) -> Chosen:
        plan = self.plans[greedy, self.sampler.top > 0]
        reading = device().run(plan, self.sampler.result(length))
        assert reading is not None
        return self.sampler.chosen(run_sync(reading.bytes()))

    def sample(
        self,
        logits: np.ndarray,
        sampling: Sampling,
        tokens: list[int],
        seed: int,
        *,
        greedy: bool | None = None,
    ) -> Chosen:
        self.begin(logits, sampling, tokens, seed)
        return self.step(len(tokens), sampling.greedy if greedy is None else greedy)


@cache
def bench(vocab: int, softcap: float) -> Bench:
    return Bench(vocab, softcap)


def own(logits: np.ndarray, softcap: float = 0.0) -> np.ndarray:
    """The model's own logits: capped, and without the suppressed tokens."""
    cap = np.float32(softcap)
    capped = cap * np.tanh(logits / cap) if softcap else logits.copy()
    capped[list(SUPPRESSED)] = -np.inf
    return capped


def check(
    logits: np.ndarray,
    sampling: Sampling,
    tokens: list[int],
    seed: int,
    softcap: float = 0.0,
    greedy: bool | None = None,
) -> int:
    """Token and log-probability are the reference's."""
    token, logprob, _ = sample(own(logits, softcap), sampling, tokens, seed)
    found = bench(len(logits), softcap).sample(logits, sampling, tokens, seed, greedy=greedy)
    assert found.token == token
    assert found.logprob == pytest.approx(logprob, abs=LOGPROB)
    return token


def history(rng: np.random.Generator, vocab: int, length: int = 60) -> list[int]:
    """Tokens with many repeats."""
    return rng.choice(rng.integers(0, vocab, 20), length).tolist()


def test_draw_is_python_s_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    cases = rng.integers(0, 2**32, (1000, 4), np.uint32)  # seed low and high, step
    cases[:8, :3] = np.array(np.meshgrid([0, 2**32 - 1], [0, 2**32 - 1], [0, 1])).reshape(3, 8).T
    lib = files("webgemma.kernels").joinpath("wgsl", "lib", "draw.wgsl").read_text("utf-8")
    kernel = Kernel(
        "draw",
        lib
        + """
        @group(0) @binding(0) var<uniform> count: u32;
        @group(0) @binding(1) var<storage, read> cases: array<vec4<u32>>;
        @group(0) @binding(2) var<storage, read_write> draws: array<u32>;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if (id.x < count) {
                draws[id.x] = draw(cases[id.x].xy, cases[id.x].z);
            }
        }""",
        ("uniform", "read", "write"),
    )
    draws = put(np.zeros(len(cases), np.uint32))
    recorder = Recorder(device())
    recorder.call(kernel, (-(-len(cases) // 64),), [len(cases)], put(cases), draws)
    device().run(recorder.plan())
    wanted = [draw(int(low) | int(high) << 32, int(step)) for low, high, step, _ in cases]
    assert (get(draws, np.uint32) / 2**24).tolist() == wanted


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
    {"repetition_penalty": 5.0, "presence_penalty": 1.0, "recent": 0},
    {"logit_bias": {0: 9.0, 17: 12.5, 319: 11.0}, "repetition_penalty": 1.1},
    {"logit_bias": {3: 1e9, 5: 100.0, 6: -1e9}, "temperature": 2.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [320, 4096])
def test_same_token_as_the_reference(vocab: int, settings: dict[str, float]) -> None:
    rng = np.random.default_rng(vocab)
    for seed in (0, 1, 2**64 - 1, 0x123456789):
        logits = rng.normal(0, 4, vocab).astype(np.float32)
        check(logits, Sampling(**settings), history(rng, vocab), seed)


@pytest.mark.parametrize("settings", SETTINGS[::4], ids=str)
def test_the_whole_vocabulary(settings: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, 262144).astype(np.float32)
    check(logits, Sampling(**settings), history(rng, 262144), 7)


@pytest.mark.parametrize("spread", [5.0, 60.0, 1e5])
def test_softcap_comes_first(spread: float) -> None:
    rng = np.random.default_rng(4)
    logits = (spread * rng.normal(0, 1, 4096)).astype(np.float32)
    for seed in range(4):
        check(logits, Sampling(temperature=0.7), history(rng, 4096), seed, softcap=30.0)
    check(logits, Sampling(temperature=0), history(rng, 4096), 1, softcap=30.0)


@pytest.mark.parametrize("settings", [{"top_k": 0, "top_p": 1.0}, {"top_k": 64}, {"top_p": 0.5}])
@pytest.mark.parametrize("levels", [1, 3, 40])
@pytest.mark.parametrize("vocab", [320, 4096])
def test_ties_go_by_the_lowest_id(vocab: int, levels: int, settings: dict[str, float]) -> None:
    rng = np.random.default_rng(levels)
    logits = rng.integers(0, levels, vocab).astype(np.float32) / 4
    logits[::2] = np.where(logits[::2] == 0, np.float32(-0.0), logits[::2])
    for seed in range(6):
        check(logits, Sampling(**settings), [1, 2], seed)


def test_ties_across_the_whole_vocabulary() -> None:
    logits = np.ones(262144, np.float32)
    assert check(logits, Sampling(temperature=0), [], 0) == 0
    check(logits, Sampling(top_k=1000, top_p=1.0), [], 0)
    # All in one bin and all bytes of the logit the same: the most steps that `choose` can take.
    check(logits, Sampling(top_k=1 << 17, top_p=0.5), [], 0)


def test_tokens_at_the_lowest_are_never_drawn() -> None:
    logits = np.full(4096, LOWEST, np.float32)
    alive = [9, 2047, 2048, 4095]
    logits[alive] = [-100.0, -100.5, -101.0, -99.0]
    sampling = Sampling(temperature=100.0, top_k=0, top_p=1.0)
    chosen = {check(logits, sampling, [0, 1], seed) for seed in range(20)}
    assert chosen == set(alive)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_without_a_draw_both_plans_agree(settings: dict[str, float]) -> None:
    rng = np.random.default_rng(8)
    logits = rng.integers(-9, 9, 4096).astype(np.float32)
    sampling = Sampling(**{**settings, "temperature": 0.0})
    tokens = history(rng, 4096)
    assert check(logits, sampling, tokens, 1, greedy=True) == check(
        logits, sampling, tokens, 1, greedy=False
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_steps_follow_each_other_without_the_host(temperature: float) -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1, 320).astype(np.float32)
    sampling = Sampling(
        temperature=temperature, repetition_penalty=1.5, presence_penalty=0.3, recent=4, top_k=9
    )
    here = bench(320, 0.0)
    tokens = [1, 2, 2]
    here.begin(logits, sampling, tokens, 6)
    for _ in range(12):
        wanted = sample(own(logits), sampling, tokens, 6).token
        assert here.step(len(tokens), sampling.greedy).token == wanted
        tokens.append(wanted)
        assert get(here.ids, np.uint32)[0] == wanted
        assert get(here.state, np.uint32)[:2].tolist() == [len(tokens) - 1, 1]
    assert get(here.sampler.tokens, np.uint32)[: len(tokens)].tolist() == tokens


def test_the_last_token_of_the_context_has_a_place() -> None:
    logits = np.arange(320, dtype=np.float32)
    tokens = [7] * CONTEXT
    check(logits, Sampling(temperature=0, presence_penalty=900.0, recent=-1), tokens, 1)
    assert get(bench(320, 0.0).sampler.tokens, np.uint32)[CONTEXT] == 319


@pytest.mark.parametrize("vocab", [320, 262144])
def test_the_likeliest_tokens_are_the_models_own(vocab: int) -> None:
    rng = np.random.default_rng(12)
    logits = rng.normal(0, 4, vocab).astype(np.float32)
    logits[[vocab - 1, 11, 12]] = 40.0  # the best are equal
    sampling = Sampling(logit_bias={11: -50.0}, presence_penalty=9.0, top_logprobs=TOP_LOGPROBS)
    mine = own(logits).astype(np.float64)
    order = np.argsort(-mine, kind="stable")[:TOP_LOGPROBS]
    logprobs = mine - mine.max() - np.log(np.exp(mine - mine.max()).sum())
    for greedy in (False, True):
        found = bench(vocab, 0.0).sample(logits, sampling, [12], 1, greedy=greedy)
        assert [token for token, _ in found.top] == order.tolist()
        np.testing.assert_allclose([x for _, x in found.top], logprobs[order], atol=LOGPROB)
        fewer = bench(vocab, 0.0).sample(
            logits, replace(sampling, top_logprobs=3), [12], 1, greedy=greedy
        )
        assert fewer == found._replace(top=found.top[:3])


@pytest.mark.parametrize("alive", [(9,), (4095, 9, 2048), (3, 300, 9)], ids=str)
def test_impossible_tokens_are_not_among_the_likeliest(alive: tuple[int, ...]) -> None:
    logits = np.full(4096, LOWEST, np.float32)
    logits[list(alive)] = 7.0
    sampling = Sampling(top_logprobs=5, logit_bias={3: 1e9, 8: 1e9})
    possible = sorted(set(alive) - set(SUPPRESSED))
    for greedy in (False, True):
        found = bench(4096, 0.0).sample(logits, sampling, [1], 1, greedy=greedy)
        assert [token for token, _ in found.top] == possible
        assert found.top[0][1] == pytest.approx(-math.log(len(possible)), abs=LOGPROB)


def shares(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that stay, the likeliest first, and their probabilities, in float64 (no top_k)."""
    changed = penalise(own(logits), sampling, []).astype(np.float64)
    order = np.argsort(-changed, kind="stable")
    p = np.exp(changed[order] - changed.max())
    p /= p.sum()
    kept = (np.cumsum(p) - p < sampling.top_p) & (p >= sampling.min_p * p[0])
    share = p[kept] ** (1 / sampling.temperature)
    return order[kept], share / share.sum()


FLAT = [
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 8.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 1.0, "min_p": 0.01},
]


@pytest.mark.parametrize("settings", FLAT, ids=str)
def test_any_number_of_candidates_keeps_the_order(settings: dict[str, float]) -> None:
    rng = np.random.default_rng(13)
    logits = rng.normal(0, 1, 262144).astype(np.float32)
    sampling = Sampling(top_k=0, **settings)
    order, p = shares(logits, sampling)
    assert len(order) > 10000
    end = np.cumsum(p)
    for seed in range(3):
        token = bench(262144, 0.0).sample(logits, sampling, [4, 4], seed).token
        (place,) = np.flatnonzero(order == token)
        u = draw(seed, 2)
        assert end[place] - p[place] - QUANTILE <= u < end[place] + QUANTILE


def test_a_flat_distribution_is_drawn_evenly() -> None:
    """Counts over 16 groups of tokens, by id and likeliest first, by chi-square."""
    rng = np.random.default_rng(14)
    logits = rng.normal(0, 0.5, 4096).astype(np.float32)
    sampling = Sampling(top_k=0, top_p=0.95)
    order, p = shares(logits, sampling)
    here = bench(4096, 0.0)
    steps = Plan(here.plans[False, False].dispatches * RESULTS)
    tokens: list[int] = []
    for seed in range(24):
        here.begin(logits, sampling, [1] * RESULTS, seed)  # the results' ring begins anew
        device().run(steps)
        tokens += get(here.sampler.results, np.uint32)[:, 0, 0].tolist()
    probability = np.zeros(4096)
    probability[order] = p
    assert probability[tokens].min() > 0
    likeliest = np.argsort(-probability, kind="stable")
    for arranged in (np.arange(4096), likeliest):
        wanted = probability[arranged].reshape(16, -1).sum(1) * len(tokens)
        counts = np.bincount(np.argsort(arranged)[tokens] // 256, minlength=16)
        assert counts[wanted == 0].sum() == 0
        chi_square = ((counts - wanted) ** 2 / wanted.clip(1e-9)).sum()
        assert chi_square < 45  # 15 degrees of freedom: 1 in 10,000


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"logit_bias": dict.fromkeys(range(BIASES + 1), 1.0)}, "names 1025 tokens"),
        ({"logit_bias": {320: 1.0}}, "token 320; the last of this model is 319"),
    ],
    ids=["too many", "no such token"],
)
def test_biases_that_cannot_be_had(settings: dict[str, dict[int, float]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        bench(320, 0.0).sampler.set(Sampling(**settings), 1)


def test_sizes_that_cannot_be_had() -> None:
    with pytest.raises(InputError, match="at most"):
        GpuSampler(device(), 1 << 20, 8, (), 30.0)
    with pytest.raises(InputError, match="there is room for 201"):
        bench(320, 0.0).sampler.tell([1] * 202)


def test_nothing_but_nonsense_still_gives_a_token() -> None:
    logits = np.full(320, math.nan, np.float32)
    for greedy in (False, True):
        chosen = bench(320, 0.0).sample(logits, Sampling(top_logprobs=2), [1], 1, greedy=greedy)
        assert all(token < 320 for token in (chosen.token, *dict(chosen.top)))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000], ids=hex)
@pytest.mark.parametrize("places", [[0], [4095], [2047, 2048], range(4096)], ids=str)
def test_a_logit_that_is_no_number(places: Sequence[int], bits: int, greedy: bool) -> None:
    """NaN and infinity of both signs: the log-probability is one that cannot be."""
    logits = np.linspace(-90, 90, 4096).astype(np.float32)
    logits.view(np.uint32)[list(places)] = bits
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.1)
    for softcap in (0.0, 30.0):
        chosen = bench(4096, softcap).sample(logits, sampling, [0, 1], 7, greedy=greedy)
        assert chosen.logprob > IMPOSSIBLE
        assert 0 <= chosen.token < 4096
