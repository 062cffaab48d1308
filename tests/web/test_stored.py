"""Models kept in the browser, the picker's groups, what fits the GPU, and what can go wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.page import FAKE_WORKER, Visitor, serving_page

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

OLLAMA = {"gemma4:e2b": "small", "slow:e4b": "moe", "huge:31b": "mixed", "bad:e2b": "large"}
ROOM = 1_200_000  # between what `small` takes with and without its table


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    for name, kind in OLLAMA.items():
        add_model(folder / "store", name, gguf=tiny_gguf(KINDS[kind]))
    worker = FAKE_WORKER.replace("const ROOM = Infinity;", f"const ROOM = {ROOM};")
    with serving_page(folder, worker) as url:
        yield url


class Chooser(Visitor):
    """A visitor who knows the picker."""

    def pick(self) -> None:
        """Open the picker and wait until it has looked at everything."""
        self.page.locator("#model-button").click()
        self.page.locator("#ollama .model", has_text="too large").first.wait_for()

    def close(self) -> None:
        self.button("Close").click()

    def rows(self, group: str) -> list[str]:
        return [text.replace("\n", " | ") for text in self.texts(f"#{group} .model")]

    def choose_file(self, path: Path, nbytes: int) -> None:
        path.write_bytes(b"GGUF" + bytes(nbytes - 4))
        self.page.locator("#model-file").set_input_files(path)
        self.page.locator("#model-name", has_text=path.name).wait_for()

    def keep(self, name: str) -> None:
        """Keep a model in the open picker, to the end."""
        self.button(f"Keep {name}").click()
        self.page.locator("#models-news", has_text=f"{name} is kept").wait_for()


@pytest.fixture
def visitor(context: Any, url: str) -> Iterator[Chooser]:
    visitor = Chooser(context, url)
    visitor.open()
    yield visitor
    assert visitor.errors == []


def test_three_groups_with_sizes_and_what_fits(visitor: Chooser) -> None:
    visitor.pick()
    dialog = visitor.page.get_by_role("dialog", name="Models")
    groups = ["In this browser", "Ollama on this machine", "A file"]
    assert dialog.get_by_role("heading", level=3).all_inner_texts() == groups
    for group in groups[:2]:
        assert dialog.get_by_role("list", name=group).count() == 1
    assert visitor.rows("stored") == ["Bundled model | small, comes with webgemma"]
    facts = "gemma4 · 5.1B · Q4_K_M"
    assert visitor.rows("ollama") == [
        f"bad:e2b | 454 kB | {facts} · fits",
        f"gemma4:e2b | 1.1 MB | {facts} · fits, a little slower",
        f"huge:31b | 3.2 MB | {facts} · too large for this GPU",
        f"slow:e4b | 1.5 MB | {facts} · too large for this GPU",
    ]


def test_keep_load_and_delete(visitor: Chooser) -> None:
    visitor.page.evaluate("navigator.storage.persist = async () => { window.asked = true; }")
    visitor.pick()
    visitor.keep("gemma4:e2b")
    assert visitor.page.evaluate("window.asked")
    assert visitor.texts("#stored-state") == ["3.9 MB more can be stored here."]
    assert visitor.rows("stored")[1:] == ["gemma4:e2b | 1.1 MB | fits"]
    assert "kept" in visitor.rows("ollama")[1]
    assert visitor.button("Keep gemma4:e2b").count() == 0
    visitor.page.locator("#ollama .model", has_text="gemma4:e2b").click()
    visitor.page.locator("#model-name", has_text="gemma4:e2b").wait_for()
    visitor.open("gemma4:e2b")  # what is stored outlives the page
    visitor.pick()
    current = visitor.page.locator(".model[aria-current]")
    assert current.count() == 1
    visitor.button("Delete gemma4:e2b").click()
    question = visitor.page.locator("#question")
    assert "the bundled model takes its place" in question.inner_text()
    question.get_by_role("button", name="Cancel").click()
    assert len(visitor.rows("stored")) == 2
    visitor.button("Delete gemma4:e2b").click()
    question.get_by_role("button", name="Delete").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    visitor.pick()
    assert len(visitor.rows("stored")) == 1
    assert visitor.button("Keep gemma4:e2b").count() == 1


def test_an_ollama_model_that_is_kept_loads_from_the_browser(visitor: Chooser) -> None:
    visitor.pick()
    visitor.keep("gemma4:e2b")
    visitor.page.locator("#ollama .model", has_text="gemma4:e2b").click()
    visitor.page.locator("#model-name", has_text="gemma4:e2b").wait_for()
    visitor.pick()
    current = visitor.page.locator(".model[aria-current]")
    assert current.count() == 1
    assert visitor.page.locator("#stored .model[aria-current]").count() == 1


def test_a_copy_shows_its_progress_while_one_chats_stops_and_goes_on(visitor: Chooser) -> None:
    page = visitor.page
    visitor.pick()
    visitor.button("Keep slow:e4b").click()
    bar = page.get_by_role("progressbar", name="Keeping slow:e4b")
    page.locator("#keeping-in-picker .pace", has_text="of 1.5 MB").wait_for()
    assert bar.count() == 1
    assert visitor.button("Keep gemma4:e2b").is_disabled()
    page.locator("#keeping-in-picker .pace", has_text="left").wait_for()
    status = page.locator("#keeping-in-picker [role=status]")
    assert status.inner_text().startswith("Keeping slow:e4b")
    visitor.close()
    page.locator("#keeping").get_by_role("progressbar").wait_for()
    assert visitor.ask("still there?") == "You said still there?."
    visitor.button("Stop keeping").click()
    bar.wait_for(state="detached")
    visitor.pick()
    row = visitor.rows("stored")[1]
    assert row.startswith("slow:e4b | 1.5 MB | ")
    assert "of 1.5 MB has come" in row
    assert page.locator("#stored .model", has_text="slow:e4b").is_disabled()
    visitor.open()
    visitor.pick()
    visitor.button("Go on slow:e4b").click()
    page.locator("#stored .model", has_text="on its way").wait_for()
    page.get_by_role("progressbar", name="Checking slow:e4b").wait_for()
    page.locator("#models-news", has_text="slow:e4b is kept").wait_for()
    assert "has come" not in visitor.rows("stored")[1]


def test_a_copy_goes_on_when_the_worker_is_replaced(visitor: Chooser) -> None:
    visitor.pick()
    visitor.button("Keep slow:e4b").click()
    visitor.page.locator("#keeping-in-picker .pace", has_text="758 kB of").wait_for()
    visitor.close()
    visitor.say("die")
    visitor.notice()
    visitor.button("Load the model again").click()
    visitor.page.locator("#notice-text", has_text="slow:e4b is kept in this browser").wait_for()
    assert visitor.ask("again") == "You said again."


def test_the_rest_of_a_model_that_ollama_has_no_more(context: Any, tmp_path: Path) -> None:
    manifest = add_model(tmp_path / "store", "slow:e4b", gguf=tiny_gguf(KINDS["moe"]))
    with serving_page(tmp_path) as url:
        visitor = Chooser(context, url)
        visitor.open()
        visitor.page.locator("#model-button").click()
        visitor.button("Keep slow:e4b").click()
        visitor.page.locator("#keeping-in-picker .pace", has_text="758 kB of").wait_for()
        visitor.button("Stop keeping").click()
        visitor.button("Go on slow:e4b").wait_for()
        manifest.unlink()
        visitor.open()
        visitor.page.locator("#model-button").click()
        visitor.page.locator("#ollama-state", has_text="Ollama has no models here").wait_for()
        visitor.button("Go on slow:e4b").click()
        said = visitor.page.locator("#models-news.problem").inner_text()
        assert said.startswith("The rest of slow:e4b comes from Ollama, where it is not found now")


def test_a_file_of_this_visit_can_be_kept(visitor: Chooser, tmp_path: Path) -> None:
    visitor.choose_file(tmp_path / "slow.gguf", 1000)
    visitor.pick()
    assert visitor.rows("files") == ["slow.gguf | 1.0 kB | of this visit"]
    visitor.button("Keep slow.gguf").click()
    visitor.page.locator("#keeping-in-picker .pace", has_text="500 B of 1.0 kB").wait_for()
    visitor.button("Stop keeping").click()
    visitor.button("Go on slow.gguf").wait_for()
    visitor.open()
    visitor.pick()
    other = tmp_path / "other" / "slow.gguf"
    other.parent.mkdir()
    other.write_bytes(bytes(999))
    for path, news in (
        (other, "slow.gguf is another file: choose the slow.gguf that was being kept"),
        (tmp_path / "slow.gguf", "slow.gguf is kept in this browser"),
    ):
        with visitor.page.expect_file_chooser() as chooser:
            visitor.button("Go on slow.gguf").click()
        chooser.value.set_files(path)
        visitor.page.locator("#models-news", has_text=news).wait_for()
    assert visitor.rows("files") == ["slow.gguf | 1.0 kB | of this visit · kept"]


def test_no_room_is_said_before_the_copy_begins(visitor: Chooser, tmp_path: Path) -> None:
    visitor.choose_file(tmp_path / "large.gguf", 6_000_000)
    visitor.pick()
    visitor.button("Keep large.gguf").click()
    news = visitor.page.locator("#models-news.problem").inner_text()
    assert news.startswith("large.gguf needs 6.0 MB, but this browser lets the page store only 5.0")
    assert visitor.page.locator("#keeping-in-picker .keeping").is_hidden()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("full.gguf", "This browser has no room left."),
        ("bad.gguf", "bad.gguf is damaged: its SHA-256 is another."),
    ],
)
def test_a_copy_that_fails_says_why_and_the_model_stays(
    visitor: Chooser, tmp_path: Path, name: str, sentence: str, is_open: bool
) -> None:
    visitor.choose_file(tmp_path / name, 1000)
    visitor.pick()
    visitor.button(f"Keep {name}").click()
    if is_open:
        visitor.page.locator("#models-news.problem", has_text=sentence).wait_for()
        visitor.close()
    else:
        visitor.close()
        assert visitor.notice().startswith(sentence)
        visitor.button("Show the models").click()
        visitor.page.locator("#stored .model").first.wait_for()
        visitor.close()
    assert visitor.ask("and you?") == "You said and you?."
    assert visitor.page.locator("#model-name").inner_text() == name


def test_a_model_too_large_names_those_that_fit(visitor: Chooser) -> None:
    visitor.pick()
    visitor.page.locator("#ollama .model", has_text="huge:31b").click()
    said = "huge:31b needs more than this GPU has. "
    visitor.page.locator("#notice-text", has_text="would fit").wait_for()
    fitting = "These would fit: bad:e2b, gemma4:e2b, Bundled model."
    assert visitor.notice() == said + fitting
    visitor.button("Choose a model").click()
    visitor.page.locator("#stored .model", has_text="Bundled").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    assert visitor.page.locator("#notice").is_hidden()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken.gguf", "broken.gguf is not a GGUF file. Choose another model."),
        ("gone.gguf", "gone.gguf cannot be read from this browser's storage. Make room"),
        ("huge.gguf", "huge.gguf needs more than this GPU has."),
    ],
)
def test_what_cannot_be_loaded_gets_a_sentence_and_an_action(
    visitor: Chooser, tmp_path: Path, name: str, sentence: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF")
    visitor.page.locator("#model-file").set_input_files(path)
    assert visitor.notice().startswith(sentence)
    visitor.button("Choose a model").click()
    visitor.page.locator("#files .model", has_text=name).wait_for()


def test_the_picker_keeps_the_focus_and_names_its_buttons(visitor: Chooser) -> None:
    page = visitor.page
    visitor.pick()
    keep = visitor.button("Keep gemma4:e2b")
    keep.focus()
    page.keyboard.press("Enter")
    page.locator("#models-news", has_text="gemma4:e2b is kept").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog')?.id") == "models-dialog"
    visitor.button("Delete gemma4:e2b").click()
    page.locator("#question").get_by_role("button", name="Delete").click()
    visitor.button("Keep gemma4:e2b").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog')?.id") == "models-dialog"
    unnamed = page.evaluate(
        """[...document.querySelectorAll("dialog[open] button")].filter((control) =>
          !control.textContent.trim() && !control.ariaLabel).map((control) => control.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_has_room_for_it_all(visitor: Chooser, width: int) -> None:
    page = visitor.page
    page.set_viewport_size({"width": width, "height": 700})
    visitor.pick()
    visitor.button("Keep slow:e4b").click()
    page.locator("#keeping-in-picker .pace", has_text="of 1.5 MB").wait_for()
    overflow = """["html", "#models-dialog", "#scroller"].map((name) =>
      document.querySelector(name)).filter((area) => area.scrollWidth > area.clientWidth).length"""
    assert page.evaluate(overflow) == 0
    visitor.close()
    page.locator("#keeping").get_by_role("progressbar", name="Keeping slow:e4b").wait_for()
    assert page.evaluate(overflow) == 0


def test_the_next_visit_begins_with_the_last_model(visitor: Chooser) -> None:
    visitor.pick()
    visitor.page.get_by_text("gemma4:e2b").click()
    shown = visitor.page.locator("#model-name", has_text="gemma4:e2b")
    shown.wait_for()
    visitor.page.reload()
    shown.wait_for()
    assert visitor.page.locator("#notice").is_hidden()


def test_a_model_that_may_have_ended_the_last_visit_waits(visitor: Chooser) -> None:
    kept = {"model": {"name": "huge", "source": {"kind": "stored", "id": "1"}}, "isLoaded": False}
    visitor.page.evaluate(
        "(kept) => localStorage.setItem('webgemma-model', JSON.stringify(kept))", kept
    )
    visitor.open()
    assert visitor.notice() == "huge was not there yet when the last visit ended."
    for nonsense in ("{", "null", '"x"', '{"model": {"name": 1}}'):
        visitor.page.evaluate("(text) => localStorage.setItem('webgemma-model', text)", nonsense)
        visitor.open()
        assert visitor.page.locator("#notice").is_hidden()
