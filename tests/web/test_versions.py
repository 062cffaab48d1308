"""Versions of messages on the chat page: nothing that is edited or regenerated is lost."""

import json
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def edit(visitor: Visitor, at: int, text: str) -> None:
    """Edit a message of the user and wait for the reply."""
    message = visitor.page.locator(".user").nth(at)
    message.hover()
    message.get_by_role("button", name="Edit").click()
    message.get_by_role("textbox").fill(text)
    visitor.page.keyboard.press("Enter")
    visitor.page.locator(".message:last-child .body", has_text=f"You said {text}.").wait_for()
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()


def regenerate(visitor: Visitor) -> None:
    visitor.button("Regenerate").click()
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()


def go(visitor: Visitor, at: int, name: str, count: str) -> None:
    """Show another version of the message at this place, and wait for it."""
    visitor.page.locator(".message").nth(at).get_by_role("button", name=name).click()
    visitor.page.locator(".message").nth(at).locator(".versions", has_text=count).wait_for()


def bodies(visitor: Visitor) -> list[str]:
    return visitor.texts(".message .body")


FIRST = ["first", "You said first.", "second", "You said second."]
OTHER = ["other", "You said other."]


def test_an_edit_keeps_what_followed_also_after_a_reload(visitor: Visitor) -> None:
    visitor.ask("first")
    visitor.ask("second")
    edit(visitor, 0, "other")
    assert bodies(visitor) == OTHER
    assert visitor.texts(".versions:not([hidden])") == ["‹\n2/2\n›"]
    visitor.open()
    assert bodies(visitor) == OTHER
    go(visitor, 0, "Previous version", "1/2")
    assert bodies(visitor) == FIRST
    focused = visitor.page.evaluate("document.activeElement.ariaLabel")
    assert focused == "Next version"  # at the first version, there is none before
    visitor.open()
    assert bodies(visitor) == FIRST
    visitor.ask("third")
    go(visitor, 0, "Next version", "2/2")
    assert bodies(visitor) == OTHER
    go(visitor, 0, "Previous version", "1/2")
    assert bodies(visitor) == [*FIRST, "third", "You said third."]


def test_a_regenerated_reply_is_another_version(visitor: Visitor) -> None:
    visitor.ask("request")
    regenerate(visitor)
    regenerate(visitor)
    assert visitor.texts(".versions:not([hidden])") == ["‹\n3/3\n›"]
    assert len(visitor.last_request()["messages"]) == 1
    go(visitor, 1, "Previous version", "2/3")
    visitor.ask("after the second")
    visitor.open()
    assert visitor.texts(".versions:not([hidden])") == ["‹\n2/3\n›"]
    go(visitor, 1, "Next version", "3/3")
    assert len(visitor.texts(".message")) == 2


def test_versions_survive_export_and_import(visitor: Visitor, browser: Any, url: str) -> None:
    visitor.ask("first")
    visitor.ask("second")
    edit(visitor, 0, "other")
    regenerate(visitor)
    archive = visitor.exported()
    visitor.ask("later")
    assert visitor.import_text(archive) == "0 conversations were imported."  # it has all of them
    context = browser.new_context()
    other = Visitor(context, url)
    other.open()
    assert other.import_text(archive) == "One conversation was imported."
    other.open()
    assert bodies(other) == OTHER
    assert other.texts(".versions:not([hidden])") == ["‹\n2/2\n›", "‹\n2/2\n›"]
    assert other.texts(".author")[-1] == "Bundled model"
    go(other, 0, "Previous version", "1/2")
    assert bodies(other) == FIRST
    context.close()


def message(id: Any, parent: Any, **changes: Any) -> dict[str, Any]:
    facts = {"id": id, "parent": parent, "created": 1, "role": "user", "content": "hi"}
    return facts | changes


