"""The lock of an index: one run at a time makes it or brings it up to date."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from webgemma.errors import InputError

_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def index_lock(path: Path) -> Iterator[None]:
    """Keep other runs from making or updating an index; InputError if one is under way.

    Searches go on meanwhile. A process that ends in any way frees the lock, a hidden file beside
    the index."""
    lock = lock_path(path)
    descriptor = _locked(lock, path)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock.unlink()  # while it is held: whoever waited for it looks for a new one
            os.close(descriptor)


def lock_path(path: Path) -> Path:
    """Return the lock of an index: there is such a file while a run goes on."""
    whole = path.resolve()
    return whole.with_name(f".{whole.name.lstrip('.')}.lock")


def _locked(lock: Path, path: Path) -> int | None:
    """Return the descriptor of the lock, or None where files cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        try:
            descriptor = os.open(lock, _OPEN, 0o600)
        except OSError:  # nothing can be written here, as whoever has to write the index will say
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"Another run of `webgemma index` is writing {path}: wait for it, or name another "
                "file with --index."
            ) from None
        except OSError:  # this file system has no locks
            os.close(descriptor)
            return None
        if _is_at(lock, descriptor):
            return descriptor
        os.close(descriptor)  # its owner has removed it just now


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the one that a path names."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
