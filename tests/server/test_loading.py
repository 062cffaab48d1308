"""Models that come and go under clients that leave at any moment: none stays, none is missed."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import tiny_model

from webgemma.errors import DeviceMemoryError, InputError
from webgemma.server import loading
from webgemma.server.protocol import RequestError
from webgemma.server.registry import Registry

MODELS, CLIENTS, REQUESTS = 6, 12, 15


class Device:
    """Stands in for the GPU: it has room for some models, and loading fails now and then."""

    def __init__(self, chance: random.Random, room: int) -> None:
        self.chance, self.room = chance, room
        self.models: set[object] = set()
        self.most = 0

    async def aload(self, _found: Any, **_options: Any) -> "Model":
        await asyncio.sleep(self.chance.random() * 0.01)
        if len(self.models) >= self.room:
            raise DeviceMemoryError("It is full.", 1)
        if self.chance.random() < 0.05:
            raise InputError("It is damaged.")
        return Model(self)


class Model:
    """A model on that device."""

    memory_nbytes, context = 0, 1

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_closed = False
        device.models.add(self)
        device.most = max(device.most, len(device.models))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        time.sleep(0.001)
        self.device.models.remove(self)


async def client(registry: Registry, chance: random.Random) -> list[str]:
    """Use models for a while; return what became of the requests."""
    outcomes = []
    for _ in range(REQUESTS):
        try:
            async with asyncio.timeout(chance.choice([0.003, 0.01, 30])):
                name = f"m{int(MODELS * chance.random() ** 2)}"
                if chance.random() < 0.05:
                    await registry.unload(name)
                    continue
                async with registry.use(name, chance.choice([None, 0, 1])) as engine:
                    model: Any = engine.model
                    assert not model.is_closed
                    await asyncio.sleep(chance.random() * 0.004)
                    assert not model.is_closed
                outcomes.append("served")
        except TimeoutError:
            outcomes.append("left")
        except (InputError, RequestError) as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("seed", range(6))
def test_no_model_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    device = Device(chance, room=(9, 2, 1)[seed % 3])
    monkeypatch.setattr(loading, "Gemma", device)
    paths = [str(tiny_model(tmp_path, f"m{n}")) for n in range(MODELS)]
    limits: dict[str, Any] = {"max_loaded": 1 + seed % 3}
    if seed % 2:
        needed = Registry(paths).find("m0").memory_budget({}).nbytes("device")
        limits = {"memory_gb": (1.5 + seed % 3) * needed / 1e9}

    async def main() -> None:
        registry = Registry(paths, keep_seconds=chance.choice([0.005, 3600]), **limits)
        clients = [client(registry, chance) for _ in range(CLIENTS)]
        async with asyncio.timeout(30):
            outcomes = [each for some in await asyncio.gather(*clients) for each in some]
        assert outcomes.count("served") > 20
        assert set(outcomes) <= {"served", "left", "It is damaged."}  # memory is waited for
        assert registry.requests == 0
        assert all(model.users == 0 for model in registry.loaded())
        assert len(registry.loaded()) <= len(device.models) <= 1 + seed % 3
        await registry.close()
        assert not device.models
        assert device.most <= 1 + seed % 3

    asyncio.run(main())
