"""A model stored in the browser, with the real engine: interrupted, resumed, damaged, offline."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import ControlledSite, Person
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.client import serving

from webgemma.gguf.opfs import CHUNK_NBYTES

NAME, DAMAGED = "large:tiny", "damaged:tiny"
MODEL = tiny_gguf(KINDS["small"]) + bytes(5 * CHUNK_NBYTES)  # bytes after the tensors are allowed
COPIED_NBYTES = 2 * CHUNK_NBYTES  # of a copy that is interrupted in the next chunk
QUOTA = 90_000_000  # the page takes two thirds of it; the model needs more than the rest


@dataclass
class Visit:
    """One visit; each test is a step of it."""

    context: Any
    person: Person
    site: ControlledSite
    server: ExitStack  # closing it ends the server

    def allow_storage(self, nbytes: int | None) -> None:
        """Limit the storage of the page; None: the default."""
        session = self.context.new_cdp_session(self.person.page)
        quota = {} if nbytes is None else {"quotaSize": nbytes}
        origin = self.person.url.rstrip("/")
        session.send("Storage.overrideQuotaForOrigin", {"origin": origin, **quota})


@pytest.fixture(scope="module")
def visit(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """A person whose Ollama has a model and a damaged one."""
    folder = tmp_path_factory.mktemp("stored")
    store, damaged = folder / "store", tiny_gguf(KINDS["large"])
    add_model(store, NAME, gguf=MODEL)
    add_model(store, DAMAGED, gguf=damaged)
    blob = store / "blobs" / f"sha256-{hashlib.sha256(damaged).hexdigest()}"
    blob.write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    site = ControlledSite(store)
    with ExitStack() as server, storing(chromium, folder / "profile") as context:
        client = server.enter_context(serving(site))
        person = Person(context, f"http://localhost:{client.port}/")
        person.open()
        person.set(Temperature="0", Max_tokens="4")
        yield Visit(context, person, site, server)
        assert person.errors == []
        assert person.others() == []


def test_a_full_storage_is_reported_before_anything_is_fetched(visit: Visit) -> None:
    visit.allow_storage(QUOTA)
    visit.person.open_models()
    visit.person.button(f"Store {NAME}").click()
    message = visit.person.status("43.1 MB")
    assert message.startswith(f"{NAME} needs 43.1 MB")
    assert "store only" not in message  # the browser does not report how much is free
    assert all(end - first == 1 for first, end in visit.site.ranges)
    visit.allow_storage(None)


def test_an_interrupted_download_is_reported(visit: Visit, tmp_path: Path) -> None:
    visit.site.truncated = tmp_path / "truncated.gguf"
    visit.site.truncated.write_bytes(MODEL[: COPIED_NBYTES + 4_000_000])
    visit.person.button(f"Resume {NAME}").click()
    visit.person.page.locator("#storing-in-dialog .transfer", has_text="MB of 43.1 MB").wait_for()
    message = visit.person.status("cannot be fetched")
    assert "its server does not respond; if that is `webgemma web`" in message
    assert message.endswith("What was copied stays: resume from the list of models.")
    assert "16.8 MB of 43.1 MB stored" in visit.person.rows("stored")[1]
    visit.site.truncated = None


def test_a_reload_interrupts_the_copy(visit: Visit) -> None:
    since = len(visit.site.ranges)
    visit.site.hold(COPIED_NBYTES)
    visit.person.button(f"Resume {NAME}").click()
    assert visit.site.is_holding.wait(30)
    visit.person.open()
    visit.site.release()
    assert visit.site.first_requested(since) == COPIED_NBYTES
    visit.person.open_models()
    visit.person.button(f"Resume {NAME}").wait_for()
    assert "16.8 MB of 43.1 MB stored" in visit.person.rows("stored")[1]


def test_a_copy_in_progress_needs_no_more_storage(visit: Visit) -> None:
    since = len(visit.site.ranges)
    visit.site.hold(COPIED_NBYTES)
    visit.person.button(f"Resume {NAME}").click()
    assert visit.site.is_holding.wait(30)
    visit.allow_storage(COPIED_NBYTES)  # the rest is filled meanwhile
    visit.site.release()
    visit.person.status(f"{NAME} is stored in this browser: it loads from here, also offline.")
    visit.allow_storage(None)
    assert visit.site.first_requested(since) == COPIED_NBYTES


def test_it_loads_from_the_browser(visit: Visit) -> None:
    since = len(visit.site.ranges)
    assert (
        visit.person.rows("stored")[1] == f"{NAME} | 43.1 MB"
    )  # the storage was too full to note its GPU memory
    assert any(f"{NAME} | " in row and "stored" in row for row in visit.person.rows("ollama"))
    visit.person.choose("ollama", NAME)
    assert visit.person.ask("Hello")
    assert visit.site.ranges[since:] == []


def test_a_damaged_model_is_reported_and_the_loaded_one_stays(visit: Visit) -> None:
    visit.person.open_models()
    visit.person.button(f"Store {DAMAGED}").click()
    message = visit.person.status("is damaged")
    assert message.startswith(f"{DAMAGED} is damaged: ")
    assert "sha256:" in message
    assert len(visit.person.rows("stored")) == 2
    visit.person.close()
    assert visit.person.ask("And you?")


def test_without_the_server_it_loads_and_is_deleted(visit: Visit) -> None:
    person = visit.person
    before = person.texts(".message .body")
    visit.server.close()
    person.open(NAME)  # the model of the last visit, from storage
    assert person.texts(".message .body") == before
    person.button("New conversation").click()
    assert person.ask("Hello") == before[1]
    person.open_models()
    assert "`webgemma web` is not running" in person.texts("#ollama-state")[0]
    person.button(f"Delete {NAME}").click()
    person.page.locator("#question").get_by_role("button", name="Delete").click()
    person.wait_for_model("Bundled model")
    person.open_models()
    person.page.locator("#stored .model", has_text=NAME).wait_for(state="hidden")
    assert person.rows("stored") == ["Bundled model | small, included in webgemma"]
    assert all("ERR_CONNECTION_REFUSED" in error for error in person.errors)
    person.errors.clear()
