"""Sessions in files: they go on where they were, and no damaged file gets through."""

import hashlib
import io
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.gpu import device
from helpers.sessions import IDS, RANDOM, SHORT, open_tiny, take, truth

from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.weights import Model
from webgemma.sync import run_sync


def saved_by(session: Session, path: Path) -> Path:
    run_sync(session.save(path))
    return path


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("length", [0, 5, 60], ids=["empty", "short", "wrapped"])
def test_saved_and_restored(
    model: Model, tmp_path: Path, length: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webgemma.gemma.kv_cache.PIECE_NBYTES", 1000)
    session = Session(model, 256, kv=kv)
    history = [*IDS[:length], *take(session, IDS[:length], 4)] if length else []
    path = saved_by(session, tmp_path / "a")
    restored = run_sync(Session.restore(model, path))
    assert (restored.tokens, restored.context, restored.kv) == (history, 256, kv)
    assert saved_by(restored, tmp_path / "b").read_bytes() == path.read_bytes()
    assert take(restored, [*history, 50], 6, RANDOM) == take(session, [*history, 50], 6, RANDOM)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    session.close()
    restored.close()


def test_saved_to_an_open_file(model: Model, tmp_path: Path) -> None:
    session = Session(model, 256)
    take(session, IDS[:5], 3)
    file = io.BytesIO()
    run_sync(session.save(file))
    assert file.getvalue() == saved_by(session, tmp_path / "a").read_bytes()
    restored = run_sync(Session.restore(model, file))
    assert restored.tokens == session.tokens
    assert not file.closed
    file.close()
    with pytest.raises(InputError, match="cannot be written"):
        run_sync(session.save(file))
    with pytest.raises(InputError, match="cannot be read"):
        run_sync(session.take_over(file))
    session.close()
    restored.close()


def test_restored_it_is_not_read_again(
    session: Session, model: Model, read: list[int], tmp_path: Path
) -> None:
    other = Session(model, 128, kv="f32")  # with another context
    history = [*IDS[:60], *take(other, IDS[:60], 4)]
    run_sync(session.take_over(saved_by(other, tmp_path / "saved")))
    assert take(session, [*history, 50], 6) == truth([*history, 50], 6)
    assert read == [1]
    session.rewind(len(history) - 5)
    assert take(session, [*history[:-5], 50], 6) == truth([*history[:-5], 50], 6)
    assert read == [1, 1]
    other.close()


def test_files_that_do_not_fit(session: Session, model: Model, tmp_path: Path) -> None:
    run_sync(session.logits(IDS[:60]))
    path = saved_by(session, tmp_path / "saved")
    small, half = Session(model, 59, kv="f32"), Session(model, 256, kv="f16")
    with pytest.raises(InputError, match="holds 60 tokens, but the context holds 59"):
        run_sync(small.take_over(path))
    with pytest.raises(InputError, match="saved with kv f32"):
        run_sync(half.take_over(path))
    gguf, config = open_tiny(replace(SHORT, seed=4))
    other = run_sync(Model.load(gguf, config, device()))
    with pytest.raises(InputError, match="belongs to another model"):
        run_sync(Session.restore(other, path))
    with pytest.raises(InputError, match="There is no file"):
        run_sync(session.take_over(tmp_path / "missing"))
    with pytest.raises(InputError, match="There is no file"):
        run_sync(session.take_over(tmp_path))
    with pytest.raises(InputError, match="cannot be written"):
        run_sync(session.save(tmp_path / "missing" / "saved"))
    assert session.tokens == IDS[:60]
    for each in (small, half, other):
        each.close()


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    session = Session(model, 64)
    run_sync(session.logits(IDS[:40]))
    path = saved_by(session, tmp_path_factory.mktemp("saved") / "saved")
    session.close()
    return path.read_bytes()


def refused(session: Session, path: Path, data: bytes) -> str:
    """What a session says to a file; it is then empty or as before, and works."""
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        run_sync(session.take_over(path))
    return str(caught.value)


def test_damaged_files(model: Model, saved: bytes, tmp_path: Path) -> None:
    session = Session(model, 64)
    wanted = take(session, IDS[:40], 3)
    path = tmp_path / "saved"
    for cut in (0, 7, 15, 16, 17, 100, len(saved) // 2, len(saved) - 1):
        said = refused(session, path, saved[:cut])
        assert "no saved conversation" in said if cut < 16 else "is damaged" in said
    for at in range(0, len(saved), len(saved) // 60):
        changed = saved[:at] + bytes([saved[at] ^ 0x10]) + saved[at + 1 :]
        assert refused(session, path, changed).startswith(str(path))
    assert "is damaged" in refused(session, path, saved + b"\0")
    assert "of version 9" in refused(session, path, saved[:8] + b"\x09" + saved[9:])
    assert take(session, IDS[:40], 3) == wanted
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
def test_headers_that_make_no_sense(
    model: Model, saved: bytes, tmp_path: Path, change: dict[str, object] | str
) -> None:
    """Their checksum is right."""
    magic, version, nbytes = struct.unpack("<8sII", saved[:16])
    header = json.loads(saved[16 : 16 + nbytes])
    text = json.dumps(header | change) if isinstance(change, dict) else change
    packed = text.encode(errors="surrogateescape")
    data = struct.pack("<8sII", magic, version, len(packed)) + packed + saved[16 + nbytes : -32]
    path = tmp_path / "saved"
    path.write_bytes(data + hashlib.sha256(data).digest())
    with pytest.raises(InputError, match=r"is damaged|belongs to another model"):
        run_sync(Session.restore(model, path))
