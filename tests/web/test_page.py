"""The chat page as people use it: chat, stop, edit, settings, models, errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.page import FAKE_WORKER, Visitor, serving_page

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    add_model(folder / "store", "gemma4:e2b", gguf=tiny_gguf(KINDS["small"]))
    add_model(folder / "store", "stuck:e4b", gguf=tiny_gguf(KINDS["large"]))
    add_model(folder / "store", "absent:e2b", gguf=None)
    with serving_page(folder) as url:
        yield url


def test_a_reply_streams_in(visitor: Visitor) -> None:
    visitor.say("forever")
    for pieces in (5, 20):
        visitor.page.locator(".assistant .body", has_text="on and " * pieces).wait_for()
    assert visitor.page.locator("#announcer").inner_text() == ""  # not announced for each token
    visitor.button("Stop").click()
    visitor.button("Send").wait_for()
    assert "stopped" in visitor.texts(".facts")[-1]
    assert (
        visitor.page.locator("#announcer").inner_text().startswith("The model replied: on and on")
    )


def test_enter_sends_and_a_reply_has_its_facts(visitor: Visitor) -> None:
    box = visitor.page.get_by_label("Message", exact=True)
    box.press_sequentially("echo one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    box.press("Enter")
    visitor.page.locator(".facts", has_text="1 token · 12.3 tokens/s").wait_for()
    assert visitor.reply() == "one\ntwo"
    assert visitor.texts(".user .body") == ["echo one\ntwo"]
    assert visitor.page.locator("#device").inner_text() == "Pretend GPU (software, slow) · 1.0 MB"
    box.fill("   ")
    box.press("Enter")
    assert len(visitor.texts(".message")) == 2


def test_drafts_are_in_the_hint_of_a_replys_facts(visitor: Visitor) -> None:
    facts = visitor.page.locator(".message:last-child .facts")
    visitor.ask("draft")
    assert facts.get_attribute("title") == "4 of 5 drafted tokens were accepted"
    visitor.ask("hello")
    assert facts.get_attribute("title") == ""


def test_escape_stops_the_reply(visitor: Visitor) -> None:
    visitor.say("forever")
    visitor.page.locator(".assistant .body p").wait_for()
    visitor.page.keyboard.press("Escape")
    visitor.page.locator(".facts", has_text="stopped").wait_for()
    assert visitor.ask("more") == "You said more."


def test_regenerate_shows_another_reply(visitor: Visitor) -> None:
    visitor.ask("first")
    visitor.ask("request")
    assert visitor.page.get_by_role("button", name="Regenerate").count() == 1
    visitor.button("Regenerate").click()
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    sent = visitor.last_request()["messages"]
    assert [m["content"] for m in sent] == ["first", "You said first.", "request"]
    assert len(visitor.texts(".message")) == 4


def test_an_edited_message_is_shown_with_its_reply(visitor: Visitor) -> None:
    visitor.ask("first")
    visitor.ask("second")
    message = visitor.page.locator(".user").first
    message.hover()
    message.get_by_role("button", name="Edit").click()
    visitor.page.keyboard.press("Escape")
    assert len(visitor.texts(".message")) == 4
    message.get_by_role("button", name="Edit").click()
    message.get_by_role("textbox").fill("other")
    visitor.page.keyboard.press("Enter")
    visitor.page.locator(".body", has_text="You said other.").wait_for()
    assert visitor.texts(".message .body") == ["other", "You said other."]
    assert visitor.texts(".conversation") == ["other"]


def test_copy_a_message_and_a_code_block(visitor: Visitor) -> None:
    visitor.ask("echo Run\n```python\nprint('<b>')\n```")
    visitor.button("Copy code").click()
    clipboard = "navigator.clipboard.readText()"
    assert visitor.page.evaluate(clipboard) == "print('<b>')"
    visitor.page.locator(".assistant").get_by_role("button", name="Copy", exact=True).click()
    assert visitor.page.evaluate(clipboard) == "Run\n```python\nprint('<b>')\n```"
    visitor.button("Copied").first.wait_for()


def test_settings_are_sent_to_the_worker_and_stored(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    values = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 7}
    values |= {"max_tokens": 100, "typical_p": 0.8}
    values |= {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.get_by_label("Think before answering").check()
    visitor.button("Save").click()
    visitor.open()
    request = visitor.request()
    assert request["settings"] == values | {"think": True}
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert page.locator("details.thinking").get_attribute("open") is None
    page.get_by_text("Thought for 1 s").click()
    assert page.locator(".thoughts").inner_text() == "Let me see."
    visitor.button("Settings").click()
    visitor.button("Reset").click()
    visitor.button("Save").click()
    request = visitor.request()
    assert set(request["settings"].values()) == {None, False}
    assert request["messages"][0]["role"] == "user"


OVERFLOWING = """(name) => ((area) => area.scrollWidth > area.clientWidth)(
  document.querySelector(name))"""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["*x*", "_y_"]}}, "required": ["a"]}


def test_a_schema_is_checked_stored_and_sent_and_its_reply_is_code(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Settings").click()
    box = page.get_by_label("Reply as JSON of this schema")
    problem = page.locator("#schema-problem")
    for text, sentence in (
        ('{"type": "object",}', "This is not JSON: Expected double-quoted property name in JSON"),
        ("[1]", 'A JSON Schema is an object, such as {"type": "object"}.'),
    ):
        box.fill(text)
        visitor.button("Save").click()
        assert problem.inner_text().startswith(sentence)
        assert box.get_attribute("aria-invalid") == "true"
        assert "schema-problem" in box.get_attribute("aria-describedby")
        assert page.evaluate("document.activeElement.id") == "schema"
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate(OVERFLOWING, "#settings-dialog") is False
    box.fill(f" {json.dumps(SCHEMA)}\n")
    assert problem.inner_text() == ""
    assert box.get_attribute("aria-invalid") is None
    visitor.button("Save").click()
    visitor.open()
    visitor.ask('echo {"a":"*x*","b":[1,{}],"long":"' + 60 * "x" + '"}')
    shown = page.locator(".message:last-child .body figure.code code").inner_text()
    assert shown.startswith('{\n  "a": "*x*",\n  "b": [\n    1,\n    {}\n  ],\n  "long": "xxx')
    assert page.evaluate(OVERFLOWING, "html") is page.evaluate(OVERFLOWING, "#scroller") is False
    visitor.ask("cut")
    assert "stopped at the token limit" in visitor.texts(".message:last-child .facts")[0]
    assert visitor.button("Continue").is_hidden()  # JSON would begin anew
    request = visitor.request()
    assert request["settings"]["schema"] == SCHEMA
    visitor.button("Settings").click()
    box.fill("")
    visitor.button("Save").click()
    assert "schema" not in visitor.request()["settings"]
    page.set_viewport_size({"width": 1280, "height": 720})
    exported = json.loads(visitor.exported())["conversations"][0]["messages"]
    formats = [m.get("format") for m in exported if m["role"] == "assistant"]
    assert formats == ["json", "json", "json", None]


def test_an_invalid_setting_is_reported_and_a_new_context_offers_a_reload(visitor: Visitor) -> None:
    visitor.button("Settings").click()
    visitor.page.locator("[name=top_p]").fill("2")
    visitor.button("Save").click()
    problem = visitor.page.locator("#settings-problem")
    assert problem.inner_text() == "Top p must be a number from 0 to 1, or empty."
    field = visitor.page.locator("#number-fields label:has(+ #settings-problem) input")
    assert [field.get_attribute(name) for name in ("name", "aria-invalid")] == ["top_p", "true"]
    visitor.page.locator("[name=top_p]").fill("")
    visitor.page.locator("[name=context]").fill("4096")
    visitor.button("Save").click()
    visitor.button("Load the model again").click()
    visitor.page.locator("#model-button[title*='4096']").wait_for()


def test_invalid_stored_settings_are_ignored(visitor: Visitor) -> None:
    wrong = '{"temperature": "hot", "top_p": 9, "schema": "{", "think": "no", "seed": 3}'
    for stored in ("{", "[]", "7", wrong):
        visitor.page.evaluate("(text) => localStorage.setItem('webgemma.settings', text)", stored)
        visitor.open()
    settings = visitor.request()["settings"]
    assert settings["temperature"] is settings["top_p"] is None
    assert settings["think"] is False
    assert settings["seed"] == 3
    assert "schema" not in settings


def test_the_dialog_lists_and_loads_models(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Model: Bundled model").click()
    page.locator(".model", has_text="gemma4:e2b").filter(has_text="fits").wait_for()
    row = page.locator(".model", has_text="gemma4:e2b").inner_text().split("\n")
    assert row == ["gemma4:e2b", "1.1 MB", "gemma4 · 5.1B · Q4_K_M · fits"]
    assert page.locator(".model[aria-current]").inner_text().startswith("Bundled model")
    assert page.locator(".model", has_text="absent:e2b").is_disabled()
    page.locator(".model", has_text="gemma4:e2b").click()
    page.locator("#model-name", has_text="gemma4:e2b").wait_for()
    assert visitor.ask("hi") == "You said hi."


def test_progress_is_shown_and_can_be_cancelled(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Model: Bundled model").click()
    page.locator(".model", has_text="stuck:e4b").click()
    page.locator("#loading-facts", has_text="500 kB of 1.0 MB").wait_for()
    assert "/s · " in page.locator("#loading-facts").inner_text()
    assert visitor.button("Send").is_disabled()
    visitor.button("Cancel").click()
    assert visitor.notice() == "Loading stuck:e4b was cancelled."
    visitor.button("Dismiss").click()
    visitor.say("anyone?")
    assert visitor.notice() == "No model is loaded."
    assert visitor.texts(".message") == []
    visitor.button("Model: no model").click()
    page.locator(".model", has_text="Bundled").click()
    page.locator("#model-name", has_text="Bundled model").wait_for()


DROP = """(name) => {
  const data = new DataTransfer();
  data.items.add(new File(["GGUF"], name));
  for (const kind of ["dragover", "drop"]) {
    const options = { dataTransfer: data, bubbles: true, cancelable: true };
    document.body.dispatchEvent(new DragEvent(kind, options));
  }
}"""


def test_a_file_is_chosen_or_dropped(visitor: Visitor, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")
    visitor.page.locator("#model-file").set_input_files(path)
    visitor.page.locator("#model-name", has_text="mine.gguf").wait_for()
    visitor.page.evaluate(DROP, "dropped.GGUF")
    visitor.page.locator("#model-name", has_text="dropped.GGUF").wait_for()
    visitor.page.evaluate(DROP, "broken.gguf")
    visitor.button("Choose a model").wait_for()
    assert visitor.notice() == (
        "broken.gguf is not a GGUF file. Choose another model. dropped.GGUF stays loaded."
    )
    assert visitor.ask("still there?") == "You said still there?."


def test_a_message_waits_for_the_model_that_was_chosen(visitor: Visitor) -> None:
    visitor.page.evaluate(DROP, "waiting.gguf")
    visitor.page.locator("#loading-name", has_text="waiting.gguf").wait_for()
    visitor.say("hello")  # the model of before is still loaded, but would not end its reply
    assert visitor.button("Send").is_disabled()
    assert visitor.texts(".message") == []
    visitor.release()
    visitor.page.locator("#model-name", has_text="waiting.gguf").wait_for()
    visitor.button("Send").click()
    visitor.page.locator(".message.assistant .facts:not(:empty)").wait_for()
    assert visitor.texts(".message .body") == ["hello", "You said hello."]


@pytest.mark.parametrize("has_units", [True, False])
def test_matrix_units_that_are_off_are_mentioned(
    context: Any, tmp_path: Path, has_units: bool
) -> None:
    ready = f"software: false, matrix_units: {str(has_units).lower()}"
    worker = FAKE_WORKER.replace("software: true", ready)
    with serving_page(tmp_path, worker) as url:
        visitor = Visitor(context, url)
        visitor.open()
        visitor.say("die")
        visitor.button("Load the model again").click()  # the GPU is found a second time
        visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
        title = visitor.page.locator("#device").get_attribute("title")
    assert title.count("chrome://flags/#enable-unsafe-webgpu") == (0 if has_units else 1)


def test_a_lost_device_keeps_the_conversation_and_offers_a_reload(visitor: Visitor) -> None:
    visitor.say("lose the device")
    assert visitor.notice().startswith("The GPU was lost: its driver was reset")
    assert visitor.texts(".message .body") == ["lose the device", "Half a"]
    assert visitor.button("Send").is_disabled()
    visitor.button("Load the model again").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    assert visitor.ask("again") == "You said again."


def test_a_lost_device_is_reported_at_once(visitor: Visitor) -> None:
    visitor.ask("lose the device afterwards")
    assert visitor.notice() == (
        "The GPU was lost: its driver was reset, or the browser has removed it. "
        "Your conversation is saved."
    )
    assert visitor.texts("#model-name") == ["no model"]
    visitor.button("Load the model again").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()


def test_a_worker_that_dies_keeps_the_conversation(visitor: Visitor) -> None:
    visitor.say("die")
    assert visitor.notice() == "The engine of this page has failed. Your conversation is saved."
    visitor.button("Load the model again").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    assert visitor.ask("again") == "You said again."


def test_a_failed_reply_is_reported_and_the_model_stays(visitor: Visitor) -> None:
    visitor.say("fail")
    assert visitor.notice() == "The prompt is too long."
    assert "ended with an error" in visitor.texts(".facts")[-1]
    assert visitor.ask("again") == "You said again."


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (
            'postMessage({type: "error", kind: "no-webgpu", message: "There is no WebGPU."});',
            "This browser offers no GPU: use a browser with WebGPU (a current Chrome, ",
        ),
        ("throw new Error('no start')", "The engine of this page did not start."),
        (None, "The engine of this page did not start."),
    ],
)
def test_a_worker_that_cannot_start_is_reported(
    context: Any, tmp_path: Path, worker: str | None, message: str
) -> None:
    with serving_page(tmp_path, worker) as url:
        visitor = Visitor(context, url)
        visitor.page.goto(url)
        assert visitor.notice().startswith(message)
        assert visitor.button("Send").is_disabled()
        visitor.page.close()


def test_the_server_is_to_blame_only_if_it_does_not_respond(context: Any, tmp_path: Path) -> None:
    with serving_page(tmp_path, "throw new Error('no start')") as url:
        visitor = Visitor(context, url)
        visitor.page.goto(url)
        assert "webgemma web" not in visitor.notice()
    visitor.button("Load the model again").click()
    visitor.page.locator("#notice-text", has_text="`webgemma web` does not respond").wait_for()
    visitor.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_overrides_the_system(visitor: Visitor, scheme: str) -> None:
    page = visitor.page
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme=scheme)
    system = page.evaluate(ground)
    other = "dark" if scheme == "light" else "light"
    page.get_by_label("Theme").select_option(other)
    assert page.evaluate(ground) != system
    visitor.open()
    assert page.evaluate(ground) != system
    page.get_by_label("Theme").select_option("system")
    assert page.evaluate(ground) == system


def test_a_phone_scrolls_vertically_only(visitor: Visitor) -> None:
    page = visitor.page
    page.set_viewport_size({"width": 360, "height": 640})
    wide = "| a | b |\n|---|---|\n| " + "w" * 200 + " | x |\n"
    visitor.ask(
        f"echo {'long' * 100}\n\n```\n{'code ' * 60}\n```\n{wide}\nhttps://a.example/{'p' * 200}"
    )
    overflow = """["html", "#scroller"].map((name) => document.querySelector(name))
      .filter((area) => area.scrollWidth > area.clientWidth).length"""
    for opener in (None, "Conversations", "Settings", "Model: Bundled model"):
        if opener:
            visitor.button(opener).click()
            page.wait_for_timeout(250)
        assert page.evaluate(overflow) == 0, opener
        if opener:
            page.keyboard.press("Escape")


def test_every_control_has_a_name_and_the_page_has_landmarks(visitor: Visitor) -> None:
    visitor.ask("echo ```\ncode\n```")
    page = visitor.page
    for role in ("navigation", "main", "banner", "form"):
        assert page.get_by_role(role).count() == 1, role
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea")].filter((control) =>
          control.checkVisibility() && !control.textContent.trim() && !control.ariaLabel
          && !control.labels?.length
        ).map((control) => control.outerHTML)"""
    )
    assert unnamed == []


def test_every_control_can_be_reached_by_keyboard(visitor: Visitor) -> None:
    visitor.ask("hello")
    page = visitor.page
    page.evaluate("document.activeElement.blur()")
    focused_texts = set()
    for _ in range(26):
        page.keyboard.press("Tab")
        focused_texts.add(page.evaluate("document.activeElement.textContent.trim()"))
        visible = page.evaluate(
            """(() => {
              const focused = document.activeElement.closest("#composer") ?? document.activeElement;
              return document.activeElement === document.body
                || getComputedStyle(focused).outlineStyle !== "none"
                || getComputedStyle(document.activeElement).outlineStyle !== "none";
            })()"""
        )
        assert visible, page.evaluate("document.activeElement.outerHTML")
    assert {
        "New conversation",
        "hello",
        "⋯",
        "Settings",
        "Copy",
        "Edit",
    } <= focused_texts
