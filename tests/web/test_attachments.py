"""Images and audio on the chat page: attached, dropped, pasted, stored, sent."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.page import serving_page
from web.sender import DROP, FILES, PASTE, SECONDS, Sender, as_base64, sending

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    parts = [("projector", b"GGUF mmproj"), ("draft", b"GGUF drafter")]
    add_model(folder / "store", "vision:e2b", gguf=tiny_gguf(KINDS["small"]), layers=parts)
    with serving_page(folder) as url:
        yield url


PNG = {"mime": "image/png"}
RED = {"type": "image", "image": PNG | {"nbytes": len(FILES["red.png"][1])}}
BLUE = {"type": "image", "image": PNG | {"nbytes": len(FILES["blue.png"][1])}}
TEXT = {"type": "text", "text": "request"}


def test_images_are_attached_removed_and_sent_before_the_text(visitor: Sender) -> None:
    visitor.attach("red.png", "blue.png")
    visitor.attach("red.png")
    visitor.button("Remove red.png").first.click()
    visitor.wait_for_tray(["blue.png", "red.png"])
    assert visitor.page.evaluate("document.activeElement.id") == "prompt"
    assert visitor.parts() == [BLUE, RED, TEXT]
    assert visitor.tray() == []
    assert visitor.images() == ["blue.png", "red.png"]
    assert visitor.request()["messages"][0]["content"] == [BLUE, RED, TEXT]


def test_audio_is_decoded_and_can_be_played(visitor: Sender) -> None:
    visitor.attach("song.wav")
    assert visitor.texts("#tray .audio-label") == ["song.wav\n0:02"]
    assert visitor.page.locator("#announcer").inner_text() == "Attached: song.wav"
    (part, text) = visitor.parts()
    assert text == TEXT
    assert part["type"] == "audio"
    assert part["audio"]["samples"] == SECONDS * 16_000
    assert part["audio"]["loudest"] == pytest.approx(0.5, abs=0.01)
    player = visitor.page.get_by_label("song.wav")
    visitor.page.wait_for_function("() => document.querySelector('audio').duration === 2")
    assert player.get_attribute("controls") is not None


def test_dropped_images_are_attached_and_a_dropped_model_is_loaded(visitor: Sender) -> None:
    visitor.page.evaluate(DROP, as_base64("red.png", "model.gguf", "song.wav"))
    visitor.wait_for_tray(["red.png", "song.wav"])
    visitor.page.locator("#model-name", has_text="model.gguf").wait_for()
    visitor.page.evaluate(DROP, as_base64("blue.png"))
    visitor.wait_for_tray(["red.png", "song.wav", "blue.png"])
    assert visitor.page.locator("#drop-here").is_hidden()


def test_a_pasted_image_is_attached_unless_it_comes_with_text(visitor: Sender) -> None:
    visitor.page.evaluate(PASTE, [*as_base64("red.png")[0], ""])
    visitor.wait_for_tray(["red.png"])
    visitor.page.evaluate(PASTE, [*as_base64("blue.png")[0], "a table of a spreadsheet"])
    assert visitor.parts() == [RED, TEXT]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut.png", "cut.png is damaged or not an image that this browser can read"),
        (
            "photo.heic",
            "photo.heic is damaged or not an image that this browser can read: use JPEG",
        ),
        ("torn.wav", "torn.wav is damaged, empty or not audio that this browser can play"),
    ],
)
def test_a_file_that_cannot_be_decoded_is_reported(
    visitor: Sender, name: str, message: str
) -> None:
    visitor.page.evaluate(DROP, as_base64(name, "red.png"))
    assert visitor.notice().startswith(message)
    assert visitor.tray() == ["red.png"]


def test_an_image_can_be_sent_without_text(visitor: Sender) -> None:
    visitor.attach("red.png")
    visitor.page.get_by_label("Message", exact=True).press("Enter")
    visitor.page.locator(".assistant .facts:not(:empty)").wait_for()
    assert visitor.texts(".conversation") == ["red.png"]
    assert visitor.page.locator(".user .body").is_hidden()
    assert visitor.images() == ["red.png"]


def test_attachments_survive_a_reload(visitor: Sender) -> None:
    visitor.attach("red.png", "song.wav")
    visitor.parts()
    visitor.open()
    visitor.page.wait_for_function("() => document.querySelector('.media img').naturalWidth === 64")
    visitor.page.wait_for_function("() => document.querySelector('audio').duration === 2")
    visitor.button("Regenerate").click()
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    image, audio, text = visitor.last_request()["messages"][-1]["content"]
    assert (image, text) == (RED, TEXT)
    assert audio["audio"]["samples"] == SECONDS * 16_000


STORED_FILES = """() => new Promise((resolve) => {
  indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
    const all = database.transaction("attachments").objectStore("attachments").getAllKeys();
    all.onsuccess = () => { database.close(); resolve(all.result.length); };
  };
})"""


def test_editing_keeps_or_removes_attachments(visitor: Sender) -> None:
    visitor.attach("red.png", "blue.png")
    visitor.parts()
    message = visitor.page.locator(".user").first
    message.hover()
    message.get_by_role("button", name="Edit").click()
    message.get_by_role("button", name="Remove red.png").click()
    visitor.page.keyboard.press("Escape")
    assert visitor.images() == ["red.png", "blue.png"]
    message.get_by_role("button", name="Edit").click()
    message.get_by_role("button", name="Remove red.png").click()
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_function("() => document.querySelectorAll('.media img').length === 1")
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    assert visitor.last_request()["messages"][-1]["content"] == [BLUE, TEXT]
    assert visitor.images() == ["blue.png"]
    visitor.open()
    assert visitor.page.evaluate(STORED_FILES) == 2  # the earlier version has both
    visitor.page.clock.install()
    visitor.act("Delete")
    visitor.page.locator("#welcome").wait_for()
    assert visitor.page.evaluate(STORED_FILES) == 2  # it could be restored
    visitor.pass_undo()
    assert visitor.page.evaluate(STORED_FILES) == 0


def test_a_database_without_attachments_is_upgraded(context: Any, url: str) -> None:
    page = context.new_page()
    page.goto(f"{url}icon.svg")
    page.evaluate("""() => new Promise((resolve) => {
      const request = indexedDB.open("webgemma", 1);
      request.onupgradeneeded = () => {
        const store = request.result.createObjectStore("conversations", { keyPath: "id" });
        const messages = [{ role: "user", content: "stored before" }];
        store.put({ id: "1", title: "stored before", created: 1, updated: 1, messages });
      };
      request.onsuccess = () => { request.result.close(); resolve(); };
    })""")
    page.close()
    with sending(context, url) as visitor:
        assert visitor.texts(".user .body") == ["stored before"]
        visitor.attach("red.png")
        assert visitor.parts() == [RED, TEXT]


def test_export_and_import_include_attachments(visitor: Sender, browser: Any, url: str) -> None:
    visitor.attach("red.png", "song.wav")
    visitor.parts()
    archive = visitor.exported()
    assert visitor.import_text(archive) == "0 conversations were imported."
    context = browser.new_context()
    with sending(context, url) as other:
        for count in ("One conversation was imported.", "0 conversations were imported."):
            other.import_text(archive)
            other.page.locator("#notice-text", has_text=count).wait_for()
        other.open()
        other.page.locator(".conversation").click()
        image, audio, _ = other.request()["messages"][0]["content"]
        assert image == RED
        assert audio["audio"]["samples"] == SECONDS * 16_000
    context.close()


@pytest.mark.parametrize(
    "change",
    [
        {"data": "data:text/html;base64,QUJD"},
        {"data": "data:image/png;base64,%%%"},
        {"data": "blob:x"},
        {"kind": "video"},
        {"kind": "audio"},
        {"name": ""},
        {"id": 5},
    ],
)
def test_an_invalid_attachment_is_refused(visitor: Sender, change: dict[str, Any]) -> None:
    data = "data:image/png;base64," + as_base64("red.png")[0][2]
    attachment = {"id": "1", "kind": "image", "name": "x.png", "data": data} | change
    message = {"role": "user", "content": "hi", "attachments": [attachment]}
    conversation = {"id": "a", "title": "t", "created": 1, "updated": 1, "messages": [message]}
    archive = {"format": "webgemma-conversations", "version": 1, "conversations": [conversation]}
    notice = visitor.import_text(json.dumps(archive))
    assert "has an image or audio that cannot be read" in notice
    assert visitor.texts(".conversation") == []


def test_a_missing_encoder_is_reported_and_nothing_is_lost(visitor: Sender) -> None:
    visitor.attach("red.png")
    visitor.say("no encoder")
    assert visitor.notice().startswith("bundled has no vision encoder in its file.")
    assert visitor.notice().endswith("(mmproj….gguf), drop it on this page.")
    assert visitor.texts(".user .body") == ["no encoder"]
    assert visitor.images() == ["red.png"]
    visitor.open()
    assert visitor.images() == ["red.png"]


def test_encoding_is_shown_and_can_be_stopped(visitor: Sender) -> None:
    visitor.attach("red.png")
    visitor.say("encode long")
    visitor.page.locator(".stage", has_text="Processing images … 40 %").wait_for()
    visitor.button("Stop").click()
    visitor.page.locator(".facts", has_text="stopped").wait_for()
    assert visitor.page.locator(".stage").inner_text() == ""


def test_a_file_that_the_browser_has_deleted(visitor: Sender) -> None:
    visitor.attach("red.png")
    visitor.parts()
    visitor.page.evaluate("""() => new Promise((resolve) => {
      indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
        const transaction = database.transaction("attachments", "readwrite");
        transaction.objectStore("attachments").clear();
        transaction.oncomplete = () => { database.close(); resolve(); };
      };
    })""")
    visitor.open()
    assert visitor.texts(".media") == ["red.png is no longer stored"]
    visitor.button("Regenerate").click()
    assert visitor.notice().startswith("red.png is no longer stored in this browser: edit")


# Encoders in a file of their own


def wait_for_hint(visitor: Sender, name: str) -> None:
    """Wait until a model is loaded, by the start of the model button's hint."""
    visitor.page.locator(f'#model-button[title^="{name}"]').wait_for()


