"""Sessions: nothing is read twice; rewinding, stopping, forking, several at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.gpu import device
from helpers.sessions import (
    CHUNK,
    GREEDY,
    IDS,
    RANDOM,
    RING,
    SHORT,
    close,
    expected,
    next_token,
    open_tiny,
    reference,
    take,
)
from tolerance import GPU_LOGITS_OF_TRANSFORMERS

from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.weights import Model
from webgemma.settings import Settings
from webgemma.sync import run_sync


@pytest.mark.parametrize("length", [1, 2, 4, 15, 16, 17, 32, 33, 90])
def test_prompts_of_any_length(session: Session, length: int) -> None:
    assert take(session, IDS[:length], 3) == expected(IDS[:length], 3)
    assert session.tokens[:length] == IDS[:length]


@pytest.mark.parametrize("settings", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_generating_past_the_end_of_the_rings(session: Session, settings: Settings) -> None:
    assert take(session, IDS[:7], 50, settings) == expected(IDS[:7], 50, settings)


def test_logits_of_any_length_on_one_session(session: Session) -> None:
    import numpy as np

    for length in (3, 40, 2, 16, 33, 3):
        logits = np.frombuffer(run_sync(session.logits(IDS[:length])), np.float32)
        reference_logits = run_sync(reference().logits(IDS[:length])).ravel()
        np.testing.assert_allclose(
            logits, reference_logits, rtol=0, atol=GPU_LOGITS_OF_TRANSFORMERS
        )


def test_logits_and_generations_may_alternate(session: Session) -> None:
    run_sync(session.logits(IDS[:20]))
    assert take(session, IDS[:20], 4) == expected(IDS[:20], 4)
    run_sync(session.logits(IDS[50:60]))
    assert take(session, IDS[:20], 4) == expected(IDS[:20], 4)


def test_turns_are_appended(session: Session, read: list[int]) -> None:
    history = IDS[:20]
    for turn, new in enumerate((0, 3, 1, 17)):
        history += IDS[20 : 20 + new]
        read.clear()
        tokens = take(session, history, 5)
        assert sum(read) == (20 if turn == 0 else max(new, 1))
        assert tokens == expected(history, 5)
        history += tokens


def test_the_same_prompt_again_reads_its_last_token(session: Session, read: list[int]) -> None:
    tokens = take(session, IDS[:20], 5)
    read.clear()
    assert take(session, IDS[:20], 5) == tokens
    assert read == [1]


def test_a_prompt_with_another_end_is_read_from_there_on(session: Session, read: list[int]) -> None:
    take(session, IDS[:20], 2)
    read.clear()
    other = [*IDS[:16], 99, 98]
    assert take(session, other, 5) == expected(other, 5)
    assert sum(read) == 2


# With all of IDS read, the rings hold the last RING positions. A token at `length` attends to
# WINDOW - 1 positions before it, which are there down to length = 120 - CHUNK - 1.
@pytest.mark.parametrize(
    ("count", "kept"),
    [
        *((0, True), (1, True), (5, True), (CHUNK, True), (CHUNK + 1, True)),
        *((CHUNK + 2, False), (RING, False), (100, False), (120, False)),
    ],
)
def test_rewinding(session: Session, count: int, kept: bool) -> None:
    run_sync(session.logits(IDS))
    length = len(IDS) - count
    session.rewind(length)
    assert session.tokens == (IDS[:length] if kept else [])
    history = [*IDS[:length], 40, 41]
    assert take(session, history, 4) == expected(history, 4)


def test_rewinding_several_times(session: Session) -> None:
    take(session, IDS[:60], 8)
    session.rewind(58)
    take(session, [*IDS[:58], 30, 31, 32], 1)
    for length in (55, 50, 30):
        session.rewind(min(length, len(session.tokens)))
        history = [*IDS[:length], 44]
        assert take(session, history, 3) == expected(history, 3)


def test_a_context_within_the_ring_is_rewound_to_any_length(model: Model) -> None:
    session = Session(model, RING, kv="f32")
    run_sync(session.logits(IDS[:RING]))
    session.rewind(1)
    assert session.tokens == IDS[:1]
    assert take(session, IDS[:9], 3) == expected(IDS[:9], 3)
    session.close()


@pytest.mark.parametrize("length", [-1, 21])
def test_rewinding_out_of_range_raises_an_error(session: Session, length: int) -> None:
    run_sync(session.logits(IDS[:20]))
    with pytest.raises(InputError, match=f"has 20 tokens; it cannot be rewound to {length}"):
        session.rewind(length)


@pytest.mark.parametrize("count", range(1, 8))
def test_stopping_at_any_token(session: Session, read: list[int], count: int) -> None:
    tokens = expected(IDS[:6], 8)
    assert take(session, IDS[:6], count) == tokens[:count]
    assert session.tokens == [*IDS[:6], *tokens[:count]]
    read.clear()
    history = [*IDS[:6], *tokens[:count], 77]
    assert take(session, history, 3) == expected(history, 3)
    assert read == [1]


def test_stopping_submits_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = session.generate(IDS[:6], GREEDY, 5)
    next_token(stream)
    monkeypatch.setattr(session.device, "run", None)
    close(stream)
    monkeypatch.undo()
    assert len(take(session, IDS[:9], 2)) == 2


def test_a_caller_may_raise_into_a_generation(session: Session) -> None:
    stream = session.generate(IDS[:6], GREEDY, 5)
    first = next_token(stream)

    async def fail() -> None:
        await stream.athrow(RuntimeError("the caller's own"))

    with pytest.raises(RuntimeError, match="the caller's own"):
        run_sync(fail())
    history = [*IDS[:6], first, 50]
    assert take(session, history, 3) == expected(history, 3)


def test_a_generation_need_not_be_closed(session: Session) -> None:
    next_token(session.generate(IDS[:6], GREEDY, 5))
    assert take(session, IDS[:9], 3) == expected(IDS[:9], 3)


@pytest.mark.parametrize("begin", [lambda s: take(s, [2, 3], 1), lambda s: s.rewind(2)])
def test_another_request_ends_a_generation(
    session: Session, begin: Callable[[Session], object]
) -> None:
    stream = session.generate(IDS[:6], GREEDY, 5)
    next_token(stream)
    begin(session)
    with pytest.raises(InputError, match="need a session each"):
        next_token(stream)


@pytest.mark.parametrize("length", [17, 20, 23, 24])
def test_generation_ends_when_the_context_is_full(model: Model, length: int) -> None:
    session = Session(model, 24, kv="f32")
    stream = session.generate(IDS[:length], GREEDY, 5)
    tokens = expected(IDS[:length], 24 - length)
    assert [next_token(stream) for _ in range(24 - length)] == tokens
    with pytest.raises(StopAsyncIteration):
        next_token(stream)
    assert session.tokens == [*IDS[:length], *tokens][: max(length, 23)]
    session.rewind(10)
    assert take(session, IDS[:12], 3) == expected(IDS[:12], 3)
    session.close()


def test_prompts_that_cannot_be_read_raise_an_error(session: Session) -> None:
    with pytest.raises(InputError, match="empty"):
        take(session, [], 1)
    with pytest.raises(InputError, match="257 tokens, but the context holds 256"):
        take(session, [2] * 257, 1)
    with pytest.raises(InputError, match="257 tokens"):
        run_sync(session.logits([2] * 257))


def test_a_closed_session_raises_an_error(model: Model, tmp_path: Path) -> None:
    session = Session(model, 64)
    stream = session.generate(IDS[:3], GREEDY, 5)
    next_token(stream)
    session.close()
    session.close()
    for attempt in (
        lambda: next_token(stream),
        lambda: take(session, [2], 1),
        lambda: run_sync(session.logits([2])),
        lambda: session.rewind(0),
        session.fork,
        lambda: run_sync(session.save(tmp_path / "never")),
        lambda: run_sync(session.load(tmp_path / "never")),
    ):
        with pytest.raises(InputError, match="This session is closed"):
            attempt()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_two_conversations_may_alternate_step_by_step(model: Model, settings: Settings) -> None:
    prompts = [IDS[:5], IDS[40:63]]
    sessions = [Session(model, 128, kv="f32") for _ in prompts]
    streams = [
        session.generate(ids, settings, 5) for session, ids in zip(sessions, prompts, strict=True)
    ]
    generated: list[list[int]] = [[], []]
    for _ in range(12):
        for stream, tokens in zip(streams, generated, strict=True):
            tokens.append(next_token(stream))
    assert generated == [expected(ids, 12, settings) for ids in prompts]
    for session in sessions:
        session.close()


def test_conversations_in_several_threads(model: Model) -> None:
    """Let them wait for the same device, one of them in the library at a time."""
    prompts = [[2, 30 + i, 31] for i in range(4)]
    sessions = [Session(model, 64, kv="f32") for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(take, sessions, prompts, [20] * len(prompts)))
    assert found == [take(reference(), prompt, 20) for prompt in prompts]
    for session in sessions:
        session.close()


@pytest.mark.parametrize("length", [5, RING, 60], ids=["short", "ring", "wrapped"])
def test_a_fork_continues_separately(session: Session, length: int) -> None:
    ids = IDS[:length]
    first = take(session, ids, 4)
    fork = session.fork()
    assert take(fork, [*ids, *first, 50], 6) == expected([*ids, *first, 50], 6)
    assert take(session, [*ids, *first, 60], 6) == expected([*ids, *first, 60], 6)
    session.close()
    assert take(fork, [*ids, 70], 3) == expected([*ids, 70], 3)
    fork.close()


def test_a_fork_during_a_generation(session: Session) -> None:
    tokens = expected(IDS[:30], 8)
    stream = session.generate(IDS[:30], GREEDY, 5)
    generated = [next_token(stream) for _ in range(4)]
    fork = session.fork()
    assert fork.tokens == [*IDS[:30], *generated]
    generated += [next_token(stream) for _ in range(4)]
    assert generated == tokens
    assert take(fork, [*IDS[:30], *tokens[:4]], 4) == tokens[4:]
    fork.close()


def test_a_table_that_stays_in_the_file() -> None:
    gguf, config = open_tiny(SHORT)
    on_host = run_sync(Model.load(gguf, config, device(), table="host"))
    session = Session(on_host, 256, kv="f32")
    assert take(session, IDS[:40], 6) == expected(IDS[:40], 6)
    history = [*session.tokens, 50]
    assert len(history) == 46  # the last generated token is not read yet
    assert take(session, history, 6) == expected(history, 6)
    session.close()
    on_host.close()