def export_of(*messages: Any, **changes: Any) -> str:
    conversation = {"id": "a", "title": "t", "created": 1, "updated": 1, "leaf": None}
    conversation |= {"messages": messages} | changes
    archive = {"format": "webgemma-conversations", "version": 2, "conversations": [conversation]}
    return json.dumps(archive)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (export_of(message(None, None)), "number 1) without an id of its own"),
        (export_of(message("1", None), message("1", None)), "number 2) without an id of its own"),
        (export_of(message("1", "2"), message("2", "1")), "number 1) that follows none before it"),
        (export_of(message("1", "1")), "number 1) that follows none before it"),
        (export_of(message("1", None, created="now")), "number 1) without a date"),
        (export_of(message("1", None, tool_calls=[{}])), "number 1) that cannot be read"),
        (export_of(message("1", None, tool_calls=5)), "number 1) that cannot be read"),
        (export_of(message("1", None, model=7)), "number 1) that cannot be read"),
        (export_of(message("1", None, attachments=["x"])), "image or audio that cannot be read"),
        (export_of(message("1", None), files={}), "image or audio that cannot be read"),
    ],
)
def test_a_file_with_invalid_versions_is_refused(visitor: Visitor, text: str, reason: str) -> None:
    visitor.ask("mine")
    assert reason in visitor.import_text(text)
    assert visitor.texts(".conversation") == ["mine"]


def test_a_file_cannot_overwrite_messages_of_another_conversation(visitor: Visitor) -> None:
    visitor.ask("mine")
    archive = json.loads(visitor.exported())
    (conversation,) = archive["conversations"]
    for each in conversation["messages"]:
        each["content"] = "theirs"
    conversation |= {"leaf": "nowhere"}
    conversation["messages"][0] |= {"usage": {"left_out": -3}, "finish": "<b>", "extra": 1}
    assert visitor.import_text(json.dumps(archive)) == "One conversation was imported."
    visitor.open()
    assert bodies(visitor) == ["mine", "You said mine."]
    other = visitor.page.locator("#conversations li:not(.current) .conversation")
    other.click()
    visitor.page.locator(".body", has_text="theirs").first.wait_for()
    assert bodies(visitor) == ["theirs", "theirs"]


OLD = """() => new Promise((resolve) => {
  const request = indexedDB.open("webgemma", 2);
  request.onupgradeneeded = () => {
    for (const name of ["conversations", "attachments"]) request.result.createObjectStore(name, { keyPath: "id" });
    const store = request.transaction.objectStore("conversations");
    const messages = ["one", "two", "three", "four"].map((content, i) => ({ role: i % 2 ? "assistant" : "user", content }));
    store.put({ id: "a", title: "older", created: 1, updated: 1, messages: messages.slice(0, 2) });
    store.put({ id: "b", title: "newer", created: 2, updated: 2, messages });
    store.put({ id: "c", title: "empty", created: 0, updated: 0, messages: [] });
  };
  request.onsuccess = () => { request.result.close(); resolve(); };
})"""  # noqa: E501


def test_conversations_of_the_older_form_are_kept(context: Any, url: str) -> None:
    page = context.new_page()
    page.goto(f"{url}icon.svg")
    page.evaluate(OLD)
    page.close()
    visitor = Visitor(context, url)
    visitor.open()
    assert visitor.texts(".conversation") == ["newer", "older", "empty"]
    assert bodies(visitor) == ["one", "two", "three", "four"]
    edit(visitor, 1, "five")
    go(visitor, 2, "Previous version", "1/2")
    assert bodies(visitor) == ["one", "two", "three", "four"]
    texts = ["one", "two", "three", "four"]
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]
    conversation = {"id": "b", "title": "newer", "created": 2, "updated": 2, "messages": messages}
    archive = {"format": "webgemma-conversations", "version": 1, "conversations": [conversation]}
    notice = visitor.import_text(json.dumps(archive))
    assert notice == "0 conversations were imported."  # an export of the older form
    assert visitor.errors == []
