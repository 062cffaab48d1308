"""The page as a person uses it, with the real engine: chat, stop, reload, a file, a lost GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import LAST, ControlledSite, Person, endless_gguf, visiting
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf

from webgemma import Gemma


@pytest.fixture(scope="module")
def person(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person whose Ollama has a model with endless replies; the tests are steps of one visit."""
    folder = tmp_path_factory.mktemp("person")
    with pytest.MonkeyPatch.context() as patch:
        add_model(folder / "store", "on:tiny", gguf=endless_gguf(patch))
    site = ControlledSite(folder / "store")
    with storing(chromium, folder / "profile") as context, visiting(context, site) as person:
        person.open()
        person.set(Temperature="0", Max_tokens="400")
        yield person


def test_a_reply_streams_and_keeps_its_text_when_stopped(person: Person) -> None:
    assert "(software, slow)" in person.texts("#device")[0]
    person.open_models()
    person.choose("ollama", "on:tiny")
    person.say("Are you there?")
    lengths = [0]
    for length in (8, 24, 48):  # and longer than at the last check, however much came meanwhile
        lengths.append(person.wait_for_text(max(length, lengths[-1] + 1)))
    assert lengths == sorted(set(lengths))
    person.button("Stop").click()
    person.button("Send").wait_for()
    assert "tokens/s · stopped" in person.texts(f"{LAST} .facts")[0]
    reply = person.reply()
    assert reply == "On" + " and on" * (reply.count(" ") // 2)
    assert len(reply) >= lengths[-1]


def test_a_reply_is_generated_while_another_tab_is_in_front(person: Person) -> None:
    person.set(Max_tokens="30")
    person.button("Regenerate").click()
    person.button("Stop").wait_for()
    other = person.page.context.new_page()
    other.bring_to_front()
    # Headless, every tab counts as visible; a hidden one gets no frames until it is shown.
    person.page.evaluate(
        "() => { waiting = []; requestAnimationFrame = (show) => waiting.push(show); }"
    )
    expected = "On" + " and on" * 29
    assert person.wait_for_reply() == expected
    other.close()
    person.page.evaluate("() => waiting.forEach((show) => show())")
    assert person.reply() == expected
    assert "30 tokens" in person.texts(f"{LAST} .facts")[0]
    assert len(person.texts(".message")) == 2


@pytest.mark.parametrize("kind", ["junk", "truncated"])
def test_an_invalid_file_is_reported_and_the_model_stays(
    person: Person, tmp_path: Path, kind: str
) -> None:
    data = tiny_gguf(KINDS["small"])
    path = tmp_path / f"{kind}.gguf"
    path.write_bytes(data[: len(data) // 2] if kind == "truncated" else b"no model" * 9999)
    person.page.locator("#model-file").set_input_files(path)
    message = person.notice()
    reason = {"junk": "is not a GGUF file", "truncated": "the file is cut short or damaged"}[kind]
    assert message.startswith(path.name)
    assert reason in message
    assert message.endswith("on:tiny stays loaded.")
    person.button("Choose a model").click()
    person.page.locator("#ollama .model[aria-current]", has_text="on:tiny").wait_for()
    assert person.rows("files") == []
    person.close()


def test_after_a_reload_a_chosen_file_continues_the_conversation(
    person: Person, tmp_path: Path
) -> None:
    before = person.texts(".message .body")
    person.open("on:tiny")
    assert person.texts(".message .body") == before == ["Are you there?", "On" + " and on" * 29]
    path = tmp_path / "small.gguf"
    path.write_bytes(tiny_gguf(KINDS["small"]))
    person.page.locator("#model-file").set_input_files(path)
    person.wait_for_model("small.gguf")
    person.set(Max_tokens="8")
    person.ask("And then?")
    assert len(person.texts(".message")) == 4
    roles = ["user", "assistant", "user"]
    contents = [*before, "And then?"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    expected, without_history = natively(path, [messages, messages[2:]])
    assert person.copied() == expected != without_history


def test_a_lost_gpu_is_reported_and_the_model_loaded_again(person: Person) -> None:
    session = person.page.context.new_cdp_session(person.page)
    session.send("Browser.crashGpuProcess")
    message = person.notice()  # at once, not with the next message
    assert "was lost: " in message
    assert message.endswith(" Your conversation is saved.")
    assert person.texts("#model-name") == ["no model"]
    assert person.button("Send").is_disabled()
    person.button("Load the model again").click()
    person.wait_for_model("small.gguf")
    assert person.texts(".user .body") == ["Are you there?", "And then?"]
    person.ask("Are you still there?")
    assert person.texts(f"{LAST} .facts")[0].startswith("8 tokens")
    assert len(person.texts(".message")) == 6


def natively(path: Path, conversations: list[list[dict[str, str]]]) -> list[str]:
    """Return the replies to conversations on this machine's own GPU."""
    with Gemma.load(path, "gpu") as model:
        replies = [model.chat(each, temperature=0, max_tokens=8) for each in conversations]
        return ["".join(piece.text for piece in reply) for reply in replies]
