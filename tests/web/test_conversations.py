"""Conversations on the chat page: stored, renamed, deleted, exported and imported."""

import json
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def test_a_reload_keeps_the_conversation_also_during_a_reply(visitor: Visitor) -> None:
    visitor.ask("hello there")
    visitor.say("forever")
    visitor.page.locator(".message:last-child .body", has_text="on and on and").wait_for()
    visitor.open()
    assert visitor.texts(".user .body") == ["hello there", "forever"]
    assert visitor.reply().startswith("on and on and")
    assert visitor.ask("and now") == "You said and now."
    assert visitor.page.title() == "hello there – webgemma"


def test_conversations_are_listed_renamed_and_deleted(visitor: Visitor) -> None:
    visitor.ask("the first of them")
    visitor.button("New conversation").click()
    assert visitor.texts(".message") == []
    visitor.ask("a rather long question whose title cannot hold all of its many words")
    cut = "a rather long question whose title cannot hold …"
    assert visitor.texts(".conversation") == [cut, "the first of them"]
    visitor.rename("<i>renamed</i>")
    visitor.page.locator(".conversation", has_text="<i>renamed</i>").wait_for()
    visitor.act("Delete")
    visitor.page.locator(".user .body", has_text="the first of them").wait_for()
    assert visitor.texts(".conversation") == ["the first of them"]
    visitor.open()
    assert visitor.texts(".conversation") == ["the first of them"]


def test_a_reply_continues_while_another_conversation_is_shown(visitor: Visitor) -> None:
    visitor.ask("old")
    visitor.button("New conversation").click()
    visitor.say("forever")
    visitor.page.locator(".body", has_text="on and").last.wait_for()
    visitor.page.locator(".conversation", has_text="old").click()
    assert visitor.texts(".message .body") == ["old", "You said old."]
    visitor.button("Stop").click()
    visitor.button("Send").wait_for()
    assert visitor.texts(".message .body") == ["old", "You said old."]
    visitor.page.locator(".conversation", has_text="forever").click()
    assert visitor.reply().startswith("on and")


def test_export_and_import_restore_all_conversations(
    visitor: Visitor, browser: Any, url: str
) -> None:
    visitor.ask("one")
    visitor.button("New conversation").click()
    visitor.ask("two")
    archive = visitor.exported()
    assert visitor.import_text(archive) == "0 conversations were imported."
    context = browser.new_context()
    other = Visitor(context, url)
    other.open()
    assert other.import_text(archive) == "2 conversations were imported."
    other.open()
    assert other.texts(".conversation") == ["two", "one"]
    assert other.texts(".message .body") == ["two", "You said two."]
    context.close()


def export_with(**changes: Any) -> str:
    message = {"role": "user", "content": "hi"}
    conversation = {"id": "a", "title": "t", "created": 1, "updated": 1, "messages": [message]}
    conversation |= changes
    archive = {"format": "webgemma-conversations", "version": 1, "conversations": [conversation]}
    return json.dumps(archive)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("null", "no conversations of this page"),
        ('{"conversations": []}', "no conversations of this page"),
        (export_with().replace('"version": 1', '"version": 9'), "another version"),
        (export_with(id=7), "conversation 1 has no id"),
        (export_with(title=" "), "conversation 1 has no title"),
        (export_with(title=None), "conversation 1 has no title"),
        (export_with(created="x"), "conversation 1 has no dates"),
        (export_with(messages={}), "conversation 1 has no messages"),
        (export_with(messages=[{"role": "system", "content": ""}]), "message (number 1)"),
        (export_with(messages=[{"role": "user", "content": {}}]), "message (number 1)"),
        (export_with(messages=[None]), "message (number 1)"),
    ],
)
def test_an_invalid_file_is_refused_and_nothing_is_lost(
    visitor: Visitor, text: str, reason: str
) -> None:
    visitor.ask("mine")
    notice = visitor.import_text(text)
    assert reason in notice
    assert "unchanged" in notice
    assert visitor.texts(".conversation") == ["mine"]
