"""Models that a browser keeps, without a browser: copied, cut, taken up again, checked, deleted."""

import asyncio
import hashlib
from typing import Any

import pytest
from helpers.pretend_files import JsError, PretendFile, PretendFiles, PretendStored

from webgemma.errors import GgufError, InputError, ModelNotFoundError, StorageError
from webgemma.gguf import browser, opfs
from webgemma.gguf.browser import BrowserSource
from webgemma.gguf.opfs import FOLDER, OpfsStore, StoredFile, StoredModel

DATA = bytes(range(256)) * 40
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opfs, "CHUNK_NBYTES", 1000)
    monkeypatch.setattr(browser, "WAIT_SECONDS", ())


@pytest.fixture
def files() -> PretendFiles:
    return PretendFiles()


def keep(files: PretendFiles, file: PretendFile, digest: str | None = DIGEST) -> StoredModel:
    return asyncio.run(OpfsStore(files).keep(BrowserSource(file), "gemma", digest))


def stored(files: PretendFiles) -> list[StoredModel]:
    return asyncio.run(OpfsStore(files).list())


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_kept_once(files: PretendFiles, digest: str | None) -> None:
    model = keep(files, PretendFile("a", DATA), digest)
    assert (model.name, model.nbytes, model.have, model.whole) == ("gemma", 10240, 10240, True)
    assert stored(files) == [model]

    async def read() -> bytes:
        source = await OpfsStore(files).open(model.id)
        assert source.name == "gemma"
        return await source.read(100, 50)

    assert asyncio.run(read()) == DATA[100:150]
    again = PretendFile("a", DATA)
    assert keep(files, again, digest) == model
    assert not again.reads


def test_progress(files: PretendFiles) -> None:
    told: list[tuple[str, int, int]] = []
    source = BrowserSource(PretendFile("a", DATA))
    asyncio.run(OpfsStore(files).keep(source, None, DIGEST, lambda *how: told.append(how)))
    for stage in ("copying", "checking"):
        steps = [done for which, done, total in told if which == stage and total == len(DATA)]
        assert steps == [*range(0, 10240, 1000), 10240]


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_a_copy_that_was_cut_goes_on(files: PretendFiles, digest: str | None) -> None:
    cut = PretendFile("a", DATA[:4500], size=len(DATA))
    with pytest.raises(GgufError, match="became shorter"):
        keep(files, cut, digest)
    (half,) = stored(files)
    assert (half.have, half.whole) == (4000, False)
    with pytest.raises(GgufError, match="The copy of gemma is not whole yet"):
        asyncio.run(OpfsStore(files).open(half.id))
    rest = PretendFile("a", DATA)
    assert keep(files, rest, digest).whole
    assert rest.reads[0] == (4000, 5000)
    assert files.disk[f"{FOLDER}/{half.id}.gguf"] == DATA


def test_a_chunk_that_was_cut_is_copied_again(files: PretendFiles) -> None:
    with pytest.raises(GgufError):
        keep(files, PretendFile("a", DATA[:4500], size=len(DATA)))
    (half,) = stored(files)
    files.disk[f"{FOLDER}/{half.id}.gguf"] += b"torn"
    assert keep(files, PretendFile("a", DATA)).whole


def test_a_wrong_byte_is_told_and_deleted(files: PretendFiles) -> None:
    wrong = bytearray(DATA)
    wrong[5000] ^= 1
    with pytest.raises(GgufError, match="gemma is damaged: its bytes are not those of its digest"):
        keep(files, PretendFile("a", wrong))
    assert not files.disk
    assert not files.locked


def test_another_version_on_the_server_begins_anew(files: PretendFiles) -> None:
    old = PretendFile("a", DATA[:3000], size=len(DATA))
    old.tag = "one"  # type: ignore[assignment]
    with pytest.raises(GgufError):
        keep(files, old, None)
    new = PretendFile("a", DATA[::-1])
    new.tag = "two"  # type: ignore[assignment]
    model = keep(files, new, None)
    assert files.disk[f"{FOLDER}/{model.id}.gguf"] == DATA[::-1]


def test_room_is_looked_for_first(files: PretendFiles) -> None:
    files.free = opfs.SPARE_NBYTES + len(DATA) - 1
    file = PretendFile("a", DATA)
    with pytest.raises(StorageError, match="delete a stored model, or make room on the disk"):
        keep(files, file)
    assert not file.reads
    assert not files.disk
    files.free += 1
    assert keep(files, file).whole


