"""The chat page in a real Chromium, served by the real server, with a worker that has no model."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from web.client import serving

from webgemma.web.site import STATIC, Site

FAKE_WORKER = (Path(__file__).parent / "fake_worker.js").read_text()


def page_site(folder: Path, worker: str | None = FAKE_WORKER) -> Site:
    """The page, with `worker` in place of the real one; None: without any."""
    static = folder / "static"
    shutil.copytree(STATIC, static)
    (static / "worker.js").unlink(missing_ok=True)
    if worker is not None:
        (static / "worker.js").write_text(worker)
    return Site(folder / "store", folder, static=static)


@contextmanager
def serving_page(folder: Path, worker: str | None = FAKE_WORKER) -> Iterator[str]:
    """The address of the page, as `page_site` makes it."""
    with serving(page_site(folder, worker)) as client:
        yield f"http://localhost:{client.port}/"


class Visitor:
    """A person at the page; remembers what went wrong and who was asked."""

    def __init__(self, context: Any, url: str) -> None:
        self.url = url
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)  # the machine may be busy
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self, model: str = "Bundled model") -> None:
        """Go to the page and wait until the model is there."""
        self.page.goto(self.url)
        self.page.locator("#model-name", has_text=model).wait_for()

    def say(self, text: str) -> None:
        """Write a message and send it; the reply may still be on its way."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Say something and wait for the whole reply."""
        self.say(text)
        self.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
        return self.reply()

    def reply(self) -> str:
        """The text of the last reply."""
        return str(self.page.locator(".message.assistant .body").last.inner_text())

    def request(self) -> Any:
        """What the worker is asked when the user says "request"."""
        self.ask("request")
        return self.last_request()

    def last_request(self) -> Any:
        """What the worker was asked, from the reply that repeats it."""
        return json.loads(self.page.locator(".message:last-child pre").inner_text())

    def button(self, name: str) -> Any:
        """A button by its name."""
        return self.page.get_by_role("button", name=name, exact=True)

    def notice(self) -> str:
        """The sentence above the conversation."""
        shown = self.page.locator("#notice:not([hidden]) #notice-text")
        shown.wait_for()
        return str(shown.inner_text())

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements there are now."""
        return [str(text) for text in self.page.locator(selector).all_inner_texts()]
