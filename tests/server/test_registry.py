"""Models by name: those given, Ollama's, the bundled one; loaded on demand, one at a time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import tiny_model
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf

from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf.ollama import OllamaStore
from webgemma.server import registry as registry_module
from webgemma.server.protocol import RequestError
from webgemma.server.registry import Registry


@pytest.fixture
def two(tmp_path: Path) -> Registry:
    paths = [tiny_model(tmp_path, name) for name in ("one", "two")]
    return Registry([str(path) for path in paths], device="cpu")


def loaded(registry: Registry) -> list[str]:
    return [model.entry.name for model in registry.running()]


def test_without_models_the_bundled_one_and_ollamas(tmp_path: Path) -> None:
    add_model(tmp_path, "tiny:e2b", gguf=tiny_gguf(SMALL))
    registry = Registry(store=OllamaStore(tmp_path), device="cpu")
    assert [entry.name for entry in registry.entries()] == ["demo", "tiny:e2b"]
    assert registry.find("").name == "demo"
    for name in ("tiny:e2b", "TINY:E2B", "library/tiny:e2b"):
        assert registry.find(name).name == "tiny:e2b"
    _, gguf, capabilities = registry.describe("tiny:e2b")
    gguf.close()
    assert "completion" in capabilities
    add_model(tmp_path, "later:latest", gguf=tiny_gguf(SMALL))
    assert registry.find("later").name == "later:latest"

    async def use() -> None:
        async with registry.use("tiny:e2b") as engine:
            assert engine.model.name == "tiny:e2b"
        await registry.close()

    asyncio.run(use())


def test_models_that_are_given_are_the_only_ones(two: Registry, tmp_path: Path) -> None:
    assert [entry.name for entry in two.entries()] == ["one", "two"]
    for name in ("One", "one:latest"):
        assert two.find(name).name == "one"
    for name in (
        "demo",
        "one.gguf",
        str(tmp_path / "one.gguf"),
        "../one",
        "one:other",
        "-",
        " one",
    ):
        with pytest.raises(RequestError, match="not found") as missing:
            two.find(name)
        assert missing.value.status == 404


def test_a_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file of that name is beside the server."""
    tiny_model(tmp_path, "secret")
    monkeypatch.chdir(tmp_path)
    registry = Registry(store=OllamaStore(tmp_path / "store"))
    for name in ("secret.gguf", "./secret.gguf", str(tmp_path / "secret.gguf"), "file:secret.gguf"):
        with pytest.raises(RequestError, match="not found"):
            registry.find(name)


def test_what_cannot_be_offered_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"not a model")
    with pytest.raises(GgufError):
        Registry([str(tmp_path / "wrong.gguf")])
    with pytest.raises(ModelNotFoundError):
        Registry([str(tmp_path / "missing.gguf")])
    with pytest.raises(InputError, match="download it"):
        Registry(["https://example.com/model.gguf"])
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InputError, match="rename"):
        Registry([str(tiny_model(tmp_path)), str(tiny_model(other))])


def test_one_model_at_a_time_first_come_first_served(two: Registry) -> None:
    order = []

    async def ask(name: str, waits: asyncio.Event | None = None) -> None:
        async with two.use(name):
            order.append(name)
            assert loaded(two) == [name]
            if waits:
                await waits.wait()

    async def main() -> None:
        free = asyncio.Event()
        first = asyncio.create_task(ask("one", free))
        while not order:
            await asyncio.sleep(0.01)
        beside = asyncio.create_task(ask("one"))  # it is loaded: at once
        await beside
        others = [asyncio.create_task(ask(name)) for name in ("two", "one", "two")]
        await asyncio.sleep(0.05)
        assert order == ["one", "one"]
        others[2].cancel()  # a client that leaves the queue
        free.set()
        await asyncio.gather(first, *others[:2])
        assert order == ["one", "one", "two", "one"]
        await two.close()
        assert loaded(two) == []

    asyncio.run(main())


def test_keep_alive(two: Registry) -> None:
    async def main() -> None:
        async with two.use("one", 3600):
            pass
        assert loaded(two) == ["one"]
        async with two.use("one", float("inf")):
            pass
        assert two.running()[0].expires == float("inf")
        async with two.use("one", 0.01):
            pass
        async with asyncio.timeout(30):
            while two.running():
                await asyncio.sleep(0.01)
        async with two.use("one", 0.0):
            await asyncio.sleep(0.05)  # in use, it stays
            assert loaded(two) == ["one"]
        async with two.use("one", 1e30):  # again, before it was unloaded
            pass
        await asyncio.sleep(0.05)
        assert loaded(two) == ["one"]
        await two.unload("two")
        assert loaded(two) == ["one"]
        await two.unload("one")
        assert loaded(two) == []
        await two.close()

    asyncio.run(main())


def test_a_full_queue_is_said(two: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_REQUESTS", 2)

    async def main() -> None:
        async with two.use("one"), two.use("one"):
            with pytest.raises(RequestError, match="queue is full") as full:
                await two.use("one").__aenter__()
            assert full.value.status == 503
        async with two.use("one"):
            pass
        await two.close()

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_leaves_no_trace(two: Registry) -> None:
    async def main() -> None:
        failing: Any = two._options
        failing["context"] = 10**9
        for _ in range(2):
            with pytest.raises(InputError, match="context"):
                await two.use("one").__aenter__()
        assert not two.is_loading
        failing["context"] = None
        async with two.use("one") as engine:
            assert engine.model.context == 512
        await two.close()

    asyncio.run(main())
