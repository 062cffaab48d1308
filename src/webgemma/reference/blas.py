"""Threads of numpy's BLAS: half of the cores for small products, three quarters for large ones.

BLAS splits even a small product over all cores and waits for the slowest. Where another process has
one of them, that is a time slice of some milliseconds, many times the product itself. The number
does not follow what runs meanwhile, because the last bits of a sum may depend on it."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from threadpoolctl import LibController, ThreadpoolController  # type: ignore[import-untyped]

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 64_000_000  # from here on a product takes some milliseconds, whoever has to be waited for
READING = 8  # rows that could be multiplied while a weight is read from memory
CGROUP = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds, and in how many


class Blas:
    """The libraries that multiply for numpy, and how many threads each may use."""

    def __init__(self, libraries: list[LibController], cores: int) -> None:
        self._libraries = libraries
        count = max(1, min([cores, *(library.num_threads for library in libraries)]))
        self.most = count - count // 4
        self.few = max(1, count // 2)
        self._before = [library.num_threads for library in libraries]
        self._depth = 0
        self._lock = threading.Lock()

    def threads(self, rows: int, weights: int) -> int:
        """Return how many threads multiply so many rows by a matrix of so many weights."""
        return self.most if (rows + READING) * weights >= LARGE else self.few

    @contextmanager
    def step(self) -> Iterator[None]:
        """Use few threads for what is not a `product`; afterwards, as many as before."""
        with self._lock:
            self._depth += 1
            self._set(self.few)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                self._reset()

    @contextmanager
    def product(self, rows: int, weights: int) -> Iterator[None]:
        """Use the threads of a product."""
        count = self.threads(rows, weights)
        self._set(count)
        try:
            yield
        finally:
            if count != self.few or not self._depth:
                self._reset()

    def _set(self, count: int) -> None:
        for library in self._libraries:
            if library.num_threads != count:
                _set_threads(library, count)

    def _reset(self) -> None:
        if self._depth:
            self._set(self.few)
        else:
            for library, count in zip(self._libraries, self._before, strict=True):
                _set_threads(library, count)


def _set_threads(library: LibController, count: int) -> None:
    """Let a library use so many threads, whichever of ours has set that before.

    Since threadpoolctl 3.8 only the first one that does so is heard, until it is released."""
    release = getattr(library, "clear_controlling_thread", None)
    if release is not None:
        release(force=True)
    library.set_num_threads(count)


@cache
def blas() -> Blas:
    """Return the BLAS of this process; call it when numpy is imported."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    return Blas(libraries, available_cores(CGROUP))


def few_threads(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose small products get few threads."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with blas().step():
            return function(*args, **kwargs)

    return call


def available_cores(cgroup: Path) -> int:
    """Return how many cores this process may use, also inside a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = map(int, cgroup.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return cores or 1
    return max(1, min(cores or 1, math.ceil(quota / max(1, period))))
