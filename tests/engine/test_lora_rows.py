"""Adapters of single conversations: computed together, each gives the bits that it gives alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpu import device, hardware, put
from helpers.sessions import SHORT, open_tiny
from helpers.tiny import MIXED, MOE, Tiny
from helpers.tiny_adapter import ENDS, EXPERTS, LAYER, tiny_adapter, tiny_pairs

from webgemma.engine import batching
from webgemma.engine.batching import Batch, Generation
from webgemma.engine.plans import Plans
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.errors import InputError
from webgemma.gemma.lora_weights import NO_CHOICE, Choice, ScaledAdapter
from webgemma.gemma.soft_tokens import SoftTokens
from webgemma.gemma.weights import Model
from webgemma.settings import resolve
from webgemma.sync import run_sync

KINDS: dict[str, Tiny] = {
    "dense": SHORT,
    "mixed formats": replace(MIXED, pattern="sf"),
    "moe": replace(MOE, pattern="sf"),
}
SETTINGS = [
    resolve({"temperature": 0.0, "top_logprobs": 2}),
    resolve({"temperature": 1.3, "top_k": 0, "top_p": 1.0}),
]
# With these scales the adapters are attached; a conversation chooses them with factors.
SCALES = {"one": 1.0, "two": 0.5}
CHOICES: list[Choice] = [{}, {"one": 1.0}, {"two": 1.0}, {"one": 0.25, "two": -1.5}]
TOKENS = 5

Said = list[object]


def prompt(number: int) -> list[int]:
    return [2, *(24 + (number * 31 + at * 7) % 200 for at in range(20 - number))]


def adapters(kind: str, first: tuple[str, ...] = (*LAYER, *ENDS)) -> Mapping[str, ScaledAdapter]:
    """Return two adapters, of which the second changes fewer matrices, with another rank."""
    gguf, _ = open_tiny(KINDS[kind])
    one = tiny_pairs(gguf, first, strength=0.2)
    two = tiny_pairs(gguf, ("attn_k", "ffn_up", "proj", *ENDS), seed=2, rank=6, strength=0.2)
    pairs = {"one": tiny_adapter(one).pairs, "two": tiny_adapter(two).pairs}
    return {name: (pairs[name], scale) for name, scale in SCALES.items()}


def load(kind: str, divided: str = "software") -> Model:
    gguf, config = open_tiny(KINDS[kind])
    return run_sync(Model.load(gguf, config, device() if divided == "software" else hardware()))


def open_batch(model: Model, **options: Any) -> tuple[Batch, list[Session]]:
    batch = Batch(Slots(model, 128, count=len(CHOICES), **options))
    return batch, [Session.in_slot(batch, index) for index in range(len(CHOICES))]


def begin(session: Session, number: int, choice: Choice, **options: Any) -> Generation:
    settings = SETTINGS[number % len(SETTINGS)]
    return run_sync(session.begin(prompt(number), settings, number, choice=choice, **options))


def results(generations: list[Generation], count: int = TOKENS) -> list[Said]:
    """Return tokens, the bits of their log-probabilities and the likeliest of each; end them."""
    found: list[Said] = [[] for _ in generations]
    for _ in range(count):
        for mine, generation in zip(found, generations, strict=True):
            sampled = run_sync(generation.next())
            assert sampled is not None
            mine.append((sampled.token, np.float32(sampled.logprob).tobytes(), sampled.top))
    for generation in generations:
        generation.leave()
    return found


def tokens(said: Said) -> list[int]:
    """Return the tokens alone: a prompt of which a part is cached is rounded in another way."""
    return [token for token, *_ in said]  # type: ignore[misc]


def alone(sessions: list[Session], number: int, choice: Choice = NO_CHOICE) -> Said:
    """Return what a conversation says while there is no other."""
    sessions[0].rewind(0)
    return results([begin(sessions[0], number, choice)])[0]


def together(sessions: list[Session]) -> list[Said]:
    """Return what conversations with all the choices say side by side."""
    for session in sessions:
        session.rewind(0)
    order = enumerate(zip(reversed(sessions), CHOICES, strict=True))
    return results([begin(session, number, choice) for number, (session, choice) in order])


@pytest.fixture(scope="module")
def attached() -> Iterator[Model]:
    model = load("dense")
    model.set_adapters(named=adapters("dense"))
    yield model
    model.close()


@pytest.mark.parametrize(
    ("kind", "precision", "divided"),
    [
        ("dense", "exact", "software"),
        ("dense", "int16", "software"),
        ("dense", "exact", "hardware"),
        ("dense", "int16", "hardware"),
        ("mixed formats", "exact", "hardware"),
        ("mixed formats", "int16", "hardware"),
        ("moe", "exact", "software"),
        ("moe", "int16", "hardware"),
    ],
)
def test_each_computes_what_it_would_alone(kind: str, precision: str, divided: str) -> None:
    """Alone on a model that has no other adapters than its own, or none at all."""
    model, named, expected = load(kind, divided), adapters(kind), []
    batch, sessions = open_batch(model, precision=precision)
    for number, choice in enumerate(CHOICES):
        always = [(named[name][0], named[name][1] * factor) for name, factor in choice.items()]
        model.set_adapters(always)
        expected.append(alone(sessions, number))
    assert len({str(said) for said in expected}) == len(CHOICES)
    model.set_adapters([], named)
    assert together(sessions) == expected
    assert [alone(sessions, *case) for case in enumerate(CHOICES)] == expected
    batch.close()
    model.close()


def test_without_adapters_is_not_what_it_is_with_them(attached: Model) -> None:
    batch, sessions = open_batch(attached)
    first = [alone(sessions, 0, choice) for choice in CHOICES]
    assert len({str(said) for said in first}) == len(CHOICES)
    batch.close()


def test_joining_and_leaving_record_nothing_anew(
    attached: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, sessions = open_batch(attached, precision="int16")
    expected = together(sessions)
    assert alone(sessions, 0)  # the plans of a single conversation, without adapters
    recorded, record = list[object](), Plans.record

    def recording(plans: Plans, *arguments: Any) -> None:
        recorded.append(arguments[-1])
        record(plans, *arguments)

    monkeypatch.setattr(Plans, "record", recording)
    written = attached.device.nbytes
    assert together(sessions) == expected
    for session in sessions:
        session.rewind(0)
    # One leaves, and another one with other adapters joins in its slot.
    first = [begin(sessions[at], at, CHOICES[at]) for at in (0, 1, 2)]
    run_sync(first[1].next())
    first[1].leave()
    last = begin(sessions[1], 3, CHOICES[3])
    found = results([first[0], last, first[2]])
    assert found == [expected[0], expected[3], expected[2]]
    keys = {(key.kind, key.rows) for key in recorded}  # type: ignore[attr-defined]
    assert keys <= {("decode", 1), ("decode", 2)}  # rows that there had not been before
    assert attached.device.nbytes - written < 1 << 22
    batch.close()


def test_a_step_is_adapted_only_if_one_of_its_rows_is(
    attached: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, sessions = open_batch(attached)
    keys, compiled = list[Any](), batch.slots.plans.compiled

    async def compiling(key: Any) -> Any:
        keys.append(key)
        return await compiled(key)

    monkeypatch.setattr(batch.slots.plans, "compiled", compiling)
    alone(sessions, 0)
    assert {key.adapted for key in keys} == {False}
    keys.clear()
    alone(sessions, 0, {"two": 1.0})
    assert {key.adapted for key in keys} == {True}
    keys.clear()
    together(sessions)
    adapted = {(key.kind, key.rows, key.adapted) for key in keys}
    assert {("read", 32, False), ("read", 32, True), ("decode", 4, True)} <= adapted
    assert ("decode", 4, False) not in adapted
    batch.close()


def test_what_other_adapters_have_read_is_read_again(attached: Model) -> None:
    batch, sessions = open_batch(attached)
    ids, session = prompt(0), sessions[0]
    expected = {str(choice): tokens(alone(sessions, 0, choice)) for choice in CHOICES}
    session.rewind(0)
    for choice, cached in [
        *((CHOICES[0], 0), (CHOICES[0], len(ids) - 1), (CHOICES[1], 0), (CHOICES[2], 0)),
        *((CHOICES[2], len(ids) - 1), ({"two": 0.5}, 0), (CHOICES[0], 0)),
    ]:
        generation = begin(session, 0, choice)
        assert generation.cached == cached, choice
        found = tokens(results([generation])[0])
        assert found == expected.get(str(choice), found)
        assert session.reusable(ids, (), choice) == len(ids) - 1
        assert session.reusable(ids, (), {"one": 0.5}) == 0
    batch.close()


def test_a_slot_that_has_not_followed_new_adapters_is_not_reused(attached: Model) -> None:
    batch, sessions = open_batch(attached)
    first = alone(sessions, 0, {"one": 1.0})
    attached.set_adapters([], adapters("dense"))  # the same, but who knows
    assert sessions[0].reusable(prompt(0), (), {"one": 1.0}) == 0
    assert alone(sessions, 0, {"one": 1.0}) == first
    batch.close()


def test_drafts_apply_the_adapters_of_their_conversation(
    attached: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, sessions = open_batch(attached, precision="int16")
    expected = together(sessions)
    batch.close()
    monkeypatch.setattr(batching, "choose_drafts", lambda *_: ("lookup", 3))
    batch, sessions = open_batch(attached, precision="int16")
    assert together(sessions) == expected
    batch.close()


def test_soft_tokens_apply_the_adapters_of_their_conversation(attached: Model) -> None:
    rows = np.random.default_rng(1).standard_normal((6, attached.config.width), np.float32)
    soft = [SoftTokens(5, put(rows), 7)]
    batch, sessions = open_batch(attached)
    found = [
        results([begin(session, 0, choice, soft=soft)])[0]
        for session, choice in zip(sessions, CHOICES, strict=True)
    ]
    assert len({str(said) for said in found}) == len(CHOICES)
    again = [
        begin(session, 0, choice, soft=soft)
        for session, choice in zip(reversed(sessions), CHOICES, strict=True)
    ]
    assert results(again) == found
    batch.close()


def test_adapters_of_experts_beside_none() -> None:
    """Their products are sorted by expert: a conversation without them is close to that alone."""
    model = load("moe")
    batch, sessions = open_batch(model, precision="exact", kv="f32")
    plain = alone(sessions, 0)
    model.set_adapters([], adapters("moe", (*EXPERTS, "attn_q")))
    expected = [alone(sessions, *case) for case in enumerate(CHOICES)]
    assert together(sessions) == expected
    for (token, bits, _), (other, other_bits, _) in zip(plain, expected[0], strict=True):  # type: ignore[misc]
        assert token == other
        assert np.frombuffer(bits, "<f4") == pytest.approx(np.frombuffer(other_bits, "<f4"), 1e-4)
    batch.close()
    model.close()


def test_a_session_is_saved_with_its_choice(attached: Model, tmp_path: Path) -> None:
    session = Session(attached, 128)
    choice = {"one": 0.5}
    expected = results([begin(session, 0, choice)])[0]
    run_sync(session.save(tmp_path / "saved"))
    restored = run_sync(Session.restore(attached, tmp_path / "saved"))
    assert restored.reusable(prompt(0), (), choice) == len(prompt(0)) - 1
    assert restored.reusable(prompt(0), ()) == 0
    assert tokens(results([begin(restored, 0, choice)])[0]) == tokens(expected)
    fork = restored.fork()
    assert begin(fork, 0, choice).cached == len(prompt(0)) - 1
    named = adapters("dense")
    attached.set_adapters([], {"other": named["one"]})
    with pytest.raises(InputError, match="belongs to another model"):
        run_sync(restored.load(tmp_path / "saved"))
    attached.set_adapters([], named)
    run_sync(restored.load(tmp_path / "saved"))
    for each in (fork, restored, session):
        each.close()


def test_choices_that_cannot_be_applied(attached: Model) -> None:
    session = Session(attached, 128)
    with pytest.raises(InputError, match="no adapter 'three'; those attached: one, two"):
        begin(session, 0, {"three": 1.0})
    with pytest.raises(InputError, match="too large for float32"):
        begin(session, 0, {"one": 1e300})
    assert results([begin(session, 0, {})])
    session.close()
