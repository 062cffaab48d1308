"""The asynchronous faces of Gemma: a loop that never blocks, cancelling, closing, mixing."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import numpy as np
import pytest

from webgemma import Gemma, InputError, ModelNotFoundError, Piece
from webgemma.engine.gpu import GpuEngine
from webgemma.models import BUNDLED_PATH

DEVICES = ("cpu", "gpu")
TICK = 0.01  # seconds
LONG = 0.1  # seconds; on a busy machine the longest gap between ticks was 0.45
QUESTION, ANSWER = "What is 3 + 4?", "3 plus 4 is 7."
STORY = "Tell me a story about a small fox."  # its reply has more than a hundred tokens
MUST_AWAIT = "use the method whose name begins with 'a'"


@pytest.fixture(scope="module", params=DEVICES)
def gemma(request: pytest.FixtureRequest) -> Iterator[Gemma]:
    with asyncio.run(Gemma.aload(device=request.param)) as loaded:
        assert reply(loaded) == ANSWER  # later calls do not compile or dequantise
        yield loaded


def reply(gemma: Gemma, message: str = QUESTION, max_tokens: int = 60) -> str:
    pieces = gemma.chat(message, temperature=0, max_tokens=max_tokens)
    return "".join(piece.text for piece in pieces)


async def areply(gemma: Gemma, message: str = QUESTION, max_tokens: int = 60) -> str:
    return await text_of(gemma.achat(message, temperature=0, max_tokens=max_tokens))


async def text_of(stream: AsyncIterator[Piece]) -> str:
    return "".join([piece.text async for piece in stream])


def long_prompt(gemma: Gemma, count: int = 300) -> list[int]:
    ids = gemma.tokenizer.encode("The small fox sat in the sun and saw a cat. " * 60)
    return [gemma.tokenizer.bos, *ids[: count - 1]]


# The event loop runs while a model computes


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Measure the seconds between the ticks of a task that sleeps 10 ms again and again."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            gaps.append(time.perf_counter() - last)
            last += gaps[-1]

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        yield gaps
    finally:
        await asyncio.sleep(2 * TICK)  # until the gap that includes the last call is measured
        task.cancel()


def is_blocked(gaps: list[float], idle: list[float]) -> bool:
    """Return whether ticks are several times rarer than idle, or missing for half of the time."""
    missing = max(max(gaps), sum(gap for gap in gaps if gap > LONG))
    return median(gaps) > 4 * median(idle) or missing > 0.5 * sum(gaps)


def blocks_the_loop(call: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
    """Return whether a call blocks the loop every time; other processes may delay it once."""

    async def measure() -> bool:
        async with ticking() as idle:
            await asyncio.sleep(0.2)
        async with ticking() as gaps:
            await call()
        return is_blocked(gaps, idle)

    return all(asyncio.run(measure()) for _ in range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_loading_does_not_block_the_loop(device: Any) -> None:
    async def load() -> None:
        end = time.perf_counter() + 0.5  # long enough for many ticks: a load may take 20 ms
        while time.perf_counter() < end:
            (await Gemma.aload(device=device)).close()

    assert not blocks_the_loop(load)


CALLS: dict[str, Callable[[Gemma], Coroutine[Any, Any, Any]]] = {
    "achat": lambda gemma: areply(gemma, STORY, 30),
    "achat, long prompt": lambda gemma: areply(
        gemma, gemma.tokenizer.decode(long_prompt(gemma)), 2
    ),
    "agenerate": lambda gemma: text_of(gemma.agenerate("Once", temperature=0, max_tokens=30)),
    "alogits": lambda gemma: gemma.alogits(long_prompt(gemma)),
}


@pytest.mark.parametrize("name", CALLS)
def test_computing_does_not_block_the_loop(gemma: Gemma, name: str) -> None:
    assert not blocks_the_loop(lambda: CALLS[name](gemma))


def test_plain_calls_block_the_loop(gemma: Gemma) -> None:
    """Otherwise the measurement would show nothing."""

    async def plain_reply() -> str:
        return reply(gemma, STORY, 12)

    async def plain_logits() -> None:
        gemma.logits(long_prompt(gemma))

    assert blocks_the_loop(plain_reply)
    assert blocks_the_loop(plain_logits)


def step_of(gemma: Gemma) -> tuple[Any, str]:
    """Return the object and the name of the method that computes one token."""
    engine: Any = gemma._engine
    if isinstance(engine, GpuEngine):
        return engine._session.batch, "_take_step"
    return engine, "_read"


def record_threads(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the thread of every call of a method."""
    threads: list[int] = []
    method = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, recorded)
    return threads


