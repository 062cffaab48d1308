"""A live server on a free port, in a thread of this process, with a tiny model on the CPU."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from helpers.tiny import CONTROLS, SMALL, TAGS, tiny_gguf
from webgemma.server.listening import Server
from webgemma.server.registry import Registry

# Random weights draw one of these now and then: replies of a given length need them suppressed.
ENDS = tuple((CONTROLS + TAGS).index(end) for end in ("<eos>", "<turn|>", "<|tool_response>"))
PATIENCE = 30.0  # seconds; a busy machine is slow now and then


class Live:
    """A running server, with a plain HTTP client."""

    def __init__(self, server: Server, registry: Registry) -> None:
        self.server, self.registry = server, registry
        self.port = server.port
        self.url = f"http://127.0.0.1:{server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Send JSON."""
        return self.http.post(path, json={} if body is None else body, **more)

    def connect(self) -> socket.socket:
        """Return a bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@contextmanager
def live_server(*models: str | Path, **options: Any) -> Iterator[Live]:
    """Run a server; options that `Server` does not have are the registry's."""
    names = ("keys", "origins", "host", "port", "page")
    own: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    own["grace_seconds"] = options.pop("grace_seconds", 0.2)
    options.setdefault("device", "cpu")
    registry = Registry([str(model) for model in models], **options)
    server = Server(registry, **{"port": 0} | own)
    thread = threading.Thread(target=server.run)
    thread.start()
    live = Live(server, registry)
    try:
        wait_until(lambda: server.is_started)
        yield live
    finally:
        live.http.close()
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what must come true soon."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def tiny_model(folder: Path, name: str = "small", *, ends: bool = False) -> Path:
    """Write a tiny model, whose replies end at their limit of tokens, or by themselves, too."""
    path = folder / f"{name}.gguf"
    path.write_bytes(tiny_gguf(replace(SMALL, suppressed=() if ends else ENDS)))
    return path
