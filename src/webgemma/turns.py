"""Turns: threads and tasks that share a model take it one after another.

A stream keeps its turn from its first step to its last, so that no other call changes what it works
with in between. Where a model computes several streams side by side, so many of them have their
turns at once."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from typing import Any

from webgemma.errors import InputError

POLL = 1.0  # seconds after which a waiting caller looks whether the one before it is gone
BUSY = (
    "Another task of this event loop has begun a reply on this model, and this call would block "
    "the loop that has to finish it: await the method whose name begins with 'a'."
)
REPLACED = (
    "This reply has ended, because the same caller has begun another one on this model meanwhile; "
    "finish one before the next, or give each conversation a fork() of the model."
)


class Turn:
    """A caller's place in the queue."""

    __slots__ = ("ended", "has_loop", "is_stream", "ready", "task", "thread", "used")

    def __init__(self, is_stream: bool) -> None:
        self.is_stream = is_stream
        self.ended = False
        self.ready: Future[None] = Future()  # done when the turn has come
        self.thread = threading.current_thread()
        self.task: asyncio.Task[Any] | None = None
        self.has_loop = True
        try:
            self.task = asyncio.current_task()
        except RuntimeError:
            self.has_loop = False
        self.used = monotonic()

    def use(self) -> None:
        """Note that it is being used, by the running task.

        `asyncio.wait_for` may read each item of a stream in a task of its own."""
        self.used = monotonic()
        if self.task is not None:
            self.task = asyncio.current_task()

    def is_of(self, other: "Turn") -> bool:
        """Return whether both are of the same caller: a task or, outside of tasks, a thread."""
        return (self.task, self.thread) == (other.task, other.thread)

    @property
    def is_ended(self) -> bool:
        """Whether it has ended, by its caller or by the next turn of the same one."""
        return self.ended or self.is_gone

    @property
    def is_gone(self) -> bool:
        """Whether its caller has ended some time ago, or waits no longer."""
        ended = self.task.done() if self.task else not self.thread.is_alive()
        return self.ready.cancelled() or (ended and monotonic() - self.used >= POLL)


class Turns:
    """A queue of callers; it is the first one's turn or, of streams, the first `capacity` ones'."""

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self._mutex = threading.Lock()
        self._queue: deque[Turn] = deque()

    def wait(self, *, is_stream: bool, interrupts: bool = False) -> Turn | None:
        """Block until it is the caller's turn; None if it has it already.

        A caller that would wait for the stream of a task that it keeps from running gets an
        InputError or, if it `interrupts`, None."""
        turn = self._join(is_stream, True, interrupts)
        if turn is None:
            return None
        try:
            while True:
                try:
                    turn.ready.result(POLL)
                    return turn
                except TimeoutError:
                    self._advance()
        except BaseException:
            self.end(turn)
            raise

    async def await_turn(self, *, is_stream: bool) -> Turn | None:
        """Wait until it is the calling task's turn; None if it has it already."""
        turn = self._join(is_stream, False)
        if turn is None or turn.ready.done():
            return turn
        ready = asyncio.wrap_future(turn.ready)
        try:
            while not (await asyncio.wait([ready], timeout=POLL))[0]:
                self._advance()
        except BaseException:
            ready.cancel()
            self.end(turn)
            raise
        return turn

    def another(self, turn: Turn | None) -> Turn | None:
        """Return one more turn for the caller of a stream that has one; None if it had to wait."""
        with self._mutex:
            active = self._active()
            has_room = len(active) == len(self._queue) < self.capacity
            if turn is None or turn not in active or not turn.is_stream or not has_room:
                return None
            more = Turn(is_stream=True)
            more.thread, more.task, more.has_loop = turn.thread, turn.task, turn.has_loop
            more.ready.set_result(None)
            self._queue.append(more)
            return more

    @property
    def streams(self) -> list[Turn]:
        """The turns of streams that have come."""
        with self._mutex:
            return [turn for turn in self._active() if turn.is_stream and not turn.is_gone]

    def end(self, turn: Turn | None) -> None:
        """End a turn, or leave the queue."""
        with self._mutex:
            if turn is not None and turn in self._queue:
                self._remove(turn)
        self._advance()

    def check(self, turn: Turn | None) -> None:
        """Raise InputError if a stream's turn was ended by its caller's next one."""
        if turn is not None and turn not in self._queue:
            raise InputError(REPLACED)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Block until it is the caller's turn, for what streams of its own event loop notice."""
        turn = self.wait(is_stream=False, interrupts=True)
        try:
            yield
        finally:
            self.end(turn)

    def after_fork(self) -> None:
        """Forget, in the child of a fork, the callers that exist only in the parent."""
        own = [turn for turn in self._queue if turn.thread is threading.current_thread()]
        self._mutex = threading.Lock()
        self._queue = deque(own)

    def _join(self, is_stream: bool, blocking: bool, interrupts: bool = False) -> Turn | None:
        self._advance()  # past callers that are gone
        turn = Turn(is_stream)
        blocks_loop = blocking and turn.has_loop
        with self._mutex:
            active = self._active()
            own = [each for each in active if each.is_of(turn)]
            if own and not (is_stream and all(each.is_stream for each in own)):
                return None
            waits = bool(self._queue) and not (is_stream and len(active) == len(self._queue))
            waits |= len(active) >= self.capacity or not all(each.is_stream for each in active)
            beside = [each for each in active if each.thread is turn.thread]
            if waits and own and len(own) == len(active):  # it would wait for itself
                self._remove(own[0])
            elif waits and blocks_loop and beside:
                if any(each.is_stream for each in beside) and not interrupts:
                    raise InputError(BUSY)
                return None  # a short call: its lock is enough
            # Who blocks a loop cannot wait for tasks of that loop, which may be queued.
            at = min(len(active), len(self._queue)) if blocks_loop else len(self._queue)
            self._queue.insert(at, turn)
        self._advance()
        return turn

    def _remove(self, turn: Turn) -> None:
        turn.ended = True
        self._queue.remove(turn)

    def _active(self) -> list[Turn]:
        """Return the turns that have come: that of a call, or those of streams."""
        queue = list(self._queue)
        if queue and not queue[0].is_stream:
            return queue[:1]
        calls = [at for at, turn in enumerate(queue) if not turn.is_stream]
        return queue[: min([self.capacity, *calls])]

    def _advance(self) -> None:
        """Drop callers that are gone; tell those whose turn has come."""
        with self._mutex:
            for turn in [turn for turn in self._queue if turn.is_gone]:
                self._remove(turn)
            for turn in self._active():
                if not turn.ready.done():
                    turn.ready.set_result(None)