def test_every_step_is_computed_in_one_other_thread(
    gemma: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = record_threads(*step_of(gemma), monkeypatch)
    assert asyncio.run(areply(gemma)) == ANSWER
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads
    threads.clear()
    assert reply(gemma) == ANSWER
    assert set(threads) == {threading.get_ident()}


# Cancelling and closing


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03])
def test_a_cancelled_reply_ends_within_a_step(
    gemma: Gemma, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = record_threads(*step_of(gemma), monkeypatch)

    async def cancel() -> str:
        pieces: list[Piece] = []

        async def story() -> None:
            async for piece in gemma.achat(STORY, temperature=0):
                pieces.append(piece)

        task = asyncio.create_task(story())
        while len(pieces) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(delay)
        count = len(steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(steps) <= count + 1
        assert pieces[-1].finish == ""
        return await areply(gemma)

    assert asyncio.run(cancel()) == ANSWER
    assert reply(gemma) == ANSWER


def test_a_timeout_cancels_a_reply(gemma: Gemma) -> None:
    async def within(seconds: float) -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await text_of(gemma.agenerate("Once", temperature=0, logit_bias={300: 1e6}))
        return await areply(gemma)

    assert asyncio.run(within(0.2)) == ANSWER


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_a_long_prompt_can_be_cancelled(gemma: Gemma, delay: float) -> None:
    """On the CPU, reading a prompt is one step."""

    async def cancel(call: Coroutine[Any, Any, Any]) -> str:
        task = asyncio.create_task(call)
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await areply(gemma)

    ids = long_prompt(gemma)
    assert asyncio.run(cancel(text_of(gemma.agenerate(ids, temperature=0)))) == ANSWER
    assert asyncio.run(cancel(gemma.alogits(ids))) == ANSWER
    ids = long_prompt(gemma, 200)
    np.testing.assert_array_equal(gemma.logits(ids), asyncio.run(gemma.alogits(ids)))


def test_a_long_prompt_is_cancelled_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", 8)
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 8))

    async def cancel() -> str:
        with await Gemma.aload(device="gpu") as gemma:
            expected = await areply(gemma)
            session: Any = gemma.gpu_engine("Reading")._session
            chunks = record_threads(session, "read_chunk", monkeypatch)
            task = asyncio.create_task(
                text_of(gemma.agenerate(long_prompt(gemma), temperature=0, max_tokens=1))
            )
            while len(chunks) < 5:
                await asyncio.sleep(0.001)
            count = len(chunks)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(chunks) <= count + 1
            assert len(chunks) < 300 // 8
            assert await areply(gemma) == expected
            return expected

    assert asyncio.run(cancel()) == ANSWER


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.5])
def test_loading_can_be_cancelled(device: Any, delay: float) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(Gemma.aload(device=device))
        await asyncio.sleep(delay)
        if not task.cancel():  # it was loaded sooner
            task.result().close()
            return
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    with Gemma.load(device=device) as gemma:
        assert len(gemma.logits([2, 3])) == 2


