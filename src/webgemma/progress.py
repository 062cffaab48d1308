"""Telling somebody who waits how far long work is."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]  # is told how many steps of how many are done


def unwatched(done: int, total: int) -> None:
    """The progress that nobody asked for."""
