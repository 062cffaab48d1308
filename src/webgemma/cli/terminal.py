"""Output of the command line: text and errors for people, JSON for scripts, progress bars."""

import codecs
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from webgemma.cli.interrupts import EXIT_CODE, Interruptible
from webgemma.errors import WebgemmaError

out = Console(highlight=False)  # rich honours NO_COLOR and a missing terminal by itself
err = Console(stderr=True, highlight=False)


# What a terminal would obey, spelled out: models and files of strangers may say anything.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
PLAIN = str.maketrans({"…": "...", "·": "-", "→": ">", "–": "-", "—": "-", "’": "'", "×": "x"})


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Spell what an encoding has no letters for: in plain letters, or as Python writes it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error("webgemma.spell", _spell)


def prepare_output() -> None:
    """Make standard output and error accept every text, in any encoding and when closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="webgemma.spell")


def discard(stream: IO[str]) -> None:
    """Send what a stream still holds, and all that follows, nowhere: the end of Python is quiet."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def writes_unicode() -> bool:
    """Return whether standard output can write every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def print_error(message: str) -> None:
    """Print an error."""
    err.print(f"[bold red]error:[/] {escape(message.translate(CONTROLS))}", soft_wrap=True)


def say(console: Console, line: str) -> None:
    """Print a line of plain text for whoever still reads: work does not end with its terminal."""
    with may_be_gone(console):
        console.print(line, markup=False, soft_wrap=True)


@contextmanager
def may_be_gone(console: Console) -> Iterator[None]:
    """Drop what is written if the terminal or pipe is gone, now and from then on."""
    try:
        yield
    except (OSError, SystemExit):  # rich exits if a pipe is broken
        discard(console.file)


def fail(message: str) -> NoReturn:
    """Print an error and exit with 1."""
    print_error(message)
    raise typer.Exit(1)


def sentence(error: OSError) -> str:
    """Return an error of the system as a sentence."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}."


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn every error that a user can cause into a sentence and an exit code."""
    try:
        with Interruptible():
            yield
    except WebgemmaError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_CODE) from None
    except BrokenPipeError:  # as in `webgemma kernels norm | head -1`
        discard(sys.stdout)
        raise typer.Exit(0) from None
    except MemoryError:
        fail("The memory of this machine is full; use a smaller model or a shorter prompt.")
    except OSError as error:
        fail(sentence(error))


def write_json(value: Any) -> None:
    """Write one JSON value to standard output."""
    text = json.dumps(value, ensure_ascii=not writes_unicode(), indent=2)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def bytes_bar(label: str, total_nbytes: int | None = None) -> Iterator[Any]:
    """Show a progress bar of bytes on standard error; give the function that moves it.

    It appears when it is first moved, and may learn the total only then."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task(label, total=total_nbytes, visible=False)
        yield lambda nbytes, total=None: bars.update(
            task, completed=nbytes, total=total, visible=True
        )


class StepsBar:
    """A bar that appears when it is first moved."""

    def __init__(self, bars: Progress, label: str) -> None:
        self._bars = bars
        self._task = bars.add_task(label, total=None, visible=False)

    def show(self, done: int, total: int) -> None:
        """Move it."""
        self._bars.start()
        self._bars.update(self._task, completed=done, total=total, visible=True)

    def hide(self) -> None:
        """Remove it."""
        self._bars.stop()


@contextmanager
def steps_bar(label: str) -> Iterator[StepsBar]:
    """Show a progress bar of steps on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bars = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    try:
        yield StepsBar(bars, label)
    finally:
        bars.stop()


def format_nbytes(nbytes: int) -> str:
    """Format bytes with powers of ten, as Ollama does: 7.2 GB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def format_count(count: int) -> str:
    """Format a number of parameters: 4.65B, 12.5M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