def test_a_stream_may_be_closed_early(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = record_threads(*step_of(gemma), monkeypatch)

    async def close() -> str:
        stream = gemma.achat(STORY, temperature=0)
        assert (await anext(stream)).finish == ""
        await stream.aclose()
        count = len(steps)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await gemma.achat(STORY).aclose()  # before it has begun
        assert len(steps) == count
        return await areply(gemma)

    assert asyncio.run(close()) == ANSWER


def test_a_stream_may_be_left_by_break(gemma: Gemma) -> None:
    async def leave() -> str:
        async for _ in gemma.agenerate("Once", temperature=0):
            break
        return await areply(gemma)

    assert asyncio.run(leave()) == ANSWER


# Plain and asynchronous calls together


def test_plain_and_asynchronous_calls_may_alternate(gemma: Gemma) -> None:
    async def alternate() -> None:
        for _ in range(2):
            assert await areply(gemma) == ANSWER
            assert reply(gemma) == ANSWER
        ids = long_prompt(gemma, 20)
        np.testing.assert_array_equal(gemma.logits(ids), await gemma.alogits(ids))

    asyncio.run(alternate())
    assert reply(gemma) == ANSWER
    asyncio.run(alternate())  # another event loop


def test_calls_from_several_tasks_follow_each_other(gemma: Gemma) -> None:
    prompts = ([2, 30, 31], [2, 40], [2, 50, 51, 52])

    async def several() -> list[Any]:
        return await asyncio.gather(*(gemma.alogits(ids) for ids in prompts))

    for ids, logits in zip(prompts, asyncio.run(several()), strict=True):
        np.testing.assert_array_equal(logits, gemma.logits(ids))


def test_a_plain_call_between_the_pieces_of_a_reply(gemma: Gemma) -> None:
    """A task does not wait for itself: without a free slot its next reply ends the one before."""
    expected = reply(gemma, STORY, 8)

    async def interrupt() -> str:
        stream = gemma.achat(STORY, temperature=0, max_tokens=8)
        first = await anext(stream)
        assert reply(gemma) == ANSWER
        return first.text + await text_of(stream)

    if len(gemma.slots) == 1:
        with pytest.raises(InputError, match="same caller has begun another one"):
            asyncio.run(interrupt())
    else:
        assert asyncio.run(interrupt()) == expected
    assert reply(gemma) == ANSWER


def test_new_adapters_end_the_reply_of_a_task(gemma: Gemma) -> None:
    async def change() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in gemma.achat(STORY, temperature=0, max_tokens=8):
                begun.set()
                await asyncio.sleep(0.001)

        task = asyncio.create_task(read())
        await begun.wait()
        gemma.set_lora(None)
        with pytest.raises(InputError, match="adapters were changed meanwhile"):
            await task

    asyncio.run(change())
    assert reply(gemma) == ANSWER


def test_forks_reply_at_the_same_time(gemma: Gemma) -> None:
    if not isinstance(gemma._engine, GpuEngine):
        with pytest.raises(InputError, match="needs the GPU"):
            gemma.fork()
        return
    expected = reply(gemma, STORY, 12)

    async def both() -> list[str]:
        with gemma.fork() as fork:
            return await asyncio.gather(areply(gemma, STORY, 12), areply(fork))

    assert asyncio.run(both()) == [expected, ANSWER]
    assert asyncio.run(areply(gemma)) == ANSWER


def test_a_plain_call_while_a_step_waits_for_the_loop() -> None:
    """The table of embeddings is read on the loop, for which every token waits."""

    async def change() -> None:
        with await Gemma.aload(SlowSource(), "gpu", memory_gb=0.0195) as gemma:
            source: Any = gemma.gpu_engine("Reading").gguf._parts[0].source._source
            assert await areply(gemma) == ANSWER
            source.delay, reads = 0.1, source.reads
            task = asyncio.create_task(areply(gemma, STORY, 9))
            while source.reads == reads:
                await asyncio.sleep(0.001)
            assert gemma.worker.lock.acquire(timeout=20)
            gemma.worker.lock.release()
            gemma.set_lora(None)
            with pytest.raises(InputError, match="adapters were changed meanwhile"):
                await task
            source.delay = 0.001
            assert await areply(gemma) == ANSWER

    asyncio.run(change())


# Errors and progress


def test_progress_is_reported_in_the_thread_of_the_caller() -> None:
    threads: set[int] = set()
    reported: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        threads.add(threading.get_ident())
        reported.append((done, total))

    async def load() -> None:
        (await Gemma.aload(device="gpu", progress=progress)).close()

    asyncio.run(load())
    Gemma.load(device="gpu", progress=progress).close()
    assert threads == {threading.get_ident()}
    half = len(reported) // 2
    assert reported[:half] == reported[half:] == sorted(reported[:half])
    assert 0 < reported[-1][0] <= reported[-1][1]


def test_progress_may_raise_to_end_loading() -> None:
    def progress(*_: int) -> None:
        raise InputError("enough")

    async def load() -> None:
        await Gemma.aload(device="gpu", progress=progress)

    with pytest.raises(InputError, match="enough"):
        asyncio.run(load())
    with pytest.raises(InputError, match="enough"):
        Gemma.load(device="gpu", progress=progress)


def test_errors_reach_the_caller(gemma: Gemma) -> None:
    async def check() -> None:
        with pytest.raises(InputError, match="no setting 'temprature'"):
            await anext(gemma.achat(QUESTION, temprature=1))
        with pytest.raises(InputError, match="The prompt is empty"):
            await anext(gemma.agenerate([]))
        with pytest.raises(InputError, match="the id -1"):
            await gemma.alogits([2, -1])
        with pytest.raises(InputError, match="cannot read images"):
            await gemma.aencode_image(np.zeros((48, 48, 3), np.uint8))
        with pytest.raises(ModelNotFoundError, match="There is no file"):
            await Gemma.aload("missing.gguf")
        assert await areply(gemma) == ANSWER

    asyncio.run(check())


def test_a_closed_model_raises_an_error() -> None:
    async def check() -> None:
        gemma = await Gemma.aload(device="cpu")
        assert len(await gemma.alogits([2])) == 1
        gemma.close()
        with pytest.raises(InputError, match="is closed"):
            await gemma.alogits([2])
        gemma.close()

    asyncio.run(check())


# Sources that suspend


class SlowSource:
    """The bundled model as bytes that have to be awaited."""

    def __init__(self, delay: float = 0.001) -> None:
        self.data = BUNDLED_PATH.read_bytes()
        self.name, self.nbytes = "slow.gguf", len(self.data)
        self.delay = delay
        self.threads: set[int] = set()
        self.reads = 0
        self.closed = False

    async def read(self, offset: int, nbytes: int) -> bytes:
        self.reads += 1
        self.threads.add(threading.get_ident())
        await asyncio.sleep(self.delay)
        self.threads.add(threading.get_ident())
        return self.data[offset : offset + nbytes]

    async def sibling(self, name: str) -> "SlowSource":
        raise ModelNotFoundError(name)

    def close(self) -> None:
        self.closed = True


def test_a_source_that_suspends_is_read_on_the_loop_of_the_caller() -> None:
    source = SlowSource()

    async def load() -> None:
        with await Gemma.aload(source, "gpu") as gemma:
            assert gemma.name == "slow.gguf"
            assert await areply(gemma) == ANSWER
            assert reply(gemma) == ANSWER  # everything is on the GPU

    asyncio.run(load())
    assert source.reads > 10
    assert source.threads == {threading.get_ident()}
    assert source.closed


def test_loading_from_a_source_that_suspends_can_be_cancelled() -> None:
    source = SlowSource(0.02)

    async def cancel() -> None:
        task = asyncio.create_task(Gemma.aload(source, "gpu"))
        while source.reads < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert source.closed


@pytest.mark.parametrize("delay", [0, 0.001])
def test_plain_load_of_a_source_that_suspends_raises_an_error(delay: float) -> None:
    source = SlowSource(delay)
    with pytest.raises(InputError, match=MUST_AWAIT):
        Gemma.load(source, "gpu")
    assert source.closed


@pytest.mark.parametrize("delay", [0, 0.001])
def test_plain_load_inside_a_loop_raises_the_same_error(delay: float) -> None:
    source = SlowSource(delay)

    async def load() -> None:
        Gemma.load(source, "gpu")

    with pytest.raises(InputError, match=MUST_AWAIT):
        asyncio.run(load())
    assert source.closed


def test_a_source_that_never_suspends_can_be_loaded_plainly() -> None:
    class FastSource(SlowSource):
        async def read(self, offset: int, nbytes: int) -> bytes:
            return self.data[offset : offset + nbytes]

    with Gemma.load(FastSource(), "gpu") as gemma:
        assert reply(gemma) == ANSWER


def test_a_program_ends_although_its_model_is_open() -> None:
    program = (
        "import asyncio\n"
        "from webgemma import Gemma\n"
        "async def main():\n"
        "    gemma = await Gemma.aload(device='cpu')\n"
        f"    async for piece in gemma.achat({QUESTION!r}, temperature=0):\n"
        "        print(piece.text, end='')\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == ANSWER
