"""Settings of one conversation and of all, presets, and the switch that lets the model think."""

import json
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor
from web.sender import Sender

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def open_settings(visitor: Visitor, scope: str | None = None) -> None:
    visitor.page.locator("#settings-button").click()
    if scope:
        visitor.page.get_by_label(scope).check()


def scope(visitor: Visitor) -> str:
    """Return which settings the open dialog shows."""
    return str(visitor.page.locator("#scope :checked").get_attribute("value"))


def sent(visitor: Visitor) -> dict[str, Any]:
    """Return the settings of the next request that are set, with the system prompt."""
    request = visitor.request()
    values = {k: v for k, v in request["settings"].items() if v not in (None, False)}
    first = request["messages"][0]
    return values | ({"system": first["content"]} if first["role"] == "system" else {})


def test_a_conversation_has_settings_of_its_own(visitor: Visitor) -> None:
    page = visitor.page
    open_settings(visitor, "This conversation only")
    assert page.locator("[name=context]").is_hidden()  # of the model, which has one context
    page.get_by_label("System prompt").fill("Be brief.")
    page.locator("[name=top_p]").fill("0.5")
    visitor.button("Save").click()
    visitor.open()  # it is not stored yet: the tab remembers
    assert sent(visitor) == {"system": "Be brief.", "top_p": 0.5}
    visitor.button("New conversation").click()
    assert sent(visitor) == {}
    open_settings(visitor)
    assert scope(visitor) == "all"
    page.locator("[name=top_k]").fill("7")
    visitor.button("Save").click()
    assert sent(visitor) == {"top_k": 7}
    page.locator(".conversation").nth(1).click()
    assert page.locator("#settings-button").get_attribute("title").startswith("This conversation")
    assert sent(visitor) == {"system": "Be brief.", "top_p": 0.5, "top_k": 7}
    exported = visitor.exported()
    open_settings(visitor)
    assert scope(visitor) == "own"
    visitor.button("Reset").click()
    visitor.button("Save").click()
    assert sent(visitor) == {"top_k": 7}
    data = json.loads(exported)
    kept = [c for c in data["conversations"] if c.get("settings")]
    assert kept[0]["settings"]["values"] == {"system": "Be brief.", "top_p": 0.5}
    kept[0]["settings"] = {"changed": "now"}
    refusal = visitor.import_text(json.dumps(data))
    assert "conversation 1 has settings that cannot be read" in refusal
    kept[0]["settings"] = {"changed": 1, "values": {"top_p": 99, "min_p": 0.25, "x": [1]}}
    kept[0]["id"], kept[0]["title"] = "imported", "imported"
    data["conversations"] = kept
    assert visitor.import_text(json.dumps(data)) == "One conversation was imported."
    page.locator(".conversation", has_text="imported").click()
    assert sent(visitor) == {"min_p": 0.25, "top_k": 7}


def test_thinking_is_switched_at_the_box_and_measured(visitor: Sender) -> None:
    page, switch = visitor.page, visitor.button("Thinking")
    switch.click()
    assert switch.get_attribute("aria-pressed") == "true"
    assert sent(visitor) == {"think": True}
    summary = page.locator(".thinking summary")
    assert summary.inner_text() == "Thought for 1 s"
    message = json.loads(visitor.exported())["conversations"][0]["messages"][-1]
    assert (message["thinking"], 0 <= message["thinking_seconds"] < 30) == ("Let me see.", True)
    visitor.open()
    assert summary.inner_text() == "Thought for 1 s"
    assert switch.get_attribute("aria-pressed") == "true"
    visitor.button("New conversation").click()
    assert switch.get_attribute("aria-pressed") == "false"
    page.locator(".conversation").click()
    switch.click()
    assert sent(visitor) == {}
    gguf = {"name": "gemma3.gguf", "mimeType": "", "buffer": b"GGUF"}
    switch.click()
    page.locator("#model-file").set_input_files([gguf])
    page.locator("#model-name", has_text="gemma3.gguf").wait_for()
    assert switch.is_hidden()
    assert sent(visitor) == {}  # it would refuse


def test_presets_fill_the_settings_and_own_ones_are_kept(visitor: Visitor, context: Any) -> None:
    page = visitor.page
    preset = page.get_by_label("Preset", exact=True)

    def chosen() -> str:
        return str(preset.evaluate("(select) => select.selectedOptions[0].text"))

    open_settings(visitor, "This conversation only")
    assert chosen() == "None"
    preset.select_option(label="Translator into English")
    assert chosen() == "Translator into English"
    page.locator("[name=temperature]").fill("0.1")
    assert chosen() == "None"
    visitor.button("Save as preset …").click()
    page.get_by_label("Name", exact=True).fill("Mine")
    page.keyboard.press("Enter")
    preset.get_by_role("option", name="Mine").wait_for(state="attached")
    assert chosen() == "Mine"
    visitor.button("Save").click()
    settings = sent(visitor)
    assert settings["temperature"] == 0.1
    assert settings["system"].startswith("Translate every message into English.")
    other = Visitor(context, visitor.url)
    other.open()
    open_settings(other)
    other.button("Rename …").click()
    other.page.get_by_label("Name", exact=True).fill("Ours")
    other.page.keyboard.press("Enter")
    open_settings(visitor)
    preset.get_by_role("option", name="Ours").wait_for(state="attached")
    assert (scope(visitor), chosen()) == ("own", "Ours")
    preset.select_option(label="None")
    assert page.get_by_label("System prompt").input_value() == ""
    preset.select_option(label="Ours")
    visitor.button("Delete …").click()
    page.locator("#question").get_by_role("button", name="Delete").click()
    page.wait_for_function("() => document.getElementById('preset').value === ''")
    assert "Ours" not in preset.inner_text()
    visitor.button("Close without saving").click()
    assert sent(visitor)["temperature"] == 0.1
    assert other.errors == []


def test_own_settings_follow_in_another_tab(visitor: Visitor, context: Any) -> None:
    visitor.ask("hello")
    other = Visitor(context, visitor.url)
    other.open()
    open_settings(other, "This conversation only")
    other.page.locator("[name=top_p]").fill("0.5")
    open_settings(visitor, "This conversation only")
    visitor.page.get_by_label("System prompt").fill("Be brief.")
    visitor.button("Save").click()
    filled = "() => document.querySelector('[name=system]').value === 'Be brief.'"
    other.page.wait_for_function(filled)
    assert other.page.locator("[name=top_p]").input_value() == "0.5"
    other.button("Save").click()
    visitor.page.wait_for_function(
        "() => document.getElementById('settings-button').classList.contains('own')"
    )
    for tab in (other, visitor):
        assert sent(tab) == {"system": "Be brief.", "top_p": 0.5}
    assert other.errors == []
