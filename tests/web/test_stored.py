"""The model dialog: models stored in the browser, what fits the GPU, and errors."""

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
GPU_NBYTES = 1_200_000  # between what `small` needs with and without its table


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    for name, kind in OLLAMA.items():
        add_model(folder / "store", name, gguf=tiny_gguf(KINDS[kind]))
    limited = f"const GPU_NBYTES = {GPU_NBYTES};"
    worker = FAKE_WORKER.replace("const GPU_NBYTES = Infinity;", limited)
    with serving_page(folder, worker) as url:
        yield url


class Chooser(Visitor):
    """A visitor who uses the model dialog."""

    def open_models(self) -> None:
        """Open the dialog and wait until it shows what fits."""
        self.page.locator("#model-button").click()
        self.page.locator("#ollama .model", has_text="too large").first.wait_for()

    def close(self) -> None:
        self.button("Close").click()

    def rows(self, group: str) -> list[str]:
        """Return the texts of the models in a group of the dialog."""
        return [text.replace("\n", " | ") for text in self.texts(f"#{group} .model")]

    def choose_file(self, path: Path, nbytes: int) -> None:
        """Write a file, choose it, and wait until it is loaded."""
        path.write_bytes(b"GGUF" + bytes(nbytes - 4))
        self.page.locator("#model-file").set_input_files(path)
        self.page.locator("#model-name", has_text=path.name).wait_for()

    def store(self, name: str) -> None:
        """Store a model in the open dialog, and wait until it is stored."""
        self.button(f"Store {name}").click()
        self.page.locator("#models-status", has_text=f"{name} is stored").wait_for()


@pytest.fixture
def visitor(context: Any, url: str) -> Iterator[Chooser]:
    visitor = Chooser(context, url)
    visitor.open()
    yield visitor
    assert visitor.errors == []


def test_models_are_listed_in_groups_with_sizes_and_fit(visitor: Chooser) -> None:
    visitor.open_models()
    dialog = visitor.page.get_by_role("dialog", name="Models")
    groups = ["In this browser", "Ollama on this machine", "A file"]
    assert dialog.get_by_role("heading", level=3).all_inner_texts() == groups
    for group in groups[:2]:
        assert dialog.get_by_role("list", name=group).count() == 1
    assert visitor.rows("stored") == ["Bundled model | small, included in webgemma"]
    facts = "gemma4 · 5.1B · Q4_K_M"
    assert visitor.rows("ollama") == [
        f"bad:e2b | 454 kB | {facts} · fits",
        f"gemma4:e2b | 1.1 MB | {facts} · fits, a little slower",
        f"huge:31b | 3.2 MB | {facts} · too large for this GPU",
        f"slow:e4b | 1.5 MB | {facts} · too large for this GPU",
    ]


def test_a_model_is_stored_loaded_and_deleted(visitor: Chooser) -> None:
    visitor.page.evaluate("navigator.storage.persist = async () => { window.persisted = true; }")
    visitor.open_models()
    visitor.store("gemma4:e2b")
    assert visitor.page.evaluate("window.persisted")
    assert visitor.texts("#stored-state") == ["3.9 MB more can be stored here."]
    assert visitor.rows("stored")[1:] == ["gemma4:e2b | 1.1 MB | fits"]
    assert "stored" in visitor.rows("ollama")[1]
    assert visitor.button("Store gemma4:e2b").count() == 0
    visitor.page.locator("#ollama .model", has_text="gemma4:e2b").click()
    visitor.page.locator("#model-name", has_text="gemma4:e2b").wait_for()
    visitor.open("gemma4:e2b")  # stored models outlive the page
    visitor.open_models()
    current = visitor.page.locator(".model[aria-current]")
    assert current.count() == 1
    visitor.button("Delete gemma4:e2b").click()
    question = visitor.page.locator("#question")
    assert "the bundled model will be loaded instead" in question.inner_text()
    question.get_by_role("button", name="Cancel").click()
    assert len(visitor.rows("stored")) == 2
    visitor.button("Delete gemma4:e2b").click()
    question.get_by_role("button", name="Delete").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    visitor.open_models()
    assert len(visitor.rows("stored")) == 1
    assert visitor.button("Store gemma4:e2b").count() == 1


