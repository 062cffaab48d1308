"""Workers: plain and asynchronous faces of coroutines, cancelling, and the caller's event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from webgemma import InputError
from webgemma.sync import (
    Aside,
    Worker,
    checkpoint,
    for_caller,
    has_event_loop,
    iterate_sync,
    on_event_loop,
    run_sync,
)

MUST_AWAIT = "use the method whose name begins with 'a'"


async def identity(value: int) -> int:
    return value


async def thread_id() -> int:
    return threading.get_ident()


def test_a_coroutine_that_suspends_cannot_run_plainly() -> None:
    ended = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    assert run_sync(identity(3)) == 3
    with pytest.raises(InputError, match=MUST_AWAIT):
        run_sync(suspends())
    assert ended == [True]


def test_closing_a_plain_iterator_closes_the_generator() -> None:
    ended = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            for number in range(9):
                yield number
        finally:
            ended.append(True)

    stream = iterate_sync(numbers())
    assert [next(stream), next(stream)] == [0, 1]
    assert not ended
    stream.close()  # type: ignore[attr-defined]
    assert ended == [True]
    assert list(iterate_sync(numbers())) == list(range(9))


def test_a_worker_has_one_thread_until_it_is_closed() -> None:
    worker = Worker()

    async def threads() -> tuple[int, int]:
        return await worker.arun(thread_id()), await worker.arun(thread_id())

    assert worker.run(thread_id()) == threading.get_ident()
    first = asyncio.run(threads())
    assert len({*first, threading.get_ident()}) == 2
    worker.close()
    worker.close()
    assert worker.run(identity(4)) == 4
    second = asyncio.run(threads())
    assert second[0] == second[1] != threading.get_ident()
    worker.close()


def test_a_worker_iterates_and_closes_generators() -> None:
    worker, threads = Worker(), set[int]()

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            for number in range(5):
                threads.add(threading.get_ident())
                yield number
        finally:
            threads.add(threading.get_ident())

    async def run() -> None:
        assert [n async for n in worker.aiterate(numbers())] == list(range(5))
        stream = worker.aiterate(numbers())
        assert await anext(stream) == 0
        await stream.aclose()

    asyncio.run(run())
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert list(worker.iterate(numbers())) == list(range(5))
    worker.close()


def test_jobs_of_a_worker_never_overlap() -> None:
    worker, active, order = Worker(), [0], list[str]()

    async def job(name: str) -> None:
        active[0] += 1
        assert active[0] == 1
        time.sleep(0.05)
        active[0] -= 1
        order.append(name)

    async def run() -> None:
        tasks = [asyncio.create_task(worker.arun(job(name))) for name in "ab"]
        await asyncio.sleep(0.02)
        worker.run(job("plain"))  # waits for the job that holds the lock
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert order[0] == "a"
    assert sorted(order) == ["a", "b", "plain"]
    worker.close()


def test_what_stands_aside_leaves_the_thread_and_the_lock_to_others() -> None:
    worker, begun, held = Worker(), threading.Event(), threading.Event()

    async def slow(fails: bool) -> int:
        begun.set()
        assert held.wait(10)
        if fails:
            raise InputError("It failed.")
        return 7

    async def stream(fails: bool) -> AsyncGenerator[Any, None]:
        aside = Aside(lambda: slow(fails))
        yield aside
        assert worker.lock.acquire(timeout=0)
        worker.lock.release()
        yield aside.result()

    async def run(fails: bool) -> list[int]:
        begun.clear()
        held.clear()
        reading = asyncio.create_task(_all(worker.aiterate(stream(fails))))
        await asyncio.to_thread(begun.wait, 10)
        assert await worker.arun(identity(4), brief=True) == 4
        held.set()
        return await reading

    assert asyncio.run(run(fails=False)) == [7]
    with pytest.raises(InputError, match="It failed"):
        asyncio.run(run(fails=True))
    assert list(worker.iterate(stream(False))) == [7]
    worker.close()


async def _all(stream: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in stream]


def test_who_leaves_ends_what_stands_aside() -> None:
    worker, begun, log = Worker(), threading.Event(), list[str]()

    async def endless() -> None:
        begun.set()
        try:
            while True:
                time.sleep(0.001)
                checkpoint()
        finally:
            log.append("ended")

    async def stream(seconds: float | None = None) -> AsyncGenerator[Any, None]:
        try:
            yield (aside := Aside(endless, seconds, InputError("It is late.")))
            aside.result()
        finally:
            log.append("closed")

    async def run() -> None:
        reading = asyncio.create_task(_all(worker.aiterate(stream())))
        await asyncio.to_thread(begun.wait, 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
    assert log == ["ended", "closed"]
    with pytest.raises(InputError, match="It is late"):
        asyncio.run(_all(worker.aiterate(stream(0.05))))
    assert log == ["ended", "closed"] * 2
    worker.close()


def test_a_checkpoint_raises_only_in_a_cancelled_job() -> None:
    worker, log = Worker(), list[str]()

    async def job() -> None:
        checkpoint()
        log.append("begun")
        try:
            while True:
                time.sleep(0.005)
                checkpoint()
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    async def cancel() -> None:
        task = asyncio.create_task(worker.arun(job()))
        while not log:
            await asyncio.sleep(0.001)
        queued = asyncio.create_task(worker.arun(job()))  # never begins
        await asyncio.sleep(0.02)
        for each in (queued, task):
            each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await each
        assert await worker.arun(identity(5)) == 5

    checkpoint()
    asyncio.run(cancel())
    assert log == ["begun", "cancelled"]
    worker.close()


def test_a_job_may_catch_its_cancellation() -> None:
    """The caller is cancelled nevertheless, after the job has ended."""
    worker, log = Worker(), list[str]()

    async def job() -> int:
        log.append("begun")
        time.sleep(0.1)
        log.append("ended")
        return 6

    async def cancel() -> None:
        task = asyncio.create_task(worker.arun(job()))
        while not log:
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["begun", "ended"]

    asyncio.run(cancel())
    worker.close()


def test_the_loop_runs_what_a_job_awaits_on_it() -> None:
    worker = Worker()

    async def waits(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return threading.get_ident()

    async def fails() -> None:
        await asyncio.sleep(0.001)
        raise InputError("wrong")

    async def job() -> tuple[int, int]:
        assert has_event_loop()
        with pytest.raises(InputError, match="wrong"):
            await on_event_loop(fails())
        return await on_event_loop(waits(0.01)), threading.get_ident()

    async def run() -> tuple[int, int]:
        assert not has_event_loop()  # outside of a job
        return await worker.arun(job())

    loop, thread = asyncio.run(run())
    assert loop == threading.get_ident() != thread
    worker.close()


def test_the_loop_may_use_a_worker_whose_job_waits_for_it() -> None:
    worker = Worker()

    async def job() -> int:
        await on_event_loop(asyncio.sleep(0.1))
        return 9

    async def run() -> None:
        task = asyncio.create_task(worker.arun(job()))
        await asyncio.sleep(0.03)
        assert worker.lock.acquire(timeout=20)
        worker.lock.release()
        assert worker.run(identity(7)) == 7
        assert not task.done()
        assert await task == 9

    asyncio.run(run())
    worker.close()


def test_callbacks_are_called_in_the_thread_of_the_caller() -> None:
    worker, threads = Worker(), list[int]()

    def callback(value: int, *, factor: int) -> int:
        threads.append(threading.get_ident())
        if factor == 0:
            raise InputError("zero")
        return factor * value

    call = for_caller(callback)

    async def job() -> int:
        with pytest.raises(InputError, match="zero"):
            call(2, factor=0)
        return call(2, factor=3)

    assert call(2, factor=2) == 4
    assert asyncio.run(worker.arun(job())) == worker.run(job()) == 6
    assert set(threads) == {threading.get_ident()}
    worker.close()


def test_plain_code_awaits_no_event_loop() -> None:
    assert not has_event_loop()
    assert run_sync(on_event_loop(identity(7))) == 7
    with pytest.raises(InputError, match=MUST_AWAIT):
        run_sync(on_event_loop(asyncio.sleep(0)))


def test_cancelling_a_job_cancels_what_it_awaits_on_the_loop() -> None:
    worker, log = Worker(), list[str]()

    async def waits() -> None:
        log.append("waiting")
        try:
            await asyncio.sleep(60)
        finally:
            log.append("cancelled")

    async def job() -> None:
        try:
            await on_event_loop(waits())
        except asyncio.CancelledError:
            log.append("ended")
            raise

    async def cancel() -> None:
        task = asyncio.create_task(worker.arun(job()))
        while not log:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert await worker.arun(identity(8)) == 8

    asyncio.run(cancel())
    assert log[0] == "waiting"
    assert sorted(log[1:]) == ["cancelled", "ended"]  # the job does not wait for the coroutine
    worker.close()
