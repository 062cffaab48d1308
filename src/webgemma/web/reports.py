"""What the worker reports to the page: progress, not too often, and the kinds of errors."""

import asyncio
import time
from collections.abc import Callable

from webgemma.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    GgufError,
    MissingEncoderError,
    MissingPackageError,
    ModelNotFoundError,
    PromptLengthError,
    StorageError,
    WebgemmaError,
)

PROGRESS_SECONDS = 0.1  # minimum time between two messages of progress


class ThrottledProgress:
    """Progress that is reported every PROGRESS_SECONDS at most; the latest value is never lost."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._report_seconds = 0.0  # when the last report was sent
        self._latest = (0, 0)
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, done: int, total: int) -> None:
        self._latest = (done, total)
        if time.monotonic() - self._report_seconds >= PROGRESS_SECONDS or done == total:
            self._flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PROGRESS_SECONDS, self._flush)

    def _flush(self) -> None:
        self.close()
        self._report_seconds = time.monotonic()
        self._report(*self._latest)

    def close(self) -> None:
        """Drop a pending report: the work has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def kind_of(error: WebgemmaError) -> str:
    """Return the kind of an error, by which the page chooses its advice."""
    if isinstance(error, StorageError):
        return "storage"
    if isinstance(error, PromptLengthError):
        return "prompt"
    if isinstance(error, DeviceMemoryError):
        return "memory"
    if isinstance(error, GgufError | ModelNotFoundError):
        return "file"
    if isinstance(error, MissingEncoderError):
        return "no-encoder"
    if isinstance(error, MissingPackageError):
        return "no-schemas"
    if isinstance(error, DeviceLostError):
        return "device-lost"
    return "device" if isinstance(error, DeviceError) else "other"
