"""What tests of sessions are handed: a model, a session, and how much that reads."""

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("webgemma.engine.session.CHUNK", CHUNK)
        patch.setattr("webgemma.engine.session.BATCHES", (1, 4, CHUNK))
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    gguf, config = open_tiny(SHORT)
    return run_sync(Model.load(gguf, config, device()))


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    made = Session(model, 256, kv="f32")
    yield made
    made.close()


@pytest.fixture
def read(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the session hands to the device, chunk by chunk."""
    counts: list[int] = []
    write = session.device.write

    def spy(buffer, data, offset: int = 0) -> None:
        if buffer is session._inputs.state.buffer:
            counts.append(struct.unpack("<4I", data)[1])
        write(buffer, data, offset)

    monkeypatch.setattr(session.device, "write", spy)
    return counts
