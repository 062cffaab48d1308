"""Two tabs with the chat page: nothing that one of them writes is lost to the other."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor
from web.sender import Sender

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@pytest.fixture
def other(visitor: Visitor, context: Any, url: str) -> Iterator[Visitor]:
    """A second tab of the same person, with the same conversation, which has one turn."""
    visitor.ask("hello")
    other = Visitor(context, url)
    other.open()
    assert other.texts(".user .body") == ["hello"]
    yield other
    assert other.errors == []


def wait_for_texts(visitor: Visitor, selector: str, texts: list[str]) -> None:
    """Wait until the elements that match have these texts."""
    same = """([selector, texts]) => JSON.stringify(texts)
      === JSON.stringify([...document.querySelectorAll(selector)].map((n) => n.innerText))"""
    visitor.page.wait_for_function(same, arg=[selector, texts])


def test_each_tab_shows_and_keeps_what_the_other_writes(visitor: Visitor, other: Visitor) -> None:
    visitor.ask("from the first")
    wait_for_texts(other, ".user .body", ["hello", "from the first"])
    other.ask("from the second")
    texts = ["hello", "from the first", "from the second"]
    wait_for_texts(visitor, ".user .body", texts)
    visitor.page.locator(".body", has_text="You said from the second.").wait_for()
    for tab in (visitor, other):
        tab.open()
        assert tab.texts(".user .body") == texts
        assert tab.reply() == "You said from the second."


def test_messages_written_at_the_same_time_are_versions(visitor: Visitor, other: Visitor) -> None:
    for tab in (visitor, other):
        tab.say("forever")  # neither has ended when the other begins
        tab.page.locator(".message:last-child .body", has_text="on and").wait_for()
    for tab in (visitor, other):
        tab.button("Stop").click()
        tab.button("Send").wait_for()
    visitor.say("forever")
    other.say("forever")
    for tab in (visitor, other):
        tab.button("Stop").click()
        tab.button("Send").wait_for()
    visitor.open()
    stored = """() => new Promise((resolve) => {
      indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
        const all = database.transaction("messages").objectStore("messages").getAll();
        all.onsuccess = () => { database.close(); resolve(all.result.map(({ role }) => role)); };
      };
    })"""
    roles = visitor.page.evaluate(stored)
    assert (roles.count("user"), roles.count("assistant")) == (5, 5)


def test_a_stale_tab_overwrites_nothing(visitor: Visitor, other: Visitor) -> None:
    """A tab that hears nothing of the others, as while the browser has suspended it."""
    other.page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    other.ask("second")
    visitor.ask("first")
    visitor.open()
    visitor.page.locator(".versions", has_text="2/2").wait_for()
    shown = [visitor.texts(".message .body")]
    visitor.button("Previous version").click()
    visitor.page.locator(".versions", has_text="1/2").wait_for()
    shown.append(visitor.texts(".message .body"))
    start = ["hello", "You said hello."]
    assert sorted(shown) == [
        [*start, "first", "You said first."],
        [*start, "second", "You said second."],
    ]


def test_a_reply_is_seen_growing_in_the_other_tab(visitor: Visitor, other: Visitor) -> None:
    visitor.say("forever")
    growing = other.page.locator(".message:last-child .body", has_text="on and on and")
    growing.wait_for()
    assert other.texts(".message:last-child .facts") == ["being written in another tab"]
    assert other.button("Continue").is_hidden()
    other.ask("meanwhile")
    visitor.button("Stop").click()
    visitor.button("Send").wait_for()
    other.page.locator(".facts", has_text="stopped").wait_for()
    for tab in (visitor, other):
        tab.open()
        assert tab.texts(".user .body") == ["hello", "forever", "meanwhile"]


def test_a_reply_of_a_tab_that_was_closed_can_be_continued(
    visitor: Visitor, other: Visitor
) -> None:
    visitor.say("forever")
    other.page.locator(".facts", has_text="being written in another tab").wait_for()
    visitor.page.goto("about:blank")
    other.page.locator(".message:last-child .facts", has_text="not finished").wait_for()
    other.button("Continue").click()
    other.page.locator(".body", has_text="and the rest.").wait_for()
    other.open()
    assert other.reply().endswith("and the rest.")
    assert other.page.locator(".message:last-child .versions").is_hidden()


def test_a_reply_that_both_tabs_continue_becomes_two_versions(
    visitor: Visitor, other: Visitor
) -> None:
    visitor.ask("cut")
    other.page.locator(".message:last-child .facts", has_text="limit").wait_for()
    other.page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    other.button("Continue").click()
    other.page.locator(".body", has_text="and the rest.").wait_for()
    other.button("Send").wait_for()
    visitor.button("Continue").click()
    visitor.page.locator(".message:last-child .versions", has_text="2/2").wait_for()
    visitor.button("Send").wait_for()
    visitor.open()
    assert visitor.reply() == "You said cut. and the rest."
    visitor.button("Previous version").click()
    visitor.page.locator(".message:last-child .versions", has_text="1/2").wait_for()
    assert visitor.reply() == "You said cut. and the rest."


def test_the_list_and_titles_follow(visitor: Visitor, other: Visitor) -> None:
    visitor.button("New conversation").click()
    visitor.ask("another")
    wait_for_texts(other, ".conversation", ["another", "hello"])
    assert other.texts(".user .body") == ["hello"]
    other.rename("renamed")
    wait_for_texts(visitor, ".conversation", ["another", "renamed"])
    visitor.page.locator(".conversation", has_text="renamed").click()
    visitor.ask("more")  # and does not bring the old title back
    visitor.open()
    assert visitor.texts(".conversation") == ["renamed", "another"]


def delete_shown(visitor: Visitor) -> None:
    visitor.act("Delete")


def test_a_conversation_deleted_in_the_other_tab_can_be_kept(
    visitor: Visitor, other: Visitor
) -> None:
    visitor.say("forever")
    visitor.page.locator(".body", has_text="on and").wait_for()
    delete_shown(other)
    assert visitor.notice() == "“hello” was deleted in another tab."
    assert visitor.texts(".conversation") == visitor.texts(".message") == []
    visitor.button("Send").wait_for()  # the reply has ended
    visitor.button("Keep it").click()
    wait_for_texts(other, ".conversation", ["hello"])
    for tab in (visitor, other):
        tab.open()
        assert tab.texts(".user .body") == ["hello", "forever"]
        assert tab.reply().startswith("on and")


def test_a_deleted_conversation_stays_deleted(visitor: Visitor, other: Visitor) -> None:
    """Also if a tab writes to it that has not heard of that yet."""
    other.page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    delete_shown(other)
    other.page.locator("#welcome").wait_for()
    visitor.say("anyone?")
    assert visitor.notice() == "“hello” was deleted in another tab."
    visitor.open()
    assert visitor.texts(".conversation") == []


def test_late_news_of_a_deleted_conversation_is_ignored(visitor: Visitor, other: Visitor) -> None:
    other.page.evaluate(
        """() => {
          const { postMessage } = BroadcastChannel.prototype;
          const late = [];
          BroadcastChannel.prototype.postMessage = function (data) { late.push([this, data]); };
          globalThis.sendLate = () => {
            BroadcastChannel.prototype.postMessage = postMessage;
            for (const [channel, data] of late) channel.postMessage(data);
          };
        }"""
    )
    other.ask("written before")
    delete_shown(visitor)
    visitor.page.locator("#welcome").wait_for()
    assert other.notice() == "“hello” was deleted in another tab."
    other.page.evaluate("sendLate()")
    other.ask("next")
    wait_for_texts(visitor, ".conversation", ["next"])


def test_an_image_reaches_the_other_tab(visitor: Sender, other: Visitor) -> None:
    visitor.attach("red.png")
    visitor.ask("what is this?")
    wide = "() => document.querySelector('.media img')?.naturalWidth === 64"
    other.page.wait_for_function(wide)


def test_settings_follow_and_are_merged(visitor: Visitor, other: Visitor) -> None:
    other.button("Settings").click()
    other.page.locator("[name=top_p]").fill("0.5")
    visitor.button("Settings").click()
    visitor.page.get_by_label("System prompt").fill("Be brief.")
    visitor.button("Save").click()
    filled = "() => document.querySelector('[name=system]').value === 'Be brief.'"
    other.page.wait_for_function(filled)
    assert other.page.locator("[name=top_p]").input_value() == "0.5"
    other.button("Save").click()
    visitor.page.wait_for_function("() => localStorage['webgemma.settings'].includes('0.5')")
    for tab in (visitor, other):
        request = tab.request()
        assert request["settings"]["top_p"] == 0.5
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}


def test_the_theme_follows(visitor: Visitor, other: Visitor) -> None:
    visitor.page.get_by_label("Theme").select_option("dark")
    other.page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert other.page.get_by_label("Theme").input_value() == "dark"
