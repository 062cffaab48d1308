"""How the command line speaks: a console for words, one for complaints, JSON for scripts."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

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

from webgemma.errors import WebgemmaError

out = Console(highlight=False)  # rich honours NO_COLOR and a missing terminal by itself
err = Console(stderr=True, highlight=False)


def complain(sentence: str) -> NoReturn:
    """Say what is wrong, and leave with 1."""
    err.print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True)
    raise typer.Exit(1)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what a user can cause into a sentence and exit code 1, never a traceback."""
    try:
        yield
    except WebgemmaError as error:
        complain(str(error))
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of our output has gone, as in `webgemma list | head -1`
        sys.stderr.close()
        raise typer.Exit(0) from None
    except MemoryError:
        complain("The memory of this machine is full; take a smaller model or a shorter prompt.")
    except OSError as error:
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")


def write_json(value: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
    sys.stdout.flush()


@contextmanager
def progress(label: str, total_nbytes: int | None = None) -> Iterator[Any]:
    """A progress bar on standard error; gives the function that moves it to so many bytes.

    It appears when it is first moved, and may be told the total only then."""
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
        """Move it to so many steps of so many."""
        self._bars.start()
        self._bars.update(self._task, completed=done, total=total, visible=True)

    def hide(self) -> None:
        """Take it away."""
        self._bars.stop()


@contextmanager
def steps_bar(label: str) -> Iterator[StepsBar]:
    """A progress bar on standard error that counts steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bars = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    try:
        yield StepsBar(bars, label)
    finally:
        bars.stop()


def human_nbytes(nbytes: int) -> str:
    """Bytes as people write them: 7.2 GB (powers of ten, as Ollama shows them)."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def human_count(count: int) -> str:
    """Parameters as people write them: 4.65B, 12.5M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
