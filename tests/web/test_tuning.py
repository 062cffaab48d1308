"""Fine-tuning in the page: the messages of the tab, and the dialog."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.pretend_files import PretendFiles
from helpers.tiny import SMALL, tiny_gguf
from web.page import Visitor
from web.test_tab import HELLO, file_spec, messages_of

from webgemma.gguf.sources import BytesSource
from webgemma.lora.gguf_file import open_gguf_adapter
from webgemma.sync import run_sync
from webgemma.web.tab import Tab
from webgemma.web.tuning import FOLDER

pytest.importorskip("playwright.sync_api", reason="needs playwright")
in_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

TINY = tiny_gguf(SMALL)
ROWS = [{"prompt": f"Hello {n}", "completion": "Good day to you."} for n in range(6)]
DATA = "\n".join(map(json.dumps, ROWS))
GREEDY = json.dumps({"temperature": 0, "max_tokens": 6})


def options(**changes: Any) -> str:
    """Return the options of a training as JSON."""
    return json.dumps(
        {"name": "polite.jsonl", "rank": 4, "learning_rate": 0.02, "batch": 2} | changes
    )


def tuning_messages(
    act: Callable[[Tab], Coroutine[Any, Any, None]], files: PretendFiles | None = None
) -> list[dict[str, Any]]:
    """Return all messages that a tab sends during `act`, after it has loaded a tiny model."""

    async def load_and_act(tab: Tab) -> None:
        await tab.load(file_spec(TINY), None, "exact")
        await act(tab)

    messages = messages_of(load_and_act, files)
    return messages[1 + next(at for at, m in enumerate(messages) if m["type"] == "loaded") :]


def of(messages: list[dict[str, Any]], type: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["type"] == type]


def text(messages: list[dict[str, Any]], id: int) -> str:
    return "".join(m["text"] for m in of(messages, "piece") if m["id"] == id)


def test_examples_are_checked() -> None:
    data = f'{DATA}\nnot JSON\n{{"question": "?"}}'
    messages = tuning_messages(lambda tab: tab.tuning.examine(data, options(epochs=2)))
    (facts,) = of(messages, "examined")
    assert (facts["rows"], facts["examples"], facts["steps"], facts["batch"]) == (8, 6, 6, 2)
    assert (facts["truncated"], facts["skipped_count"]) == (0, 2)
    assert [line for line, _ in facts["skipped"]] == [7, 8]
    assert "JSON" in facts["skipped"][0][1]
    assert 0 < facts["targets"] < facts["tokens"]
    assert 0 < facts["nbytes"] == facts["free_nbytes"]


def test_an_adapter_is_trained_stored_applied_detached_and_deleted() -> None:
    files = PretendFiles()
    data: list[bytes] = []

    async def act(tab: Tab) -> None:
        await tab.chat(1, HELLO, GREEDY)
        await tab.tuning.tune(DATA, options(epochs=8, held_out=0.2))
        (name,) = {path.split("/")[-1].split(".")[0] for path in files.disk}
        notes = json.loads(files.disk[f"{FOLDER}/{name}.json"])["notes"]
        assert "judged" in notes  # the key that adapters in browsers have
        await tab.tuning.apply_adapter(name)
        await tab.chat(2, HELLO, GREEDY)
        await tab.tuning.detach_adapter()
        await tab.chat(3, HELLO, GREEDY)
        data.append(await tab.tuning.read_adapter(name) or b"")
        await tab.tuning.delete_adapter(name)

    messages = tuning_messages(act, files)
    steps = of(messages, "tuning")
    assert [m["step"] for m in steps] == list(range(1, steps[0]["steps"] + 1))
    losses = [m["loss"] for m in steps]
    assert losses[-1] < 0.7 * losses[0]
    held_out = [m["held_out_loss"] for m in steps if m["held_out_loss"] is not None]
    assert len(held_out) == 8
    assert held_out[-1] < 0.7 * held_out[0]
    assert steps[-1]["tokens_per_second"] > 0
    (done,) = of(messages, "tuned")
    assert (done["name"], done["steps"], done["stopped"]) == ("polite", len(steps), False)
    assert text(messages, 1) == text(messages, 3) != text(messages, 2)
    assert [m["id"] for m in of(messages, "adapter_applied")] == [None, done["id"], None]
    first, last = [m["adapters"] for m in of(messages, "adapters")]
    assert [(a["name"], a["base"], a["stored"]) for a in first] == [("polite", "mine.gguf", True)]
    assert first[0]["held_out_loss"] == min(held_out)
    assert first[0]["nbytes"] == len(data[0])
    assert last == []
    assert not files.disk
    adapter = run_sync(open_gguf_adapter(BytesSource(data[0], "mine")))
    assert {pair.rank for pair in adapter.pairs.values()} == {4}


def test_a_stopped_training_is_stored() -> None:
    files, messages = PretendFiles(), list[dict[str, Any]]()

    async def run() -> None:
        def receive(message: str) -> None:
            messages.append(json.loads(message))
            if messages[-1].get("step") == 2:
                tab.tuning.stop_tuning()

        tab = Tab(receive, files)
        await tab.load(file_spec(TINY), None, "exact")
        await tab.tuning.tune(DATA, options(epochs=50))
        await tab.unload()

    asyncio.run(run())
    assert [m["step"] for m in of(messages, "tuning")] == [1, 2]
    (done,) = of(messages, "tuned")
    assert (done["steps"], done["stopped"]) == (2, True)
    assert f"{FOLDER}/{done['id']}.gguf" in files.disk


def test_an_adapter_lasts_until_the_page_is_closed_if_the_storage_is_full() -> None:
    files = PretendFiles()
    files.quota = 1000
    data: list[bytes] = []

    async def act(tab: Tab) -> None:
        await tab.tuning.tune(DATA, options(steps=1))
        (id,) = tab.tuning._unstored
        await tab.tuning.apply_adapter(id)
        data.append(await tab.tuning.read_adapter(id) or b"")
        await tab.tuning.delete_adapter(id)

    messages = tuning_messages(act, files)
    first, last = [m["adapters"] for m in of(messages, "adapters")]
    assert [(a["name"], a["stored"], a["nbytes"]) for a in first] == [
        ("polite", False, len(data[0]))
    ]
    assert of(messages, "adapter_applied")[-1]["name"] == "polite"
    assert last == []
    assert of(messages, "error") == []


@pytest.mark.parametrize(
    ("data", "changes", "expected"),
    [
        ("no", {}, "polite.jsonl has no row to train on; line 1: it is"),
        ("", {}, "has no row to train on"),
        (DATA, {"rank": 0}, "rank 0"),
        (DATA, {"learning_rate": 7}, "learning rate"),
        (DATA, {"targets": "feet"}, "no target 'feet'"),
        (DATA, {"held_out": 1}, "held-out share"),
    ],
)
def test_invalid_examples_and_options_are_reported(
    data: str, changes: dict[str, Any], expected: str
) -> None:
    async def act(tab: Tab) -> None:
        await tab.tuning.tune(data, options(**changes))
        await tab.chat(1, HELLO, GREEDY)

    messages = tuning_messages(act)
    (error,) = of(messages, "error")
    assert expected in error["message"]
    assert error["tune"] == "tune"
    assert messages[-1]["type"] == "done"  # the model stays


def test_a_training_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> int:
        return 0

    monkeypatch.setattr("webgemma.web.tuning.free_nbytes", nothing)
    (error,) = of(tuning_messages(lambda tab: tab.tuning.tune(DATA, options())), "error")
    assert "in addition to the model" in error["message"]


def test_a_training_requires_a_model() -> None:
    error = messages_of(lambda tab: tab.tuning.tune(DATA, options()))[-1]
    assert (error["tune"], error["message"]) == ("tune", "No model is loaded: choose one.")


def test_a_missing_adapter_is_reported() -> None:
    async def act(tab: Tab) -> None:
        await tab.tuning.apply_adapter("0" * 64)
        assert await tab.tuning.read_adapter("0" * 64) is None

    errors = of(tuning_messages(act), "error")
    requests = [("apply_adapter", "file"), ("read_adapter", "file")]
    assert [(m["tune"], m["kind"]) for m in errors] == requests
    assert all("no longer stored in this browser" in m["message"] for m in errors)


# The dialog


def choose_examples(visitor: Visitor, name: str, data: str = DATA) -> None:
    """Choose a file of examples."""
    files = [{"name": name, "mimeType": "text/plain", "buffer": data.encode()}]
    visitor.page.locator("#tune-file").set_input_files(files)


def shown(visitor: Visitor, selector: str, has_text: str) -> str:
    """Wait until an element has this text, and return all of its text."""
    found = visitor.page.locator(selector, has_text=has_text)
    found.wait_for()
    return str(found.inner_text())


@in_chromium
def test_an_adapter_is_trained_applied_downloaded_and_deleted(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Fine-tune").click()
    assert visitor.button("Start").is_disabled()
    choose_examples(visitor, "polite.jsonl", f"{DATA}\n<b>no</b>")
    data = shown(visitor, "#tune-data", "polite.jsonl")
    assert "6 examples from 7 rows, 100 tokens, 40 of them to learn" in data
    assert visitor.texts("#tune-skipped li") == ["Line 7: it is not JSON."]
    assert shown(visitor, "#tune-fit", "It fits").startswith("12 steps; training needs 3.0 GB")
    page.get_by_label("Epochs").fill("2")
    page.get_by_text("More options").click()
    page.get_by_label("Held out").fill("10")
    page.keyboard.press("Tab")
    shown(visitor, "#tune-fit", "8 steps")
    visitor.button("Start").click()
    shown(visitor, "#tune-state", "Done after 8 steps. Loss 0.50:")
    chart = page.get_by_role("img", name="Loss after 8 of 8 steps: 0.50, first 4.00")
    assert "Held-out loss: 0.63." in str(chart.get_attribute("aria-label"))
    assert chart.locator("circle").count() == 2
    visitor.button("Apply polite").click()
    shown(visitor, "#model-name", "Bundled model + polite")
    with page.expect_download() as download:
        visitor.button("Download polite").click()
    assert download.value.suggested_filename == "polite.gguf"
    assert download.value.path().read_text() == "GGUF of polite 0"
    visitor.button("Turn off polite").click()
    visitor.button("Apply polite").wait_for()
    assert page.locator("#model-name").inner_text() == "Bundled model"
    visitor.button("Delete polite").click()
    visitor.button("Delete").click()
    visitor.button("Delete polite").wait_for(state="detached")


@in_chromium
def test_no_message_is_sent_during_training_and_it_can_be_stopped(visitor: Visitor) -> None:
    visitor.button("Fine-tune").click()
    choose_examples(visitor, "slow.jsonl")
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").press("Enter")
    shown(visitor, "#tune-state", " of 1000")
    assert visitor.page.get_by_label("Rank").is_disabled()
    visitor.page.keyboard.press("Escape")
    visitor.say("Hello")
    assert "is being fine-tuned" in visitor.notice()
    visitor.button("Show fine-tuning").click()
    visitor.button("Stop and save").click()
    shown(visitor, "#tune-state", "Stopped after")
    visitor.page.keyboard.press("Escape")
    assert visitor.button("Fine-tune").is_visible()
    assert visitor.ask("Hello") == "You said Hello."


@in_chromium
def test_a_training_that_ends_with_the_dialog_closed_shows_a_notice(visitor: Visitor) -> None:
    visitor.button("Fine-tune").click()
    choose_examples(visitor, "held.jsonl")
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").click()
    visitor.page.keyboard.press("Escape")
    visitor.release()
    shown(visitor, "#notice-text", "Done after 12 steps")
    visitor.button("Apply held").click()
    shown(visitor, "#model-name", "Bundled model + held")


@in_chromium
def test_problems_are_shown_in_the_dialog(visitor: Visitor) -> None:
    visitor.button("Fine-tune").click()
    choose_examples(visitor, "bad.jsonl")
    shown(visitor, "#tune-problem", "bad.jsonl has no row to train on; line 1")
    assert visitor.button("Start").is_disabled()
    choose_examples(visitor, "large.jsonl")
    shown(visitor, "#tune-fit", "but 1.0 GB is free: use a smaller batch")
    assert visitor.button("Start").is_disabled()
    choose_examples(visitor, "diverging.jsonl")
    shown(visitor, "#tune-fit", "It fits")
    visitor.page.get_by_label("Rank").fill("0")
    visitor.page.keyboard.press("Tab")
    shown(visitor, "#tune-problem", "Rank must be a whole number from 1 to 256.")
    visitor.page.get_by_label("Rank").fill("8")
    visitor.page.keyboard.press("Tab")
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").click()
    shown(visitor, "#tune-problem", "The loss is not a number")
    assert visitor.button("Start").is_enabled()
    files = [{"name": "x.txt", "mimeType": "text/plain", "buffer": b"\xff\xfe"}]
    visitor.page.locator("#tune-file").set_input_files(files)
    shown(visitor, "#tune-problem", "x.txt cannot be used: it is not UTF-8 text.")


@in_chromium
def test_examples_are_dropped_and_nothing_overflows_on_a_phone(visitor: Visitor) -> None:
    page = visitor.page
    page.set_viewport_size({"width": 320, "height": 640})
    page.evaluate(
        """(data) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([data], "full.jsonl"));
          window.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
        }""",
        DATA,
    )
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").click()
    shown(visitor, "#adapters .problem", "The storage is full")
    for selector in ("#tune-dialog", "html", "header"):
        content, box = page.locator(selector).evaluate("(e) => [e.scrollWidth, e.clientWidth]")
        assert content <= box, selector
