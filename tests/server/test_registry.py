"""Models by name: those given, Ollama's, the bundled one; loaded on demand."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import tiny_model
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf

from webgemma.api import Gemma
from webgemma.errors import DeviceMemoryError, GgufError, InputError, ModelNotFoundError
from webgemma.gguf.ollama import OllamaStore
from webgemma.server import loading
from webgemma.server import registry as registry_module
from webgemma.server.engine import Engine
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
        others = []
        for name in ("two", "one", "two"):
            others.append(asyncio.create_task(ask(name)))
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


def test_an_idle_model_is_prepared_for_structured_output(
    two: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while it is loaded or used, and only once; closing does not wait for it."""
    monkeypatch.setattr(loading, "PREPARE_SECONDS", 0.05)
    prepared: list[bool] = []
    held = asyncio.Event()

    async def prepare(_: Engine) -> None:
        prepared.append(any(model.users for model in two.loaded()))
        await held.wait()

    monkeypatch.setattr(Engine, "prepare", prepare)

    async def main() -> None:
        async with two.use("one"):
            await asyncio.sleep(0.15)
            assert prepared == []
        async with two.use("one"):  # not idle for long enough
            await asyncio.sleep(0.1)
        assert prepared == []
        await asyncio.sleep(0.15)
        assert prepared == [False]
        async with two.use("one"):
            pass
        await asyncio.sleep(0.15)
        assert prepared == [False]
        (model,) = two.loaded()
        async with asyncio.timeout(30):
            await two.close()
        assert model.preparing is not None
        await asyncio.wait([model.preparing])
        assert model.preparing.cancelled()

    asyncio.run(main())


def test_what_is_prepared_is_used(two: Registry) -> None:
    async def main() -> None:
        async with two.use("one") as engine:
            await engine.prepare()
            compiler: Any = engine.model._structures.compiler
            assert compiler._prepared is not None
        await two.close()

    asyncio.run(main())


