"""Search over conversations on the chat page."""

from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

FIND = """async (query) => {
  const box = document.getElementById("search");
  box.value = query;
  box.dispatchEvent(new Event("input"));
  while (!document.getElementById("search-state").textContent) {
    await new Promise((resolve) => { setTimeout(resolve, 5); });
  }
  return [...document.querySelectorAll("#results li")].map((item) => [
    item.querySelector(".title").innerText, item.querySelector(".snippet")?.innerText ?? null,
    [...item.querySelectorAll("mark")].map((mark) => mark.textContent).join("|"),
  ]);
}"""


def find(visitor: Visitor, query: str) -> Any:
    """Return the results of a search: title, snippet, marked texts."""
    return visitor.page.evaluate(FIND, query)


def test_words_are_found_in_titles_and_messages_of_every_script(visitor: Visitor) -> None:
    start = "word " * 30
    texts = [
        "Un Café à Zürich, Straße",
        f"echo {start}needle <b>in</b> hay",
        "東京のガイド、か",
        "مُحَمَّد يكتب",
        "ΟΔΟΣ",
    ]
    for text in texts:
        visitor.button("New conversation").click()
        visitor.ask(text)
    reply = "You said Un Café à Zürich, Straße."
    assert find(visitor, " zurich  CAFE ") == [
        [texts[0], None, "Café|Zürich"],
        [texts[0], reply, "Café|Zürich|Café|Zürich"],
    ]
    assert find(visitor, "STRASSE said") == [[texts[0], reply, "Straße|said|Straße"]]
    assert find(visitor, "cafe needle") == []
    found = find(visitor, "needle <B>")
    assert [marks for _, _, marks in found] == ["needle|<b>", "needle|<b>"]
    assert all(snippet.startswith("… word ") for _, snippet, _ in found)
    assert visitor.page.locator("#results b").count() == 0
    assert find(visitor, "ガイ")[0][2] == "ガイ"
    assert find(visitor, "が") == []  # another letter than か
    assert find(visitor, "محمد")[0][2] == "مُحَمَّد"
    assert find(visitor, "οδος")[0][2] == "ΟΔΟΣ"
    assert visitor.texts("#search-state") == ["2 results"]


def test_a_result_is_opened_at_its_message_also_in_another_version(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("echo the hidden treasure")
    visitor.ask("echo " + "long text\n\n" * 60)
    message = page.locator(".user").first
    message.hover()
    message.get_by_role("button", name="Edit").click()
    page.keyboard.press("Control+a")
    page.keyboard.type("changed")
    page.keyboard.press("Enter")
    page.locator(".body", has_text="You said changed.").wait_for()
    visitor.button("Send").wait_for()
    visitor.button("New conversation").click()
    visitor.ask("another")
    page.keyboard.press("Control+k")
    page.keyboard.type("treasure")
    page.locator("#search-state:not(:empty)").wait_for()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.closest('li').parentElement.id") == "results"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.locator(".found").wait_for()
    assert "treasure" in page.locator(".found").inner_text()
    in_view = page.evaluate(
        """() => {
          const { top, bottom } = document.querySelector(".found").getBoundingClientRect();
          return top > 0 && bottom < innerHeight && CSS.highlights.get("found").size;
        }"""
    )
    assert in_view == 1
    assert len(visitor.texts(".message")) == 4
    page.locator("#search").press("Escape")
    assert page.locator("#conversations").is_visible()
    assert page.locator("#search").input_value() == ""
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.locator(".conversation", has_text="another").click()
    page.locator(".body", has_text="You said another.").wait_for()
    assert page.locator(".found").count() == 0


MANY = """([count, each]) => new Promise((resolve) => {
  indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
    const transaction = database.transaction(["conversations", "messages"], "readwrite");
    for (let c = 0; c < count; c += 1) {
      const head = { id: `c${c}`, title: `Title ${c}`, created: c, updated: Date.now() - c * 3.6e6 };
      transaction.objectStore("conversations").put({ ...head, titled: 0, leaf: null });
      for (let m = 0; m < each; m += 1) {
        transaction.objectStore("messages").put({
          conversation: head.id, id: `${m}`, parent: m ? `${m - 1}` : null, created: m,
          role: m % 2 ? "assistant" : "user", content: `Text ${m} of conversation ${c}.`, finish: "stop",
        });
      }
    }
    transaction.oncomplete = () => { database.close(); resolve(); };
  };
})"""  # noqa: E501


def test_long_lists_are_read_bit_by_bit_and_stay_as_they_are_during_a_reply(
    visitor: Visitor,
) -> None:
    page = visitor.page
    page.evaluate(MANY, [300, 4])
    page.add_init_script(
        """const { getAll } = IDBObjectStore.prototype;
        globalThis.readsAtOnce = 0;
        IDBObjectStore.prototype.getAll = function (...given) {
          if (this.name === "messages" && !given.length) globalThis.readsAtOnce += 1;
          return getAll.apply(this, given);
        };"""
    )
    visitor.open()
    assert len(visitor.texts(".conversation")) == 300
    assert page.evaluate("readsAtOnce") == 0  # the messages of all would take seconds
    assert visitor.texts(".message .body")[0] == "Text 0 of conversation 0."
    assert [result[0] for result in find(visitor, "3 299")] == ["Title 299"]
    page.locator("#results .conversation").click()
    page.locator(".body", has_text="Text 3 of conversation 299.").wait_for()
    page.locator("#search").fill("")
    page.evaluate(
        """() => {
          globalThis.changes = 0;
          new MutationObserver((changes) => { globalThis.changes += changes.length; })
            .observe(document.getElementById("conversations"), { childList: true, subtree: true });
        }"""
    )
    visitor.say("forever")
    page.locator(".body", has_text="on and " * 30).wait_for()
    assert page.evaluate("changes") < 10  # it came to the top, and that was all
    visitor.button("Stop").click()
    visitor.button("Send").wait_for()
    assert visitor.texts(".conversation")[0] == "Title 299"
