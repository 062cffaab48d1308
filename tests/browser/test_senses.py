"""Pictures and sounds on the page with its real engine: the model replies as natively."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import SLOW_MS, Person, Wire, visiting
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_ears import EARS, ears_metadata, ears_tensors
from helpers.tiny_eyes import EMBEDDER, eyes_metadata, eyes_tensors
from web.sender import DROP, FILES, Sender, given

from webgemma import Gemma
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes

TEXT = replace(SMALL, context=1024)
EYES = replace(EMBEDDER, positions=96)  # the quickest: software computes here
SENSES = replace(EARS, output=SMALL.width)
COUNT = 8
PICTURES, SOUND = ("red.png", "blue.png"), "song.wav"


def mmproj() -> bytes:
    """Eyes and ears in one file."""
    metadata = eyes_metadata(EYES, "clip.") | ears_metadata(SENSES)
    return gguf_bytes(metadata, [*eyes_tensors(EYES), *ears_tensors(SENSES)])


def natively(*names: str, text: str) -> str:
    """What the model replies to files and a text on this machine's own adapter."""
    parts: list[dict[str, Any]] = [
        {"type": kind, kind: FILES[name][1]}
        for name in names
        for kind in [FILES[name][0].split("/")[0]]
    ]
    asked = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    model, senses = BytesSource(tiny_gguf(TEXT)), BytesSource(mmproj())
    with Gemma.load(model, "gpu", mmproj=senses) as gemma:
        return "".join(p.text for p in gemma.chat(asked, temperature=0, max_tokens=COUNT))


class Witness(Sender, Person):
    """A person who shows things to a model."""

    def show(self, *names: str, text: str) -> str:
        """Send files with a text; the reply as it was written."""
        self.attach(*names)
        self.ask(text)
        return self.copied()

    def drop(self, **files: bytes) -> None:
        """Drop model files, of these names with _ for a hyphen."""
        for name, data in files.items():
            FILES[f"{name.replace('_', '-')}.gguf"] = ("", data)
        self.page.evaluate(DROP, given(*(f"{name.replace('_', '-')}.gguf" for name in files)))


@pytest.fixture(scope="module")
def person(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    """Someone whose Ollama has a model with a projector; the tests are steps of one visit."""
    folder = tmp_path_factory.mktemp("person")
    layers = [("projector", mmproj())]
    add_model(folder / "store", "sees:tiny", gguf=tiny_gguf(TEXT), layers=layers)
    site = Wire(folder / "store")
    with (
        storing(chromium, folder / "profile") as context,
        visiting(context, site, who=Witness) as person,
    ):
        person.page.set_default_timeout(3 * SLOW_MS)  # looking takes software longer than talking
        person.open()
        person.set(Temperature="0", Most_tokens=str(COUNT))
        yield person


def test_a_model_without_eyes_says_so(person: Witness) -> None:
    person.attach(PICTURES[0])
    person.say("What is this?")
    assert "the bundled model cannot see: there is no vision tower" in person.notice()
    assert person.pictures() == [PICTURES[0]]
    person.button("New conversation").click()
    person.attach(SOUND)
    person.say("What is this?")
    person.page.locator("#notice-text", has_text="cannot hear").wait_for()


def test_pictures_are_seen_as_natively(person: Witness) -> None:
    person.pick()
    person.choose("ollama", "sees:tiny")
    person.button("New conversation").click()
    found = person.show(*PICTURES, text="the sea?")
    assert found == natively(*PICTURES, text="the sea?")
    assert found != natively(*reversed(PICTURES), text="the sea?")


def test_a_reload_keeps_the_pictures_and_another_reply_is_the_same(person: Witness) -> None:
    before = person.copied()
    person.open("sees:tiny")
    person.page.wait_for_function(
        "() => [...document.querySelectorAll('.media img')].every((image) => image.naturalWidth)"
    )
    assert person.pictures() == list(PICTURES)
    person.button("Regenerate").click()
    person.wait_for_reply()
    assert person.copied() == before


def test_looking_can_be_stopped(person: Witness) -> None:
    person.set(Most_tokens="900")
    person.button("New conversation").click()
    person.attach(*PICTURES)
    person.say("the hills?")
    person.page.locator(".sensing", has_text="Looking at what you sent").wait_for()
    person.button("Stop").click()
    person.button("Send").wait_for()
    assert person.texts(".message .facts")[-1].endswith("stopped")
    assert person.pictures() == list(PICTURES)
    person.set(Most_tokens=str(COUNT))


def test_a_sound_is_heard_as_natively(person: Witness) -> None:
    person.button("New conversation").click()
    found = person.show(SOUND, text="the song?")
    assert found == natively(SOUND, text="the song?")
    person.button("New conversation").click()
    assert person.show(PICTURES[0], SOUND, text="both?") == natively(
        PICTURES[0], SOUND, text="both?"
    )


def test_what_is_kept_sees_too(person: Witness) -> None:
    person.pick()
    person.button("Keep sees:tiny").click()
    person.news("sees:tiny is kept in this browser")
    assert [row.split(" | ")[0] for row in person.rows("stored")] == ["Bundled model", "sees:tiny"]
    person.choose("stored", "sees:tiny")
    person.button("New conversation").click()
    found = person.show(PICTURES[1], SOUND, text="and now?")
    assert found == natively(PICTURES[1], SOUND, text="and now?")


def test_dropped_eyes_and_a_dropped_model(person: Witness) -> None:
    person.drop(text=tiny_gguf(TEXT))
    person.wait_for_model("text.gguf")
    person.button("New conversation").click()
    person.attach(PICTURES[0])
    person.say("what?")
    assert "text.gguf cannot see" in person.notice()
    person.drop(mmproj_text=mmproj())
    person.page.locator("#notice").wait_for(state="hidden")
    person.wait_for_model("text.gguf")
    person.button("Regenerate").click()
    person.wait_for_reply()
    assert person.copied() == natively(PICTURES[0], text="what?")


def test_a_file_that_is_no_eyes(person: Witness, tmp_path: Path) -> None:
    paths = [tmp_path / "text.gguf", tmp_path / "mmproj.gguf"]
    for path in paths:
        path.write_bytes(tiny_gguf(TEXT))
    person.page.locator("#model-file").set_input_files(paths)
    person.wait_for_model("text.gguf")
    person.button("Regenerate").click()
    assert "text.gguf cannot see: there is no vision tower in mmproj.gguf" in person.notice()
