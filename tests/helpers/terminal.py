"""A program in a terminal of its own: what a person types, and what the terminal shows."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Self

PATIENCE_S = 240  # a busy machine is slow; what is expected comes long before, or never
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")


def _without_size() -> dict[str, str]:
    """Return the environment without the size of another terminal, which pytest-xdist sets."""
    return {name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "LINES")}


class Terminal:
    """Runs `webgemma`, or a line of the shell, in a pseudo-terminal."""

    def __init__(
        self,
        *args: object,
        env: dict[str, str] | None = None,
        columns: int = 80,
        shell: str = "",
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            ["sh", "-c", shell] if shell else [sys.executable, "-m", "webgemma", *map(str, args)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**_without_size(), "TERM": "xterm", **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.raw = ""  # all that it wrote
        self._seen = 0  # where `expect` continues
        self._bytes = b""

    def type(self, text: str) -> None:
        """Type text; "\\r" is Enter, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._ours, text.encode())

    def paste(self, text: str) -> None:
        """Paste text, as a terminal that knows bracketed paste does."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def expect(self, text: str) -> str:
        """Wait until the text appears; return what was shown up to it since the last time."""
        end = time.monotonic() + PATIENCE_S
        while (at := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} did not appear in {self.shown!r}"
            assert self._read(), f"it ended without {text!r}: {self.shown!r}"
        before, self._seen = self.shown[self._seen : at], at + len(text)
        return before

    @property
    def shown(self) -> str:
        """What it wrote, without colours and movements of the cursor."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def wait(self) -> int:
        """Wait until it ends; return its exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Read what there is; return whether it still runs."""
        if not select.select([self._ours], [], [], PATIENCE_S)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            data = b""
        self._bytes += data
        self.raw = self._bytes.decode("utf-8", "ignore")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)
