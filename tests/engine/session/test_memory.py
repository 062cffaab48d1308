"""A session's memory: all of it is freed, and too little of it raises an error."""

import pytest
from helpers.objects import object_counts
from helpers.sessions import IDS, RANDOM, SHORT, open_tiny, take

from webgemma.device.null import NullDevice
from webgemma.engine.session import Session
from webgemma.errors import DeviceError, DeviceMemoryError, InputError
from webgemma.gemma.weights import Model
from webgemma.settings import resolve
from webgemma.sync import run_sync

# When drafts pay depends on how busy the machine is, and a plan is recorded for them then.
STEADY = resolve({"temperature": 0, "speculate": "off"})


def test_sessions_that_cannot_be_opened(model: Model) -> None:
    with pytest.raises(InputError, match="The KV cache cannot be 'f64'"):
        Session(model, 64, kv="f64")
    with pytest.raises(DeviceError, match="with a context of 2097152 or less"):
        Session(model, 1 << 24, kv="f16")


def buffers() -> int:
    """Return how many buffers are alive, on all devices."""
    return object_counts()["Buffer"]


def test_no_buffer_is_left_behind(session: Session) -> None:
    counts = []
    for _ in range(4):
        take(session, IDS[:10], 75, STEADY)
        other = session.fork()
        take(other, IDS[:44], 5, STEADY)
        run_sync(other.logits(IDS[:20]))
        other.close()
        del other
        counts.append(buffers())
    assert counts[1:] == counts[1:2] * 3  # the first round leaves small staging buffers


def use(model: Model) -> None:
    """Run every kind of plan once."""
    session = Session(model, 64)
    try:
        take(session, IDS[:20], 2)
        take(session, IDS[:3], 2, RANDOM)
        run_sync(session.logits(IDS[:5]))
    finally:
        session.close()


@pytest.mark.parametrize("table", ["device", "host"])
def test_closing_frees_without_a_garbage_collector(table: str) -> None:
    """Count buffers: a browser frees them late, or never, unless they are destroyed."""
    on = NullDevice()
    model = run_sync(Model.load(*open_tiny(SHORT), on, table=table))
    kept = len(on.buffers)
    use(model)
    assert len(on.buffers) == kept
    model.close()
    assert not on.buffers


def test_memory_may_run_out_at_any_allocation() -> None:
    """Expect all but the model to be freed, while a session is opened or a plan is recorded."""
    on = NullDevice()
    model = run_sync(Model.load(*open_tiny(SHORT), on))
    kept = set(on.buffers)
    use(model)
    assert on.buffers == kept
    steps = range(0, on.peak_nbytes - on.nbytes, 5000)
    for spare_nbytes in steps:
        on.memory_nbytes = on.nbytes + spare_nbytes
        with pytest.raises(DeviceMemoryError, match="The GPU has no"):
            use(model)
        assert on.buffers == kept
    assert len(steps) > 20
    on.memory_nbytes = None
    use(model)
