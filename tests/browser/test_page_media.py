"""Images and audio on the page with its real engine: the model replies as natively."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import SLOW_MS, ControlledSite, Person, visiting
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_audio import TINY_AUDIO, audio_metadata, audio_weights
from helpers.tiny_vision import EMBEDDER, vision_metadata, vision_weights
from web.sender import DROP, FILES, Sender, as_base64

from webgemma import Gemma
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes

TEXT = replace(SMALL, context=1024)
VISION = replace(EMBEDDER, positions=96)  # the fastest on a software GPU
AUDIO = replace(TINY_AUDIO, output=SMALL.width)
COUNT = 8
STOP_ENCODING = """new MutationObserver((changes, observer) => {
    const shown = [...document.querySelectorAll(".stage")].map((node) => node.textContent);
    if (!shown.some((text) => text.startsWith("Processing images"))) return;
    observer.disconnect();
    document.getElementById("stop").click();
}).observe(document.body, { subtree: true, childList: true })"""
IMAGES, SONG = ("red.png", "blue.png"), "song.wav"


def mmproj() -> bytes:
    """Return an mmproj file with a vision and an audio encoder."""
    metadata = vision_metadata(VISION, "clip.") | audio_metadata(AUDIO)
    return gguf_bytes(metadata, [*vision_weights(VISION), *audio_weights(AUDIO)])


def natively(*names: str, text: str) -> str:
    """Return the model's reply to files and a text on this machine's own GPU."""
    parts: list[dict[str, Any]] = [
        {"type": kind, kind: FILES[name][1]}
        for name in names
        for kind in [FILES[name][0].split("/")[0]]
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    model, encoders = BytesSource(tiny_gguf(TEXT)), BytesSource(mmproj())
    with Gemma.load(model, "gpu", mmproj=encoders) as gemma:
        return "".join(p.text for p in gemma.chat(messages, temperature=0, max_tokens=COUNT))


class MediaPerson(Sender, Person):
    """A person who sends images and audio."""

    def ask_about(self, *names: str, text: str) -> str:
        """Send files with a text, and return the reply as the model wrote it."""
        self.attach(*names)
        self.ask(text)
        return self.copied()

    def drop(self, **files: bytes) -> None:
        """Drop model files, by their names with _ for a hyphen."""
        for name, data in files.items():
            FILES[f"{name.replace('_', '-')}.gguf"] = ("", data)
        self.page.evaluate(DROP, as_base64(*(f"{name.replace('_', '-')}.gguf" for name in files)))


@pytest.fixture(scope="module")
def person(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaPerson]:
    """A person whose Ollama has a model with a projector; the tests are steps of one visit."""
    folder = tmp_path_factory.mktemp("person")
    layers = [("projector", mmproj())]
    add_model(folder / "store", "vision:tiny", gguf=tiny_gguf(TEXT), layers=layers)
    site = ControlledSite(folder / "store")
    with (
        storing(chromium, folder / "profile") as context,
        visiting(context, site, who=MediaPerson) as person,
    ):
        person.page.set_default_timeout(3 * SLOW_MS)  # encoding is slower than replying
        person.open()
        person.set(Temperature="0", Max_tokens=str(COUNT))
        yield person


def test_missing_encoders_are_reported(person: MediaPerson) -> None:
    person.attach(IMAGES[0])
    person.say("What is this?")
    message = person.notice()
    assert message.startswith("the bundled model")
    assert "no vision" in message
    assert person.images() == [IMAGES[0]]
    person.button("New conversation").click()
    person.attach(SONG)
    person.say("What is this?")
    person.page.locator("#notice-text", has_text="no audio").wait_for()


def test_replies_to_images_are_as_natively(person: MediaPerson) -> None:
    person.open_models()
    person.choose("ollama", "vision:tiny")
    person.button("New conversation").click()
    reply = person.ask_about(*IMAGES, text="the sea?")
    assert reply == natively(*IMAGES, text="the sea?")
    assert reply != natively(*reversed(IMAGES), text="the sea?")


def test_a_reload_keeps_the_images_and_another_reply_is_equal(person: MediaPerson) -> None:
    before = person.copied()
    person.open("vision:tiny")
    person.page.wait_for_function(
        "() => [...document.querySelectorAll('.media img')].every((image) => image.naturalWidth)"
    )
    assert person.images() == list(IMAGES)
    person.button("Regenerate").click()
    person.wait_for_reply()
    assert person.copied() == before


def test_encoding_can_be_stopped(person: MediaPerson) -> None:
    person.set(Max_tokens="900")
    person.button("New conversation").click()
    person.attach(*IMAGES)
    person.page.evaluate(STOP_ENCODING)  # in the page, which cannot miss it
    person.say("the hills?")
    person.wait_for_reply()
    assert person.texts(".message .facts")[-1].endswith("stopped")
    assert person.images() == list(IMAGES)
    person.set(Max_tokens=str(COUNT))


def test_replies_to_audio_are_as_natively(person: MediaPerson) -> None:
    person.button("New conversation").click()
    reply = person.ask_about(SONG, text="the song?")
    assert reply == natively(SONG, text="the song?")
    person.button("New conversation").click()
    assert person.ask_about(IMAGES[0], SONG, text="both?") == natively(
        IMAGES[0], SONG, text="both?"
    )


def test_a_stored_model_has_its_encoders(person: MediaPerson) -> None:
    person.open_models()
    person.button("Store vision:tiny").click()
    person.status("vision:tiny is stored in this browser")
    assert [row.split(" | ")[0] for row in person.rows("stored")] == [
        "Bundled model",
        "vision:tiny",
    ]
    person.choose("stored", "vision:tiny")
    person.button("New conversation").click()
    reply = person.ask_about(IMAGES[1], SONG, text="and now?")
    assert reply == natively(IMAGES[1], SONG, text="and now?")


def test_a_dropped_model_gets_a_dropped_mmproj(person: MediaPerson) -> None:
    person.drop(text=tiny_gguf(TEXT))
    person.wait_for_model("text.gguf")
    person.button("New conversation").click()
    person.attach(IMAGES[0])
    person.say("what?")
    message = person.notice()
    assert message.startswith("text.gguf")
    assert "no vision" in message
    person.drop(mmproj_text=mmproj())
    person.page.locator("#notice").wait_for(state="hidden")
    person.wait_for_model("text.gguf")
    person.button("Regenerate").click()
    person.wait_for_reply()
    assert person.copied() == natively(IMAGES[0], text="what?")


def test_an_mmproj_without_encoders_is_reported(person: MediaPerson, tmp_path: Path) -> None:
    paths = [tmp_path / "text.gguf", tmp_path / "mmproj.gguf"]
    for path in paths:
        path.write_bytes(tiny_gguf(TEXT))
    person.page.locator("#model-file").set_input_files(paths)
    message = person.notice()
    assert message.startswith("mmproj.gguf holds neither a vision nor an audio encoder.")
    assert message.endswith("stays loaded.")
