"""Fine-tuning in the page with the real engine: an adapter is trained, stored and applied."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import ControlledSite, Person, visiting
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf

from webgemma.gguf.sources import FileSource
from webgemma.lora.gguf_file import open_gguf_adapter
from webgemma.sync import run_sync

ROWS = [{"prompt": f"Hello {n}", "completion": "Good day to you."} for n in range(4)]


@pytest.fixture(scope="module")
def person(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person with a tiny model; the tests are steps of one visit."""
    folder = tmp_path_factory.mktemp("tuning")
    add_model(folder / "store", "small:tiny", gguf=tiny_gguf(SMALL))
    site = ControlledSite(folder / "store")
    with storing(chromium, folder / "profile") as context, visiting(context, site) as person:
        person.open()
        person.set(Temperature="0", Max_tokens="6")
        person.open_models()
        person.choose("ollama", "small:tiny")
        yield person


def test_an_adapter_is_trained_and_downloaded(person: Person, tmp_path: Path) -> None:
    person.button("Fine-tune").click()
    data = "\n".join(map(json.dumps, ROWS)).encode()
    files = [{"name": "polite.jsonl", "mimeType": "text/plain", "buffer": data}]
    person.page.locator("#tune-file").set_input_files(files)
    person.page.locator("#tune-fit", has_text="It fits").wait_for()
    for label, value in {"Rank": "4", "Epochs": "5", "Learning rate": "0.02"}.items():
        person.page.get_by_label(label).fill(value)
    person.page.keyboard.press("Tab")
    person.page.locator("#tune-fit", has_text="5 steps").wait_for()
    person.button("Start").click()
    person.page.locator("#tune-state", has_text="Done after 5 steps").wait_for()
    name = str(person.page.get_by_role("img", name="Loss after 5 of 5").get_attribute("aria-label"))
    last, first = (float(name.split(before)[1].split(",")[0]) for before in ("steps: ", "first "))
    assert last < 0.8 * first
    with person.page.expect_download() as download:
        person.button("Download polite").click()
    path = tmp_path / "polite.gguf"
    download.value.save_as(path)
    adapter = run_sync(open_gguf_adapter(FileSource(path)))
    assert {pair.rank for pair in adapter.pairs.values()} == {4}
    person.close()


def test_the_adapter_survives_a_reload_and_changes_replies(person: Person) -> None:
    person.open("small:tiny")
    before = person.ask("Hello 1")
    person.button("Fine-tune").click()
    person.button("Apply polite").click()
    person.wait_for_model("small:tiny + polite")
    person.close()
    person.button("New conversation").click()
    assert person.ask("Hello 1") != before
    person.button("Fine-tune").click()
    person.button("Delete polite").click()
    person.page.locator("#question-yes").click()
    person.button("Delete polite").wait_for(state="detached")
    person.page.locator("#model-name", has_text="polite").wait_for(state="detached")
    person.close()
    person.button("New conversation").click()
    assert person.ask("Hello 1") == before