def test_a_model_and_its_mmproj_are_dropped_together_or_in_turn(visitor: Sender) -> None:
    visitor.page.evaluate(DROP, as_base64("mmproj-model.gguf", "model.gguf"))
    wait_for_hint(visitor, "model.gguf with mmproj-model.gguf")
    visitor.open()
    visitor.page.evaluate(DROP, as_base64("model.gguf"))
    wait_for_hint(visitor, "model.gguf:")
    visitor.page.evaluate(DROP, as_base64("mmproj-model.gguf"))
    wait_for_hint(visitor, "model.gguf with mmproj-model.gguf")
    visitor.page.locator("#model-button").click()
    visitor.page.locator("#files .model", has_text="with mmproj-model.gguf").click()
    wait_for_hint(visitor, "model.gguf with mmproj-model.gguf")


def test_a_model_of_ollama_is_loaded_with_its_projector_and_drafter(visitor: Sender) -> None:
    visitor.page.locator("#model-button").click()
    visitor.page.locator("#ollama .model", has_text="vision:e2b").click()
    both = re.compile("vision:e2b with models/sha256-.* and models/sha256-")
    wait_for_hint(visitor, "vision:e2b with ")
    assert both.match(visitor.page.locator("#model-button").get_attribute("title"))
    visitor.open("vision:e2b")
    wait_for_hint(visitor, "vision:e2b with ")
    assert both.match(visitor.page.locator("#model-button").get_attribute("title"))


