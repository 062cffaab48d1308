"""What the chat page stores: on a full disk, without storage, and messages not yet sent."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.sender import FILES, Sender, sending

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@pytest.fixture
def disk(context: Any, url: str) -> Iterator["Disk"]:
    """The storage of the page, almost full before the page is opened: Chromium caches the room."""
    page = context.new_page()
    page.goto(f"{url}icon.svg")
    session = context.new_cdp_session(page)  # the quota is set as long as the session lasts
    origin = {"origin": url.removesuffix("/")}
    session.send("Storage.overrideQuotaForOrigin", origin | {"quotaSize": 1_500_000})
    yield Disk(session, origin)
    page.close()


class Disk:
    """The storage that the browser grants the page."""

    def __init__(self, session: Any, origin: dict[str, str]) -> None:
        self.session = session
        self.origin = origin

    def extend(self) -> None:
        """Make as much room as there is."""
        self.session.send("Storage.overrideQuotaForOrigin", self.origin)


ATTACH_LARGE = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1200, height: 1200 });
  const context = canvas.getContext("2d");
  const noise = context.createImageData(1200, 1200);
  for (let i = 0; i < noise.data.length; i += 1) noise.data[i] = Math.random() * 256;
  context.putImageData(noise, 0, 0);
  canvas.toBlob((blob) => {
    const data = new DataTransfer();
    data.items.add(new File([blob], "large.png", { type: "image/png" }));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
  });
}"""


def test_a_full_disk_is_reported_and_the_picture_is_written_when_there_is_room(
    disk: Disk, visitor: Sender
) -> None:
    visitor.ask("before")
    visitor.page.evaluate(ATTACH_LARGE)
    visitor.wait_for_tray(["large.png"])
    visitor.ask("look")
    visitor.page.locator("#notice-text", has_text="The storage of this browser is full").wait_for()
    assert visitor.texts("#unsaved") == ["Not saved"]
    assert visitor.ask("and now") == "You said and now."
    assert visitor.texts("#unsaved") == ["Not saved"]
    disk.extend()
    visitor.page.locator("#notice-text", has_text="Everything is saved again.").wait_for()
    assert visitor.texts("#unsaved") == [""]
    visitor.open()
    assert visitor.texts(".user .body") == ["before", "look", "and now"]
    shown = "() => document.querySelector('.media img')?.naturalWidth === 1200"
    visitor.page.wait_for_function(shown)


def test_without_room_for_the_picture_the_texts_are_kept(visitor: Sender) -> None:
    visitor.page.evaluate(
        """() => {
          const { put } = IDBObjectStore.prototype;
          IDBObjectStore.prototype.put = function (record) {
            const request = put.call(this, record);
            if (this.name === "attachments") this.transaction.abort();
            return request;
          };
        }"""
    )
    visitor.attach("red.png")
    visitor.ask("look")
    assert visitor.notice().startswith("The latest messages are not saved (")
    visitor.ask("and now")
    visitor.page.once("dialog", lambda dialog: dialog.accept())
    visitor.open()
    assert visitor.errors.pop() == "dialog: "  # the browser asks before it leaves the page
    assert visitor.texts(".user .body") == ["look", "and now"]
    assert visitor.texts(".media") == ["red.png is no longer stored", ""]


FAIL = """([method, name]) => {
  const original = IDBObjectStore.prototype[method];
  IDBObjectStore.prototype[method] = function (...given) {
    const request = original.apply(this, given);
    if (this.name === name && !globalThis.hasRoom) this.transaction.abort();
    return request;
  };
}"""


def test_a_picture_that_is_not_yet_written_survives_a_suspended_tab(visitor: Sender) -> None:
    visitor.page.evaluate(FAIL, ["put", "attachments"])
    visitor.attach("red.png")
    visitor.ask("look")
    visitor.page.locator("#unsaved", has_text="Not saved").wait_for()
    visitor.page.evaluate(
        """() => {
          document.dispatchEvent(new Event("resume")); // reads what other tabs have written
          return new Promise((resolve) => {
            indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
              const names = [...database.objectStoreNames];
              database.transaction(names, "readwrite").oncomplete = () => resolve(database.close());
            };
          });
        }"""
    )
    picture = visitor.request()["messages"][0]["content"][0]
    assert picture["image"] == {"mime": "image/png", "nbytes": len(FILES["red.png"][1])}


def test_a_reply_continued_on_a_full_disk_gets_no_second_version(visitor: Sender) -> None:
    visitor.ask("cut")
    visitor.open()
    visitor.page.evaluate(FAIL, ["put", "messages"])
    visitor.button("Continue").click()
    visitor.page.locator("#unsaved", has_text="Not saved").wait_for()
    visitor.page.locator(".body", has_text="and the rest.").wait_for()
    visitor.page.evaluate("globalThis.hasRoom = true")
    visitor.page.locator("#notice-text", has_text="Everything is saved again.").wait_for()
    visitor.open()
    assert visitor.texts(".message .body") == ["cut", "You said cut. and the rest."]
    assert visitor.page.locator(".message:last-child .versions").is_hidden()


