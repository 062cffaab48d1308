"""The self-test: it trusts a GPU that computes right, and says what one that does not got wrong."""

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from helpers import gpu

from webgemma import Gemma
from webgemma.device import Buffer, Device
from webgemma.device.native import NativeDevice, adapters
from webgemma.engine.selftest import selftest
from webgemma.errors import DeviceError
from webgemma.sync import run_sync

Lie = Callable[[float], float]


class Liar:
    """A device whose floats arrive changed."""

    def __init__(self, device: Device, lie: Lie) -> None:
        self._device = device
        self._lie = lie
        self.held = 0  # buffers
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        self.held += 1
        return self._device.buffer(nbytes, label)

    def free(self, buffer: Buffer) -> None:
        self.held -= 1
        self._device.free(buffer)

    def read(self, *args: Any) -> "LyingReading":
        return LyingReading(self._device.read(*args), self._lie)

    def close(self) -> None:
        self.closed = True


class LyingReading:
    def __init__(self, reading: Any, lie: Lie) -> None:
        self._reading, self._lie = reading, lie

    async def bytes(self) -> bytes:
        data = await self._reading.bytes()
        values = struct.unpack(f"<{len(data) // 4}f", data)
        return struct.pack(f"<{len(values)}f", *map(self._lie, values))


@pytest.mark.parametrize("without", [frozenset(), frozenset({"subgroups"})], ids=["all", "plain"])
def test_a_gpu_that_computes_right_passes(without: frozenset[str]) -> None:
    run_sync(selftest(gpu.device(without)))


def test_what_it_takes_it_gives_back() -> None:
    honest = Liar(gpu.device(), lambda value: value)
    run_sync(selftest(honest))
    assert honest.held == 0


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (lambda value: value * 1.001, "a product with Q8_0"),
        (lambda _: math.nan, "nan instead of"),
        (lambda _: 0.0, "0 instead of"),
        (lambda value: value if abs(value) > 0.05 else 0.0, "a product with Q8_0: 0 instead of"),
        (lambda value: value if value > 3 or value < 0 else -value, "instead of"),
    ],
    ids=["slightly off", "no numbers", "nothing", "flushed to zero", "sign"],
)
def test_wrong_values_are_named(lie: Lie, what: str) -> None:
    liar = Liar(gpu.device(), lie)
    with pytest.raises(DeviceError) as caught:
        run_sync(selftest(liar))
    sentence = str(caught.value)
    assert sentence.startswith(f"{gpu.device().name} computes wrong values (")
    assert what in sentence
    assert sentence.endswith("update its driver or use --device cpu.")
    assert liar.held == 0


@pytest.mark.parametrize("number", range(4))
def test_each_probe_is_judged(number: int) -> None:
    """A device that lies in one of its answers only is found out, too."""
    asked = 0

    class LiesOnce(Liar):
        def read(self, *args: Any) -> Any:
            nonlocal asked
            asked += 1
            return super().read(*args) if asked == number + 1 else self._device.read(*args)

    with pytest.raises(DeviceError, match="computes wrong values"):
        run_sync(selftest(LiesOnce(gpu.device(), lambda value: value + 1)))


def test_no_model_is_loaded_on_a_gpu_that_computes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Liar(NativeDevice(adapters()[0]), lambda value: -value)
    monkeypatch.setattr("webgemma.device.open_device", lambda *_, **__: liar)
    with pytest.raises(DeviceError, match="computes wrong values"):
        Gemma.load(None, "gpu")
    assert liar.closed
    liar._device.close()
