"""What does not fit is refused, with numbers, before the first byte is loaded; memory_gb."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.blank import BlankGguf, e2b
from helpers.tiny import SMALL, tiny_gguf

from webgemma import Gemma
from webgemma.device import Device
from webgemma.device.null import NullDevice
from webgemma.engine import opening as engines
from webgemma.engine.opening import EngineOptions
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.sync import run_sync

IDS = [2, 270, 31, 31, 300, 5]


class WatchedGguf(BlankGguf):
    """Must not be read."""

    async def read(self, *_: object) -> bytes:
        raise AssertionError("a byte was read")


def refused(on: NullDevice, config: Config, context: int, memory_gb: float | None = None) -> str:
    options = EngineOptions(memory_gb=memory_gb)
    gguf = WatchedGguf(config)
    with pytest.raises(DeviceError) as caught:
        run_sync(engines._gpu_engine(gguf, config, on, context, options))
    assert not on.buffers
    return str(caught.value)


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NullDevice computes nothing, so it would fail the self-test."""

    async def pass_at_once(_: Device) -> None:
        pass

    monkeypatch.setattr(engines, "selftest", pass_at_once)


@pytest.mark.usefixtures("untested")
def test_a_gpu_that_is_too_small() -> None:
    sentence = refused(NullDevice(memory_nbytes=int(0.5e9)), e2b(), 32768)
    assert (
        "blank.gguf needs 1.41 GB for weights (and 1.93 GB left in the file) and 0.214 GB for a "
        "cache of 32768 tokens, but no GPU could give only 0.4"
    ) in sentence
    assert sentence.endswith("; take a smaller model or quantisation, or a shorter context.")


@pytest.mark.usefixtures("untested")
def test_a_cache_that_does_not_fit_beside_the_weights() -> None:
    sentence = refused(NullDevice(memory_nbytes=int(1.6e9)), e2b(), 65536)
    assert "0.415 GB for a cache of 65536 tokens, but no GPU could give only 1." in sentence


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize(("gb", "host"), [(4.0, False), (3.2, True)])
def test_a_table_that_does_not_fit_stays_in_the_file(gb: float, host: bool) -> None:
    """Found out by asking for the memory: no device tells how much it has."""
    on, config = NullDevice(memory_nbytes=int(gb * 1e9)), e2b()
    gguf, options = WatchedGguf(config), EngineOptions()
    needs = engines.Needs.of(gguf, config, 32768, options)
    session = run_sync(engines._reserve(gguf, config, on, needs, options))
    assert (session.model.table is not None) is host
    session.close()
    session.model.close()
    assert not on.buffers


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("memory_gb", [None, 2.0])
def test_a_machine_that_is_too_small(
    memory_gb: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Software and integrated GPUs promise memory that is not there."""
    monkeypatch.setattr(engines, "machine_free_nbytes", lambda: 10**9)
    on = NullDevice()
    on.unified = True
    sentence = refused(on, e2b(), 4096, memory_gb)
    assert "no GPU computes in this machine's memory, of which 1 GB is free" in sentence
    assert on.peak_nbytes == 0
    monkeypatch.setattr(engines, "machine_free_nbytes", lambda: 2 * 10**9)
    with pytest.raises(AssertionError, match="a byte was read"):  # without the table it fits
        refused(on, e2b(), 4096, memory_gb)
    assert 10**9 < on.peak_nbytes < 2 * 10**9
    monkeypatch.setattr(engines, "machine_free_nbytes", lambda: None)
    with pytest.raises(AssertionError, match="a byte was read"):
        refused(on, e2b(), 4096, memory_gb)


def test_the_free_memory_of_this_machine() -> None:
    free_nbytes = engines.machine_free_nbytes()
    assert free_nbytes is None or 1 << 20 < free_nbytes < 1 << 50


FILL_UP = """
import os, resource
from webgemma.device import open_device
from webgemma.errors import DeviceMemoryError
device = open_device()
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
made = []
try:
    for _ in range(8):
        made.append(device.buffer(1 << 28, "weights"))
except DeviceMemoryError as error:
    assert error.held_nbytes == len(made) << 28, error.held_nbytes
    print(len(made), error)
while made:
    device.free(made.pop())
device.buffer(1 << 28, "again")
print(device.nbytes)
"""


def test_a_true_device_without_memory() -> None:
    """It says so, and has it again when it is freed."""
    done = subprocess.run(
        [sys.executable, "-c", FILL_UP], capture_output=True, text=True, check=True
    )
    assert re.match(r"[1-4] The GPU has no 268435456 bytes for weights beside \d+", done.stdout)
    assert done.stdout.splitlines()[-1] == str(1 << 28)


@pytest.mark.parametrize(("missing_gb", "place"), [(0.0, "device"), (0.001, "host")])
def test_memory_gb_says_where_the_table_is(missing_gb: float, place: str) -> None:
    needs = engines.Needs("a model", 10**9, 2 * 10**9, 10**8, 4096, 3.1 - missing_gb)
    assert needs.place_of_table() == place


# memory_gb of the public face


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


@pytest.mark.parametrize(("memory_gb", "host"), [(1.0, False), (0.0011, True)])
def test_memory_gb_moves_the_table(small_path: Path, memory_gb: float, host: bool) -> None:
    """1.115 MB of weights, 0.123 of them in the table, and 0.016 of cache."""
    with Gemma.load(small_path, "gpu", context=64, memory_gb=memory_gb) as gemma:
        assert (gemma._engine._session.model.table is not None) is host
        assert gemma.logits(IDS).shape == (len(IDS), 320)


def test_memory_gb_refuses_what_cannot_fit(small_path: Path) -> None:
    sentence = (
        r"small.gguf needs 0.000\d+ GB for weights \(and 0.000\d+ GB left in the file\) and "
        r"1.64e-05 GB for a cache of 64 tokens, but memory_gb=0.001; take a smaller"
    )
    with pytest.raises(DeviceError, match=sentence):
        Gemma.load(small_path, "gpu", context=64, memory_gb=0.001)


@pytest.mark.parametrize("memory_gb", [0, -1, float("nan"), float("inf")])
def test_memory_gb_is_above_zero(small_path: Path, memory_gb: float) -> None:
    with pytest.raises(InputError, match=r"memory_gb is .* above zero"):
        Gemma.load(small_path, "gpu", memory_gb=memory_gb)
