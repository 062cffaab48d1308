"""The journal of a job: every answer is on the disk before the next, so that nothing is lost.

It is a file beside the output: a line that says what the job is, then a line for each row that is
answered, in any order. The last line of a process that was killed may be cut; it is dropped."""

import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from webgemma.errors import InputError
from webgemma.values import shortened

ENDING = ".partial"
NONE = -1

Answer = Mapping[str, Any]
Job = Mapping[str, Any]  # what must be the same for a job to go on


class Journal:
    """The answers to some rows of a job."""

    def __init__(self, path: Path, file: IO[bytes], rows: int) -> None:
        self.path, self._file = path, file
        self._at = array("q", [NONE]) * rows  # where each row's line begins
        self.done = self.failed = 0

    @classmethod
    @contextmanager
    def opened(cls, out: Path, job: Job, rows: int, *, force: bool) -> Iterator["Journal"]:
        """Give the journal of the file to write, with what an earlier process left in it.

        InputError if it is of another job, unless `force` is set, or in use."""
        path = out.with_name(out.name + ENDING)
        try:
            file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(path, error) from None
        with file:
            _lock(file, out)
            journal = cls(path, file, rows)
            journal._restore(job, force=force)
            try:
                yield journal
            finally:
                if not journal.done:
                    journal.remove()

    def has(self, row: int) -> bool:
        """Return whether a row is answered."""
        return self._at[row] != NONE

    def add(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Write answers, of which those that are there already are dropped, down to the disk."""
        try:
            at = self._file.seek(0, os.SEEK_END)
            lines = []
            for row, answer in answers:
                if not self.has(row):
                    lines.append(json.dumps({"row": row, **answer}).encode() + b"\n")
                    self._note(row, at, answer)
                    at += len(lines[-1])
            self._file.writelines(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def answer(self, row: int) -> Answer:
        """Return the answer to a row."""
        self._file.seek(self._at[row])
        answer: dict[str, Any] = json.loads(self._file.readline())
        del answer["row"]
        return answer

    def remove(self) -> None:
        """Remove the file: all that is in it is written elsewhere."""
        with suppress(OSError):
            self.path.unlink()

    def _note(self, row: int, at: int, answer: Answer) -> None:
        self._at[row] = at
        self.done += 1
        self.failed += answer.get("error") is not None

    def _restore(self, job: Job, *, force: bool) -> None:
        """Read what there is; a job that is new begins the file."""
        head, first = self._file.readline(), self._file.readline()
        if first.endswith(b"\n") and not force:  # else nothing would be lost
            found = _object(head)
            if found is None:
                raise InputError(f"{shortened(self.path)} is no journal of a job: remove it.")
            _check_same(self.path, found, dict(job))
            self._file.seek(len(head))
            self._read_answers(len(head))
            return
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(job).encode() + b"\n")
        self._file.flush()

    def _read_answers(self, at: int) -> None:
        for line in self._file:
            answer = _object(line) if line.endswith(b"\n") else None
            row = answer.get("row") if answer else None
            if answer is None or not isinstance(row, int) or not 0 <= row < len(self._at):
                break  # what follows was never complete
            if not self.has(row):
                self._note(row, at, answer)
            at += len(line)
        self._file.seek(at)
        self._file.truncate()


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _check_same(path: Path, found: Job, job: Job) -> None:
    """Raise InputError, which names what differs, for a journal of another job."""
    if json.loads(json.dumps(job)) == found:
        return
    names = [name for name in {**found, **job} if found.get(name) != job.get(name)]
    raise InputError(
        f"{shortened(path)} was left by a job that differs in: {', '.join(names)}. Run it again as "
        "it was to go on, or begin anew with --force (in Python force=True)."
    )


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(f"{shortened(path)} cannot be written: {error.strerror or error}.")


def _lock(file: IO[bytes], out: Path) -> None:
    """Keep other jobs out; a process that ends in any way frees the file."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"Another job is writing {shortened(out)}: wait for it, or choose another file."
        ) from None
    except OSError:  # this file system has no locks
        pass