def test_without_llguidance_nothing_is_prepared(
    two: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def main() -> None:
        async with two.use("one") as engine:
            await engine.prepare()
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
        failing: Any = two._loaded.options
        failing["context"] = 10**9
        for _ in range(2):
            with pytest.raises(RequestError, match="context") as wrong:
                await two.use("one").__aenter__()
            assert wrong.value.status == 500  # it is not the client's
        assert not two.is_loading
        failing["context"] = None
        async with two.use("one") as engine:
            assert engine.model.context == 512
        await two.close()

    asyncio.run(main())


# Several at once


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    return [str(tiny_model(tmp_path, name)) for name in ("one", "two", "three")]


async def touch(registry: Registry, *names: str, **keep: float) -> None:
    for name in names:
        async with registry.use(name, **keep):
            pass


def nbytes(registry: Registry) -> int:
    """What the first model takes by the estimate."""
    return registry.find("one").memory_budget({}).nbytes("device")


def test_several_models_stay_until_another_needs_the_room(three: list[str]) -> None:
    async def main() -> None:
        registry = Registry(three, device="cpu", max_loaded=2)
        await touch(registry, "one", "two")
        assert loaded(registry) == ["two", "one"]
        assert registry.find("").name == "two"
        await touch(registry, "one", "three")  # of two idle ones the least recently used one leaves
        assert loaded(registry) == ["three", "one"]
        async with registry.use("one"):
            await touch(registry, "two")  # one is in use, so three leaves, which was used later
            assert loaded(registry) == ["two", "one"]
        await registry.close()
        assert loaded(registry) == []

    asyncio.run(main())


def test_a_budget_of_memory(three: list[str]) -> None:
    async def main() -> None:
        registry = Registry(three, device="cpu")
        needed = nbytes(registry)
        registry = Registry(three, device="cpu", memory_gb=2.5 * needed / 1e9)
        await touch(registry, "one", "two")
        assert loaded(registry) == ["two", "one"]
        await touch(registry, "three")
        assert loaded(registry) == ["three", "two"]
        await registry.close()
        exact = Registry(three, device="cpu", memory_gb=needed / 1e9, max_loaded=3)
        await touch(exact, "one", "two")
        assert loaded(exact) == ["two"]
        await exact.close()

    asyncio.run(main())


def test_a_model_that_cannot_fit_is_refused_with_numbers(three: list[str]) -> None:
    async def main() -> None:
        budget = Registry(three).find("one").memory_budget({})
        least = budget.nbytes("host")
        registry = Registry(three, device="cpu", memory_gb=(least - 1) / 1e9)
        for _ in range(2):
            with pytest.raises(
                RequestError, match=r"needs .* GB for weights.*--memory-gb"
            ) as error:
                await touch(registry, "one")
            assert error.value.status == 500
        assert not registry.is_loading
        registry = Registry(three, device="cpu", memory_gb=least / 1e9)  # without its table
        await touch(registry, "one")
        assert least < budget.nbytes("device")
        await registry.close()

    asyncio.run(main())


@pytest.mark.parametrize(("room", "slots"), [(0, 1), (2.5, 3), (50, 6)])
def test_a_limit_says_how_many_slots_a_model_gets(
    three: list[str], monkeypatch: pytest.MonkeyPatch, room: float, slots: int
) -> None:
    given: list[int] = []
    real = Gemma.aload

    async def load(found: Any, **options: Any) -> Gemma:
        given.append(options["slots"])
        return await real(found, device="cpu")

    async def main() -> None:
        budget = Registry(three).find("one").memory_budget({})
        most = budget.nbytes("device") + room * budget.cache_nbytes
        registry = Registry(three, slots=6, memory_gb=(most + 1) / 1e9)
        sentence = registry.memory_sentences()["one"]
        assert (f" for {slots} conversations at once (slots), " in sentence) is (slots > 1)
        assert "up to" not in sentence
        await touch(registry, "one")
        assert given == [slots]
        assert registry.loaded()[0].estimate == budget.nbytes("device") + (
            (slots - 1) * budget.cache_nbytes
        )
        await registry.close()

    monkeypatch.setattr(loading.Gemma, "aload", load)
    asyncio.run(main())


def test_what_a_model_takes_is_logged_before_it_is_loaded(
    three: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError, match="a whole number from 1 to 64"):
        Registry(three, slots=65)
    caplog.set_level("INFO", "webgemma.server")
    registry = Registry(three[:1], memory_gb=1)
    assert registry.memory_sentences()["one"].startswith("0.001")

    async def main() -> None:
        cpu = Registry(three, device="cpu", context=64)
        await touch(cpu, "two")
        await cpu.close()

    asyncio.run(main())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "two is being loaded: 0.00111 GB for weights and 1.64e-05 GB for a cache of 64 tokens."
    )


