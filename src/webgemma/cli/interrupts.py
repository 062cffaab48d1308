"""Ctrl-C: whenever it comes, the command ends with 130 and prints no traceback.

This is imported before everything else, so it imports only what Python has loaded anyway."""

import os

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # signal itself imports enum, re and others, in reach of a Ctrl-C

EXIT_CODE = 130  # as a shell reports it
IMPORTING = "<frozen importlib._bootstrap>"  # the file of the code that runs an import
RETRY_SECONDS = 0.02


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process at once, except inside `Interruptible`.

    Where it is ignored, as in a script's background jobs, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


class Interruptible:
    """A block in which Ctrl-C raises KeyboardInterrupt, for what has something to finish."""

    def __enter__(self) -> None:
        self._replaced = signal.getsignal(signal.SIGINT) is _end
        if self._replaced:
            signal.signal(signal.SIGINT, _interrupt)

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, _end)


def _end(_signal: int, _frame: "FrameType | None") -> None:
    os._exit(EXIT_CODE)


def _interrupt(_signal: int, frame: "FrameType | None") -> None:
    """Raise KeyboardInterrupt; during an import, as soon as that is done.

    Interrupted imports report it in many ways, and leave modules that cannot be imported again."""
    if not _is_importing(frame):
        raise KeyboardInterrupt
    from threading import Timer

    again = Timer(RETRY_SECONDS, signal.raise_signal, [signal.SIGINT])
    again.daemon = True
    again.start()


def _is_importing(frame: "FrameType | None") -> bool:
    while frame is not None and frame.f_globals.get("__name__") != "webgemma.cli":
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False
