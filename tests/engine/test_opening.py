"""Opening an engine on a GPU: models that do not fit are rejected before a byte is loaded."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.blank import BlankGguf, e2b
from helpers.sessions import open_tiny
from helpers.tiny import LARGE, SMALL, Tiny, tiny_gguf

from webgemma import Gemma
from webgemma.device import Device
from webgemma.device.null import NullDevice
from webgemma.engine import gpu
from webgemma.engine.gpu import allocate, open_gpu_engine
from webgemma.engine.interface import EngineOptions
from webgemma.engine.memory_budget import MemoryBudget, free_host_nbytes
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.sync import run_sync

IDS = [2, 270, 31, 31, 300, 5]


class UnreadGguf(BlankGguf):
    """A file that must not be read."""

    async def read(self, *_: object) -> bytes:
        raise AssertionError("a byte was read")


def rejection(on: NullDevice, config: Config, context: int, memory_gb: float | None = None) -> str:
    """Return the error for a model that does not fit; all memory is freed then."""
    options = EngineOptions(memory_gb=memory_gb)
    gguf = UnreadGguf(config)
    with pytest.raises(DeviceError) as caught:
        run_sync(open_gpu_engine(gguf, config, on, context, options))
    assert not on.buffers
    return str(caught.value)


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the self-test, which a NullDevice fails because it computes nothing."""

    async def pass_always(_: Device) -> None:
        pass

    monkeypatch.setattr(gpu, "selftest", pass_always)


@pytest.mark.usefixtures("untested")
def test_a_gpu_that_is_too_small_raises_an_error() -> None:
    message = rejection(NullDevice(memory_nbytes=int(0.5e9)), e2b(), 32768)
    assert (
        "blank.gguf needs 1.41 GB for weights (and 1.93 GB left in the file) and 0.214 GB for a "
        "cache of 32768 tokens, but no GPU could allocate only 0.4"
    ) in message
    assert message.endswith("; use a smaller model or quantisation, or a shorter context.")


