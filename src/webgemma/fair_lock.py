"""A lock that threads get in the order in which they asked for it."""

import threading
from collections import deque
from typing import Self


class FairLock:
    """A reentrant lock that goes to the thread that has waited longest."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner = 0  # a thread's identifier; 0 if it is free
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # threads, and what wakes them

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for the lock, at most so many seconds; a thread that has it takes it once more."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (0, me):
                self._owner = me
                self._depth += 1
                return True
            awake = threading.Lock()
            awake.acquire()
            turn = (me, awake)
            self._waiting.append(turn)
        try:
            if awake.acquire(timeout=timeout):
                return True
        except BaseException:  # Ctrl-C
            if not self._stops_waiting(turn):
                self.release()
            raise
        return not self._stops_waiting(turn)

    def _stops_waiting(self, turn: tuple[int, threading.Lock]) -> bool:
        """Leave the queue; return False if the lock had just come."""
        with self._mutex:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return True
        return False

    def release(self) -> None:
        """Give the lock back, as often as it was taken; then the next thread has it."""
        with self._mutex:
            assert self._owner == threading.get_ident()
            self._depth -= 1
            if not self._depth:
                self._hand_on()

    def breathe(self) -> None:
        """Let all who wait have the lock, one after the other, and take it again."""
        if not self._waiting:
            return
        with self._mutex:
            assert self._owner == threading.get_ident()
            depth, self._depth = self._depth, 0
            self._hand_on()
        self.acquire()
        self._depth = depth

    def _hand_on(self) -> None:
        self._owner, self._depth = 0, 0
        if self._waiting:
            self._owner, awake = self._waiting.popleft()
            self._depth = 1
            awake.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
