"""WebKit, of which Safari is made, by Debian's WebKitWebDriver, on a screen that nobody sees."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

DRIVER, SCREEN = shutil.which("WebKitWebDriver") or "", shutil.which("Xvfb") or ""
BROWSERS = sorted(Path("/usr/lib").glob("*/webkit2gtk-4.*/MiniBrowser"))
WEBKIT = bool(DRIVER and SCREEN and BROWSERS)


class Tab:
    """The only tab of a WebKit."""

    def __init__(self, port: int) -> None:
        self._port = port
        options = {"binary": str(BROWSERS[-1]), "args": ["--automation"]}
        wanted = {"alwaysMatch": {"webkitgtk:browserOptions": options}}
        session = self._call("POST", "/session", capabilities=wanted)["sessionId"]
        self._session = f"/session/{session}"

    def _call(self, method: str, path: str, **body: Any) -> Any:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request(method, path, json.dumps(body) if method == "POST" else None)
            response = connection.getresponse()
            value = json.load(response)["value"]
        assert response.status == 200, value
        return value

    def open(self, url: str, cookie: tuple[str, str]) -> None:
        """Open an address with a cookie."""
        self._call("POST", f"{self._session}/url", url=url)  # a cookie is for the page shown
        given = {"name": cookie[0], "value": cookie[1]}
        self._call("POST", f"{self._session}/cookie", cookie=given)
        self._call("POST", f"{self._session}/url", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return what an expression is."""
        script = f"return ({expression})"
        return self._call("POST", f"{self._session}/execute/sync", script=script, args=[])

    def close(self) -> None:
        """End the browser."""
        self._call("DELETE", self._session)


@contextmanager
def webkit() -> Iterator[Tab]:
    """Launch a WebKit; the value is its tab."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [SCREEN, "-displayfd", "1", "-nolisten", "tcp"]
    screen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert screen.stdout
    environ = os.environ | {"DISPLAY": f":{screen.stdout.readline().strip()}"}
    driver = subprocess.Popen([DRIVER, f"--port={port}"], env=environ)
    try:
        _wait_for(port)
        tab = Tab(port)
        yield tab
        tab.close()
    finally:
        for process in (driver, screen):
            process.terminate()
            process.wait()
        screen.stdout.close()


def _wait_for(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < end, "WebKitWebDriver does not listen"
            time.sleep(0.05)
        else:
            return
