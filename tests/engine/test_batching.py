"""Conversations that decode together: each is computed bit for bit as if it were alone."""

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.gpu import device, hardware
from helpers.sessions import IDS, SHORT, open_tiny, reference, take
from helpers.tiny import GEMMA3, MIXED, MOE, Tiny

from webgemma.engine.batching import MOST_UNREAD, Batch, Generation
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.record import matmul, tiling
from webgemma.gemma.weights import Model
from webgemma.settings import Settings, resolve
from webgemma.sync import run_sync

SETTINGS = [
    resolve({"temperature": 0.0}),
    resolve({"temperature": 1.3, "top_k": 0, "top_p": 1.0}),
    resolve({"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.4, "recent": 20}),
    resolve({"temperature": 1.0, "logit_bias": {7: 3.0, 9: -4.0}, "top_logprobs": 3}),
]
KINDS: dict[str, Tiny] = {"dense": SHORT, "moe": MOE, "mixed formats": MIXED, "gemma3": GEMMA3}
TOKENS = 7


def prompt(number: int) -> list[int]:
    return [2, *(24 + (number * 31 + at * 7) % 200 for at in range(3 + number))]


def settings(number: int) -> Settings:
    return SETTINGS[number % len(SETTINGS)]


def open_batch(model: Model, count: int, **options: str) -> tuple[Batch, list[Session]]:
    batch = Batch(Slots(model, 128, count=count, **options))
    return batch, [Session.in_slot(batch, index) for index in range(count)]


def begin(session: Session, number: int) -> Generation:
    return run_sync(session.begin(prompt(number), settings(number), number))


def results(generations: list[Generation], count: int = TOKENS) -> list[list[object]]:
    """Return tokens, the bits of their log-probabilities and the likeliest of each; end them."""
    found: list[list[object]] = [[] for _ in generations]
    for _ in range(count):
        for mine, generation in zip(found, generations, strict=True):
            sampled = run_sync(generation.next())
            assert sampled is not None
            mine.append((sampled.token, struct.pack("<f", sampled.logprob), sampled.top))
    for generation in generations:
        generation.leave()
    return found


def load(kind: str, divided: str = "software") -> Model:
    gguf, config = open_tiny(KINDS[kind])
    on = device() if divided == "software" else hardware()
    return run_sync(Model.load(gguf, config, on))


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    loaded = load("dense")
    yield loaded
    loaded.close()


# As work is divided on a software GPU and, what takes longer to compile there, on a hardware one.
@pytest.mark.parametrize(
    ("kind", "precision", "divided", "counts"),
    [
        ("dense", "exact", "software", (2, 5, 16)),
        ("dense", "int16", "software", (16,)),
        ("dense", "exact", "hardware", (2, 16)),
        ("dense", "int16", "hardware", (2, 3, 8)),
        ("moe", "exact", "software", (16,)),
        ("moe", "int16", "hardware", (2, 8)),
        ("mixed formats", "int16", "hardware", (8,)),
        ("gemma3", "exact", "software", (4,)),
    ],
)
def test_each_computes_what_it_would_alone(
    kind: str, precision: str, divided: str, counts: tuple[int, ...]
) -> None:
    model = load(kind, divided)
    batch, sessions = open_batch(model, 16, precision=precision)
    alone = []
    for number in range(4):
        alone += results([begin(sessions[0], number)])
        sessions[0].rewind(0)
    for count in counts:
        # Other slots than before, in another order.
        together = [begin(sessions[15 - number], number) for number in range(count)]
        assert results(together)[:4] == alone[:count], count
        for session in sessions:
            session.rewind(0)
    batch.close()
    model.close()


def test_large_matrices_are_divided_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From some rows on, those of a few conversations are; the sums stay the same."""
    monkeypatch.setattr(matmul, "GATED_APART", 1)
    monkeypatch.setattr(tiling, "MORE_ROWS", 1)
    model = load("dense", "hardware")
    batch, sessions = open_batch(model, 8, precision="int16")
    alone = []
    for number in range(8):
        alone += results([begin(sessions[0], number)])
        sessions[0].rewind(0)
    assert results([begin(session, number) for number, session in enumerate(sessions)]) == alone
    names = {
        dispatch.name.split("/")[0].split()[0]
        for plan in batch.slots.plans._plans.values()
        for dispatch in plan.dispatches
    }
    assert {"gate_up", "geglu"} <= names
    batch.close()
    model.close()


def test_they_compute_what_the_reference_does(model: Model) -> None:
    batch, sessions = open_batch(model, 4, kv="f32", precision="exact")
    starts = [IDS[: 20 + 9 * number] for number in range(4)]
    greedy = SETTINGS[0]
    generations = [
        run_sync(session.begin(ids, greedy, 5))
        for session, ids in zip(sessions, starts, strict=True)
    ]
    found = [[token for token, *_ in tokens] for tokens in results(generations, 12)]  # type: ignore[misc]
    assert found == [take(reference(), ids, 12, greedy) for ids in starts]
    batch.close()


def test_joining_and_leaving_change_nothing(model: Model) -> None:
    batch, sessions = open_batch(model, 4)
    alone = []
    for number in range(4):
        alone += results([begin(sessions[0], number)])
        sessions[0].rewind(0)
    first = begin(sessions[2], 0)
    start = [run_sync(first.next()) for _ in range(3)]
    second, third = begin(sessions[0], 1), begin(sessions[3], 2)
    run_sync(second.next())
    second.leave()
    fourth = begin(sessions[1], 3)
    assert results([third, fourth]) == [alone[2], alone[3]]
    tokens = [token.token for token in start if token] + [
        token
        for token, *_ in results([first], TOKENS - 3)[0]  # type: ignore[misc]
    ]
    assert tokens == [token for token, *_ in alone[0]]  # type: ignore[misc]
    assert not any(map(batch.is_busy, sessions))
    batch.close()


def test_a_prompt_is_read_between_the_tokens_of_others(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", 8)
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 8))
    batch, sessions = open_batch(model, 2)
    writing = begin(sessions[0], 0)
    run_sync(writing.next())
    reading = run_sync(sessions[1].begin(IDS[:100], SETTINGS[0], 1))
    kinds = []
    while reading.is_reading:
        before = len(sessions[1].tokens), len(writing.unread)
        run_sync(batch._take_step())
        kinds.append("chunk" if len(sessions[1].tokens) > before[0] else "token")
    assert kinds[:-1] == ["chunk", "token"] * 12  # a token between any two chunks
    assert len(writing.unread) >= 12
    batch.close()


def test_who_does_not_read_is_waited_for(model: Model) -> None:
    batch, sessions = open_batch(model, 2)
    idle, busy = begin(sessions[0], 0), begin(sessions[1], 1)
    run_sync(idle.next())
    for _ in range(100):
        assert run_sync(busy.next()) is not None
    assert len(idle.unread) <= MOST_UNREAD
    assert len(results([idle], 100)[0]) == 100
    batch.close()


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_a_copied_prefix_is_as_good_as_a_read_one(model: Model, kv: str) -> None:
    batch, sessions = open_batch(model, 3, kv=kv, precision="exact")
    run_sync(sessions[0].begin(IDS[:30], SETTINGS[0], 1))
    expected = results(batch.generations)
    sessions[2].copy_prefix(sessions[0], 29)
    copied = run_sync(sessions[2].begin(IDS[:30], SETTINGS[0], 1))
    assert copied.cached == 29
    assert [token for token, *_ in results([copied])[0]] == [token for token, *_ in expected[0]]  # type: ignore[misc]
    batch.close()


def test_more_slots_in_the_middle_of_replies(model: Model) -> None:
    batch, (first,) = open_batch(model, 1)
    alone = []
    for number in range(2):
        alone += results([begin(first, number)])
        first.rewind(0)
    writing = begin(first, 1)
    start = [run_sync(writing.next()) for _ in range(4)]
    run_sync(batch.grow(4, [first]))
    assert batch.slots.count == 4
    later = begin(Session.in_slot(batch, 3), 0)
    assert results([later]) == [alone[0]]
    rest = results([writing], TOKENS - 4)[0]
    found = [(token.token, struct.pack("<f", token.logprob), token.top) for token in start if token]
    assert found + rest == alone[1]
    batch.close()


def test_too_little_memory_for_more_slots_changes_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, (first,) = open_batch(model, 1)
    alone = results([begin(first, 2)])
    first.rewind(0)
    writing = begin(first, 2)
    run_sync(writing.next())
    nbytes = batch.device.nbytes

    def full(*_: object) -> None:
        raise DeviceError("The GPU has no memory left.")

    monkeypatch.setattr("webgemma.engine.slots.GpuSampler", full)
    with pytest.raises(DeviceError, match="no memory left"):
        run_sync(batch.grow(8, [first]))
    assert (batch.slots.count, batch.device.nbytes) == (1, nbytes)
    assert results([writing], TOKENS - 1)[0] == alone[0][1:]
    batch.close()


def test_an_error_of_the_device_ends_all(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sessions = open_batch(model, 2)
    generations = [begin(sessions[0], 0), begin(sessions[1], 1)]
    results_before = [run_sync(generation.next()) for generation in generations]
    assert all(results_before)

    def lost(*_: object) -> None:
        raise DeviceError("The GPU is lost.")

    with monkeypatch.context() as patch:
        patch.setattr(batch.device, "run", lost)
        for generation in generations:
            with pytest.raises(DeviceError, match="lost"):
                results([generation], 10)
    batch.close()


@pytest.mark.parametrize("count", [0, 65])
def test_too_few_and_too_many_slots(model: Model, count: int) -> None:
    with pytest.raises(InputError, match=f"1 to 64 slots .* not {count}"):
        Slots(model, 64, count=count)


def test_a_context_that_several_slots_cannot_have(model: Model) -> None:
    limits = model.device.limits
    model.device.limits = replace(limits, binding_nbytes=1 << 16)
    try:
        with pytest.raises(DeviceError, match="for each of 64 conversations"):
            Slots(model, 512, count=64)
    finally:
        model.device.limits = limits
