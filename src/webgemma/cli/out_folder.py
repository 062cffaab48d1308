"""The folder that a training writes: reserved and tried before it begins, replaced with care."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from webgemma.cli.terminal import format_nbytes
from webgemma.errors import InputError
from webgemma.gguf.writer import TEMPORARY_ENDING, written_beside
from webgemma.lora.adapter import Adapter
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.peft_folder import CONFIG_FILE, WEIGHTS_FILE, write_peft_folder

CHECKPOINT_FILE, GGUF_FILE, BEST = "checkpoint.safetensors", "adapter.gguf", "best"
CHECKPOINT_SHARE = 3  # a checkpoint has each of the adapter's numbers with its two moments
_PEFT_FILES = (WEIGHTS_FILE, CONFIG_FILE)
_BLOCK_NBYTES = 1 << 20


class OutFolder:
    """An adapter, perhaps also as GGUF, the best one in `best`, and the checkpoint."""

    def __init__(self, path: Path, *, replaces: bool = False) -> None:
        self.path = path
        self.checkpoint = path / CHECKPOINT_FILE
        self.gguf = path / GGUF_FILE
        self.best = path / BEST
        self._replaces = replaces  # what another training left
        self._written: set[Path] = set()

    @classmethod
    @contextmanager
    def reserved(cls, path: Path, *, resume: bool, force: bool) -> Iterator[OutFolder]:
        """Make and lock the folder and try to write there; InputError if it cannot be used.

        A folder that was made here and in which nothing was written is removed again."""
        if resume and not path.is_dir():
            raise InputError(f"There is no folder {path}: there is nothing to resume.")
        made = _make(path)
        folder = cls(path, replaces=force)
        try:
            with _locked(path):
                folder._check_content(resume=resume, force=force)
                folder._remove_unfinished()
                _try_to_write(path)
                yield folder
        finally:
            for each in made:
                with suppress(OSError):
                    each.rmdir()

    def check_space(self, adapter: Adapter, *, as_gguf: bool, best: bool) -> None:
        """Write as many bytes as a checkpoint has, and remove them; InputError if they do not fit.

        While a checkpoint replaces another there are two of them."""
        copies = 2 * CHECKPOINT_SHARE + 1 + as_gguf + 2 * best
        held = sum(path.stat().st_size for path in self._files() if path.is_file())
        needed, free = copies * adapter.nbytes - held, _free_nbytes(self.path)
        if free is not None and free < needed:
            raise InputError(
                f"The training writes up to {format_nbytes(needed)} to {self.path}, where "
                f"{format_nbytes(free)} are free: make room, or choose another folder."
            )
        block = os.urandom(_BLOCK_NBYTES)  # which no file system stores as fewer bytes
        left = CHECKPOINT_SHARE * adapter.nbytes
        sizes = (min(_BLOCK_NBYTES, left - at) for at in range(0, left, _BLOCK_NBYTES))
        with written_beside(self.checkpoint, (block[:size] for size in sizes)):
            pass  # it is not renamed, and removed

    def write(self, adapter: Adapter, *, as_gguf: bool) -> None:
        """Write the adapter; GgufError or InputError if that fails."""
        write_peft_folder(adapter, self.path)
        self.wrote(self.path / WEIGHTS_FILE, self.path / CONFIG_FILE)
        if as_gguf:
            write_gguf_adapter(adapter, self.gguf)
            self.wrote(self.gguf)
        else:
            with suppress(OSError):
                self.gguf.unlink(missing_ok=True)  # of an earlier step

    def write_best(self, adapter: Adapter) -> None:
        """Write the best adapter so far; GgufError or InputError if that fails."""
        write_peft_folder(adapter, self.best)
        self.wrote(self.best / WEIGHTS_FILE, self.best / CONFIG_FILE)

    def wrote(self, *paths: Path) -> None:
        """Note what was written; only then what it replaces is removed."""
        self._written.update(paths)
        if self._replaces:
            for path in self._files():
                if path not in self._written:
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
            with suppress(OSError):
                self.best.rmdir()  # if it is empty

    def _files(self) -> list[Path]:
        pairs = [folder / name for folder in (self.path, self.best) for name in _PEFT_FILES]
        return [*pairs, self.gguf, self.checkpoint]

    def _check_content(self, *, resume: bool, force: bool) -> None:
        there = [path.relative_to(self.path) for path in self._files() if path.exists()]
        unfinished = self.checkpoint.exists()
        if resume and not unfinished:
            state = "holds a finished adapter" if there else "holds no training"
            raise InputError(f"{self.path} {state} and no {CHECKPOINT_FILE} to resume.")
        if there and not resume and not force:
            choice = "--resume continues it, --force replaces it" if unfinished else ""
            raise InputError(
                f"{self.path} already holds {'a training' if unfinished else 'an adapter'} "
                f"({there[0]}): {choice or '--force replaces it'}, or choose another folder."
            )

    def _remove_unfinished(self) -> None:
        """Remove what a process that was killed had not finished writing."""
        for path in self._files():
            for part in path.parent.glob(f".{path.name}.????????{TEMPORARY_ENDING}"):
                with suppress(OSError):
                    part.unlink()


def _make(path: Path) -> list[Path]:
    """Make the folder and those above; return those that did not exist, the innermost first."""
    made: list[Path] = []
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; --out has to be a folder.")
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise InputError(f"{path} cannot be made a folder: {error.strerror or error}.") from error
    return made


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other trainings out of the folder; a process that ends in any way frees it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"Another training is writing to {path}: wait for it, or choose another folder."
            ) from None
        except OSError:  # this file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _try_to_write(path: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path} cannot be written to: {error.strerror or error}.") from error


def _free_nbytes(path: Path) -> int | None:
    """Return how many bytes are free; None where the system does not say."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free if usage.total else None