def test_a_last_model_that_names_its_mmproj_eyes_is_loaded(visitor: Sender) -> None:
    mmproj = {"kind": "url", "url": "models/mmproj"}
    source = {"kind": "url", "url": "models/x", "name": "vision", "eyes": mmproj}
    entry = {"model": {"name": "vision", "source": source}, "isLoaded": True}
    visitor.page.evaluate(
        "(entry) => localStorage.setItem('webgemma-model', JSON.stringify(entry))", entry
    )
    visitor.open("vision")
    wait_for_hint(visitor, "vision with models/mmproj")


@pytest.mark.parametrize("width", [360, 390])
def test_nothing_overflows_on_a_phone(visitor: Sender, width: int) -> None:
    page = visitor.page
    page.set_viewport_size({"width": width, "height": 700})
    overflow = """["html", "#scroller", "#composer"].map((name) => document.querySelector(name))
      .filter((area) => area.scrollWidth > area.clientWidth).length"""
    visitor.attach("red.png", "blue.png", "song.wav", "red.png", "red.png")
    assert page.evaluate(overflow) == 0
    visitor.parts()
    assert page.evaluate(overflow) == 0
    message = page.locator(".user").first
    message.get_by_role("button", name="Edit").click()
    assert page.evaluate(overflow) == 0


def test_every_control_has_a_name(visitor: Sender) -> None:
    visitor.attach("red.png", "song.wav")
    unnamed = """[...document.querySelectorAll("button, input, audio, img")]
      .filter((control) => control.checkVisibility() && !control.textContent.trim()
        && !control.ariaLabel && !control.labels?.length && !control.hasAttribute("alt"))
      .map((control) => control.outerHTML)"""
    assert visitor.page.evaluate(unnamed) == []
    visitor.parts()
    assert visitor.page.evaluate(unnamed) == []
    labels = [b.get_attribute("aria-label") for b in visitor.page.locator("#writing .icon").all()]
    assert labels == [
        *("Attach files", "Tools", "Answer from documents", "Record audio", "Thinking")
    ]
