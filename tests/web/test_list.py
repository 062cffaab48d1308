"""The list of conversations: groups, menus, pins, renaming in place, deleting and its undoing."""

import json
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor
from web.sender import Sender

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

DAY = 24 * 3600 * 1000
WIDER = """() => {
  const { right } = document.querySelector("#search").getBoundingClientRect();
  return [...document.querySelectorAll("#sidebar .tools *")].map((node) => [node.id, node])
    .filter(([, node]) => node.getBoundingClientRect().right > right + 1
      || node.localName === "button" && node.scrollWidth > node.clientWidth)
    .map(([id]) => id);
}"""  # cut, or wider than the side bar


def archive(*conversations: dict[str, Any]) -> str:
    """Return an exported file of conversations of one turn each."""
    messages = [
        {"id": "1", "parent": None, "created": 1, "role": "user", "content": "hi"},
        {"id": "2", "parent": "1", "created": 2, "role": "assistant", "content": "hello"},
    ]
    facts = {"created": 1, "updated": 1, "leaf": None, "messages": messages}
    listed = [facts | {"id": each["title"]} | each for each in conversations]
    head = {"format": "webgemma-conversations", "version": 2}
    return json.dumps(head | {"conversations": listed})


def test_conversations_are_grouped_by_date_and_pins_come_first(visitor: Visitor) -> None:
    now = visitor.page.evaluate("new Date().setHours(12, 0, 0, 0)")
    ages = {"future": -400, "now": 0, "day": 1, "week": 6, "month": 29, "old": 200, "b.c.": 9e5}
    listed = [{"title": name, "updated": now - days * DAY} for name, days in ages.items()]
    listed[2] |= {"pinned": "yes"}
    listed[5] |= {"pinned": True}
    visitor.import_text(archive(*listed))
    visitor.open()
    ancient = visitor.page.evaluate(
        "(time) => new Intl.DateTimeFormat('en', { month: 'long', year: 'numeric' }).format(time)",
        now - 9e5 * DAY,
    )
    groups = ["Pinned", "Today", "Yesterday", "Previous 7 days", "Previous 30 days", ancient]
    assert visitor.texts("#conversations h2") == groups
    assert sorted(visitor.texts("#conversations section:nth-child(2) .conversation")) == [
        "future",
        "now",
    ]
    assert visitor.texts("#conversations section:first-child .conversation") == ["old"]
    assert visitor.exported().count('"pinned": true') == 1
    visitor.act("Unpin", "old")
    visitor.act("Pin", "day")
    visitor.page.locator("section:first-child .conversation", has_text="day").wait_for()
    visitor.open()
    assert visitor.texts("#conversations section:first-child .conversation") == ["day"]


@pytest.mark.parametrize("updated", ["1e300", "-9e15"])
def test_dates_that_are_none_are_refused(visitor: Visitor, updated: str) -> None:
    text = archive({"title": "t"}).replace('"updated": 1', f'"updated": {updated}')
    assert "conversation 1 has no dates" in visitor.import_text(text)


