"""The OPFS store, tested without a browser: copying, resuming, checking and deleting models."""

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
    return asyncio.run(OpfsStore(files).store(BrowserSource(file), "gemma", digest))


def stored(files: PretendFiles) -> list[StoredModel]:
    return asyncio.run(OpfsStore(files).list())


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_a_model_is_copied_once(files: PretendFiles, digest: str | None) -> None:
    model = keep(files, PretendFile("a", DATA), digest)
    assert (model.name, model.nbytes, model.stored_nbytes, model.whole) == (
        "gemma",
        10240,
        10240,
        True,
    )
    assert stored(files) == [model]

    async def read() -> bytes:
        source = await OpfsStore(files).open(model.id)
        assert source.name == "gemma"
        return await source.read(100, 50)

    assert asyncio.run(read()) == DATA[100:150]
    again = PretendFile("a", DATA)
    assert keep(files, again, digest) == model
    assert not again.reads


def test_progress_is_reported(files: PretendFiles) -> None:
    reported: list[tuple[str, int, int]] = []
    source = BrowserSource(PretendFile("a", DATA))
    asyncio.run(OpfsStore(files).store(source, None, DIGEST, lambda *step: reported.append(step)))
    for stage in ("copying", "checking"):
        steps = [done for name, done, total in reported if name == stage and total == len(DATA)]
        assert steps == [*range(0, 10240, 1000), 10240]


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_an_interrupted_copy_is_resumed(files: PretendFiles, digest: str | None) -> None:
    short = PretendFile("a", DATA[:4500], size=len(DATA))
    with pytest.raises(GgufError, match="became shorter"):
        keep(files, short, digest)
    (half,) = stored(files)
    assert (half.stored_nbytes, half.whole) == (4000, False)
    with pytest.raises(GgufError, match="The copy of gemma is not complete"):
        asyncio.run(OpfsStore(files).open(half.id))
    rest = PretendFile("a", DATA)
    assert keep(files, rest, digest).whole
    assert rest.reads[0] == (4000, 5000)
    assert files.disk[f"{FOLDER}/{half.id}.gguf"] == DATA


def test_an_incomplete_chunk_is_copied_again(files: PretendFiles) -> None:
    with pytest.raises(GgufError):
        keep(files, PretendFile("a", DATA[:4500], size=len(DATA)))
    (half,) = stored(files)
    files.disk[f"{FOLDER}/{half.id}.gguf"] += b"torn"
    assert keep(files, PretendFile("a", DATA)).whole


def test_a_damaged_copy_is_reported_and_deleted(files: PretendFiles) -> None:
    wrong = bytearray(DATA)
    wrong[5000] ^= 1
    with pytest.raises(GgufError, match="gemma is damaged: its bytes do not match its digest"):
        keep(files, PretendFile("a", wrong))
    assert not files.disk
    assert not files.locked


def test_another_version_on_the_server_is_copied_from_the_start(files: PretendFiles) -> None:
    old = PretendFile("a", DATA[:3000], size=len(DATA))
    old.tag = "one"  # type: ignore[assignment]
    with pytest.raises(GgufError):
        keep(files, old, None)
    new = PretendFile("a", DATA[::-1])
    new.tag = "two"  # type: ignore[assignment]
    model = keep(files, new, None)
    assert files.disk[f"{FOLDER}/{model.id}.gguf"] == DATA[::-1]


def test_available_space_is_checked_first(files: PretendFiles) -> None:
    files.free = opfs.RESERVED_NBYTES + len(DATA) - 1
    file = PretendFile("a", DATA)
    with pytest.raises(StorageError, match="delete a stored model, or free space on the disk"):
        keep(files, file)
    assert not file.reads
    assert not files.disk
    files.free += 1
    assert keep(files, file).whole