class Slow:
    """Loads models only when it is let to; some devices have no room for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.room = 99  # models that the device has memory for
        self.loaded = 0
        self.real = Gemma.aload
        monkeypatch.setattr(loading.Gemma, "aload", self.load)

    async def load(self, found: Any, **options: Any) -> Gemma:
        self.begun.append(found.label)
        await self.go.wait()
        if self.loaded == self.room:
            raise DeviceMemoryError("The GPU has no memory left.", 1)
        self.loaded += 1
        model = await self.real(found, **options)
        close = model.close

        def closing() -> None:
            self.loaded -= 1
            close()

        model.close = closing  # type: ignore[method-assign]
        return model


def test_only_those_wait_who_need_the_model_that_is_loading(
    three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        registry = Registry(three, device="cpu", max_loaded=2)
        await touch(registry, "one")
        assert not registry.is_loading
        slow = Slow(monkeypatch)
        waiting = [asyncio.create_task(touch(registry, "two")) for _ in range(3)]
        behind = asyncio.create_task(touch(registry, "three"))
        while not slow.begun:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(touch(registry, "one"), 30)
        assert not registry.is_loading  # one answers
        assert not any(task.done() for task in (*waiting, behind))
        waiting[0].cancel()  # who leaves does not end it for others
        slow.go.set()
        await asyncio.gather(*waiting[1:], behind)
        assert slow.begun == ["two.gguf", "three.gguf"]
        assert sorted(loaded(registry)) in (["one", "three"], ["three", "two"])
        await registry.close()

    asyncio.run(main())


def test_a_model_that_nobody_waits_for_is_not_loaded(
    three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        registry = Registry(three, device="cpu")
        slow = Slow(monkeypatch)
        tasks = [asyncio.create_task(touch(registry, "two")) for _ in range(2)]
        while not slow.begun:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        slow.go.set()
        await asyncio.wait_for(touch(registry, "two"), 30)
        assert slow.begun == ["two.gguf"] * 2
        assert (slow.loaded, registry.requests) == (1, 0)
        slow.go.clear()
        stopped = [asyncio.create_task(touch(registry, name)) for name in ("one", "three")]
        while len(slow.begun) < 3:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(registry.close(), 5)
        for task in stopped:
            with pytest.raises(RequestError, match="stopping"):
                await task
        assert (slow.loaded, len(slow.begun)) == (0, 3)

    asyncio.run(main())


def test_a_device_with_less_memory_than_the_limits(
    three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """WebGPU does not say how much there is, so that it is found out by trying."""

    async def main() -> None:
        registry = Registry(three, device="cpu", max_loaded=3)
        slow = Slow(monkeypatch)
        slow.go.set()
        slow.room = 1
        await touch(registry, "one", "two")
        assert loaded(registry) == ["two"]
        async with registry.use("two"):
            waiting = asyncio.create_task(touch(registry, "one"))
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(touch(registry, "two"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert not behind.done()
        await asyncio.wait_for(asyncio.gather(waiting, behind), 30)
        assert loaded(registry) == ["two"]
        await registry.unload("two")
        slow.room = 0
        with pytest.raises(RequestError, match="no memory left") as refusal:
            await touch(registry, "one")
        assert refusal.value.status == 500
        await registry.close()
        assert slow.loaded == 0

    asyncio.run(main())


def test_nobody_waits_for_ever(three: list[str]) -> None:
    """Those who come later do not keep a model in memory that another one waits for."""

    async def main() -> None:
        registry = Registry(three, device="cpu", max_loaded=2)
        free = {name: asyncio.Event() for name in ("one", "two")}
        using = []

        async def hold(name: str) -> None:
            async with registry.use(name):
                await free[name].wait()

        for name in free:
            using.append(asyncio.create_task(hold(name)))
            while name not in loaded(registry):
                await asyncio.sleep(0.01)
        third = asyncio.create_task(touch(registry, "three"))
        await asyncio.sleep(0.05)
        later = asyncio.create_task(touch(registry, "one"))  # used least recently: it has to leave
        await asyncio.wait_for(touch(registry, "two"), 30)
        assert not third.done()
        assert not later.done()
        free["two"].set()  # but this one is idle first
        await asyncio.wait_for(asyncio.gather(using[1], third), 30)
        await asyncio.wait_for(later, 30)
        assert sorted(loaded(registry)) == ["one", "three"]
        free["one"].set()
        await using[0]
        await registry.close()

    asyncio.run(main())


def test_each_model_has_its_own_time(three: list[str]) -> None:
    async def main() -> None:
        registry = Registry(three, device="cpu", max_loaded=3, keep_seconds=3600)
        await touch(registry, "one", keep_seconds=0.05)
        await touch(registry, "two")
        async with registry.use("three"):
            await registry.unload("three")
            await registry.unload("one")
            assert loaded(registry) == ["three", "two"]  # in use, it stays until it is not
        async with asyncio.timeout(30):
            while len(registry.running()) > 1:
                await asyncio.sleep(0.01)
        assert loaded(registry) == ["two"]
        await registry.close()

    asyncio.run(main())
