"""A person at the chat page with its real engine, and a server that can be made to fail."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from helpers import standin
from web.client import serving
from web.page import Visitor

from webgemma.web.http import FileRange, Request, Response
from webgemma.web.site import Site

SLOW_MS = 60_000  # a software GPU compiles slowly
LAST = ".message.assistant:last-child"


class ControlledSite(Site):
    """The real site; records the requested ranges of models, and can truncate or delay them."""

    def __init__(self, store: Path, added: Mapping[str, str] | None = None) -> None:
        """Append the JavaScript in `added` to files, by file name."""
        super().__init__(store)
        self.ranges: list[tuple[int, int]] = []  # requested of models: first byte and end
        self.truncated: Path | None = None  # a shorter file to send instead of the model's
        self.is_holding = threading.Event()  # a response is being delayed
        self._hold_from: int | None = None
        self._released = threading.Event()
        self._added = added or {}

    def respond(self, request: Request, port: int) -> Response:
        response = super().respond(request, port)
        body = response.body
        if request.segments[:1] == ("models",) and isinstance(body, FileRange):
            self.ranges.append((body.first, body.first + body.nbytes))
            if self._hold_from is not None and body.first >= self._hold_from:
                self.is_holding.set()
                self._released.wait(30)
            if self.truncated:
                return replace(response, body=replace(body, path=self.truncated))
        name = request.segments[-1] if request.segments else ""
        if name in self._added and isinstance(body, FileRange):
            return replace(response, body=body.path.read_bytes() + self._added[name].encode())
        return response

    def hold(self, first: int) -> None:
        """Delay responses with bytes of a model from this one on, until `release`."""
        self.is_holding.clear()
        self._released.clear()
        self._hold_from = first

    def release(self) -> None:
        """Send the delayed responses."""
        self._hold_from = None
        self._released.set()

    def first_requested(self, since: int) -> int:
        """Return the first byte of a model that `ranges[since:]` requested."""
        return min(first for first, end in self.ranges[since:] if end - first > 1)


class Person(Visitor):
    """A visitor who waits for a software GPU, and uses the model dialog and the settings."""

    def __init__(self, context: Any, url: str) -> None:
        super().__init__(context, url)
        self.page.set_default_timeout(SLOW_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"])

    def set(self, **fields: str) -> None:
        """Fill fields of the settings, by their labels with _ for a space, and save."""
        self.button("Settings").click()
        for label, value in fields.items():
            self.page.get_by_label(label.replace("_", " ")).fill(value)
        self.button("Save").click()

    def wait_for_model(self, name: str) -> None:
        self.page.locator("#model-name", has_text=name).wait_for()

    def open_models(self) -> None:
        """Open the model dialog and wait until it lists all models."""
        self.page.locator("#model-button").click()
        self.page.locator("#stored .model").first.wait_for()
        self.page.locator("#ollama-state", has_text="Reading").wait_for(state="hidden")

    def close(self) -> None:
        self.button("Close").click()

    def rows(self, group: str) -> list[str]:
        """Return the texts of the models in a group of the dialog."""
        return [text.replace("\n", " | ") for text in self.texts(f"#{group} .model")]

    def status(self, text: str) -> str:
        """Wait until the dialog's message has this text, and return the message."""
        status = self.page.locator("#models-status", has_text=text)
        status.wait_for()
        return str(status.inner_text())

    def choose(self, group: str, name: str) -> None:
        """Load a model of the open dialog."""
        self.page.locator(f"#{group} .model", has_text=name).click()
        self.page.locator("#loading").wait_for(state="hidden")  # the last one may have this name
        self.wait_for_model(name)

    def wait_for_text(self, length: int) -> int:
        """Wait until the reply has this length; return its length then."""
        shown = "([name, length]) => document.querySelector(name)?.innerText.length >= length"
        self.page.wait_for_function(shown, arg=[f"{LAST} .body", length], polling=50)
        return len(self.reply())

    def wait_for_reply(self) -> str:
        self.page.locator(f"{LAST} .facts:not(:empty)").wait_for()
        return self.reply()

    def copied(self) -> str:
        """Return the last reply as the model wrote it, not as Markdown shows it."""
        self.page.locator(f"{LAST}").get_by_role("button", name="Copy", exact=True).click()
        self.page.locator(LAST).get_by_text("Copied").wait_for()
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def others(self) -> list[str]:
        """Return the requests to other hosts; there may be none."""
        return [r for r in self.requests if not r.startswith((self.url, f"blob:{self.url}"))]


AnyPerson = TypeVar("AnyPerson", bound=Person)


@contextmanager
def visiting(
    context: Any, site: Site, port: int = 0, who: type[AnyPerson] = Person
) -> Iterator[AnyPerson]:
    """Serve a site to a person; errors and requests to other hosts fail the test."""
    with serving(site, port) as client:
        person = who(context, f"http://localhost:{client.port}/")
        yield person
    assert person.errors == []
    assert person.others() == []


def endless_gguf(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a stand-in model whose reply ends only when it is stopped or the context is full."""
    sentences = {"START": ("On",), "On": (" and on",), " and on": (" and on",)}
    with monkeypatch.context() as patch:
        patch.setattr(standin, "SENTENCES", sentences)
        return standin.standin_gguf()
