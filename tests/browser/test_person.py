"""The page as a person uses it, with the real engine: talk, stop, reload, a file, a lost GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import LAST, Person, Wire, talker, visiting
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf

from webgemma import Gemma


@pytest.fixture(scope="module")
def person(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """Someone whose Ollama has a model that never ends; the tests are steps of one visit."""
    folder = tmp_path_factory.mktemp("person")
    with pytest.MonkeyPatch.context() as patch:
        add_model(folder / "store", "on:tiny", gguf=talker(patch))
    site = Wire(folder / "store")
    with storing(chromium, folder / "profile") as context, visiting(context, site) as person:
        person.open()
        person.set(Temperature="0", Most_tokens="400")
        yield person


def test_a_reply_streams_and_stops_and_what_was_said_stays(person: Person) -> None:
    assert "(software, slow)" in person.texts("#device")[0]
    person.pick()
    person.choose("ollama", "on:tiny")
    person.say("Are you there?")
    lengths = [0]
    for nbytes in (8, 24, 48):  # and more than before, however much came while nobody looked
        lengths.append(person.wait_for_text(max(nbytes, lengths[-1] + 1)))
    assert lengths == sorted(set(lengths))
    person.button("Stop").click()
    person.button("Send").wait_for()
    assert "tokens/s · stopped" in person.texts(f"{LAST} .facts")[0]
    said = person.reply()
    assert said == "On" + " and on" * (said.count(" ") // 2)
    assert len(said) >= lengths[-1]


def test_another_reply_comes_while_another_tab_is_in_front(person: Person) -> None:
    person.set(Most_tokens="30")
    person.button("Regenerate").click()
    person.button("Stop").wait_for()
    other = person.page.context.new_page()
    other.bring_to_front()
    # Without a screen every tab counts as visible; a hidden one gets no frames until it is shown.
    person.page.evaluate(
        "() => { waiting = []; requestAnimationFrame = (show) => waiting.push(show); }"
    )
    whole = "On" + " and on" * 29
    assert person.wait_for_reply() == whole
    other.close()
    person.page.evaluate("() => waiting.forEach((show) => show())")
    assert person.reply() == whole
    assert "30 tokens" in person.texts(f"{LAST} .facts")[0]
    assert len(person.texts(".message")) == 2


@pytest.mark.parametrize("kind", ["junk", "cut"])
def test_a_wrong_file_gets_a_sentence_and_the_picker(
    person: Person, tmp_path: Path, kind: str
) -> None:
    whole = tiny_gguf(KINDS["small"])
    path = tmp_path / f"{kind}.gguf"
    path.write_bytes(whole[: len(whole) // 2] if kind == "cut" else b"no model" * 9999)
    person.page.locator("#model-file").set_input_files(path)
    said = person.notice()
    wrong = {"junk": "is not a GGUF file", "cut": "the file is cut short or damaged"}[kind]
    assert said.startswith(path.name)
    assert wrong in said
    person.button("Choose a model").click()
    person.page.locator("#files .model", has_text=path.name).wait_for()
    person.close()


def test_after_a_reload_a_chosen_file_goes_on_with_the_conversation(
    person: Person, tmp_path: Path
) -> None:
    before = person.texts(".message .body")
    person.open()
    assert person.texts(".message .body") == before == ["Are you there?", "On" + " and on" * 29]
    path = tmp_path / "small.gguf"
    path.write_bytes(tiny_gguf(KINDS["small"]))
    person.page.locator("#model-file").set_input_files(path)
    person.wait_for_model("small.gguf")
    person.set(Most_tokens="8")
    person.ask("And then?")
    assert len(person.texts(".message")) == 4
    roles = ["user", "assistant", "user"]
    contents = [*before, "And then?"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    wanted, without_the_past = natively(path, [messages, messages[2:]])
    assert person.copied() == wanted != without_the_past


def test_a_lost_gpu(person: Person) -> None:
    session = person.page.context.new_cdp_session(person.page)
    session.send("Browser.crashGpuProcess")
    person.say("Are you still there?")
    said = person.notice()
    assert "was lost: its driver was reset or the browser took it away" in said
    assert said.endswith("Load the model again. Your conversation is kept.")
    assert person.texts(f"{LAST} .facts") == ["ended by an error"]
    person.button("Load the model again").click()
    person.wait_for_model("small.gguf")
    assert person.texts(".user .body") == ["Are you there?", "And then?", "Are you still there?"]
    person.button("Regenerate").click()
    person.wait_for_reply()
    assert person.texts(f"{LAST} .facts")[0].startswith("8 tokens")
    assert len(person.texts(".message")) == 6


def natively(path: Path, conversations: list[list[dict[str, str]]]) -> list[str]:
    """The same replies on this machine's own adapter."""
    with Gemma.load(path, "gpu") as model:
        replies = [model.chat(said, temperature=0, max_tokens=8) for said in conversations]
        return ["".join(piece.text for piece in reply) for reply in replies]
