"""Progress of long work, reported to a callback."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]  # how many steps of how many are done


def ignore_progress(done: int, total: int) -> None:
    """Ignore the progress."""