@pytest.mark.usefixtures("untested")
def test_a_cache_that_does_not_fit_beside_the_weights_raises_an_error() -> None:
    message = rejection(NullDevice(memory_nbytes=int(1.6e9)), e2b(), 65536)
    assert "0.415 GB for a cache of 65536 tokens, but no GPU could allocate only 1." in message


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize(("gb", "host"), [(4.0, False), (3.2, True)])
def test_a_table_that_does_not_fit_stays_in_the_file(gb: float, host: bool) -> None:
    """Let allocating fail: no device reports how much memory it has."""
    on, config = NullDevice(memory_nbytes=int(gb * 1e9)), e2b()
    gguf, options = UnreadGguf(config), EngineOptions()
    budget = MemoryBudget.of(gguf, config, 32768, options.kv)
    session = run_sync(allocate(gguf, config, on, budget, options))
    assert (session.model.table is not None) is host
    session.close()
    session.model.close()
    assert not on.buffers


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("memory_gb", [None, 2.0])
def test_a_machine_that_is_too_small_raises_an_error(
    memory_gb: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the free memory: software and integrated GPUs allocate more than there is."""
    monkeypatch.setattr(gpu, "free_host_nbytes", lambda: 10**9)
    on = NullDevice()
    on.unified = True
    message = rejection(on, e2b(), 4096, memory_gb)
    assert "no GPU computes in this machine's memory, of which 1 GB is free" in message
    assert on.peak_nbytes == 0
    monkeypatch.setattr(gpu, "free_host_nbytes", lambda: 2 * 10**9)
    with pytest.raises(AssertionError, match="a byte was read"):  # without the table it fits
        rejection(on, e2b(), 4096, memory_gb)
    assert 10**9 < on.peak_nbytes < 2 * 10**9
    monkeypatch.setattr(gpu, "free_host_nbytes", lambda: None)
    with pytest.raises(AssertionError, match="a byte was read"):
        rejection(on, e2b(), 4096, memory_gb)


def test_the_free_memory_of_this_machine() -> None:
    free_nbytes = free_host_nbytes()
    assert free_nbytes is None or 1 << 20 < free_nbytes < 1 << 50


FILL_UP = """
import os, resource
from webgemma.device import open_device
from webgemma.errors import DeviceMemoryError
device = open_device()
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
buffers = []
try:
    for _ in range(8):
        buffers.append(device.buffer(1 << 28, "weights"))
except DeviceMemoryError as error:
    assert error.held_nbytes == len(buffers) << 28, error.held_nbytes
    print(len(buffers), error)
while buffers:
    device.free(buffers.pop())
device.buffer(1 << 28, "again")
print(device.nbytes)
"""


def test_a_real_device_without_memory_raises_an_error() -> None:
    """Expect that freed memory can be allocated again."""
    done = subprocess.run(
        [sys.executable, "-c", FILL_UP], capture_output=True, text=True, check=True
    )
    assert re.match(r"[1-4] The GPU has no 268435456 bytes for weights beside \d+", done.stdout)
    assert done.stdout.splitlines()[-1] == str(1 << 28)


@pytest.mark.parametrize(("missing_gb", "location"), [(0.0, "device"), (0.001, "host")])
def test_memory_gb_decides_where_the_table_is(missing_gb: float, location: str) -> None:
    budget = MemoryBudget("a model", 10**9, 2 * 10**9, 10**8, 4096, 3.1 - missing_gb)
    assert budget.table_location() == location


# Several conversations


def test_the_caches_of_all_slots_count() -> None:
    one = MemoryBudget("a model", 10**9, 2 * 10**9, 10**8, 4096)
    four = replace(one, slots=4)
    assert four.nbytes("device") - one.nbytes("device") == 3 * 10**8
    assert [four.fitting(n, "host").slots for n in (0, 1_199_999_999, 12 * 10**8, 10**10)] == [
        *(1, 1, 2, 4)
    ]
    message = str(four.refusal("there is nothing"))
    assert (
        "a model needs 1 GB for weights (and 2 GB left in the file) and 0.4 GB for 4 conversations "
        "at once (slots), each with a cache of 4096 tokens (0.1 GB), but there is nothing; "
    ) in message
    assert "fewer slots" in message
    assert "slots" not in str(one.refusal("there is nothing"))
    assert four.described(most=True) == (
        "3 GB for weights and up to 0.4 GB for 4 conversations at once (slots), each with a cache "
        "of 4096 tokens (0.1 GB)"
    )
    assert one.described("host") == "1 GB for weights and 0.1 GB for a cache of 4096 tokens"


@pytest.mark.parametrize("kind", [SMALL, LARGE])
def test_the_budget_is_what_the_slots_take(kind: Tiny) -> None:
    """Also where several slots are made for images that are read whole."""
    gguf, config = open_tiny(kind)
    for slots in (1, 3):
        budget = MemoryBudget.of(gguf, config, 2048, "f16", slots=slots)
        session = run_sync(allocate(gguf, config, NullDevice(), budget, EngineOptions()))
        assert session.slots.count == slots
        assert session.slots.cache.slot_nbytes == budget.cache_nbytes
        session.close()
        session.model.close()


@pytest.mark.parametrize("slots", [0, 65, -1, 1.5, "4", True, float("nan"), 10**99])
def test_slots_that_do_not_exist(small_path: Path, slots: Any) -> None:
    for device in ("cpu", "gpu"):
        with pytest.raises(InputError, match="a whole number from 1 to 64"):
            Gemma.load(small_path, device, slots=slots)
    with pytest.raises(InputError, match="a whole number from 1 to 64"):
        EngineOptions(slots=slots).check()


def test_slots_take_their_memory_at_once_or_are_refused(small_path: Path) -> None:
    with Gemma.load(small_path, "gpu", slots=np.int64(2)) as two:
        taken = two.memory_nbytes
        assert len(two._engine._sessions) == len(two.slots) == 2
    with Gemma.load(small_path, "gpu", slots=12) as gemma:
        assert len(gemma.slots) == 12
        assert gemma.memory_nbytes > taken
    with pytest.raises(DeviceError, match=r"for 12 conversations at once .*but memory_gb=0\.0013"):
        Gemma.load(small_path, "gpu", memory_gb=0.0013, context=128, slots=12)
    with Gemma.load(small_path, "cpu", slots=12) as gemma:
        assert len(gemma.slots) == 1


@pytest.mark.parametrize(("extra", "slots"), [(0.0, 1), (1.5, 2), (10, 4)])
def test_without_a_number_memory_gb_says_how_many(
    small_path: Path, extra: float, slots: int
) -> None:
    gguf, config = open_tiny(SMALL)
    budget = MemoryBudget.of(gguf, config, 256, "f16")
    memory_gb = (budget.nbytes("device") + extra * budget.cache_nbytes + 1) / 1e9
    with Gemma.load(small_path, "gpu", memory_gb=memory_gb, context=256) as gemma:
        assert len(gemma.slots) == slots


# memory_gb of Gemma.load


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the small model to a file; return its path."""
    path = tmp_path_factory.mktemp("weights") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


@pytest.mark.parametrize(("memory_gb", "host"), [(1.0, False), (0.0011, True)])
def test_memory_gb_moves_the_table(small_path: Path, memory_gb: float, host: bool) -> None:
    """Load 1.115 MB of weights, 0.123 of them in the table, and 0.016 of cache."""
    with Gemma.load(small_path, "gpu", context=64, memory_gb=memory_gb) as gemma:
        assert (gemma._engine._session.model.table is not None) is host
        assert gemma.logits(IDS).shape == (len(IDS), 320)


def test_memory_gb_rejects_a_model_that_does_not_fit(small_path: Path) -> None:
    message = (
        r"small.gguf needs 0.000\d+ GB for weights \(and 0.000\d+ GB left in the file\) and "
        r"1.64e-05 GB for a cache of 64 tokens, but memory_gb=0.001; use a smaller"
    )
    with pytest.raises(DeviceError, match=message):
        Gemma.load(small_path, "gpu", context=64, memory_gb=0.001)


@pytest.mark.parametrize("memory_gb", [0, -1, float("nan"), float("inf"), "1"])
def test_memory_gb_must_be_above_zero(small_path: Path, memory_gb: Any) -> None:
    with pytest.raises(InputError, match=r"memory_gb is .* above zero"):
        Gemma.load(small_path, "gpu", memory_gb=memory_gb)
