"""Tokens that keep to a constraint: those of the reference, alone and beside others."""

import struct
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from helpers.pattern import Pattern
from helpers.sessions import SHORT, load_tiny, open_batch, open_tiny
from helpers.tiny import MOE

from webgemma.engine import speculation
from webgemma.engine.batching import Batch, Generation
from webgemma.engine.cpu import CpuEngine
from webgemma.errors import InputError
from webgemma.gemma.weights import Model
from webgemma.settings import Settings, resolve
from webgemma.sync import iterate_sync, run_sync

VOCAB = 320
GREEDY = resolve({"temperature": 0})
SAMPLED = resolve({"temperature": 1.5, "top_k": 0, "top_p": 1.0})
PENALISED = resolve(
    {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    | {"recent": 8, "logit_bias": {31: 2.0}, "top_logprobs": 3}
)
FEW, MANY = range(30, 34), range(30, 200)
PLACES: list[Sequence[int] | None] = [
    FEW,
    [50],
    [51],
    [52],
    MANY,
    None,
    [60],
    FEW,
    *([70 + i] for i in range(12)),
    FEW,
    MANY,
]
PROMPT = [2, 40, 41, 42, 43]
open_f32 = partial(open_batch, context=128, kv="f32")


def pattern(places: Sequence[Sequence[int] | None] = PLACES, *, forces: bool = True) -> Pattern:
    return Pattern(places, VOCAB, forces=forces)


def bits(tokens: Sequence[object]) -> list[object]:
    return [(t.token, struct.pack("<f", t.logprob), t.top) for t in tokens]  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=["software", "hardware"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    loaded = load_tiny(SHORT, request.param)
    yield loaded
    loaded.close()


def taken(generation: Generation, count: int) -> list[object]:
    tokens = []
    while len(tokens) < count and (token := run_sync(generation.next())) is not None:
        tokens.append(token)
    generation.leave()
    return tokens


def alone(
    model: Model, settings: Settings, constraint: Pattern | None, count: int, **options: str
) -> list[object]:
    batch, (session,) = open_f32(model, 1, **options)
    try:
        generation = run_sync(session.begin(PROMPT, settings, 7, (), constraint))
        return taken(generation, count)
    finally:
        batch.close()


def on_cpu(settings: Settings, constraint: Pattern, count: int) -> list[object]:
    gguf, config = open_tiny(SHORT)
    tokens = iterate_sync(CpuEngine(gguf, config).generate(PROMPT, settings, 7, (), constraint))
    return [token for token, _ in zip(tokens, range(count), strict=False)]


@pytest.mark.parametrize(
    "settings", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_tokens_are_those_of_the_reference(model: Model, settings: Settings) -> None:
    count = len(PLACES) + 1
    found = alone(model, settings, pattern(), count)
    expected = on_cpu(settings, pattern(), count)
    assert [t.token for t in found] == [t.token for t in expected]
    assert [t.logprob for t in found] == pytest.approx([t.logprob for t in expected], abs=1e-3)
    for token, place in zip(found, [*PLACES, [1]], strict=True):
        assert place is None or token.token in place
    assert [len(t.top) for t in found] == [settings["top_logprobs"]] * count


@pytest.mark.parametrize("precision", ["exact", "int16"])
@pytest.mark.parametrize("settings", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_forced_tokens_that_are_read_together(
    model: Model, settings: Settings, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as one by one."""
    count = len(PLACES) + 1
    together = alone(model, settings, pattern(), count, precision=precision)
    monkeypatch.setattr("webgemma.engine.batching.MAX_DRAFTS", 0)
    one_by_one = alone(model, settings, pattern(), count, precision=precision)
    assert bits(together) == bits(one_by_one)


def test_how_many_steps_forced_tokens_take(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    compute = Batch._compute

    async def counted(self: Batch, lines: list[object], kind: object) -> bool:
        lengths.extend(line.length for line in lines)  # type: ignore[attr-defined]
        return await compute(self, lines, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "_compute", counted)
    alone(model, GREEDY, pattern(), len(PLACES))
    # The first of a run is chosen from logits that are there; the others are drafts of the next.
    assert max(lengths) == 9
    assert len(lengths) < len(PLACES)


@pytest.mark.parametrize("precision", ["exact", "int16"])
def test_beside_others_with_other_constraints_and_none(model: Model, precision: str) -> None:
    count = 14
    cases = [
        (GREEDY, PLACES),
        (SAMPLED, None),
        (PENALISED, [MANY, [50], [51], [52], [53], *[MANY] * 12]),
        (SAMPLED, [None, None, FEW, [60], [61], *[FEW] * 12]),
        (GREEDY, None),
    ]
    expected = [
        bits(alone(model, s, places and pattern(places), count, precision=precision))
        for s, places in cases
    ]
    batch, sessions = open_f32(model, len(cases), precision)
    generations = [
        run_sync(session.begin(PROMPT, s, 7, (), places and pattern(places)))
        for session, (s, places) in zip(sessions, cases, strict=True)
    ]
    found: list[list[object]] = [[] for _ in cases]
    for _ in range(count):
        for tokens, generation in zip(found, generations, strict=True):
            tokens.append(run_sync(generation.next()))
    assert [bits(tokens) for tokens in found] == expected
    batch.close()


# Now and then what was looked up may not come: few tokens, other ones, and one that is forced.
REPEATED: list[Sequence[int] | None] = [
    *[MANY] * 9,
    FEW,
    *[None] * 6,
    [50],
    [51],
    *[MANY] * 8,
    range(100, 200),
    *[MANY] * 30,
]
REPEATING = [2, *[40, 41, 42, 43] * 5]


def look_up(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Let every step have so many drafts that are looked up, whether or not they pay."""
    monkeypatch.setattr(speculation, "best_looked_up", lambda *_: drafts)


def counted(
    model: Model, settings: Settings, count: int, precision: str = "exact"
) -> tuple[list[object], speculation.DraftCounts]:
    """Return the tokens of a conversation that repeats itself, and what became of its drafts."""
    batch, (session,) = open_f32(model, 1, precision=precision)
    generation = run_sync(session.begin(REPEATING, settings, 3, (), pattern(REPEATED)))
    tokens = taken(generation, count)
    batch.close()
    return tokens, generation.speculation.counts


@pytest.mark.parametrize("precision", ["exact", "int16"])
@pytest.mark.parametrize("settings", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_tokens_are_the_same_with_drafts_that_are_looked_up(
    model: Model, settings: Settings, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings is PENALISED:  # it repeats no pair of tokens

        def likely(_: object, __: object, count: int) -> list[int]:
            return [31] * count  # which is right now and then

        monkeypatch.setattr(speculation.Repetition, "following", likely)
    look_up(monkeypatch, 0)
    expected, _ = counted(model, settings, 50, precision)
    for drafts in (1, 3, 7):
        look_up(monkeypatch, drafts)
        found, counts = counted(model, settings, 50, precision)
        assert bits(found) == bits(expected), drafts
        assert counts.checked > 0


def test_drafts_that_are_looked_up_beside_others(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(GREEDY, REPEATED), (SAMPLED, None), (PENALISED, PLACES)]

    def together(drafts: int) -> list[object]:
        look_up(monkeypatch, drafts)
        batch, sessions = open_f32(model, len(cases))
        generations = [
            run_sync(session.begin(REPEATING, s, 7, (), places and pattern(places)))
            for session, (s, places) in zip(sessions, cases, strict=True)
        ]
        found: list[list[object]] = [[] for _ in cases]
        for _ in range(20):
            for tokens, generation in zip(found, generations, strict=True):
                tokens.append(run_sync(generation.next()))
        assert any(each.speculation.counts.checked for each in generations) == (drafts > 0)
        batch.close()
        return [bits(tokens) for tokens in found]

    assert together(1) == together(0)


def test_fewer_steps_where_a_constrained_text_repeats(model: Model) -> None:
    """By what is expected of the costs; each step has as many drafts as pay."""
    likely = resolve({"temperature": 0, "logit_bias": {55: 1e6}})
    batch, (session,) = open_f32(model, 1)
    generation = run_sync(session.begin(REPEATING, likely, 3, (), pattern([MANY] * 100)))
    assert {t.token for t in taken(generation, 100)} == {55}  # type: ignore[attr-defined]
    batch.close()
    counts = generation.speculation.counts
    assert counts.remained == counts.checked > 60


def test_joining_late_and_leaving_early(model: Model) -> None:
    """Whoever remains goes on as before; without constraints steps are submitted ahead again."""
    batch, (first, second, third) = open_f32(model, 3)
    free = bits(alone(model, SAMPLED, None, 20))
    held = bits(alone(model, GREEDY, pattern(), 8))
    one = run_sync(first.begin(PROMPT, SAMPLED, 7))
    tokens = [run_sync(one.next()) for _ in range(4)]
    two = run_sync(second.begin(PROMPT, GREEDY, 7, (), pattern()))
    others = [run_sync(two.next()) for _ in range(5)]
    tokens += [run_sync(one.next()) for _ in range(3)]
    three = run_sync(third.begin(PROMPT, GREEDY, 7, (), pattern()))
    others += [run_sync(two.next()) for _ in range(3)]
    assert bits(others) == held
    two.leave()
    assert bits(taken(three, 8)) == held
    tokens += [run_sync(one.next()) for _ in range(13)]
    assert bits(tokens) == free
    assert len(batch._steps) == 2
    batch.close()


def test_growing_in_the_middle(model: Model) -> None:
    expected = bits(alone(model, GREEDY, pattern(), 16))
    batch, sessions = open_f32(model, 2)
    generation = run_sync(sessions[0].begin(PROMPT, GREEDY, 7, (), pattern()))
    tokens = [run_sync(generation.next()) for _ in range(7)]
    run_sync(batch.grow(4, sessions))
    tokens += [run_sync(generation.next()) for _ in range(9)]
    assert bits(tokens) == expected
    batch.close()


def test_a_conversation_goes_on_after_forced_tokens(model: Model) -> None:
    """What the cache holds of them is what reading them would leave."""
    batch, (session, other) = open_f32(model, 2)
    tokens = taken(run_sync(session.begin(PROMPT, GREEDY, 7, (), pattern())), 18)
    ids = [*PROMPT, *(t.token for t in tokens), 44, 45]  # type: ignore[attr-defined]
    again = run_sync(session.begin(ids, GREEDY, 7))
    assert again.cached >= len(PROMPT) + 17
    anew = run_sync(other.begin(ids, GREEDY, 7))
    assert [t.token for t in taken(again, 6)] == [t.token for t in taken(anew, 6)]  # type: ignore[attr-defined]
    batch.close()


@pytest.mark.parametrize("context", [16, 17, 18, 20])
def test_the_context_ends_among_forced_tokens(model: Model, context: int) -> None:
    batch, (session,) = open_f32(model, 1, context=context)
    generation = run_sync(session.begin(PROMPT, GREEDY, 7, (), pattern()))
    tokens = taken(generation, 100)
    assert len(PROMPT) + len(tokens) == context
    expected = alone(model, GREEDY, pattern(), len(tokens))
    assert [t.token for t in tokens] == [t.token for t in expected]  # type: ignore[attr-defined]
    batch.close()


class Failing(Pattern):
    """Fails at its third mask."""

    def mask(self) -> bytes | None:
        if len(self.accepted) == 3:
            raise InputError("There is no mask.")
        return super().mask()


def test_a_constraint_that_fails_ends_its_generation_only(model: Model) -> None:
    batch, (first, second) = open_f32(model, 2)
    failing = Failing([MANY] * 20, VOCAB)
    one = run_sync(first.begin(PROMPT, GREEDY, 7, (), failing))
    two = run_sync(second.begin(PROMPT, GREEDY, 7, (), pattern()))
    found = [run_sync(one.next()).token for _ in range(3)]
    assert len(found) == 3
    with pytest.raises(InputError, match="no mask"):
        run_sync(one.next())
    assert bits(taken(two, 12)) == bits(alone(model, GREEDY, pattern(), 12))
    batch.close()


def test_experts_and_forced_tokens() -> None:
    model = load_tiny(MOE, "software")
    found = alone(model, SAMPLED, pattern(), 20)
    expected = alone(model, SAMPLED, pattern(forces=False), 20)
    assert bits(found) == bits(expected)
    model.close()


def test_a_mask_of_another_length_is_refused(model: Model) -> None:
    batch, (session,) = open_f32(model, 1)
    with pytest.raises(InputError, match="needs 40"):
        session.sampler.set_mask(0, bytes(36))
    batch.close()
