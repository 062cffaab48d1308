"""The GPU in the child of a fork: refused, because its library's threads exist only in the parent.

Whatever is called there, even to free something, may wait for ever for a lock that one of them
held."""

import os

from webgemma.errors import DeviceError

_opened = False  # whether this process, or the one it was forked from, has used the library
_forked = False


def mark_opened() -> None:
    """Declare that this process uses the library from now on."""
    global _opened
    _opened = True


def is_forked() -> bool:
    """Return whether this process was forked after the library was used: nothing is freed then."""
    return _forked


def check_process() -> None:
    """Raise DeviceError in the child of a fork."""
    if _forked:
        raise DeviceError(
            "This process was forked from one that had opened the GPU, and cannot use it: start "
            "processes with multiprocessing's 'spawn' method, and load the model in each."
        )


def _after_fork() -> None:
    global _forked
    _forked = _opened


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