def test_space_is_tried_where_the_browser_does_not_report_it(files: PretendFiles) -> None:
    files.quota = len(DATA) - 1
    file = PretendFile("a", DATA)
    with pytest.raises(StorageError, match="more than this browser can store"):
        keep(files, file)
    assert not file.reads
    files.quota += 1
    assert keep(files, file).whole


def test_a_full_disk_keeps_the_copied_bytes(files: PretendFiles) -> None:
    files.full_at = 6100
    with pytest.raises(StorageError, match="resumes where it stopped"):
        keep(files, PretendFile("a", DATA))
    assert stored(files)[0].stored_nbytes == 6000
    files.full_at = None
    rest = PretendFile("a", DATA)
    keep(files, rest)
    assert rest.reads[0] == (6000, 7000)


def test_a_full_disk_keeps_the_description(files: PretendFiles) -> None:
    model = keep(files, PretendFile("a", DATA))
    files.full_at = 5
    with pytest.raises(StorageError, match="There is no space left for gemma"):
        asyncio.run(OpfsStore(files).note(model.id, gpu_nbytes=1))
    assert stored(files) == [model]
    files.disk[f"{FOLDER}/{model.id}.json"] += b"rest of a longer one"  # not truncated
    assert stored(files) == [model]


def test_two_tabs_cannot_copy_the_same_model(files: PretendFiles) -> None:
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
    asyncio.run(OpfsStore(files).delete(left.id))
    assert not files.disk


def test_a_model_in_use_is_not_deleted(files: PretendFiles) -> None:
    model = keep(files, PretendFile("a", DATA))
    path = f"{FOLDER}/{model.id}.gguf"
    files.locked.add(path)
    with pytest.raises(StorageError, match="it is in use"):
        asyncio.run(OpfsStore(files).delete(model.id))
    files.locked.clear()
    asyncio.run(OpfsStore(files).delete(model.id))
    with pytest.raises(ModelNotFoundError, match="is no longer stored"):
        asyncio.run(OpfsStore(files).open(model.id))


def test_notes_are_stored(files: PretendFiles) -> None:
    model = keep(files, PretendFile("a", DATA))
    asyncio.run(OpfsStore(files).note(model.id, gpu_nbytes=7))
    asyncio.run(OpfsStore(files).note(model.id, other=8))
    assert stored(files)[0].notes == {"gpu_nbytes": 7, "other": 8}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TypeError", "from a worker only"),
        ("SecurityError", "gemma cannot be stored: not allowed"),
    ],
)
def test_a_storage_error_is_raised(
    files: PretendFiles, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    async def reject(*_: Any) -> None:
        raise JsError(name, "not allowed")

    monkeypatch.setattr(files, "stored", reject)
    with pytest.raises(StorageError, match=message):
        keep(files, PretendFile("a", DATA))


def test_a_stored_file_behaves_as_a_python_file(files: PretendFiles) -> None:
    files.disk["webgemma/x"] = bytearray()
    with StoredFile("x", PretendStored(files, "webgemma/x")) as file:
        assert file.write(b"hello ") + file.write(b"world") == 11
        file.flush()
        assert file.seek(0, 2) == 11
        assert file.seek(-5, 1) == 6
        assert file.read(3) + file.read() + file.read(9) == b"world"
        files.full_at = 11
        with pytest.raises(OSError, match="no space left"):
            file.write(b"!")
    file.close()
    with pytest.raises(InputError, match="'r' is not a valid mode"):
        asyncio.run(opfs.open_stored("x", "r"))


def test_an_asynchronous_stored_file_is_rejected(
    files: PretendFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asynchronous(*_: Any) -> PretendFile:
        return PretendFile("x", b"hello")  # as outside a worker, or while another tab has it open

    monkeypatch.setattr(files, "stored", asynchronous)
    monkeypatch.setattr(opfs, "browser_files", lambda: files)
    with pytest.raises(StorageError, match="from a worker only, and in one tab at a time"):
        asyncio.run(opfs.open_stored("x", "rb"))
