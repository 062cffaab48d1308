"""The welcome of the chat page: what the model can do, and suggestions."""

from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor
from web.sender import Sender

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

PLACES = """() => ["#welcome h2", "#suggestions", ".suggestion"].map((selector) => {
  const { x, y, width, height } = document.querySelector(selector).getBoundingClientRect();
  return [x, y, width, height];
})"""


def test_nothing_moves_while_the_bundled_model_is_loaded(context: Any, url: str) -> None:
    context.add_init_script(
        """const { postMessage } = Worker.prototype;
        Worker.prototype.postMessage = function (data) {
          if (data.type === "load") globalThis.loadNow = () => postMessage.call(this, data);
          else postMessage.call(this, data);
        };"""
    )
    visitor = Visitor(context, url)
    page = visitor.page
    for width in (1280, 320):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(url)
        page.locator("#loading").wait_for()
        page.locator(".suggestion").nth(3).wait_for()
        before = page.evaluate(PLACES)
        bar = page.locator("#loading").bounding_box()
        assert bar is not None
        assert bar["y"] + bar["height"] <= before[0][1]  # it covers nothing
        page.evaluate("loadNow()")
        page.locator("#model-name", has_text="Bundled model").wait_for()
        page.locator("#loading").wait_for(state="hidden")
        assert page.evaluate(PLACES) == before
    assert visitor.errors == []


def test_a_suggestion_is_sent_and_never_replaces_a_draft(visitor: Visitor) -> None:
    page = visitor.page
    assert "tiny" in page.locator("#welcome-model").inner_text()
    box = page.get_by_label("Message", exact=True)
    box.fill("my own")
    visitor.button("What is 7 + 5?").click()
    assert box.input_value() == "my own\nWhat is 7 + 5?"
    box.fill("")
    visitor.button("What is 7 + 5?").click()
    page.locator(".body", has_text="You said What is 7 + 5?.").wait_for()
    assert box.input_value() == ""
    assert page.locator("#welcome").is_hidden()
    visitor.button("New conversation").click()
    visitor.button("Load a real model").click()
    page.locator("#models-dialog[open]").wait_for()


def test_a_real_model_says_what_it_takes(visitor: Sender) -> None:
    page = visitor.page
    files = [
        {"name": name, "mimeType": "", "buffer": b"GGUF"}
        for name in ("real.gguf", "mmproj-real.gguf")
    ]
    page.locator("#model-file").set_input_files(files)
    page.locator("#model-name", has_text="real.gguf").wait_for()
    assert visitor.texts(".abilities li") == [
        "Text",
        "Images",
        "Thinking",
        "Context of 32,768 tokens",
    ]
    with page.expect_file_chooser():
        visitor.button("What is in this picture?").click()
    assert page.get_by_label("Message", exact=True).input_value() == "What is in this picture?"