def test_room_is_asked_for_where_nobody_tells(files: PretendFiles) -> None:
    files.quota = len(DATA) - 1
    file = PretendFile("a", DATA)
    with pytest.raises(StorageError, match="for which there is no room in this brow"):
        keep(files, file)
    assert not file.reads
    files.quota += 1
    assert keep(files, file).whole


def test_a_full_disk_keeps_what_has_come(files: PretendFiles) -> None:
    files.full_at = 6100
    with pytest.raises(StorageError, match="goes on where it stopped"):
        keep(files, PretendFile("a", DATA))
    assert stored(files)[0].have == 6000
    files.full_at = None
    rest = PretendFile("a", DATA)
    keep(files, rest)
    assert rest.reads[0] == (6000, 7000)


def test_what_describes_a_model_is_not_lost_for_want_of_room(files: PretendFiles) -> None:
    model = keep(files, PretendFile("a", DATA))
    files.full_at = 5
    with pytest.raises(StorageError, match="There is no room left for gemma"):
        asyncio.run(OpfsStore(files).note(model.id, gpu_nbytes=1))
    assert stored(files) == [model]
    files.disk[f"{FOLDER}/{model.id}.json"] += b"rest of a longer one"  # it was cut
    assert stored(files) == [model]


def test_two_tabs_do_not_copy_the_same(files: PretendFiles) -> None:
    files.locked.add(f"{FOLDER}/{DIGEST.removeprefix('sha256:')}.gguf")
    with pytest.raises(StorageError, match="perhaps in another tab"):
        keep(files, PretendFile("a", DATA))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"name": 1}', b'{"name": "x", "nbytes": 5, "whole": true}']
)
def test_a_damaged_description_can_be_deleted(files: PretendFiles, text: bytes) -> None:
    model = keep(files, PretendFile("a", DATA))
    files.disk[f"{FOLDER}/{model.id}.json"] = bytearray(text)
    (left,) = stored(files)
    assert (left.id, left.name, left.whole) == (model.id, "a damaged copy", False)
    asyncio.run(OpfsStore(files).forget(left.id))
    assert not files.disk


def test_forgotten_and_in_use(files: PretendFiles) -> None:
    model = keep(files, PretendFile("a", DATA))
    path = f"{FOLDER}/{model.id}.gguf"
    files.locked.add(path)
    with pytest.raises(StorageError, match="it is in use"):
        asyncio.run(OpfsStore(files).forget(model.id))
    files.locked.clear()
    asyncio.run(OpfsStore(files).forget(model.id))
    with pytest.raises(ModelNotFoundError, match="is not stored"):
        asyncio.run(OpfsStore(files).open(model.id))


def test_notes_stay(files: PretendFiles) -> None:
    model = keep(files, PretendFile("a", DATA))
    asyncio.run(OpfsStore(files).note(model.id, gpu_nbytes=7))
    asyncio.run(OpfsStore(files).note(model.id, other=8))
    assert stored(files)[0].notes == {"gpu_nbytes": 7, "other": 8}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("TypeError", "from a worker only"),
        ("SecurityError", "gemma cannot be stored: not allowed"),
    ],
)
def test_storage_that_is_refused(
    files: PretendFiles, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    async def refuse(*_: Any) -> None:
        raise JsError(name, "not allowed")

    monkeypatch.setattr(files, "stored", refuse)
    with pytest.raises(StorageError, match=sentence):
        keep(files, PretendFile("a", DATA))


def test_a_stored_file_is_a_file(files: PretendFiles) -> None:
    files.disk["webgemma/x"] = bytearray()
    with StoredFile("x", PretendStored(files, "webgemma/x")) as file:
        assert file.write(b"hello ") + file.write(b"world") == 11
        file.flush()
        assert file.seek(0, 2) == 11
        assert file.seek(-5, 1) == 6
        assert file.read(3) + file.read() + file.read(9) == b"world"
        files.full_at = 11
        with pytest.raises(OSError, match="no room left"):
            file.write(b"!")
    file.close()
    with pytest.raises(InputError, match="There is no mode 'r'"):
        asyncio.run(opfs.open_stored("x", "r"))


def test_a_stored_file_that_makes_us_wait_gets_a_sentence(
    files: PretendFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waiting(*_: Any) -> PretendFile:
        return PretendFile("x", b"hello")  # as on the page itself, or while another tab has it

    monkeypatch.setattr(files, "stored", waiting)
    monkeypatch.setattr(opfs, "browser_files", lambda: files)
    with pytest.raises(StorageError, match="from a worker only, and in one tab at a time"):
        asyncio.run(opfs.open_stored("x", "rb"))
