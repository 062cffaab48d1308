"""The chat page with its real engine, without its server: it starts and replies as before.

The server is that of the wheel, installed away from the checkout."""

from pathlib import Path
from typing import Any

from browser.serving import folder_server
from helpers.command import answer
from helpers.installed import build_wheel, install, serving_installed
from web.page import Visitor

SLOW_MS = 60_000  # a software GPU compiles slowly


class Reader(Visitor):
    """A visitor who waits for a software GPU."""

    def __init__(self, context: Any, url: str) -> None:
        super().__init__(context, url)
        self.page.set_default_timeout(SLOW_MS)

    def short_replies(self) -> None:
        """Make replies short, and always the same."""
        self.button("Settings").click()
        self.page.get_by_label("Temperature").fill("0")
        self.page.get_by_label("Max tokens").fill("4")
        self.button("Save").click()

    def wait_until_stored(self) -> None:
        """Wait until the page can start without its server."""
        self.page.evaluate("navigator.serviceWorker.ready.then(() => true)")


def test_a_visit_without_the_server_of_the_wheel(chromium: Any, tmp_path: Path) -> None:
    installed = install(build_wheel(tmp_path / "dist"), tmp_path / "installed")
    context = chromium.new_context()
    with serving_installed(installed, tmp_path / "home") as address:
        visitor = Reader(context, address)
        visitor.open()
        visitor.short_replies()
        before = visitor.ask("Hello")
        visitor.wait_until_stored()
    visitor.url = address.partition("?")[0]
    visitor.open()
    visitor.button("New conversation").click()
    assert visitor.ask("Hello") == before
    visitor.button("Settings").click()
    visitor.page.get_by_label("Max tokens").fill("12")
    visitor.page.get_by_label("Reply as JSON of this schema").fill('{"enum": [1, 2]}')
    visitor.button("Save").click()
    assert float(visitor.ask("Which?").split()[-1]) in (1, 2)
    context.close()


def test_a_visit_to_an_exported_folder_below_another_and_without_its_server(
    chromium: Any, tmp_path: Path
) -> None:
    answer("web", "--export", tmp_path / "project")
    context = chromium.new_context()
    with folder_server(tmp_path) as origin:
        visitor = Reader(context, f"{origin}/project/")
        visitor.open()
        visitor.short_replies()
        before = visitor.ask("Hello")
        assert not visitor.page.evaluate("crossOriginIsolated")
        visitor.wait_until_stored()
        assert [url for url in visitor.requests if not url.startswith(visitor.url)] == []
    visitor.open()
    visitor.button("New conversation").click()
    assert visitor.ask("Hello") == before
    assert visitor.texts("#version")[0].startswith("webgemma ")
    context.close()
