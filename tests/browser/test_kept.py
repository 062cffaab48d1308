"""A model kept in the browser, with the real engine: cut, gone on with, damaged, offline."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import storing
from browser.person import Person, Wire
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.client import serving

from webgemma.gguf.opfs import CHUNK_NBYTES

NAME, DAMAGED = "large:tiny", "damaged:tiny"
MODEL = tiny_gguf(KINDS["small"]) + bytes(5 * CHUNK_NBYTES)  # whatever follows the tensors is fine
COME_NBYTES = 2 * CHUNK_NBYTES  # of a copy that is cut in the chunk behind


QUOTA = 90_000_000  # the page takes two thirds of it; the model would take more than the rest


@dataclass
class Visit:
    """One visit, of which each test is a step."""

    context: Any
    person: Person
    site: Wire
    server: ExitStack  # ends when it is closed

    def allow_storage(self, nbytes: int | None) -> None:
        """How much may be stored; None: as much as ever."""
        session = self.context.new_cdp_session(self.person.page)
        quota = {} if nbytes is None else {"quotaSize": nbytes}
        origin = self.person.url.rstrip("/")
        session.send("Storage.overrideQuotaForOrigin", {"origin": origin, **quota})


@pytest.fixture(scope="module")
def visit(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """Someone whose Ollama has a good model and a damaged one."""
    folder = tmp_path_factory.mktemp("kept")
    store, damaged = folder / "store", tiny_gguf(KINDS["large"])
    add_model(store, NAME, gguf=MODEL)
    add_model(store, DAMAGED, gguf=damaged)
    blob = store / "blobs" / f"sha256-{hashlib.sha256(damaged).hexdigest()}"
    blob.write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    site = Wire(store)
    with ExitStack() as server, storing(chromium, folder / "profile") as context:
        client = server.enter_context(serving(site))
        person = Person(context, f"http://localhost:{client.port}/")
        person.open()
        person.set(Temperature="0", Most_tokens="4")
        yield Visit(context, person, site, server)
        assert person.errors == []
        assert person.others() == []


def test_too_little_room_is_told_before_anything_is_fetched(visit: Visit) -> None:
    visit.allow_storage(QUOTA)
    visit.person.pick()
    visit.person.button(f"Keep {NAME}").click()
    said = visit.person.news("no room")
    assert said.startswith(f"{NAME} needs 43.1 MB, for which there is no room in this browser: ")
    assert all(end - first == 1 for first, end in visit.site.ranges)
    visit.allow_storage(None)


def test_a_cut_download_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    visit.site.cut = tmp_path / "cut.gguf"
    visit.site.cut.write_bytes(MODEL[: COME_NBYTES + 4_000_000])
    visit.person.button(f"Go on {NAME}").click()
    visit.person.page.locator("#keeping-in-picker .pace", has_text="MB of 43.1 MB").wait_for()
    said = visit.person.news("cannot be fetched")
    assert "`webgemma web` does not answer" in said
    assert said.endswith("What has come stays: go on from the list of models.")
    assert "16.8 MB of 43.1 MB has come" in visit.person.rows("stored")[1]
    visit.site.cut = None


def test_a_reload_in_the_middle(visit: Visit) -> None:
    mark = len(visit.site.ranges)
    visit.site.hold(COME_NBYTES)
    visit.person.button(f"Go on {NAME}").click()
    assert visit.site.holds.wait(30)
    visit.person.open()
    visit.site.let_go()
    assert visit.site.asked_from(mark) == COME_NBYTES
    visit.person.pick()
    visit.person.button(f"Go on {NAME}").wait_for()
    assert "16.8 MB of 43.1 MB has come" in visit.person.rows("stored")[1]


def test_what_is_going_on_needs_no_more_room(visit: Visit) -> None:
    mark = len(visit.site.ranges)
    visit.site.hold(COME_NBYTES)
    visit.person.button(f"Go on {NAME}").click()
    assert visit.site.holds.wait(30)
    visit.allow_storage(COME_NBYTES)  # something else fills the rest
    visit.site.let_go()
    visit.person.news(f"{NAME} is kept in this browser: it loads from here, also offline.")
    visit.allow_storage(None)
    assert visit.site.asked_from(mark) == COME_NBYTES


def test_it_loads_from_the_browser(visit: Visit) -> None:
    mark = len(visit.site.ranges)
    assert visit.person.rows("stored")[1] == f"{NAME} | 43.1 MB"  # no room to note more of it
    assert any(f"{NAME} | " in row and "kept" in row for row in visit.person.rows("ollama"))
    visit.person.choose("ollama", NAME)
    assert visit.person.ask("Hello")
    assert visit.site.ranges[mark:] == []


def test_a_damaged_model_is_told_and_the_loaded_one_still_answers(visit: Visit) -> None:
    visit.person.pick()
    visit.person.button(f"Keep {DAMAGED}").click()
    said = visit.person.news("is damaged")
    assert said.startswith(f"{DAMAGED} is damaged: its bytes are not those of its digest sha256:")
    assert said.endswith("fetch the model again where it comes from.")
    assert len(visit.person.rows("stored")) == 2
    visit.person.close()
    assert visit.person.ask("And you?")


def test_without_the_server_it_loads_and_is_deleted(visit: Visit) -> None:
    person = visit.person
    before = person.texts(".message .body")
    visit.server.close()
    person.open(NAME)  # the model of the last visit, as it is kept
    assert person.texts(".message .body") == before
    person.button("New conversation").click()
    assert person.ask("Hello") == before[1]
    person.pick()
    assert "`webgemma web` does not run now" in person.texts("#ollama-state")[0]
    person.button(f"Delete {NAME}").click()
    person.page.locator("#question").get_by_role("button", name="Delete").click()
    person.wait_for_model("Bundled model")
    person.pick()
    assert person.rows("stored") == ["Bundled model | small, comes with webgemma"]
    assert all("ERR_CONNECTION_REFUSED" in error for error in person.errors)
    person.errors.clear()
