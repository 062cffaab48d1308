"""Headless Firefox by WebDriver BiDi, which it speaks itself: no driver is needed."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

FIREFOX = os.environ.get("FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox") or ""
LISTENS = "WebDriver BiDi listening on "


class Tab:
    """The first tab of a Firefox."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._ids = count(1)
        self._call("session.new", capabilities={})
        self._context = self._call("browsingContext.getTree")["contexts"][0]["context"]

    def _call(self, method: str, **params: Any) -> Any:
        id = next(self._ids)
        self._socket.send(json.dumps({"id": id, "method": method, "params": params}))
        while (reply := json.loads(self._socket.recv(timeout=60))).get("id") != id:
            pass  # an event
        assert reply["type"] == "success", reply
        return reply["result"]

    def open(self, url: str, cookie: tuple[str, str]) -> None:
        """Open an address with a cookie."""
        name, value = cookie
        host = urlsplit(url).hostname
        given = {"name": name, "value": {"type": "string", "value": value}, "domain": host}
        self._call("storage.setCookie", cookie=given)
        self._call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """Return the text, number or boolean that an expression is; None for others."""
        target = {"context": self._context}
        options = {"target": target, "awaitPromise": True, "userActivation": True}
        outcome = self._call("script.evaluate", expression=expression, **options)
        assert outcome["type"] == "success", outcome
        return outcome["result"].get("value")


@contextmanager
def firefox() -> Iterator[Tab]:
    """Launch a Firefox; the value is its first tab."""
    from websockets.sync.client import connect

    profile = tempfile.mkdtemp()
    options = ["--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
    process = subprocess.Popen([FIREFOX, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next(line.split()[-1] for line in process.stderr if line.startswith(LISTENS))
        process.stderr.close()
        with connect(f"{address}/session", max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)
