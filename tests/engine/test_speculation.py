"""Speculation: the same bits with drafts as without, in fewer steps, and only where it pays."""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from helpers.gpu import device, get
from helpers.sessions import SHORT, load_tiny, open_batch
from helpers.tiny import GEMMA3, LARGE, MOE, Tiny

from webgemma.engine import batching, speculation
from webgemma.engine.batching import STEPS_AHEAD, Generation
from webgemma.engine.speculation import (
    LOOKUP,
    MTP,
    Repetition,
    Speculation,
    StepCosts,
    StepSize,
    best_drafts,
    choose_drafts,
)
from webgemma.gemma.gpu_sampler import MAX_DRAFTS, MAX_SLOTS, Conversations, GpuSampler, Row
from webgemma.gemma.weights import Model
from webgemma.graph import BufferPool, Recorder
from webgemma.settings import Settings, resolve
from webgemma.sync import run_sync

GREEDY = resolve({"temperature": 0})
SAMPLED = resolve({"temperature": 1.2, "top_k": 0, "top_p": 1.0})
PENALISED = resolve(
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "recent": 12}
    | {"logit_bias": {31: 3.0, 60: -2.0}, "top_logprobs": 2}
)
REPEATING = [2, *[40, 41, 42, 43] * 5]


@pytest.fixture(scope="module", params=["software", "hardware"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    loaded = load_tiny(SHORT, request.param)
    yield loaded
    loaded.close()


def bits(tokens: Sequence[object]) -> list[object]:
    return [(t.token, struct.pack("<f", t.logprob), t.top) for t in tokens]  # type: ignore[attr-defined]


def taken(generation: Generation, count: int) -> list[object]:
    tokens = []
    while len(tokens) < count and (token := run_sync(generation.next())) is not None:
        tokens.append(token)
    generation.leave()
    return tokens


def always(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Let every step have so many drafts, whether or not they pay."""
    chosen = ("lookup", drafts) if drafts else ("", 0)
    monkeypatch.setattr(batching, "choose_drafts", lambda *_: chosen)  # of batches made from now on


def written(
    model: Model, settings: Settings, count: int, precision: str = "exact"
) -> tuple[list[object], Speculation]:
    batch, (session,) = open_batch(model, precision=precision)
    generation = run_sync(session.begin(REPEATING, settings, 3))
    tokens = taken(generation, count)
    batch.close()
    return tokens, generation.speculation


@pytest.mark.parametrize("precision", ["exact", "int16"])
@pytest.mark.parametrize(
    "settings", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_tokens_are_the_same_with_drafts(
    model: Model, settings: Settings, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, 0)
    expected, _ = written(model, settings, 60, precision)
    for drafts in (1, 3, 7):
        always(monkeypatch, drafts)
        found, speculated = written(model, settings, 60, precision)
        assert bits(found) == bits(expected), drafts
        assert speculated.counts.checked > 0
    if settings is GREEDY:  # a tiny network repeats itself
        assert speculated.counts.remained > 0


@pytest.mark.parametrize("tiny", [LARGE, MOE, GEMMA3], ids=["keys are values", "experts", "gemma3"])
def test_other_models(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny(tiny)
    always(monkeypatch, 0)
    expected, _ = written(model, SAMPLED, 40)
    always(monkeypatch, 3)
    assert bits(written(model, SAMPLED, 40)[0]) == bits(expected)
    model.close()


def test_several_conversations(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [REPEATING, [2, 50, 51, 50, 51, 50], [2, 60, 61, 62]]
    cases = list(zip(prompts, [GREEDY, SAMPLED, PENALISED], strict=True))

    def together(drafts: int) -> list[object]:
        always(monkeypatch, drafts)
        batch, sessions = open_batch(model, len(cases))
        generations = [
            run_sync(session.begin(ids, settings, 3))
            for session, (ids, settings) in zip(sessions, cases, strict=True)
        ]
        found: list[list[object]] = [[] for _ in cases]
        for _ in range(30):
            for tokens, generation in zip(found, generations, strict=True):
                tokens.append(run_sync(generation.next()))
        batch.close()
        return [bits(tokens) for tokens in found]

    assert together(1) == together(0)


def test_joining_and_leaving(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, 0)
    expected = bits(written(model, GREEDY, 50)[0])
    always(monkeypatch, 3)
    batch, (first, second) = open_batch(model, 2)
    one = run_sync(first.begin(REPEATING, GREEDY, 3))
    tokens = [run_sync(one.next()) for _ in range(9)]
    two = run_sync(second.begin(REPEATING, GREEDY, 3))
    others = [run_sync(two.next()) for _ in range(5)]
    tokens += [run_sync(one.next()) for _ in range(20)]
    two.leave()
    tokens += [run_sync(one.next()) for _ in range(21)]
    assert bits(tokens) == expected
    assert bits(others) == expected[:5]
    # What remains of a conversation is what reading it leaves.
    ids = REPEATING + [t.token for t in tokens]  # type: ignore[union-attr]
    one.leave()
    again = run_sync(first.begin([*ids, 44], GREEDY, 3))
    assert again.cached >= len(ids) - 1
    anew = run_sync(second.begin([*ids, 44], GREEDY, 3))
    assert [t.token for t in taken(again, 5)] == [t.token for t in taken(anew, 5)]  # type: ignore[attr-defined]
    batch.close()


@pytest.mark.parametrize("context", [30, 31, 33, 37])
def test_the_context_ends(model: Model, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for drafts in (0, 7):
        always(monkeypatch, drafts)
        batch, (session,) = open_batch(model, context=context)
        found.append(bits(taken(run_sync(session.begin(REPEATING, GREEDY, 3)), 100)))
        batch.close()
    assert found[0] == found[1]
    assert len(found[0]) == context - len(REPEATING)


# Drafts from the conversation


def lookup(tokens: list[int], drafts: int = 4) -> list[int]:
    """Return the drafts of the device for a conversation, in the second of two slots."""
    memory = BufferPool(device())
    table = Conversations(device(), memory)
    sampler = GpuSampler(device(), 320, 100, (), 0.0, 2)
    sampler.set_history(tokens, 1)
    table.set_next(1, len(tokens) - 1, tokens[-1])
    table.set_rows([Row(1, ahead) for ahead in range(drafts + 1)])
    recorder = Recorder(device())
    sampler.lookup_drafts(recorder, table.tensor, 8, drafts + 1)
    device().run(recorder.plan())
    first = 4 + 3 * MAX_SLOTS + MAX_DRAFTS
    found = get(table.tensor, np.uint32)[first : first + drafts].tolist()
    sampler.close()
    memory.close()
    return found


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([2, 5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),
        ([2, 5, 6, 7, 8, 1, 5, 6, 3, 4, 0, 5, 6], [3, 4, 0, 5]),  # the latest
        ([2, 4, 5, 6, 7, 8, 5, 6, 3, 9, 4, 5, 6], [7, 8, 5, 6]),  # the longest
        ([2, 7, 7, 7], [7, 7, 7, 7]),
        ([2, 5, 6, 5, 6], [5, 6, 5, 6]),  # over again where the text ends
        ([2, 5, 6, 7], [7, 7, 7, 7]),  # nowhere: the last token
        ([2], [2, 2, 2, 2]),
    ],
)
def test_what_followed_the_last_tokens_before(tokens: list[int], drafts: list[int]) -> None:
    assert lookup(tokens) == drafts


def test_a_long_conversation() -> None:
    rng = np.random.default_rng(5)
    text = rng.integers(10, 300, 60).tolist()
    assert lookup([2, *text, 9, *text[:17]], 7) == text[17:24]


# Whether it pays


def costs(each: float = 0.07, drafter: str = LOOKUP) -> StepCosts:
    """Return measured costs of one conversation: a step takes 1 s, and so much for each draft."""
    found = StepCosts()
    found.note(StepSize(1), 1.0)
    for drafts in range(1, speculation.MOST_ROWS):
        found.note(StepSize(1 + drafts, drafter, drafts), 1.0 + each * drafts)
    return found


def test_as_many_drafts_as_pay() -> None:
    cheap = costs()
    assert best_drafts([0.9], 7, cheap, LOOKUP)[0] == 7
    assert best_drafts([0.5], 7, cheap, LOOKUP)[0] == 3
    assert best_drafts([0.05], 7, cheap, LOOKUP) == (0, 1.0)
    assert best_drafts([0.9], 2, cheap, LOOKUP)[0] == 2
    drafts, rate = best_drafts([1.0], 7, cheap, LOOKUP)
    assert (drafts, rate) == (7, 8 / 1.49)
    dear = costs(0.9)
    assert best_drafts([0.9], 7, dear, LOOKUP)[0] == 0
    assert best_drafts([1.0] * 5, 7, dear, LOOKUP)[0] == 0  # there are no rows left


def test_costs_that_are_not_measured_are_estimated() -> None:
    unknown, one, four = StepCosts(), StepSize(1), StepSize(4, LOOKUP, 3)
    assert unknown.relative(one, one) == 1
    assert unknown.relative(four, one) == 1 + 3 * speculation.ROW_COST
    drafted = StepSize(4, MTP, 3)
    assert unknown.relative(drafted, one) > unknown.relative(four, one)
    unknown.note(one, 2.0)
    assert unknown.knows(one)
    assert not unknown.knows(four)
    unknown.note(four, 3.0)
    assert unknown.relative(four, one) == 1.5
    for _ in range(100):
        unknown.note(four, 30.0)  # waiting for somebody
    assert unknown.relative(four, one) > 2


def test_a_conversation_that_repeats_itself_is_noticed() -> None:
    text = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    repetition = Repetition([2, *text, 9])
    for token in text:
        repetition.read(token)
    assert repetition.share.value > 0.6
    for token in range(100, 160):
        repetition.read(token)
    assert repetition.share.value == 0
    assert Repetition([2]).share.value == 0


def test_it_begins_and_ends_by_itself() -> None:
    text = list(range(11, 60))
    speculated = Speculation("auto", 7, [2, *text, 9])
    cheap = costs()
    assert choose_drafts([speculated], cheap) == ("", 0)  # nothing is known yet
    for token in text[:12]:
        speculated.read(token)
    assert choose_drafts([speculated], StepCosts()) == ("", 0)  # nor how long a step takes
    assert choose_drafts([speculated], cheap) == (LOOKUP, 7)
    assert choose_drafts([speculated, Speculation("auto", 7, [2, *text, 9])], cheap) == ("", 0)
    for _ in range(speculation.RECENT):
        speculated.note(LOOKUP, 7, 0)
    assert choose_drafts([speculated], cheap) == ("", 0)
    assert choose_drafts([Speculation("off", 7, [2, *text])], cheap) == ("", 0)


@pytest.mark.parametrize(
    ("most", "numbers"), [(7, [1, 3, 7]), (5, [1, 3, 5]), (3, [1, 3]), (2, [1, 2]), (1, [1])]
)
def test_drafts_have_few_numbers(most: int, numbers: list[int]) -> None:
    """Each needs kernels of its own; what was asked for is one of them."""
    assert speculation.drafts_per_step(most) == numbers
    assert speculation.drafts_per_step(0) == speculation.drafts_per_step(-1) == []


def times(*seconds: float) -> list[float]:
    """Return the times of steps with 1 to 7 drafts: these, then a straight line."""
    more = seconds[-1] - seconds[-2]
    return [*seconds, *(seconds[-1] + more * each for each in range(1, 8 - len(seconds)))]


SLOW = times(1.43, 1.82, 1.95, 2.2, 2.43)  # E2B on an H200
FAST = times(1.07, 1.14)


def gain(seconds: Sequence[float], share: float, count: int) -> tuple[float, list[int]]:
    """Return how much faster so many tokens come with a drafter, and which of them had drafts.

    So large a share of its drafts is right. Steps are chosen before the last ones have ended; the
    cost of one is known where two of a size follow each other."""
    random = Random(3)
    known = StepCosts()
    known.note(StepSize(1), 1.0)
    speculated = Speculation("auto", 7, [2, 3], (LOOKUP, MTP))
    passed, token, last, drafted = 0.0, 0, StepSize(1), []
    steps = deque[StepSize]()
    while token < count:
        while len(steps) <= STEPS_AHEAD:
            name, drafts = choose_drafts([speculated], known)
            assert name in ("", MTP)
            steps.append(StepSize(1 + drafts, name, drafts))
        size = steps.popleft()
        took = seconds[size.drafts - 1] if size.drafts else 1.0
        right = 0
        if size.drafts:
            drafted.append(token)
            while right < size.drafts and random.random() < share:
                right += 1
            speculated.note(MTP, size.drafts, right)
        if size == last:
            known.note(size, took)
        passed, last = passed + took, size
        for each in range(1 + right):
            speculated.read(100 + token + each)
        token += 1 + right
    return token / passed, drafted


@pytest.mark.parametrize("seconds", [SLOW, FAST, times(1.3, 1.6)], ids=["slow", "fast", "between"])
@pytest.mark.parametrize("count", [128, 384, 2000])
def test_a_drafter_costs_little_where_it_is_never_right(
    seconds: Sequence[float], count: int
) -> None:
    assert gain(seconds, 0.0, count)[0] > 0.98


def test_a_drafter_is_given_up_for_longer_and_longer() -> None:
    _, drafted = gain(SLOW, 0.0, 3000)
    assert drafted[: 2 + STEPS_AHEAD] == [*range(2 + STEPS_AHEAD)]  # two, and those under way
    pauses = [after - at for at, after in pairwise(drafted) if after - at > 1]
    assert pauses == sorted(pauses)
    assert pauses[0] >= speculation.PATIENCE


@pytest.mark.parametrize(
    ("seconds", "share", "best"), [(SLOW, 0.9, 1.9), (FAST, 0.5, 1.55), (FAST, 0.9, 3.8)]
)
def test_a_drafter_pays(seconds: Sequence[float], share: float, best: float) -> None:
    assert gain(seconds, share, 1000)[0] > 0.93 * best


def test_drafts_can_be_chosen() -> None:
    drafters, cheap = (LOOKUP, MTP), costs(drafter=MTP)
    for kind, expected in (("lookup", ("", 0)), ("mtp", (MTP, 1)), ("off", ("", 0))):
        speculated = Speculation(kind, 3, [2, 3], drafters)
        assert choose_drafts([speculated], cheap) == expected
        for _ in range(2):  # from then on it is known what becomes of drafts
            speculated.note(MTP, 1, 1)
        assert choose_drafts([speculated], cheap) == (expected[0], 3 * expected[1])


def test_fewer_steps_where_a_text_repeats(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "relative", lambda _, step, __: step.rows**0.1)
    monkeypatch.setattr(StepCosts, "knows", lambda *_: True)
    tokens, speculated = written(model, resolve({"temperature": 0, "logit_bias": {55: 1e6}}), 120)
    assert {t.token for t in tokens} == {55}  # type: ignore[attr-defined]
    assert speculated.counts.remained > 90
    assert speculated.counts.remained == speculated.counts.checked