def test_a_stored_model_of_ollama_loads_from_the_browser(visitor: Chooser) -> None:
    visitor.open_models()
    visitor.store("gemma4:e2b")
    visitor.page.locator("#ollama .model", has_text="gemma4:e2b").click()
    visitor.page.locator("#model-name", has_text="gemma4:e2b").wait_for()
    visitor.open_models()
    current = visitor.page.locator(".model[aria-current]")
    assert current.count() == 1
    assert visitor.page.locator("#stored .model[aria-current]").count() == 1


def test_a_copy_shows_its_progress_during_a_chat_stops_and_resumes(visitor: Chooser) -> None:
    page = visitor.page
    visitor.open_models()
    visitor.button("Store slow:e4b").click()
    bar = page.get_by_role("progressbar", name="Storing slow:e4b")
    page.locator("#storing-in-dialog .transfer", has_text="of 1.5 MB").wait_for()
    assert bar.count() == 1
    assert visitor.button("Store gemma4:e2b").is_disabled()
    page.locator("#storing-in-dialog .transfer", has_text="left").wait_for()
    status = page.locator("#storing-in-dialog [role=status]")
    assert status.inner_text().startswith("Storing slow:e4b")
    visitor.close()
    page.locator("#storing").get_by_role("progressbar").wait_for()
    assert visitor.ask("still there?") == "You said still there?."
    visitor.button("Stop storing").click()
    bar.wait_for(state="detached")
    visitor.open_models()
    row = visitor.rows("stored")[1]
    assert row.startswith("slow:e4b | 1.5 MB | ")
    assert "of 1.5 MB stored" in row
    assert page.locator("#stored .model", has_text="slow:e4b").is_disabled()
    visitor.open()
    visitor.open_models()
    visitor.button("Resume slow:e4b").click()
    page.locator("#stored .model", has_text="being stored").wait_for()
    page.get_by_role("progressbar", name="Checking slow:e4b").wait_for()
    visitor.release()
    page.locator("#models-status", has_text="slow:e4b is stored").wait_for()
    assert "MB stored" not in visitor.rows("stored")[1]


def test_a_copy_resumes_when_the_worker_is_replaced(visitor: Chooser) -> None:
    visitor.open_models()
    visitor.button("Store slow:e4b").click()
    visitor.page.locator("#storing-in-dialog .transfer", has_text="758 kB of").wait_for()
    visitor.close()
    visitor.say("die")
    visitor.notice()
    visitor.button("Load the model again").click()
    visitor.page.get_by_role("progressbar", name="Checking slow:e4b").wait_for()
    visitor.release()
    visitor.page.locator("#notice-text", has_text="slow:e4b is stored in this browser").wait_for()
    assert visitor.ask("again") == "You said again."


def test_a_copy_of_a_model_that_ollama_has_deleted_cannot_resume(
    context: Any, tmp_path: Path
) -> None:
    manifest = add_model(tmp_path / "store", "slow:e4b", gguf=tiny_gguf(KINDS["moe"]))
    with serving_page(tmp_path) as url:
        visitor = Chooser(context, url)
        visitor.open()
        visitor.page.locator("#model-button").click()
        visitor.button("Store slow:e4b").click()
        visitor.page.locator("#storing-in-dialog .transfer", has_text="758 kB of").wait_for()
        visitor.button("Stop storing").click()
        visitor.button("Resume slow:e4b").wait_for()
        manifest.unlink()
        visitor.open()
        visitor.page.locator("#model-button").click()
        visitor.page.locator(
            "#ollama-state", has_text="Ollama has no models on this machine"
        ).wait_for()
        visitor.button("Resume slow:e4b").click()
        problem = visitor.page.locator("#models-status.problem").inner_text()
        assert problem.startswith(
            "The rest of slow:e4b is in Ollama’s store, where it is not found"
        )


