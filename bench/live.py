"""A server in a process of its own for soak.py and serve.py, and what that process holds."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120.0
STOP_SECONDS = 60.0

# `webgemma serve`, which says on SIGUSR1 how many tasks its event loop has.
PROGRAM = """
import asyncio, gc, signal, sys
from webgemma.cli import main
def report(*_):
    tasks = sum(type(each) is asyncio.Task and not each.done() for each in gc.get_objects())
    print("tasks", tasks, flush=True)
if hasattr(signal, "SIGUSR1"):
    signal.signal(signal.SIGUSR1, report)
sys.argv[:1] = ["webgemma", "serve"]
main()
"""


class LiveServer:
    """A running server: its address, and what its process holds, where the system says it."""

    def __init__(self, args: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *args, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            line = self._wait_for(r" at (http://\S+)", START_SECONDS)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.port = int(line[1].rpartition(":")[2])
        self.url = f"http://127.0.0.1:{self.port}"

    def rss(self) -> int | None:
        """Return the bytes of memory that the process has."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        except OSError:
            return None
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def descriptors(self) -> int | None:
        """Return how many files and sockets the process has open."""
        return self._count("fd")

    def threads(self) -> int | None:
        """Return how many threads the process has."""
        return self._count("task")

    def tasks(self) -> int | None:
        """Return how many tasks its event loop has."""
        if not hasattr(signal, "SIGUSR1"):
            return None
        self.process.send_signal(signal.SIGUSR1)
        return int(self._wait_for(r"^tasks (\d+)", 10.0)[1])

    def stop(self) -> bool:
        """End it as a system does; return whether it ended in time."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def _count(self, what: str) -> int | None:
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/{what}"))
        except OSError:
            return None

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            self._lines.put(line)
        self._lines.put("")

    def _wait_for(self, pattern: str, seconds: float) -> "re.Match[str]":
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if found := re.search(pattern, line):
                return found
            if not line:
                break
        raise SystemExit(f"The server did not start or answer: {''.join(self.said[-20:])}")


@contextmanager
def live_server(args: Sequence[str]) -> Iterator[LiveServer]:
    """Run `webgemma serve` with these arguments; it is stopped at the end if it still runs."""
    server = LiveServer(args)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        if server.process.stdout:
            server.process.stdout.close()
