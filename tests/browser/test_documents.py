"""Documents on the page with the real engine: embedded, searched by their vectors, given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import served
from browser.chromium import storing
from browser.person import LAST, SLOW_MS, ControlledSite, Person, visiting
from helpers.store import add_model
from helpers.tiny import EMBEDDING, tiny_gguf

from webgemma import Gemma
from webgemma.gguf.sources import BytesSource

EMBEDDER = tiny_gguf(EMBEDDING)
TEXTS = {
    "bread.txt": "Bake the bread for one hour.",
    "lease.txt": "The lease of the flat ends in May.",
    "zebra.txt": "Zebras sleep on their feet at night.",
}
QUESTION = "When does the lease end?"


@pytest.fixture(scope="module")
def ranked() -> Sequence[str]:
    """The names of the documents, the one first that is most like the question natively."""
    with Gemma.load(BytesSource(EMBEDDER), "cpu") as model:
        size = min(256, model.texts.embedding.size)
        vectors = np.asarray(model.embed(list(TEXTS.values()), task="document", size=size))
        scores = vectors @ np.asarray(model.embed([QUESTION], task="query", size=size))[0]
    return [list(TEXTS)[at] for at in np.argsort(-scores)]


def embed(person: Person, name: str) -> None:
    """Add the documents, and choose the model that embeds them."""
    page = person.page
    files = [
        {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
        for name, text in TEXTS.items()
    ]
    person.set(Temperature="0", Max_tokens="4")
    person.button("Documents").click()
    page.locator("#documents-files").set_input_files(files)
    page.locator("#documents-outcome", has_text="3 documents were added.").wait_for()
    person.button(f"Use {name}").click()
    page.locator("#documents-model", has_text="By meaning, with embedding").wait_for()
    page.locator("#documents-list", has_text="not embedded yet").wait_for(state="detached")
    person.close()


def given(person: Person) -> list[str]:
    """Ask the question, and return the documents whose passages the model was given."""
    person.button("Answer from documents").click()
    person.ask(QUESTION)
    person.page.locator(f"{LAST} .sources summary").click()
    listed = person.texts(f"{LAST} .sources .passage")
    person.page.locator(".passage", has_text="lease.txt").click()
    assert person.texts("#document-text mark") == [TEXTS["lease.txt"]]
    person.close()
    person.button("Documents").first.click()
    assert person.texts("#documents-problem") == [""]
    return [text.split("\n")[1] for text in listed]


def test_documents_are_embedded_and_found_in_the_tab(
    chromium: Any, tmp_path: Path, ranked: Sequence[str]
) -> None:
    add_model(tmp_path / "store", "embeddinggemma:tiny", gguf=EMBEDDER)
    site = ControlledSite(tmp_path / "store")
    with storing(chromium, tmp_path / "profile") as context, visiting(context, site) as person:
        person.page.set_default_timeout(3 * SLOW_MS)  # both models compile for the first question
        person.open()
        embed(person, "embeddinggemma:tiny")
        person.open()  # the vectors are stored, and the model is loaded again when it is needed
        assert given(person) == ranked


def test_documents_are_embedded_by_the_server_and_found(
    chromium: Any, tmp_path: Path, ranked: Sequence[str]
) -> None:
    path = tmp_path / "embedding.gguf"
    path.write_bytes(EMBEDDER)
    context = chromium.new_context()
    with served.serving("-", path) as server, served.visiting(context, server.url) as person:
        person.page.goto(person.url)
        person.wait_for_model("demo")
        embed(person, "embedding")
        assert given(person) == ranked
    context.close()
