"""The chat page with its real engine: Chromium, Pyodide and WebGPU."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.standin import standin_gguf
from helpers.store import add_model
from web.client import serving
from web.page import Visitor

from webgemma import Gemma
from webgemma.gguf.sources import BytesSource
from webgemma.web.site import Site

SLOW_MS = 60_000  # a software GPU compiles slowly


@pytest.fixture(scope="module")
def visitor(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    """A visitor with the page open, on a machine whose Ollama has a model."""
    store = tmp_path_factory.mktemp("store")
    add_model(store, "standin:tiny", gguf=standin_gguf())
    with serving(Site(store)) as client:
        context = chromium.new_context()
        visitor = Visitor(context, f"http://localhost:{client.port}/")
        visitor.page.set_default_timeout(SLOW_MS)
        visitor.open()
        yield visitor
        assert visitor.errors == []
        assert [r for r in visitor.requests if not r.startswith((visitor.url, "blob:"))] == []
        context.close()


def expected(text: str, gguf: bytes | None = None) -> str:
    source = None if gguf is None else BytesSource(gguf)
    with Gemma.load(source, "cpu") as model:
        pieces = model.chat(text, temperature=0, max_tokens=12)
        return "".join(piece.text for piece in pieces).strip()


def set_greedy(visitor: Visitor) -> None:
    visitor.button("Settings").click()
    visitor.page.get_by_label("Temperature").fill("0")
    visitor.page.get_by_label("Max tokens").fill("12")
    visitor.button("Save").click()


def test_the_bundled_model_replies_as_natively(visitor: Visitor) -> None:
    set_greedy(visitor)
    assert visitor.ask("What are you?").strip() == expected("What are you?")
    assert "tokens/s" in visitor.texts(".facts")[-1]


MOODS = ["*calm*", "_wild_"]


def set_schema(visitor: Visitor, schema: str) -> None:
    visitor.button("Settings").click()
    visitor.page.get_by_label("Reply as JSON of this schema").fill(schema)
    visitor.button("Save").click()


def test_a_reply_keeps_to_a_schema_by_a_library_that_is_loaded_then(visitor: Visitor) -> None:
    set_schema(visitor, '{"type": "object",}')
    problem = visitor.page.locator("#schema-problem")
    assert problem.inner_text().startswith("This is not JSON: Expected double-quoted property name")
    visitor.button("Close without saving").click()
    set_schema(visitor, json.dumps({"enum": MOODS}))
    visitor.ask("How is the sea?")
    shown = visitor.page.locator(".message:last-child .body figure.code code").inner_text()
    assert json.loads(shown) in MOODS
    set_schema(visitor, json.dumps({"type": "array", "uniqueItems": True}))
    visitor.say("And now?")
    assert "uniqueItems is not supported" in visitor.notice()
    visitor.button("Dismiss").click()
    set_schema(visitor, "")


def test_a_model_of_ollama_is_read_in_ranges(visitor: Visitor) -> None:
    visitor.page.locator("#model-name").click()
    visitor.page.get_by_text("standin:tiny").click()
    visitor.page.locator("#model-name", has_text="standin:tiny").wait_for()
    assert visitor.ask("Hello").strip() == expected("Hello", standin_gguf())
    assert any("/models/sha256-" in request for request in visitor.requests)


def test_another_model_during_a_reply_leaves_nothing_in_the_console(visitor: Visitor) -> None:
    warnings: list[str] = []
    visitor.page.on("console", lambda message: warnings.append(message.text))
    set_max_tokens(visitor, 400)
    for name in ("Bundled model", "standin:tiny"):
        visitor.say("Tell me a story.")
        visitor.button("Stop").wait_for()  # bytes are on their way from the GPU
        visitor.page.locator("#model-button").click()
        visitor.page.locator(".model", has_text=name).click()
        visitor.page.locator("#model-name", has_text=name).wait_for()
    set_max_tokens(visitor, 12)
    assert visitor.ask("Hello").strip() == expected("Hello", standin_gguf())
    assert warnings == []


def set_max_tokens(visitor: Visitor, count: int) -> None:
    visitor.button("Settings").click()
    visitor.page.locator("[name=max_tokens]").fill(str(count))
    visitor.button("Save").click()


def test_a_full_context_answers_every_turn_and_a_cut_reply_is_continued(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Settings").click()
    page.locator("[name=context]").fill("96")
    page.locator("[name=temperature]").fill("0")
    page.locator("[name=max_tokens]").fill("4")
    visitor.button("Save").click()
    visitor.page.locator("#model-name").click()
    page.locator(".model", has_text="Bundled model").click()
    page.locator("#model-button[title*='context of 96 tokens']").wait_for()
    visitor.button("New conversation").click()
    for turn in range(7):
        visitor.ask(f"Question {turn}: what is your name, and what can you do?")
        used, _, context, _ = visitor.texts("#tokens")[0].split()
        assert 0 < int(used) <= int(context) == 96
    assert page.locator("#notice").is_hidden()
    (line,) = visitor.texts(".left-out")
    count = int(line.split()[1])
    assert 0 < count < 14
    messages = [{"role": "user", "content": "What are you?"}]
    visitor.button("New conversation").click()
    visitor.ask("What are you?")
    visitor.button("Continue").click()
    page.locator(".facts", has_text="8 tokens").wait_for()
    with Gemma.load(None, "cpu") as model:
        settings: Any = {"temperature": 0, "max_tokens": 4}
        start = "".join(piece.text for piece in model.chat(messages, **settings))
        messages.append({"role": "assistant", "content": start})
        rest = model.chat(messages, continue_last=True, **settings)
        assert visitor.reply().strip() == (start + "".join(p.text for p in rest)).strip()
