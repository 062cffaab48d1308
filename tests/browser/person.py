"""Someone at the chat page with its real engine, and a server that can be told to misbehave."""

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

from webgemma.web.http import Answer, FilePart, Request
from webgemma.web.site import Site

PYODIDE = Path(__file__).resolve().parents[2] / "node_modules" / "pyodide"
SLOW_MS = 60_000  # a GPU in software compiles for a while
LAST = ".message.assistant:last-child"


class Wire(Site):
    """The real site; it notes which parts of models it was asked for, and can cut or hold them."""

    def __init__(self, store: Path, added: Mapping[str, str] | None = None) -> None:
        """`added` is JavaScript to be added to files, by the name of each."""
        super().__init__(store, PYODIDE)
        self.ranges: list[tuple[int, int]] = []  # of models: first byte and end
        self.cut: Path | None = None  # a file that ends too early, in place of the model's
        self.holds = threading.Event()  # a part is being held back
        self._held_from: int | None = None
        self._let_go = threading.Event()
        self._added = added or {}

    def answer(self, request: Request, port: int) -> Answer:
        answer = super().answer(request, port)
        body = answer.body
        if request.segments[:1] == ("models",) and isinstance(body, FilePart):
            self.ranges.append((body.first, body.first + body.nbytes))
            if self._held_from is not None and body.first >= self._held_from:
                self.holds.set()
                self._let_go.wait(30)
            if self.cut:
                return replace(answer, body=replace(body, path=self.cut))
        name = request.segments[-1] if request.segments else ""
        if name in self._added and isinstance(body, FilePart):
            return replace(answer, body=body.path.read_bytes() + self._added[name].encode())
        return answer

    def hold(self, first: int) -> None:
        """Send nothing of a model from this byte on, until `let_go`."""
        self.holds.clear()
        self._let_go.clear()
        self._held_from = first

    def let_go(self) -> None:
        """Send what was held back."""
        self._held_from = None
        self._let_go.set()

    def asked_from(self, mark: int) -> int:
        """The first byte of a model that was asked for since so many ranges had been."""
        return min(first for first, end in self.ranges[mark:] if end - first > 1)


class Person(Visitor):
    """A visitor who waits as long as software needs, and knows the picker and the settings."""

    def __init__(self, context: Any, url: str) -> None:
        super().__init__(context, url)
        self.page.set_default_timeout(SLOW_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"])

    def set(self, **fields: str) -> None:
        """Fill fields of the settings, by their labels with _ for a blank."""
        self.button("Settings").click()
        for label, value in fields.items():
            self.page.get_by_label(label.replace("_", " ")).fill(value)
        self.button("Save").click()

    def wait_for_model(self, name: str) -> None:
        self.page.locator("#model-name", has_text=name).wait_for()

    def pick(self) -> None:
        """Open the picker and wait until it has looked."""
        self.page.locator("#model-button").click()
        self.page.locator("#stored .model").first.wait_for()
        self.page.locator("#ollama-state", has_text="Looking").wait_for(state="hidden")

    def close(self) -> None:
        self.button("Close").click()

    def rows(self, group: str) -> list[str]:
        return [text.replace("\n", " | ") for text in self.texts(f"#{group} .model")]

    def news(self, text: str) -> str:
        """What the picker says, once it says this."""
        news = self.page.locator("#models-news", has_text=text)
        news.wait_for()
        return str(news.inner_text())

    def choose(self, group: str, name: str) -> None:
        """Load a model of the open picker."""
        self.page.locator(f"#{group} .model", has_text=name).click()
        self.wait_for_model(name)

    def wait_for_text(self, length: int) -> int:
        """Wait until the reply is so long; how long it is then."""
        shown = "([name, length]) => document.querySelector(name)?.innerText.length >= length"
        self.page.wait_for_function(shown, arg=[f"{LAST} .body", length], polling=50)
        return len(self.reply())

    def wait_for_reply(self) -> str:
        self.page.locator(f"{LAST} .facts:not(:empty)").wait_for()
        return self.reply()

    def copied(self) -> str:
        """The last reply as it was, not as Markdown shows it."""
        self.page.locator(f"{LAST}").get_by_role("button", name="Copy", exact=True).click()
        self.page.locator(LAST).get_by_text("Copied").wait_for()
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def others(self) -> list[str]:
        """Who else was asked: nobody may be."""
        return [r for r in self.requests if not r.startswith((self.url, f"blob:{self.url}"))]


AnyPerson = TypeVar("AnyPerson", bound=Person)


@contextmanager
def visiting(
    context: Any, site: Site, port: int = 0, who: type[AnyPerson] = Person
) -> Iterator[AnyPerson]:
    """A person in front of an open page; nothing may go wrong there, and nobody else be asked."""
    with serving(site, port) as client:
        person = who(context, f"http://localhost:{client.port}/")
        yield person
    assert person.errors == []
    assert person.others() == []


def talker(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A stand-in that goes on and on, until it is stopped or its context is full."""
    said = {"START": ("On",), "On": (" and on",), " and on": (" and on",)}
    with monkeypatch.context() as patch:
        patch.setattr(standin, "SENTENCES", said)
        return standin.standin_gguf()
