"""Threads and tasks on one model: they take turns, and each reply is the same as alone."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from webgemma import Gemma, InputError
from webgemma.sync import Deferred, Worker
from webgemma.turns import Turns

QUESTIONS = [f"What is {number} + {number + 3}?" for number in range(8)]
SETTINGS: dict[str, Any] = {"max_tokens": 12, "seed": 5}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def gemma(request: pytest.FixtureRequest) -> Iterator[Gemma]:
    with Gemma.load(device=request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(gemma: Gemma) -> list[list[int]]:
    """Tokens of the reply to each question when nothing else runs."""
    return [reply(gemma, question) for question in QUESTIONS]


def reply(gemma: Gemma, question: str) -> list[int]:
    return [piece.token for piece in gemma.chat(question, **SETTINGS)]


async def areply(gemma: Gemma, question: str) -> list[int]:
    return [piece.token async for piece in gemma.achat(question, **SETTINGS)]


def test_threads_get_the_replies_that_they_would_get_alone(
    gemma: Gemma, alone: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        rounds = [list(pool.map(lambda q: reply(gemma, q), QUESTIONS)) for _ in range(2)]
    assert rounds == [alone, alone]
    assert reply(gemma, QUESTIONS[0]) == alone[0]


def test_tasks_get_the_replies_that_they_would_get_alone(
    gemma: Gemma, alone: list[list[int]]
) -> None:
    async def gather() -> list[list[int]]:
        return await asyncio.gather(*(areply(gemma, question) for question in QUESTIONS))

    assert asyncio.run(gather()) == alone


def test_threads_tasks_and_short_calls_mix(gemma: Gemma, alone: list[list[int]]) -> None:
    ids = gemma.tokenizer.encode("Once upon a time")
    logits = gemma.logits(ids)

    def loop() -> list[int]:
        return asyncio.run(areply(gemma, QUESTIONS[1]))

    def short() -> bool:
        return bool((gemma.logits(ids) == logits).all())

    calls: list[Callable[[], Any]] = [
        lambda: reply(gemma, QUESTIONS[0]),
        short,
        loop,
        short,
        lambda: reply(gemma, QUESTIONS[2]),
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        results = [future.result() for future in [pool.submit(call) for call in calls]]
    assert results == [alone[0], True, alone[1], True, alone[2]]


def test_a_reply_that_is_left_does_not_hold_others_up(gemma: Gemma, alone: list[list[int]]) -> None:
    for _ in gemma.chat(QUESTIONS[0], **SETTINGS):
        break
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reply, gemma, QUESTIONS[1]).result() == alone[1]


def test_the_next_reply_of_the_same_caller_ends_the_one_before(
    gemma: Gemma, alone: list[list[int]]
) -> None:
    """Where all slots of a model are those of one caller, it would wait for itself."""
    slots = gemma.worker.turns.capacity
    assert slots == (1 if gemma.device.startswith("CPU") else 4)
    streams = [gemma.chat(question, **SETTINGS) for question in QUESTIONS[: slots + 1]]
    begun = [[next(stream).token] for stream in streams]
    with pytest.raises(InputError, match="same caller has begun another one on this model"):
        next(streams[0])
    for tokens, stream in zip(begun[1:], streams[1:], strict=True):
        tokens += [piece.token for piece in stream]
    assert begun[1:] == alone[1 : slots + 1]
    assert reply(gemma, QUESTIONS[0]) == alone[0]


def test_a_reply_that_broke_does_not_change_the_next(
    gemma: Gemma, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache never outlives a reply that ended in the middle of a step."""
    target: Any
    if gemma.device.startswith("CPU"):
        target, name = gemma._engine.model, "layer_output"  # type: ignore[attr-defined]
    else:
        target, name = gemma._engine._session.device, "run"  # type: ignore[attr-defined]
    original = getattr(target, name)
    for steps in (0, 1, 3, 9):
        left = [steps]

        def fails(*args: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise ZeroDivisionError
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(target, name, fails)
            with pytest.raises(ZeroDivisionError):
                reply(gemma, QUESTIONS[3] + " And why?")
        assert reply(gemma, QUESTIONS[3]) == alone[3]


# The queue itself


async def letters(text: str) -> AsyncGenerator[str, None]:
    for letter in text:
        yield letter


def test_a_caller_that_is_gone_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.turns.POLL", 0.01)
    worker, kept = Worker(), list[Iterator[str]]()

    def leave() -> None:
        kept.append(worker.iterate(letters("abc")))
        next(kept[0])

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert list(worker.iterate(letters("xyz"))) == ["x", "y", "z"]

    async def leave_in_a_task() -> AsyncGenerator[str, None]:
        stream = worker.aiterate(letters("abc"))
        await anext(stream)
        return stream

    async def both() -> None:
        stream = await asyncio.create_task(leave_in_a_task())
        assert [letter async for letter in worker.aiterate(letters("uv"))] == ["u", "v"]
        await stream.aclose()

    asyncio.run(both())


def test_each_item_may_be_read_by_a_task_of_its_own() -> None:
    """As `asyncio.wait_for` does it: the stream is not given up while others wait for its turn."""
    worker = Worker()

    async def read(text: str) -> str:
        stream, found = worker.aiterate(letters(text)), ""
        while True:
            try:
                found += await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return found
            await asyncio.sleep(0.01)

    async def both() -> list[str]:
        return await asyncio.gather(read("abcde"), read("uvwxyz"), read("12"))

    assert asyncio.run(both()) == ["abcde", "uvwxyz", "12"]


def test_a_plain_call_never_waits_for_a_task_that_it_blocks() -> None:
    worker = Worker()

    async def value() -> int:
        return 3

    async def main() -> None:
        begun = asyncio.Event()

        async def stream() -> None:
            async for _ in worker.aiterate(letters("ab")):
                begun.set()
                await asyncio.sleep(0)
                await asyncio.sleep(0.01)

        task = asyncio.create_task(stream())
        await begun.wait()
        with pytest.raises(InputError, match="await the method whose name begins with 'a'"):
            worker.run(value())
        await task
        assert worker.run(value()) == 3

    asyncio.run(main())


def test_a_plain_call_goes_before_the_waiting_tasks_of_its_loop() -> None:
    worker, release, begun = Worker(), threading.Event(), threading.Event()

    def hold() -> None:
        for _ in worker.iterate(letters("ab")):
            begun.set()
            release.wait()

    async def value() -> int:
        return 3

    async def main() -> None:
        holder = threading.Thread(target=hold)
        holder.start()
        begun.wait()
        waiting = asyncio.create_task(worker.arun(value()))
        await asyncio.sleep(0)
        threading.Timer(0.05, release.set).start()
        assert worker.run(value()) == 3
        assert await waiting == 3
        holder.join()

    asyncio.run(main())


def test_streams_get_their_turns_in_order() -> None:
    """Where several have theirs at once, a call waits for all of them, and who comes later waits
    behind the call."""
    worker, began = Worker(), list[str]()
    worker.turns.capacity = 2

    async def stream(name: str, length: int) -> None:
        async for _ in worker.aiterate(letters("x" * length)):
            if name not in began:
                began.append(name)
            assert len(worker.turns.streams) <= 2

    async def value() -> None:
        began.append("call")
        assert not worker.turns.streams

    async def main() -> None:
        jobs = [stream("a", 5), stream("b", 2), stream("c", 3), worker.arun(value())]
        await asyncio.gather(*jobs, stream("d", 1), stream("e", 1))

    asyncio.run(main())
    assert began == ["a", "b", "c", "call", "d", "e"]


def test_another_turn_of_the_same_caller() -> None:
    turns = Turns(3)
    one = turns.wait(is_stream=True)
    two, three = turns.another(one), turns.another(one)
    assert two is not None
    assert three is not None
    assert turns.another(one) is None  # there are three
    turns.end(two)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(turns.wait, is_stream=True).result()
        waiting = pool.submit(turns.wait, is_stream=True)
        while len(turns._queue) < 4:
            pass
        turns.end(three)
        assert waiting.result() in turns.streams
        turns.end(other)
        turns.end(waiting.result())
        call = pool.submit(turns.wait, is_stream=False)
        while len(turns._queue) < 2:
            pass
        assert turns.another(one) is None  # somebody waits
        turns.end(one)
        assert turns.another(one) is None  # it has ended
        turns.end(call.result())
    assert turns.another(None) is None
    assert not turns._queue


def test_a_stream_that_cannot_go_on_waits_for_another_turn() -> None:
    """As one does for whose conversation there turns out to be no memory."""
    worker, busy = Worker(), [False]
    worker.turns.capacity = 2

    async def one_at_a_time(text: str) -> AsyncGenerator[Any, None]:
        while busy[0]:
            worker.turns.capacity = 1
            yield Deferred()
        busy[0] = True
        try:
            for letter in text:
                yield letter
        finally:
            busy[0] = False

    async def read(text: str) -> str:
        return "".join([letter async for letter in worker.aiterate(one_at_a_time(text))])

    async def main() -> list[str]:
        return await asyncio.gather(*map(read, ("abc", "def", "ghi")))

    assert asyncio.run(main()) == ["abc", "def", "ghi"]
    worker.turns.capacity = 2
    with ThreadPoolExecutor(3) as pool:
        iterate = lambda text: "".join(worker.iterate(one_at_a_time(text)))  # noqa: E731
        assert list(pool.map(iterate, ("abc", "def", "ghi"))) == ["abc", "def", "ghi"]
    assert not worker.turns._queue


def test_cancelled_while_waiting() -> None:
    worker = Worker()

    async def main() -> None:
        first = worker.aiterate(letters("abc"))
        await anext(first)
        waiting = asyncio.create_task(anext(worker.aiterate(letters("x"))))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert [letter async for letter in first] == ["b", "c"]
        assert [letter async for letter in worker.aiterate(letters("yz"))] == ["y", "z"]

    asyncio.run(main())
