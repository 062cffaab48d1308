"""The fair lock: threads get it in their order, as often as they ask, and lose it to who waits."""

import threading
import time

import pytest

from webgemma.fair_lock import FairLock


def start(lock: FairLock, number: int, order: list[int]) -> threading.Thread:
    """Start a thread that waits for the lock; return once it does."""

    def wait() -> None:
        with lock:
            order.append(number)

    thread = threading.Thread(target=wait)
    waiting = len(lock._waiting)
    thread.start()
    while len(lock._waiting) == waiting:
        time.sleep(0.001)
    return thread


def test_threads_get_it_in_their_order() -> None:
    lock, order = FairLock(), list[int]()
    with lock:
        threads = [start(lock, number, order) for number in range(8)]
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_thread_may_take_it_again() -> None:
    lock, order = FairLock(), list[int]()
    with lock, lock:
        thread = start(lock, 1, order)
        assert lock.acquire()
        lock.release()
        assert order == []
    thread.join()
    assert order == [1]


def test_who_waits_breathes_first() -> None:
    lock, order = FairLock(), list[int]()
    with lock, lock:
        threads = [start(lock, number, order) for number in range(3)]
        lock.breathe()
        order.append(9)
        lock.breathe()  # nobody waits
        assert not lock._waiting
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 9]
    assert lock.acquire(timeout=1)


def test_a_waiting_thread_may_give_up() -> None:
    lock, found = FairLock(), list[bool]()
    with lock:
        thread = threading.Thread(target=lambda: found.append(lock.acquire(timeout=0.02)))
        thread.start()
        thread.join()
    assert found == [False]
    assert lock.acquire(timeout=1)
    lock.release()


def test_only_who_has_it_gives_it_back() -> None:
    with pytest.raises(AssertionError):
        FairLock().release()