def test_a_deletion_on_a_full_disk_is_undone_with_all_messages(visitor: Sender) -> None:
    visitor.ask("hello")
    for method in ("put", "delete"):
        visitor.page.evaluate(FAIL, [method, "messages"])
    visitor.ask("more")
    visitor.page.locator("#unsaved", has_text="Not saved").wait_for()
    visitor.act("Delete")
    visitor.page.locator("#welcome").wait_for()
    visitor.button("Undo").click()
    visitor.page.locator(".body", has_text="You said more.").wait_for()
    visitor.page.evaluate("globalThis.hasRoom = true")
    visitor.page.locator("#notice-text", has_text="Everything is saved again.").wait_for()
    visitor.open()
    assert visitor.texts(".user .body") == ["hello", "more"]


@pytest.mark.usefixtures("disk")
def test_an_import_that_does_not_fit_changes_nothing(visitor: Sender) -> None:
    visitor.ask("mine")
    text = "x" * 3_000_000
    message = f'{{"role": "user", "content": "{text}"}}'
    archive = (
        '{"format": "webgemma-conversations", "version": 1, "conversations": [{"id": "a", '
        f'"title": "t", "created": 1, "updated": 1, "messages": [{message}]}}]}}'
    )
    assert "Nothing was imported" in visitor.import_text(archive)
    assert visitor.texts(".conversation") == ["mine"]


def test_without_storage_the_page_works_and_says_so(context: Any, url: str) -> None:
    context.add_init_script(
        """IDBFactory.prototype.open = () => { throw new DOMException("denied", "SecurityError"); };
        for (const name of ["localStorage", "sessionStorage"]) {
          const get = () => { throw new DOMException("denied", "SecurityError"); };
          Object.defineProperty(window, name, { get });
        }"""
    )
    with sending(context, url) as visitor:
        assert visitor.notice().startswith("This browser does not store conversations (denied)")
        assert visitor.texts("#unsaved") == ["Conversations are not stored"]
        visitor.ask("one")
        visitor.button("New conversation").click()
        visitor.ask("two")
        assert visitor.texts(".conversation") == ["two", "one"]
        visitor.act("Delete")
        visitor.page.locator(".user .body", has_text="one").wait_for()


# Drafts


def box(visitor: Sender) -> Any:
    return visitor.page.get_by_label("Message", exact=True)


def test_a_draft_belongs_to_its_conversation(visitor: Sender) -> None:
    visitor.ask("old")
    box(visitor).fill("for the old one")
    visitor.attach("red.png")
    visitor.button("New conversation").click()
    assert box(visitor).input_value() == ""
    assert visitor.tray() == []
    box(visitor).fill("for the new one")
    visitor.page.locator(".conversation", has_text="old").click()
    assert box(visitor).input_value() == "for the old one"
    assert visitor.tray() == ["red.png"]
    visitor.open()
    assert box(visitor).input_value() == "for the old one"
    assert visitor.tray() == ["red.png"]
    visitor.button("New conversation").click()
    assert box(visitor).input_value() == "for the new one"
    visitor.open()
    assert box(visitor).input_value() == "for the new one"
    box(visitor).press("Enter")
    visitor.page.locator(".facts:not(:empty)").wait_for()
    assert visitor.texts(".user .body") == ["for the new one"]
    visitor.button("New conversation").click()
    visitor.open()
    assert box(visitor).input_value() == ""
    visitor.page.locator(".conversation", has_text="old").click()
    assert box(visitor).input_value() == "for the old one"


def test_a_file_is_attached_to_the_conversation_it_was_chosen_in(visitor: Sender) -> None:
    visitor.ask("old")
    visitor.page.evaluate(
        """() => {
          const decode = createImageBitmap;
          globalThis.createImageBitmap = async (file) => {
            await new Promise((resolve) => { globalThis.decodeNow = resolve; });
            return decode(file);
          };
        }"""
    )
    payload = {"name": "red.png", "mimeType": "image/png", "buffer": FILES["red.png"][1]}
    visitor.page.locator("#attach-file").set_input_files(payload)
    visitor.page.locator("#tray-state", has_text="Reading").wait_for()
    visitor.button("New conversation").click()
    visitor.page.evaluate("decodeNow()")
    visitor.page.locator("#announcer", has_text="red.png").wait_for(state="attached")
    assert visitor.tray() == []
    visitor.page.locator(".conversation", has_text="old").click()
    visitor.wait_for_tray(["red.png"])
