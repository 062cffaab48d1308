"""Fine-tuning in the page: what the tab tells, and what a person at the page sees of it."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.pretend_files import PretendFiles
from helpers.tiny import SMALL, tiny_gguf
from web.page import Visitor
from web.test_tab import HELLO, chosen, told

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


def asked(**options: Any) -> str:
    return json.dumps({"name": "polite.jsonl", "rank": 4, "rate": 0.02, "batch": 2} | options)


def tuned(
    act: Callable[[Tab], Coroutine[Any, Any, None]], files: PretendFiles | None = None
) -> list[dict[str, Any]]:
    """All that a tab with a tiny model tells, after it has loaded that."""

    async def ask(tab: Tab) -> None:
        await tab.load(chosen(TINY), None, "exact")
        await act(tab)

    messages = told(ask, files)
    return messages[1 + next(at for at, m in enumerate(messages) if m["type"] == "loaded") :]


def of(messages: list[dict[str, Any]], type: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["type"] == type]


def text(messages: list[dict[str, Any]], id: int) -> str:
    return "".join(m["text"] for m in of(messages, "piece") if m["id"] == id)


def test_examples_are_looked_through() -> None:
    data = f'{DATA}\nnot JSON\n{{"question": "?"}}'
    (told,) = of(tuned(lambda tab: tab.tuning.examine(data, asked(epochs=2))), "examined")
    assert (told["rows"], told["examples"], told["steps"], told["batch"]) == (8, 6, 6, 2)
    assert (told["truncated"], told["skipped_count"]) == (0, 2)
    assert [line for line, _ in told["skipped"]] == [7, 8]
    assert "no JSON" in told["skipped"][0][1]
    assert 0 < told["targets"] < told["tokens"]
    assert 0 < told["nbytes"] == told["free_nbytes"]


def test_it_learns_is_kept_put_on_taken_off_and_deleted() -> None:
    files = PretendFiles()
    data: list[bytes] = []

    async def act(tab: Tab) -> None:
        await tab.chat(1, HELLO, GREEDY)
        await tab.tuning.tune(DATA, asked(epochs=8, held_out=0.2))
        (name,) = {path.split("/")[-1].split(".")[0] for path in files.disk}
        await tab.tuning.put_on(name)
        await tab.chat(2, HELLO, GREEDY)
        await tab.tuning.take_off()
        await tab.chat(3, HELLO, GREEDY)
        data.append(await tab.tuning.adapter(name) or b"")
        await tab.tuning.forget_adapter(name)

    messages = tuned(act, files)
    steps = of(messages, "tuning")
    assert [m["step"] for m in steps] == list(range(1, steps[0]["steps"] + 1))
    losses = [m["loss"] for m in steps]
    assert losses[-1] < 0.7 * losses[0]
    judged = [m["judged"] for m in steps if m["judged"] is not None]
    assert len(judged) == 8
    assert judged[-1] < 0.7 * judged[0]
    assert steps[-1]["tokens_per_second"] > 0
    (done,) = of(messages, "tuned")
    assert (done["name"], done["steps"], done["stopped"]) == ("polite", len(steps), False)
    assert text(messages, 1) == text(messages, 3) != text(messages, 2)
    assert [m["id"] for m in of(messages, "adapted")] == [None, done["id"], None]
    first, last = [m["adapters"] for m in of(messages, "adapters")]
    assert [(a["name"], a["base"], a["kept"]) for a in first] == [("polite", "mine.gguf", True)]
    assert first[0]["nbytes"] == len(data[0])
    assert last == []
    assert not files.disk
    adapter = run_sync(open_gguf_adapter(BytesSource(data[0], "mine")))
    assert {pair.rank for pair in adapter.pairs.values()} == {4}


def test_what_was_learnt_until_it_was_stopped_is_kept() -> None:
    files, messages = PretendFiles(), list[dict[str, Any]]()

    async def run() -> None:
        def hear(message: str) -> None:
            messages.append(json.loads(message))
            if messages[-1].get("step") == 2:
                tab.tuning.enough()

        tab = Tab(hear, files)
        await tab.load(chosen(TINY), None, "exact")
        await tab.tuning.tune(DATA, asked(epochs=50))
        await tab.unload()

    asyncio.run(run())
    assert [m["step"] for m in of(messages, "tuning")] == [1, 2]
    (done,) = of(messages, "tuned")
    assert (done["steps"], done["stopped"]) == (2, True)
    assert f"{FOLDER}/{done['id']}.gguf" in files.disk


def test_without_room_to_store_it_lasts_as_long_as_the_page() -> None:
    files = PretendFiles()
    files.quota = 1000
    data: list[bytes] = []

    async def act(tab: Tab) -> None:
        await tab.tuning.tune(DATA, asked(steps=1))
        (id,) = tab.tuning._unkept
        await tab.tuning.put_on(id)
        data.append(await tab.tuning.adapter(id) or b"")
        await tab.tuning.forget_adapter(id)

    messages = tuned(act, files)
    first, last = [m["adapters"] for m in of(messages, "adapters")]
    assert [(a["name"], a["kept"], a["nbytes"]) for a in first] == [("polite", False, len(data[0]))]
    assert of(messages, "adapted")[-1]["name"] == "polite"
    assert last == []
    assert of(messages, "error") == []


@pytest.mark.parametrize(
    ("data", "options", "sentence"),
    [
        ("no", {}, "polite.jsonl has no row to learn from; line 1: it is no JSON"),
        ("", {}, "has no row to learn from"),
        (DATA, {"rank": 0}, "rank 0"),
        (DATA, {"rate": 7}, "learning rate"),
        (DATA, {"parts": "feet"}, "no part 'feet'"),
        (DATA, {"held_out": 1}, "share of rows"),
    ],
)
def test_what_cannot_be_learnt(data: str, options: dict[str, Any], sentence: str) -> None:
    async def act(tab: Tab) -> None:
        await tab.tuning.tune(data, asked(**options))
        await tab.chat(1, HELLO, GREEDY)

    messages = tuned(act)
    (error,) = of(messages, "error")
    assert sentence in error["sentence"]
    assert error["tune"] == "tune"
    assert messages[-1]["type"] == "done"  # the model stays


def test_too_large_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> int:
        return 0

    monkeypatch.setattr("webgemma.web.tuning.free_nbytes", nothing)
    (error,) = of(tuned(lambda tab: tab.tuning.tune(DATA, asked())), "error")
    assert "beside the model" in error["sentence"]


def test_without_a_model() -> None:
    error = told(lambda tab: tab.tuning.tune(DATA, asked()))[-1]
    assert (error["tune"], error["sentence"]) == ("tune", "There is no model: choose one.")


def test_an_adapter_that_is_gone() -> None:
    async def act(tab: Tab) -> None:
        await tab.tuning.put_on("0" * 64)
        assert await tab.tuning.adapter("0" * 64) is None

    errors = of(tuned(act), "error")
    assert [(m["tune"], m["kind"]) for m in errors] == [("put_on", "file"), ("adapter", "file")]
    assert all("not stored in this browser any more" in m["sentence"] for m in errors)


# At the page


def bring(visitor: Visitor, name: str, data: str = DATA) -> None:
    """Choose a file of examples."""
    files = [{"name": name, "mimeType": "text/plain", "buffer": data.encode()}]
    visitor.page.locator("#tune-file").set_input_files(files)


def shown(visitor: Visitor, selector: str, has_text: str) -> str:
    """The text of an element, once it has this in it."""
    found = visitor.page.locator(selector, has_text=has_text)
    found.wait_for()
    return str(found.inner_text())


@in_chromium
def test_learn_apply_download_delete(visitor: Visitor) -> None:
    page = visitor.page
    visitor.button("Fine-tune").click()
    assert visitor.button("Start").is_disabled()
    bring(visitor, "polite.jsonl", f"{DATA}\n<b>no</b>")
    data = shown(visitor, "#tune-data", "polite.jsonl")
    assert "6 examples of 7 rows, 100 tokens, 40 of them to learn" in data
    assert visitor.texts("#tune-skipped li") == ["Line 7: it is no JSON."]
    assert shown(visitor, "#tune-fit", "It fits").startswith("12 steps; learning takes 3.0 GB")
    page.get_by_label("Epochs").fill("2")
    page.get_by_text("More options").click()
    page.get_by_label("Held out").fill("10")
    page.keyboard.press("Tab")
    shown(visitor, "#tune-fit", "8 steps")
    visitor.button("Start").click()
    shown(visitor, "#tune-state", "Done after 8 steps, loss 0.50")
    chart = page.get_by_role("img", name="Loss after 8 of 8 steps: 0.50, at first 4.00")
    assert "Of what was held out: 0.63." in str(chart.get_attribute("aria-label"))
    assert chart.locator("circle").count() == 2
    visitor.button("Apply polite").click()
    shown(visitor, "#model-name", "Bundled model + polite")
    with page.expect_download() as download:
        visitor.button("Download polite").click()
    assert download.value.suggested_filename == "polite.gguf"
    assert download.value.path().read_text() == "GGUF of polite 0"
    visitor.button("Take off polite").click()
    visitor.button("Apply polite").wait_for()
    assert page.locator("#model-name").inner_text() == "Bundled model"
    visitor.button("Delete polite").click()
    visitor.button("Delete").click()
    visitor.button("Delete polite").wait_for(state="detached")


@in_chromium
def test_meanwhile_nothing_is_sent_and_it_is_stopped(visitor: Visitor) -> None:
    visitor.button("Fine-tune").click()
    bring(visitor, "slow.jsonl")
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").press("Enter")
    shown(visitor, "#tune-state", " of 1000")
    assert visitor.page.get_by_label("Rank").is_disabled()
    visitor.page.keyboard.press("Escape")
    visitor.say("Hello")
    assert "is learning" in visitor.notice()
    visitor.button("Look at it").click()
    visitor.button("Stop and keep").click()
    shown(visitor, "#tune-state", "Stopped after")
    visitor.page.keyboard.press("Escape")
    assert visitor.button("Fine-tune").is_visible()
    assert visitor.ask("Hello") == "You said Hello."


@in_chromium
def test_done_while_nobody_looks(visitor: Visitor) -> None:
    visitor.button("Fine-tune").click()
    bring(visitor, "polite.jsonl")
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").click()
    visitor.page.keyboard.press("Escape")
    shown(visitor, "#notice-text", "Done after 12 steps")
    visitor.button("Apply polite").click()
    shown(visitor, "#model-name", "Bundled model + polite")


@in_chromium
def test_what_goes_wrong_is_said_there(visitor: Visitor) -> None:
    visitor.button("Fine-tune").click()
    bring(visitor, "bad.jsonl")
    shown(visitor, "#tune-problem", "bad.jsonl has no row to learn from; line 1")
    assert visitor.button("Start").is_disabled()
    bring(visitor, "large.jsonl")
    shown(visitor, "#tune-fit", "which can give 1.0 GB: take fewer examples at once")
    assert visitor.button("Start").is_disabled()
    bring(visitor, "astray.jsonl")
    shown(visitor, "#tune-fit", "It fits")
    visitor.page.get_by_label("Rank").fill("0")
    visitor.page.keyboard.press("Tab")
    shown(visitor, "#tune-problem", "Rank is a whole number from 1 to 256.")
    visitor.page.get_by_label("Rank").fill("8")
    visitor.page.keyboard.press("Tab")
    shown(visitor, "#tune-fit", "It fits")
    visitor.button("Start").click()
    shown(visitor, "#tune-problem", "The loss is no longer a number")
    assert visitor.button("Start").is_enabled()
    files = [{"name": "x.txt", "mimeType": "text/plain", "buffer": b"\xff\xfe"}]
    visitor.page.locator("#tune-file").set_input_files(files)
    shown(visitor, "#tune-problem", "x.txt cannot be learnt from: it is no text in UTF-8.")


@in_chromium
def test_dropped_on_the_page_of_a_phone(visitor: Visitor) -> None:
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
    shown(visitor, "#adapters .problem", "There was no room to store it")
    for selector in ("#tune-dialog", "html", "header"):
        wide, room = page.locator(selector).evaluate("(e) => [e.scrollWidth, e.clientWidth]")
        assert wide <= room, selector
