"""SIGINT, SIGTERM and SIGHUP: they end a command at once, or after the work that is under way."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
PATIENCE = 2  # signals after which one more does not wait for the work under way


class StopSignals:
    """While it is entered, a signal raises KeyboardInterrupt, or is only noted in `number`.

    With `at_once` unset it is noted: the command is to look at `number` and to end by itself. Only
    a third signal does not wait. Signals that are ignored (under nohup) stay ignored."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self.at_once = True
        self._count = 0
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code of a command that a signal ended: 130, 143 or 129."""
        return 128 + (signal.SIGINT if self.number is None else self.number)

    def __enter__(self) -> StopSignals:
        for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                with suppress(ValueError):  # outside the main thread nothing can be handled
                    signal.signal(number, self._handle)
                    self._before[number] = before
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.number = number if self.number is None else self.number
        self._count += 1
        if self.at_once or self._count > PATIENCE:
            raise KeyboardInterrupt
        line = b"stopping after this step, then saving"
        if self._count == PATIENCE:
            line += b"; once more ends at once, without saving"
        with suppress(OSError):  # print could be in the middle of a line; the terminal may be gone
            if os.isatty(2):
                os.write(2, b"\r\n" + line + b"\r\n")
