"""The self-test: it passes a GPU that computes correctly, and names what another got wrong."""

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from helpers import gpu

from webgemma import Gemma
from webgemma.device import Buffer, Device
from webgemma.device.native import NativeDevice
from webgemma.engine.selftest import selftest
from webgemma.errors import DeviceError
from webgemma.sync import run_sync

Change = Callable[[float], float]


class WrongDevice:
    """A device whose results are changed when they are read."""

    def __init__(self, device: Device, change: Change) -> None:
        self._device = device
        self._change = change
        self.buffers = 0  # that are not freed
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        self.buffers += 1
        return self._device.buffer(nbytes, label)

    def free(self, buffer: Buffer) -> None:
        self.buffers -= 1
        self._device.free(buffer)

    def read(self, *args: Any) -> "WrongReading":
        return WrongReading(self._device.read(*args), self._change)

    def close(self) -> None:
        self.closed = True


class WrongReading:
    """A reading whose floats are changed."""

    def __init__(self, reading: Any, change: Change) -> None:
        self._reading, self._change = reading, change

    async def bytes(self) -> bytes:
        data = await self._reading.bytes()
        values = struct.unpack(f"<{len(data) // 4}f", data)
        return struct.pack(f"<{len(values)}f", *map(self._change, values))


@pytest.mark.parametrize("without", [frozenset(), frozenset({"subgroups"})], ids=["all", "plain"])
def test_a_gpu_that_computes_correctly_passes(without: frozenset[str]) -> None:
    run_sync(selftest(gpu.device(without)))  # raises an error if a value is wrong, as below


def test_memory_is_freed() -> None:
    correct = WrongDevice(gpu.device(), lambda value: value)
    run_sync(selftest(correct))
    assert correct.buffers == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda value: value * 1.001, "a product with Q8_0"),
        (lambda _: math.nan, "nan instead of"),
        (lambda _: 0.0, "0 instead of"),
        (lambda value: value if abs(value) > 0.05 else 0.0, "a product with Q8_0: 0 instead of"),
        (lambda value: value if value > 3 or value < 0 else -value, "instead of"),
    ],
    ids=["slightly off", "NaN", "zero", "flushed to zero", "sign"],
)
def test_wrong_values_are_named(change: Change, what: str) -> None:
    device = WrongDevice(gpu.device(), change)
    with pytest.raises(DeviceError) as caught:
        run_sync(selftest(device))
    message = str(caught.value)
    assert message.startswith(f"{gpu.device().name} computes wrong values (")
    assert what in message
    assert message.endswith("update its driver or use --device cpu.")
    assert device.buffers == 0


@pytest.mark.parametrize("number", range(4))
def test_each_probe_is_judged(number: int) -> None:
    """Change one of the results only."""
    count = 0

    class WrongOnce(WrongDevice):
        def read(self, *args: Any) -> Any:
            nonlocal count
            count += 1
            return super().read(*args) if count == number + 1 else self._device.read(*args)

    with pytest.raises(DeviceError, match="computes wrong values"):
        run_sync(selftest(WrongOnce(gpu.device(), lambda value: value + 1)))


def test_no_model_is_loaded_on_a_gpu_that_fails_the_selftest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = WrongDevice(NativeDevice(gpu.first_gpu(gpu.LIBRARY)), lambda value: -value)
    monkeypatch.setattr("webgemma.device.opening.open_device", lambda *_, **__: wrong)
    with pytest.raises(DeviceError, match="computes wrong values"):
        Gemma.load(None, "gpu")
    assert wrong.closed
    wrong._device.close()
