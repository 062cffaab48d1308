"""The chat page with its real engine, without its server: it starts and replies as before."""

from pathlib import Path
from typing import Any

from web.client import serving
from web.page import Visitor

from webgemma.web.site import Site

SLOW_MS = 60_000  # a software GPU compiles slowly


def test_a_visit_without_the_server(chromium: Any, tmp_path: Path) -> None:
    context = chromium.new_context()
    with serving(Site(tmp_path)) as client:
        visitor = Visitor(context, f"http://localhost:{client.port}/")
        visitor.page.set_default_timeout(SLOW_MS)
        visitor.open()
        visitor.button("Settings").click()
        visitor.page.get_by_label("Temperature").fill("0")
        visitor.page.get_by_label("Max tokens").fill("4")
        visitor.button("Save").click()
        before = visitor.ask("Hello")
        visitor.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    visitor.open()
    visitor.button("New conversation").click()
    assert visitor.ask("Hello") == before
    visitor.button("Settings").click()
    visitor.page.get_by_label("Max tokens").fill("12")
    visitor.page.get_by_label("Reply as JSON of this schema").fill('{"enum": [1, 2]}')
    visitor.button("Save").click()
    assert float(visitor.ask("Which?").split()[-1]) in (1, 2)
    context.close()
