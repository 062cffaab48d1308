"""Files that fail while a model is loaded or generates: truncated, deleted, on a broken drive."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tiny import MIXED, SMALL, tiny_gguf

from webgemma import Gemma
from webgemma.device import Device
from webgemma.device.null import NullDevice
from webgemma.engine.session import Session
from webgemma.errors import GgufError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

DEFAULTS = resolve({})


def load(gguf: Gguf, on: Device, **options: object) -> Model:
    """Load a model on a device."""
    return run_sync(Model.load(gguf, Config.from_gguf(gguf), on, **options))


class TruncatedSource:
    """A file that fails once `nbytes_left` bytes have been read."""

    def __init__(self, data: bytes, nbytes_left: int) -> None:
        self.name, self.nbytes = "short.gguf", len(data)
        self._data, self._nbytes_left = data, nbytes_left

    async def read(self, offset: int, nbytes: int) -> bytes:
        self._nbytes_left -= nbytes
        if self._nbytes_left < 0:
            raise GgufError("short.gguf: it became shorter while it was read.")
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("nbytes_left", [1 << 20, 2 << 20, 3 << 20])
def test_a_file_truncated_while_loading(nbytes_left: int) -> None:
    gguf = run_sync(Gguf.aopen(TruncatedSource(tiny_gguf(MIXED), nbytes_left)))
    on = NullDevice()
    with pytest.raises(GgufError, match="became shorter"):
        load(gguf, on)
    assert not on.buffers
    assert on.written_nbytes > 0


def test_a_file_truncated_while_generating() -> None:
    """Expect an error, and that the conversation can continue when the file is back."""
    source = TruncatedSource(tiny_gguf(replace(MIXED, ple=256)), 1 << 30)
    gguf = run_sync(Gguf.aopen(source))
    session = Session(load(gguf, NullDevice(), table="host"), 64)
    stream = iterate_sync(session.generate([2, 318], DEFAULTS, 1))
    next(stream)
    source._nbytes_left = -1
    gguf._parts[0] = replace(gguf._parts[0], head=memoryview(b""))
    with pytest.raises(GgufError, match="became shorter"):
        next(stream)
    source._nbytes_left = 1 << 30
    assert next(iterate_sync(session.generate([2, 318], DEFAULTS, 1)))[0] == 0


def test_a_file_on_disk_truncated_while_loading(tmp_path: Path) -> None:
    """Expect an error (a mapped file would end the process), no leak, and a second load to work."""
    path, data = tmp_path / "short.gguf", tiny_gguf(MIXED)
    path.write_bytes(data)
    sizes = []

    def truncate(nbytes: int) -> None:
        sizes.append(nbytes)
        if len(sizes) == 5:
            os.truncate(path, len(data) // 2)

    on = NullDevice()
    message = rf"short\.gguf became shorter while it was read: it had {len(data)} bytes"
    with Gguf.open(path) as gguf, pytest.raises(GgufError, match=message):
        load(gguf, on, progress=truncate)
    assert len(sizes) == 5
    assert not on.buffers
    path.write_bytes(data)
    with Gguf.open(path) as gguf:
        load(gguf, on).close()
    assert not on.buffers


def test_a_drive_that_fails_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "drive.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    pread, on = os.pread, NullDevice()

    def fail(file: int, nbytes: int, offset: int) -> bytes:
        if offset > 900_000:
            raise OSError(5, "Input/output error")
        return pread(file, nbytes, offset)

    with Gguf.open(path) as gguf:
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(GgufError, match=r"drive\.gguf: bytes 9\d+ to .* Input/output error"):
            load(gguf, on)
    assert not on.buffers


def test_a_file_on_disk_truncated_while_generating(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_gguf(MIXED))
    on = NullDevice()
    with Gguf.open(path) as gguf:
        model = load(gguf, on, table="host")
        session = Session(model, 64)
        stream = iterate_sync(session.generate([2, 318], DEFAULTS, 1))
        next(stream)
        os.truncate(path, 1000)
        with pytest.raises(GgufError, match="became shorter"):
            next(stream)
        session.close()
        model.close()
    assert not on.buffers


@pytest.mark.parametrize("device_name", ["gpu", "cpu"])
def test_a_deleted_file_stays_readable(tmp_path: Path, device_name: str) -> None:
    path = tmp_path / "deleted.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    with Gemma.load(path, device_name, context=64, memory_gb=0.0011) as gemma:
        path.unlink()
        assert len(list(gemma.generate([2, 30], temperature=0, max_tokens=3))) == 3
