"""A person at the chat page of a server, and `webgemma serve` in a process that can be killed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from browser.person import LAST, Person
from helpers.live_server import PATIENCE, wait_until
from web.sender import Sender


class ServedPerson(Sender, Person):
    """A person at a server's page, who may have to enter a key."""

    def __init__(self, context: Any, address: str) -> None:
        super().__init__(context, f"{address}/chat/")
        self.origin = address
        self.page.set_default_timeout(1000 * PATIENCE)

    def open_models(self) -> None:
        """Open the model dialog and wait until it lists all models."""
        self.page.locator("#model-button").click()
        self.page.locator("#served .model").first.wait_for()

    def choose(self, _group: str, name: str) -> None:
        """Choose a model of the open dialog."""
        self.page.locator("#served .model", has_text=name).click()
        self.wait_for_model(name)

    def copied(self) -> str:
        """Return the last reply as the model wrote it: pasted, also where pages may not read."""
        self.page.locator(LAST).get_by_role("button", name="Copy", exact=True).click()
        self.page.locator(LAST).get_by_text("Copied").wait_for()
        box = self.page.get_by_label("Message", exact=True)
        box.fill("")
        box.press("Control+V")
        text = str(box.input_value())
        box.fill("")
        return text

    def enter_key(self, key: str, *, remember: bool = False) -> None:
        """Fill in the dialog that asks for the key."""
        self.page.get_by_label("API key", exact=True).fill(key)
        self.page.get_by_label("Remember it").set_checked(remember)
        self.button("Use this key").click()

    def others(self) -> list[str]:
        """Return the requests to other hosts; there may be none."""
        own = (f"{self.origin}/", f"blob:{self.origin}/")
        return [request for request in self.requests if not request.startswith(own)]


@contextmanager
def visiting(context: Any, address: str, expected: tuple[str, ...] = ()) -> Iterator[ServedPerson]:
    """A person at the page; errors fail the test unless one of `expected` is part of them."""
    person = ServedPerson(context, address)
    yield person
    errors = [error for error in person.errors if not any(part in error for part in expected)]
    assert (errors, person.others()) == ([], []), (errors, person.others())
    person.page.close()


class Served:
    """`webgemma serve` on a free port, which it keeps when it is started again."""

    def __init__(self, *models: str | Path) -> None:
        self.models = models
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        options = ("--device", "cpu", "--port", str(self.port), "--json")
        command = [sys.executable, "-m", "webgemma", "serve", *map(str, self.models), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.port = urlsplit(self.url).port or 80

    def kill(self) -> None:
        """End it at once, as a power failure does."""
        self.process.kill()
        self.process.communicate()

    def get(self, path: str) -> Any:
        """Return what a route answers."""
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE, trust_env=False).json()

    def post(self, path: str, body: Any) -> Any:
        """Return what a route answers to a body."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, trust_env=False).json()

    def wait_until_idle(self) -> None:
        """Wait until no request is served, and none waits."""
        wait_until(lambda: set(self.get("/status.json")["requests"].values()) == {0})


@contextmanager
def serving(*models: str | Path) -> Iterator[Served]:
    """Serve models until the end of the block."""
    served = Served(*models)
    try:
        yield served
    finally:
        served.kill()
