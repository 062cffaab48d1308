"""Fixtures of the session tests: a model, a session, and how many tokens it reads."""

import struct
from collections.abc import Iterator

import pytest
from helpers.gpu import device
from helpers.sessions import CHUNK, SHORT, open_tiny

from webgemma.engine.session import Session
from webgemma.gemma.weights import Model
from webgemma.sync import run_sync


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Read a few tokens at once, so that a short prompt has several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("webgemma.engine.slots.CHUNK", CHUNK)
        patch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 4, CHUNK))
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    """Load the short model."""
    gguf, config = open_tiny(SHORT)
    return run_sync(Model.load(gguf, config, device()))


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    """Open a session, which is closed after the test."""
    opened = Session(model, 256, kv="f32")
    yield opened
    opened.close()


@pytest.fixture
def read(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the session's reading appends how many tokens each chunk has."""
    counts: list[int] = []
    write = session.device.write

    def count_and_write(buffer, data, offset: int = 0) -> None:
        if buffer is session.plans.chunk.batch.buffer:
            counts.append(struct.unpack("<4I", data)[1])
        write(buffer, data, offset)

    monkeypatch.setattr(session.device, "write", count_and_write)
    return counts
