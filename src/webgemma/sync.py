"""What drives coroutines, for plain and for asynchronous callers of one implementation.

The engine is written as coroutines. Natively these never suspend: every wait blocks the thread that
drives them. `run_sync` and `iterate_sync` drive them in the caller's thread; a `Worker` can also
drive them in a thread of its own, so that the caller's event loop never blocks. In a browser there
are no threads: coroutines wait for promises, and only asynchronous calls work."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from webgemma.errors import InputError
from webgemma.fair_lock import FairLock
from webgemma.turns import Turn, Turns

P = ParamSpec("P")
T = TypeVar("T")

IN_BROWSER = sys.platform == "emscripten"
NEEDS_AWAIT = "This has to be awaited here: use the method whose name begins with 'a'."

_running = threading.local()  # .job: the _Job that this thread drives, if any; .depth: of run_sync


_turn: ContextVar[Turn | None] = ContextVar("turn", default=None)  # of the stream that is driven
_driver: ContextVar[object] = ContextVar("driver", default=None)  # the task that drives, in a tab


class ForDriver:
    """An item of a stream that is for who drives it; readers never get it."""


class Detached(ForDriver):
    """Says that a stream needs neither the worker's thread nor its lock for the rest.

    From then on it is driven by the event loop that reads it."""


class Deferred(ForDriver):
    """Says that a stream cannot go on beside those that have their turn: it waits for another."""


class Aside(ForDriver, Generic[T]):
    """A coroutine that may take long and needs nothing of the model: its driver awaits it.

    Other streams go on meanwhile, with the worker's thread and lock. `result` is for the stream. On
    an event loop it takes at most so many seconds; then `late` is raised."""

    def __init__(
        self,
        begin: Callable[[], Coroutine[Any, Any, T]],
        seconds: float | None = None,
        late: Exception | None = None,
    ) -> None:
        self._begin = begin
        self._seconds, self._late = seconds, late or TimeoutError()
        self._outcome: Callable[[], T] = _raiser(RuntimeError("nobody has awaited it"))

    async def run(self) -> None:
        """Keep what becomes of the coroutine."""
        try:
            result = await self._begin()
        except Exception as error:
            self._outcome = _raiser(error)
        else:
            self._outcome = lambda: result

    async def drive(self) -> None:
        """Keep what becomes of the coroutine in a thread of its own, within its time."""
        try:
            async with asyncio.timeout(self._seconds):
                await drive_aside(self.run())
        except TimeoutError:
            self._outcome = _raiser(self._late)

    def result(self) -> T:
        """Return what the coroutine returned, or raise what it raised."""
        return self._outcome()


async def drive_aside(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that a thread of its own drives, or natively would block the event loop.

    Cancelling takes effect at its next `checkpoint`."""
    worker = Worker()
    try:
        return await worker.drive(coroutine)
    finally:
        worker.close()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends; also inside a running event loop."""
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _running.depth -= 1
    coroutine.close()
    raise InputError(NEEDS_AWAIT)


def iterate_sync(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield the items of an asynchronous generator that never suspends; closing this closes it."""
    return Worker().iterate(stream)


def is_driven() -> bool:
    """Return whether a worker drives the running code, which has its lock.

    Natively such code has to block."""
    if getattr(_running, "depth", 0) > 0:
        return True
    driver = _driver.get()
    return driver is not None and driver is asyncio.current_task()


def may_suspend() -> bool:
    """Return whether the running code may wait for something else than the engine.

    Code that `run_sync` drives may not."""
    return getattr(_running, "depth", 0) == 0


def current_turn() -> Turn | None:
    """Return the turn of the stream that the running code is a part of, if it has one."""
    return _turn.get()


def checkpoint() -> None:
    """Raise CancelledError if the job that this thread drives was cancelled.

    Code that waits calls it, so that cancelling takes effect at the next wait."""
    job = _current_job()
    if job is not None and job.cancelled:
        raise asyncio.CancelledError


def has_event_loop() -> bool:
    """Return whether the running code may wait for what needs an event loop."""
    return IN_BROWSER or _current_job() is not None