def test_the_menu_is_used_by_keyboard_and_titles_are_edited_in_place(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("one")
    visitor.say("forever")
    page.locator(".body", has_text="on and").wait_for()
    more = page.locator("#conversations .more")
    assert more.get_attribute("aria-label") == "Actions for “one”"
    more.focus()
    page.keyboard.press("Enter")
    focused = "document.activeElement.textContent"
    assert page.evaluate(focused) == "Rename"
    assert more.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == "Delete"
    page.keyboard.press("e")
    assert page.evaluate(focused) == "Export"
    page.keyboard.press("Escape")  # which does not stop the reply
    assert page.evaluate("document.activeElement.className") == "icon more"
    assert more.get_attribute("aria-expanded") == "false"
    assert page.get_by_role("menu").count() == 0
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.keyboard.type("<b>two</b>  three")
    page.keyboard.press("Enter")
    assert visitor.texts(".conversation") == ["<b>two</b> three"]
    visitor.act("Rename")
    page.keyboard.type("no")
    page.keyboard.press("Escape")
    assert visitor.texts(".conversation") == ["<b>two</b> three"]
    assert page.evaluate("document.activeElement.className") == "conversation"
    assert visitor.button("Stop").is_visible()
    visitor.button("Stop").click()
    visitor.button("Send").wait_for()
    more.click()
    more.click()
    assert page.get_by_role("menu").count() == 0
    visitor.open()
    assert visitor.texts(".conversation") == ["<b>two</b> three"]


def test_one_conversation_is_exported_under_its_title(visitor: Visitor) -> None:
    visitor.ask("../one: <two>")
    visitor.button("New conversation").click()
    visitor.ask("other")
    with visitor.page.expect_download() as download:
        visitor.act("Export", "one")
    assert download.value.suggested_filename == "one two.json"
    (only,) = json.loads(download.value.path().read_text())["conversations"]
    assert only["title"] == "../one: <two>"


def test_deleting_is_undone_also_after_a_reload_and_with_the_draft(visitor: Sender) -> None:
    visitor.ask("first")
    visitor.attach("red.png")
    visitor.page.get_by_label("Message", exact=True).fill("a draft")
    visitor.button("New conversation").click()
    visitor.ask("second")
    visitor.act("Delete", "first")
    assert visitor.notice() == "“first” was deleted."
    assert visitor.texts(".conversation") == ["second"]
    assert visitor.page.locator("#conversations .conversation:focus").count() == 1
    visitor.act("Delete", "second")
    assert visitor.notice() == "2 conversations were deleted."
    assert visitor.texts(".conversation") == visitor.texts(".message") == []
    visitor.open()
    assert visitor.texts(".conversation") == []
    assert visitor.notice() == "2 conversations were deleted."
    visitor.button("Undo").click()
    visitor.page.locator(".conversation", has_text="first").click()
    visitor.page.locator(".body", has_text="You said first.").wait_for()
    assert visitor.page.get_by_label("Message", exact=True).input_value() == "a draft"
    assert visitor.tray() == ["red.png"]
    visitor.open()
    assert visitor.texts(".conversation") == ["second", "first"]
    assert visitor.page.locator("#notice").is_hidden()


def test_what_is_not_undone_is_deleted_for_good_in_all_tabs(
    visitor: Visitor, context: Any, url: str
) -> None:
    visitor.ask("first")
    visitor.button("New conversation").click()
    visitor.ask("second")
    other = Visitor(context, url)
    other.open()
    visitor.page.clock.install()
    visitor.act("Delete", "first")
    other.page.wait_for_function("() => document.querySelectorAll('.conversation').length === 1")
    assert other.page.locator("#notice").is_hidden()  # it was not in use there
    visitor.pass_undo()
    visitor.page.locator("#notice").wait_for(state="hidden")
    for tab in (visitor, other):
        tab.open()
        assert tab.texts(".conversation") == ["second"]
        assert tab.errors == []


def test_deleting_is_undone_beside_the_open_drawer_of_a_phone(visitor: Visitor) -> None:
    visitor.ask("first")
    visitor.page.set_viewport_size({"width": 320, "height": 640})
    visitor.button("Conversations").click()
    visitor.act("Delete")
    visitor.button("Undo").click()
    visitor.page.locator(".conversation", has_text="first").wait_for()
    assert visitor.page.locator("#sidebar.open").count() == 1
    visitor.button("Close the list of conversations").click()
    visitor.page.locator("#sidebar").wait_for(state="hidden")


PURGE = """() => new Promise((resolve) => {
  indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
    const transaction = database.transaction(["conversations", "messages"], "readwrite");
    const heads = transaction.objectStore("conversations");
    heads.getAllKeys().onsuccess = ({ target: { result: [id] } }) => {
      for (const name of ["conversations", "messages"]) transaction.objectStore(name).clear();
      transaction.oncomplete = () => {
        new BroadcastChannel("webgemma.conversations").postMessage({ type: "removed", id });
        database.close();
        resolve();
      };
    };
  };
})"""


def test_what_another_tab_has_deleted_for_good_is_restored_from_memory(visitor: Visitor) -> None:
    visitor.ask("mine")
    visitor.act("Delete")
    visitor.notice()
    visitor.page.evaluate(PURGE)
    visitor.button("Undo").click()
    visitor.page.locator(".conversation", has_text="mine").wait_for()
    visitor.open()
    assert visitor.texts(".message .body") == ["mine", "You said mine."]


def test_the_sidebar_is_hidden_and_stays_so(visitor: Visitor) -> None:
    page = visitor.page
    opener = page.get_by_role("button", name="Conversations", exact=True)
    assert opener.count() == 0
    visitor.button("Close the list of conversations").click()
    assert page.get_by_role("navigation").count() == 0
    assert opener.get_attribute("aria-expanded") == "false"
    visitor.open()
    assert page.get_by_role("navigation").count() == 0
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    visitor.open()
    assert page.get_by_role("navigation").count() == 1


def test_keys_begin_edit_and_are_listed(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("one")
    visitor.ask("two")
    box = page.get_by_label("Message", exact=True)
    box.fill("x")
    box.press("ArrowUp")
    assert page.locator(".edit").count() == 0
    box.fill("")
    box.press("ArrowUp")
    assert page.locator(".edit textarea").input_value() == "two"
    page.keyboard.press("Escape")
    box.press("Control+Shift+O")
    page.locator("#welcome").wait_for()
    box.press("?")
    assert page.locator("dialog[open]").count() == 0
    box.fill("")
    visitor.button("Keys").click()
    assert "Search conversations" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()


@pytest.mark.parametrize(
    ("language", "size", "copied"),
    [("Français", "1,0\N{NO-BREAK SPACE}Mo", "Copié"), ("日本語", "1.0 MB", "コピーしました")],
)
def test_sizes_and_answers_are_in_the_language_and_fit(
    visitor: Visitor, language: str, size: str, copied: str
) -> None:
    visitor.page.get_by_label("Language").select_option(language)
    visitor.page.locator("#device", has_text=size).wait_for()
    visitor.page.locator("#prompt").fill("x")
    visitor.page.keyboard.press("Enter")
    visitor.page.locator(".facts:not(:empty)").wait_for()
    visitor.page.locator(".assistant .actions button").first.click()
    visitor.page.get_by_text(copied).wait_for()
    assert visitor.page.evaluate(WIDER) == []


def test_the_language_is_chosen_in_the_sidebar(visitor: Visitor) -> None:
    visitor.page.get_by_label("Language").select_option("العربية")
    visitor.page.wait_for_function("() => document.documentElement.dir === 'rtl'")
    visitor.open("النموذج المدمج")
    side = visitor.page.locator("#sidebar").bounding_box()
    assert side is not None
    assert side["x"] > 600
    suggestion = visitor.page.locator(".suggestion").first
    assert suggestion.evaluate("(node) => getComputedStyle(node).direction") == "ltr"
    broken = {"name": "broken.gguf", "mimeType": "", "buffer": b"GGUF"}
    visitor.page.locator("#model-file").set_input_files([broken])
    assert visitor.notice().startswith("\u2068broken.gguf is not a GGUF file.\u2069 ")
    visitor.page.locator("#language").select_option("")
    visitor.page.wait_for_function("() => document.documentElement.dir === 'ltr'")