def test_a_chosen_file_can_be_stored(visitor: Chooser, tmp_path: Path) -> None:
    visitor.choose_file(tmp_path / "slow.gguf", 1000)
    visitor.open_models()
    assert visitor.rows("files") == ["slow.gguf | 1.0 kB | chosen in this visit"]
    visitor.button("Store slow.gguf").click()
    visitor.page.locator("#storing-in-dialog .transfer", has_text="500 B of 1.0 kB").wait_for()
    visitor.button("Stop storing").click()
    visitor.button("Resume slow.gguf").wait_for()
    visitor.open()
    visitor.open_models()
    other = tmp_path / "other" / "slow.gguf"
    other.parent.mkdir()
    other.write_bytes(bytes(999))
    for path, status in (
        (other, "slow.gguf is another file: choose the slow.gguf whose copy is to be resumed"),
        (tmp_path / "slow.gguf", "slow.gguf is stored in this browser"),
    ):
        with visitor.page.expect_file_chooser() as chooser:
            visitor.button("Resume slow.gguf").click()
        chooser.value.set_files(path)
        if path != other:
            visitor.page.get_by_role("progressbar", name="Checking slow.gguf").wait_for()
            visitor.release()
        visitor.page.locator("#models-status", has_text=status).wait_for()
    assert visitor.rows("files") == ["slow.gguf | 1.0 kB | chosen in this visit · stored"]


def test_a_full_storage_is_reported_before_the_copy_starts(
    visitor: Chooser, tmp_path: Path
) -> None:
    visitor.choose_file(tmp_path / "large.gguf", 6_000_000)
    visitor.open_models()
    visitor.button("Store large.gguf").click()
    problem = visitor.page.locator("#models-status.problem").inner_text()
    assert problem.startswith(
        "large.gguf needs 6.0 MB, but this browser lets the page store only 5.0"
    )
    assert visitor.page.locator("#storing-in-dialog .storing").is_hidden()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full.gguf", "The storage of this browser is full."),
        ("full_held.gguf", "The storage of this browser is full."),
        ("bad.gguf", "bad.gguf is damaged: its SHA-256 differs."),
        ("bad_held.gguf", "bad_held.gguf is damaged: its SHA-256 differs."),
    ],
)
def test_a_failed_copy_is_reported_and_the_model_stays(
    visitor: Chooser, tmp_path: Path, name: str, message: str
) -> None:
    visitor.choose_file(tmp_path / name, 1000)
    visitor.open_models()
    visitor.button(f"Store {name}").click()
    if "held" not in name:
        visitor.page.locator("#models-status.problem", has_text=message).wait_for()
        visitor.close()
    else:
        visitor.close()
        visitor.release()
        assert visitor.notice().startswith(message)
        visitor.button("Show the models").click()
        visitor.page.locator("#stored .model").first.wait_for()
        visitor.close()
    assert visitor.ask("and you?") == "You said and you?."
    assert visitor.page.locator("#model-name").inner_text() == name