async def on_event_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that may suspend, on the event loop that waits for this thread's job.

    In plain code there is none, and the coroutine must not suspend."""
    job = _current_job()
    if job is not None:
        return job.wait(coroutine)
    try:
        return await coroutine
    except RuntimeError as error:
        if str(error) == "no running event loop":
            raise InputError(NEEDS_AWAIT) from error
        raise


def for_caller(callback: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a user's callback in the thread of the user's event loop."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        async def on_loop() -> T:
            return callback(*args, **kwargs)

        job = _current_job()
        return callback(*args, **kwargs) if job is None else job.wait(on_loop())

    return call


class _Job:
    """A coroutine that a worker's thread drives while an event loop waits for it."""

    def __init__(self, lock: FairLock) -> None:
        self.loop = asyncio.get_running_loop()
        self.cancelled = False
        self._lock = lock  # held by the thread while it runs
        self._task: asyncio.Task[Any] | None = None  # that the thread waits for

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine on the event loop, which may use the lock meanwhile."""
        finished: Future[asyncio.Task[T]] = Future()

        def start() -> None:
            self._task = task = self.loop.create_task(coroutine)
            task.add_done_callback(finished.set_result)
            if self.cancelled:
                task.cancel()

        self.loop.call_soon_threadsafe(start)
        self._lock.release()
        try:
            return finished.result().result()
        finally:
            self._lock.acquire()

    def cancel(self) -> None:
        """End the job at its next `checkpoint`, or at once if it waits for the event loop."""
        self.cancelled = True
        if self._task is not None:
            self._task.cancel()


def _current_job() -> _Job | None:
    return getattr(_running, "job", None)


class Worker:
    """Drives coroutines, in the caller's thread or in a thread of its own.

    Any number of threads and tasks may call it: they take turns, and a stream keeps its turn until
    it ends; some streams may have theirs at the same time (see `Turns`). A lock keeps the steps
    apart, also those of workers that share it."""

    def __init__(self, lock: FairLock | None = None) -> None:
        self.lock = lock or FairLock()
        self.turns = Turns()
        self._gate = asyncio.Lock()  # in a browser, where tasks take the lock's place
        self._thread: ThreadPoolExecutor | None = None
        _workers.add(self)

    def run(self, coroutine: Coroutine[Any, Any, T], *, brief: bool = False) -> T:
        """Return the result of a coroutine; the caller blocks.

        A `brief` one waits for no turn: streams may have theirs meanwhile."""
        if brief:
            return self._run(coroutine)
        try:
            turn = self.turns.wait(is_stream=False)
        except BaseException:
            coroutine.close()
            raise
        try:
            return self._run(coroutine)
        finally:
            self.turns.end(turn)

    def iterate(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous generator; the caller blocks for each."""
        turn = self.turns.wait(is_stream=True)
        context = copy_context()
        context.run(_turn.set, turn)
        try:
            while True:
                self.turns.check(turn)
                try:
                    item = context.run(self._run, _next(stream))
                except StopAsyncIteration:
                    return
                if isinstance(item, Aside):
                    run_sync(item.run())
                elif isinstance(item, Deferred):
                    self.turns.end(turn)
                    turn = self.turns.wait(is_stream=True)
                    context.run(_turn.set, turn)
                elif not isinstance(item, ForDriver):
                    yield item
        finally:
            try:
                self._run(_close(stream))
            finally:
                self.turns.end(turn)

    async def arun(self, coroutine: Coroutine[Any, Any, T], *, brief: bool = False) -> T:
        """Await the result of a coroutine; the event loop never blocks.

        Cancelling takes effect at the coroutine's next `checkpoint`. A `brief` one waits for no
        turn."""
        if brief:
            return await self.drive(coroutine)
        try:
            turn = await self.turns.await_turn(is_stream=False)
        except BaseException:
            coroutine.close()
            raise
        try:
            return await self.drive(coroutine)
        finally:
            self.turns.end(turn)

    async def aiterate(self, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield the items of an asynchronous generator; the event loop never blocks."""
        turn = await self.turns.await_turn(is_stream=True)
        _turn.set(turn)
        detached = False
        try:
            while True:
                self.turns.check(turn)
                if turn is not None:
                    turn.use()
                try:
                    item = await (anext(stream) if detached else self.drive(_next(stream)))
                except StopAsyncIteration:
                    return
                if turn is not None:
                    turn.use()
                if isinstance(item, Aside):
                    await item.drive()
                elif isinstance(item, Deferred):
                    self.turns.end(turn)
                    turn = await self.turns.await_turn(is_stream=True)
                    _turn.set(turn)
                elif isinstance(item, Detached):
                    detached = True
                elif not isinstance(item, ForDriver):
                    yield item
        finally:
            try:
                await self.drive(_close(stream))
            finally:
                self.turns.end(turn)

    async def next_item(self, stream: AsyncGenerator[T, None], *, detached: bool) -> T:
        """Return the next item of a stream that is read inside another one."""
        is_here = detached or is_driven()
        return await (anext(stream) if is_here else self.drive(_next(stream)))

    async def close_stream(self, stream: AsyncGenerator[Any, None]) -> None:
        """Close a stream that is read inside another one."""
        await (stream.aclose() if is_driven() else self.drive(_close(stream)))

    def breathe(self) -> None:
        """Let others have the lock, if the running code has it and somebody waits for it."""
        if not IN_BROWSER and is_driven():
            self.lock.breathe()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let others have the lock while the running code does what needs none of the model."""
        has_lock = not IN_BROWSER and is_driven()
        if has_lock:
            self.lock.release()
        try:
            yield
        finally:
            if has_lock:
                self.lock.acquire()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for a turn and the lock; the caller blocks."""
        with self.turns.taken(), self.lock:
            yield

    def close(self) -> None:
        """End the thread, if there is one; a later call starts another."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def after_fork(self) -> None:
        """Start anew in the child of a fork, which has none of the parent's other threads."""
        self.lock = FairLock()
        self._thread = None
        self.turns.after_fork()

    async def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that needs the lock, also inside a detached stream."""

        async def called() -> T:
            return function()

        return function() if is_driven() else await self.drive(called())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self.lock:
            return run_sync(coroutine)

    async def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that this worker's thread drives, whoever has the turn."""
        if IN_BROWSER:
            return await self._drive_here(coroutine)
        job = _Job(self.lock)
        outcome: Future[Callable[[], T]] = self._submit(
            copy_context().run, self._outcome, coroutine, job
        )
        try:
            return (await asyncio.shield(asyncio.wrap_future(outcome)))()
        except asyncio.CancelledError:
            job.cancel()
            if outcome.cancel():
                coroutine.close()  # it has not begun
            await _finished(outcome)
            raise

    async def _drive_here(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in this task, while no other one drives something."""
        if is_driven():
            return await coroutine
        try:
            await self._gate.acquire()
        except BaseException:
            coroutine.close()
            raise
        before = _driver.set(asyncio.current_task())
        try:
            return await coroutine
        finally:
            _driver.reset(before)
            self._gate.release()

    def _submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in this worker's thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "webgemma")
        return self._thread.submit(function, *args, **kwargs)

    def _outcome(self, coroutine: Coroutine[Any, Any, T], job: _Job) -> Callable[[], T]:
        """Drive a coroutine; return a function that returns its result or raises its error.

        A future cannot carry StopAsyncIteration."""
        _running.job = job
        try:
            result = self._run(coroutine)
        except BaseException as error:
            return _raiser(error)
        finally:
            del _running.job
        return lambda: result


_workers: WeakSet[Worker] = WeakSet()


def _after_fork() -> None:
    for worker in list(_workers):
        worker.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()


def _raiser(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


async def _finished(outcome: Future[Any]) -> None:
    """Wait until a job that was cancelled has ended, even if cancelled again."""
    while not outcome.done():
        try:
            await asyncio.wait([asyncio.wrap_future(outcome)])
        except asyncio.CancelledError:
            continue
