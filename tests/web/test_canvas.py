"""DiffusionGemma on the page: the canvas is shown after each step, then its text."""

import json
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.tiny import DIFFUSION, tiny_gguf
from web.page import Visitor
from web.test_tab import HELLO, file_spec, messages_of

from webgemma import Gemma
from webgemma.gguf.sources import BytesSource
from webgemma.web.tab import Tab

pytest.importorskip("playwright.sync_api", reason="needs playwright")
in_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def test_every_step_is_reported_before_its_text() -> None:
    data = tiny_gguf(DIFFUSION)
    settings = {"temperature": 0.5, "top_k": 3, "max_tokens": DIFFUSION.canvas, "seed": 4}

    async def act(tab: Tab) -> None:
        await tab.load(file_spec(data), None, "auto")
        await tab.chat(1, HELLO, json.dumps(settings))

    messages = [m for m in messages_of(act) if m.get("id") == 1]
    steps = [m for m in messages if m["type"] == "canvas"]
    assert [m["step"] for m in steps] == list(range(1, len(steps) + 1))
    assert all(m["number"] == 1 and m["size"] == DIFFUSION.canvas for m in steps)
    assert all(isinstance(text, str) for m in steps for text, _ in m["runs"])
    last_step = max(at for at, m in enumerate(messages) if m["type"] == "canvas")
    assert all(m["type"] != "piece" for m in messages[:last_step])
    with Gemma.load(BytesSource(data), "gpu") as model:
        pieces = model.chat(json.loads(HELLO), max_tokens=DIFFUSION.canvas, seed=4)
        expected = [piece.text for piece in pieces]
    assert "".join(m["text"] for m in messages if m["type"] == "piece") == "".join(expected)
    assert messages[-1]["tokens"] == len(expected)


@in_chromium
def test_the_page_shows_the_canvas(context: Any, url: str) -> None:
    visitor = Visitor(context, url)
    visitor.open()
    visitor.say("diffuse")
    canvas = visitor.page.locator(".assistant .canvas")
    canvas.locator("small", has_text="Canvas 1, step 3: 6 of 8 tokens accepted").wait_for()
    assert canvas.locator(".accepted").inner_text() == "<b>Half</b>"  # never as markup
    assert canvas.locator(".noise").text_content() == " noise↵"
    assert canvas.get_attribute("aria-hidden") == "true"
    visitor.release()
    visitor.button("Send").wait_for()
    assert visitor.reply() == "You said diffuse."
    assert canvas.locator("span").count() == 0
    assert visitor.errors == []
