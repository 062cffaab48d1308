"""Sessions in files: they continue where they were, and damaged files are rejected."""

import hashlib
import io
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.gpu import device
from helpers.sessions import IDS, RANDOM, SHORT, expected, open_tiny, take

from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.weights import Model
from webgemma.sync import run_sync


def save(session: Session, path: Path) -> Path:
    """Save a session; return the path."""
    run_sync(session.save(path))
    return path


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("length", [0, 5, 60], ids=["empty", "short", "wrapped"])
def test_a_session_is_saved_and_restored(
    model: Model, tmp_path: Path, length: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webgemma.gemma.kv_cache.CHUNK_NBYTES", 1000)
    session = Session(model, 256, kv=kv)
    history = [*IDS[:length], *take(session, IDS[:length], 4)] if length else []
    path = save(session, tmp_path / "a")
    restored = run_sync(Session.restore(model, path))
    assert (restored.tokens, restored.context, restored.kv) == (history, 256, kv)
    assert save(restored, tmp_path / "b").read_bytes() == path.read_bytes()
    assert take(restored, [*history, 50], 6, RANDOM) == take(session, [*history, 50], 6, RANDOM)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    session.close()
    restored.close()


def test_a_session_is_saved_to_an_open_file(model: Model, tmp_path: Path) -> None:
    session = Session(model, 256)
    take(session, IDS[:5], 3)
    file = io.BytesIO()
    run_sync(session.save(file))
    assert file.getvalue() == save(session, tmp_path / "a").read_bytes()
    restored = run_sync(Session.restore(model, file))
    assert restored.tokens == session.tokens
    assert not file.closed
    file.close()
    with pytest.raises(InputError, match="cannot be written"):
        run_sync(session.save(file))
    with pytest.raises(InputError, match="cannot be read"):
        run_sync(session.load(file))
    session.close()
    restored.close()


def test_restored_tokens_are_not_read_again(
    session: Session, model: Model, read: list[int], tmp_path: Path
) -> None:
    other = Session(model, 128, kv="f32")  # with another context
    history = [*IDS[:60], *take(other, IDS[:60], 4)]
    run_sync(session.load(save(other, tmp_path / "saved")))
    assert take(session, [*history, 50], 6) == expected([*history, 50], 6)
    assert read == [1]
    session.rewind(len(history) - 5)
    assert take(session, [*history[:-5], 50], 6) == expected([*history[:-5], 50], 6)
    assert read == [1, 1]
    other.close()


def test_files_that_do_not_fit_raise_an_error(
    session: Session, model: Model, tmp_path: Path
) -> None:
    run_sync(session.logits(IDS[:60]))
    path = save(session, tmp_path / "saved")
    small, half = Session(model, 59, kv="f32"), Session(model, 256, kv="f16")
    with pytest.raises(InputError, match="holds 60 tokens, but the context holds 59"):
        run_sync(small.load(path))
    with pytest.raises(InputError, match="saved with kv f32"):
        run_sync(half.load(path))
    gguf, config = open_tiny(replace(SHORT, seed=4))
    other = run_sync(Model.load(gguf, config, device()))
    with pytest.raises(InputError, match="belongs to another model"):
        run_sync(Session.restore(other, path))
    with pytest.raises(InputError, match="There is no file"):
        run_sync(session.load(tmp_path / "missing"))
    with pytest.raises(InputError, match="There is no file"):
        run_sync(session.load(tmp_path))
    with pytest.raises(InputError, match="cannot be written"):
        run_sync(session.save(tmp_path / "missing" / "saved"))
    assert session.tokens == IDS[:60]
    for each in (small, half, other):
        each.close()


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a saved session of 40 tokens."""
    session = Session(model, 64)
    run_sync(session.logits(IDS[:40]))
    path = save(session, tmp_path_factory.mktemp("saved") / "saved")
    session.close()
    return path.read_bytes()


def rejection(session: Session, path: Path, data: bytes) -> str:
    """Return the error with which a session rejects a file of these bytes."""
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        run_sync(session.load(path))
    return str(caught.value)


def test_damaged_files_raise_an_error(model: Model, saved: bytes, tmp_path: Path) -> None:
    session = Session(model, 64)
    before = take(session, IDS[:40], 3)
    path = tmp_path / "saved"
    for cut in (0, 7, 15, 16, 17, 100, len(saved) // 2, len(saved) - 1):
        message = rejection(session, path, saved[:cut])
        assert "is not a saved conversation" in message if cut < 16 else "is damaged" in message
    for at in range(0, len(saved), len(saved) // 60):
        changed = saved[:at] + bytes([saved[at] ^ 0x10]) + saved[at + 1 :]
        assert rejection(session, path, changed).startswith(str(path))
    assert "is damaged" in rejection(session, path, saved + b"\0")
    assert "has version 9" in rejection(session, path, saved[:8] + b"\x09" + saved[9:])
    assert take(session, IDS[:40], 3) == before
    session.close()


@pytest.mark.parametrize(
    "change",
    [
        {"kv": "f64"},
        {"kv": 3},
        {"context": 0},
        {"context": 1 << 40},
        {"context": "64"},
        {"tokens": 5},
        {"tokens": [2] * 41},
        {"tokens": [2] * 39},
        {"tokens": [2.5] * 40},
        {"tokens": [320] * 40},
        {"tokens": [-1] * 40},
        {"lost": 0},
        {"lost": 17},
        {"lost": 40},
        {"shapes": [[1]]},
        {"shapes": 1},
        {"more": 1},
        "[]",
        "[" * 100000,
        "\udcff",
    ],
    ids=lambda change: str(change)[:24].encode("ascii", "replace").decode(),
)
def test_headers_that_are_not_valid_raise_an_error(
    model: Model, saved: bytes, tmp_path: Path, change: dict[str, object] | str
) -> None:
    """Write each with the right checksum."""
    path = tmp_path / "saved"
    path.write_bytes(with_header(saved, change))
    with pytest.raises(InputError, match=r"is damaged|belongs to another model"):
        run_sync(Session.restore(model, path))


def with_header(saved: bytes, change: dict[str, object] | str) -> bytes:
    """Return the bytes of a file with another header, or some of its fields changed."""
    magic, version, nbytes = struct.unpack("<8sII", saved[:16])
    header = json.loads(saved[16 : 16 + nbytes])
    text = json.dumps(header | change) if isinstance(change, dict) else change
    packed = text.encode(errors="surrogateescape")
    data = struct.pack("<8sII", magic, version, len(packed)) + packed + saved[16 + nbytes : -32]
    return data + hashlib.sha256(data).digest()


def test_a_damaged_file_leaves_the_conversations_beside_it(
    model: Model, saved: bytes, tmp_path: Path
) -> None:
    """This one says that it has more than the rings of any model without whole images hold."""
    session = Session(model, 64, slots=2)
    other = Session.in_slot(session.batch, 1)
    before = take(other, IDS[:40], 3)
    assert "is damaged" in rejection(session, tmp_path / "saved", with_header(saved, {"lost": 0}))
    assert take(session, IDS[:40], 3) == take(other, IDS[:40], 3) == before
    session.close()