def test_a_model_that_is_too_large_suggests_those_that_fit(visitor: Chooser) -> None:
    visitor.open_models()
    visitor.page.locator("#ollama .model", has_text="huge:31b").click()
    message = "huge:31b needs more than this GPU has. Choose a smaller model, or a smaller "
    message += "context in the settings. "
    visitor.page.locator("#notice-text", has_text="would fit").wait_for()
    fitting = "These would fit: bad:e2b, gemma4:e2b, Bundled model."
    assert visitor.notice() == message + fitting
    visitor.button("Choose a model").click()
    visitor.page.locator("#stored .model", has_text="Bundled").click()
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    assert visitor.page.locator("#notice").is_hidden()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken.gguf", "broken.gguf is not a GGUF file. Choose another model."),
        ("gone.gguf", "gone.gguf cannot be read from this browser's storage. Free disk"),
    ],
)
def test_a_file_that_is_not_a_model_changes_nothing(
    visitor: Chooser, tmp_path: Path, name: str, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF")
    visitor.say("forever")
    visitor.page.locator("#model-file").set_input_files(path)
    notice = visitor.notice()
    assert notice.startswith(message)
    assert notice.endswith("Bundled model stays loaded.")
    visitor.button("Stop").click()  # the reply goes on
    assert visitor.ask("are you there?") == "You said are you there?."
    visitor.button("Choose a model").click()
    visitor.page.locator("#stored .model[aria-current]", has_text="Bundled").wait_for()
    assert visitor.rows("files") == []


def test_a_failed_load_is_reported_with_an_action(visitor: Chooser, tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF")
    visitor.page.locator("#model-file").set_input_files(path)
    assert visitor.notice().startswith("huge.gguf needs more than this GPU has.")
    visitor.button("Choose a model").click()
    visitor.page.locator("#files .model", has_text="huge.gguf").wait_for()


def test_a_file_that_is_read_can_be_cancelled(visitor: Chooser, tmp_path: Path) -> None:
    path = tmp_path / "waiting.gguf"
    path.write_bytes(b"GGUF")
    visitor.page.locator("#model-file").set_input_files(path)
    visitor.button("Cancel").click()
    assert visitor.page.locator("#loading").is_hidden()
    visitor.release()
    assert visitor.ask("are you there?") == "You said are you there?."
    assert visitor.texts("#model-name") == ["Bundled model"]


def test_an_adapter_joins_the_list_of_adapters(visitor: Chooser, tmp_path: Path) -> None:
    path = tmp_path / "adapter-of-mine.gguf"
    path.write_bytes(b"GGUF")
    visitor.page.locator("#model-file").set_input_files(path)
    notice = visitor.notice()
    assert notice.startswith("adapter-of-mine is an adapter, not a model: it is in the list")
    visitor.button("Show the adapters").click()
    visitor.button("Apply adapter-of-mine").click()
    visitor.page.locator("#model-name", has_text="Bundled model + adapter-of-mine").wait_for()


def test_a_context_that_is_too_long_becomes_the_models(visitor: Chooser, tmp_path: Path) -> None:
    visitor.button("Settings").click()
    visitor.page.get_by_label("Context").fill("8192")
    visitor.button("Save").click()
    visitor.button("Dismiss").click()
    for name in ("short.gguf", "long.gguf"):
        visitor.choose_file(tmp_path / name, 100)
        if name == "short.gguf":
            assert visitor.notice() == (
                "short.gguf has a context of at most 2048 tokens: it is loaded with that, not with "
                "the 8192 of the settings."
            )
    assert visitor.page.locator("#notice").is_hidden()


# A file that is dropped, with a handle as Chromium gives it for files of the disk.
DROP_WITH_HANDLE = """async (name) => {
  const folder = await navigator.storage.getDirectory();
  const handle = await folder.getFileHandle(name, { create: true });
  const data = new DataTransfer();
  data.items.add(new File(["GGUF"], name));
  DataTransferItem.prototype.getAsFileSystemHandle = async () => handle;
  const options = { dataTransfer: data, bubbles: true, cancelable: true };
  document.body.dispatchEvent(new DragEvent("drop", options));
}"""


def test_a_chosen_file_is_not_forgotten(visitor: Chooser, tmp_path: Path) -> None:
    visitor.choose_file(tmp_path / "mine.gguf", 100)
    for _ in range(2):  # as long as nothing else is chosen
        visitor.open()
        notice = visitor.notice()
        assert notice.startswith("mine.gguf was the model of the last visit. The bundled model is")
        assert "Choose or drop the file again" in notice
    with visitor.page.expect_file_chooser() as chooser:
        visitor.button("Choose mine.gguf …").click()
    chooser.value.set_files(tmp_path / "mine.gguf")
    visitor.page.locator("#model-name", has_text="mine.gguf").wait_for()
    visitor.open_models()
    visitor.store("mine.gguf")
    visitor.open("mine.gguf")
    assert visitor.page.locator("#notice").is_hidden()


def test_a_dropped_file_is_loaded_again_where_the_browser_allows_it(visitor: Chooser) -> None:
    page = visitor.page
    page.evaluate(DROP_WITH_HANDLE, "mine.gguf")
    page.locator("#model-name", has_text="mine.gguf").wait_for()
    visitor.open("mine.gguf")
    assert page.locator("#notice").is_hidden()
    page.add_init_script("FileSystemHandle.prototype.queryPermission = async () => 'prompt';")
    visitor.open()
    assert "asks before this page may read the file again" in visitor.notice()
    visitor.button("Load mine.gguf").click()
    page.locator("#model-name", has_text="mine.gguf").wait_for()
    page.evaluate("async () => (await navigator.storage.getDirectory()).removeEntry('mine.gguf')")
    visitor.open()
    visitor.button("Load mine.gguf").click()
    page.locator("#notice-text", has_text="mine.gguf cannot be read again").wait_for()


def test_the_dialog_keeps_the_focus_and_names_its_buttons(visitor: Chooser) -> None:
    page = visitor.page
    visitor.open_models()
    store = visitor.button("Store gemma4:e2b")
    store.focus()
    page.keyboard.press("Enter")
    page.locator("#models-status", has_text="gemma4:e2b is stored").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog')?.id") == "models-dialog"
    visitor.button("Delete gemma4:e2b").click()
    page.locator("#question").get_by_role("button", name="Delete").click()
    visitor.button("Store gemma4:e2b").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog')?.id") == "models-dialog"
    unnamed = page.evaluate(
        """[...document.querySelectorAll("dialog[open] button")].filter((control) =>
          !control.textContent.trim() && !control.ariaLabel).map((control) => control.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("width", [360, 390])
def test_nothing_overflows_on_a_phone(visitor: Chooser, width: int) -> None:
    page = visitor.page
    page.set_viewport_size({"width": width, "height": 700})
    visitor.open_models()
    visitor.button("Store slow:e4b").click()
    page.locator("#storing-in-dialog .transfer", has_text="of 1.5 MB").wait_for()
    overflow = """["html", "#models-dialog", "#scroller"].map((name) =>
      document.querySelector(name)).filter((area) => area.scrollWidth > area.clientWidth).length"""
    assert page.evaluate(overflow) == 0
    visitor.close()
    page.locator("#storing").get_by_role("progressbar", name="Storing slow:e4b").wait_for()
    assert page.evaluate(overflow) == 0


def test_the_next_visit_starts_with_the_last_model(visitor: Chooser) -> None:
    visitor.open_models()
    visitor.page.get_by_text("gemma4:e2b").click()
    shown = visitor.page.locator("#model-name", has_text="gemma4:e2b")
    shown.wait_for()
    visitor.page.reload()
    shown.wait_for()
    assert visitor.page.locator("#notice").is_hidden()


def test_a_model_that_was_loading_at_the_last_visit_is_offered(visitor: Chooser) -> None:
    entry = {"model": {"name": "huge", "source": {"kind": "stored", "id": "1"}}, "isLoaded": False}
    visitor.page.evaluate(
        "(entry) => localStorage.setItem('webgemma-model', JSON.stringify(entry))", entry
    )
    visitor.open()
    assert visitor.notice() == (
        "huge was still loading when the last visit ended. The bundled model is loaded instead."
    )
    for nonsense in ("{", "null", '"x"', '{"model": {"name": 1}}'):
        visitor.page.evaluate("(text) => localStorage.setItem('webgemma-model', text)", nonsense)
        visitor.open()
        assert visitor.page.locator("#notice").is_hidden()
