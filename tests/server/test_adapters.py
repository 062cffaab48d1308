"""LoRA adapters as names of their own: applied for their requests, and for no others."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import Live, live_server, tiny_model
from helpers.tiny_adapter import tiny_adapter, tiny_pairs

from webgemma import Gemma, InputError
from webgemma.gguf.reader import Gguf
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.server.adapters import Adapters
from webgemma.server.registry import Registry

TARGETS = ("attn_q", "ffn_down", "token_embd.weight", "output.weight")
BODY: dict[str, Any] = {"prompt": "a b c", "temperature": 0, "max_tokens": 8, "logprobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    with Gguf.open(tiny_model(path)) as gguf:
        write_peft_folder(tiny_adapter(tiny_pairs(gguf, TARGETS)), path / "one")
        write_gguf_adapter(tiny_adapter(tiny_pairs(gguf, TARGETS, seed=2)), path / "two.gguf")
    return path


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    adapters = [f"One={folder / 'one'}", f"two={folder / 'two.gguf'}:0.5"]
    with live_server(folder / "small.gguf", adapters=adapters) as server:
        yield server


def logprobs(live: Live, model: str) -> list[float]:
    answer = live.post("/v1/completions", {**BODY, "model": model})
    assert answer.status_code == 200, answer.text
    values: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return values


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[float]]:
    """The log-probabilities of each name, of the model alone with its adapter."""
    names = {"small": None, "one": folder / "one", "two": f"{folder / 'two.gguf'}:0.5"}
    found = {}
    with Gemma.load(folder / "small.gguf", "cpu") as gemma:
        for name, lora in names.items():
            gemma.set_lora(lora)
            pieces = gemma.generate("a b c", temperature=0, max_tokens=8, top_logprobs=1)
            found[name] = [piece.logprob for piece in pieces]
    assert len({tuple(values) for values in found.values()}) == 3
    return found


def assert_same(found: list[float], expected: list[float]) -> None:
    """Compare log-probabilities; the server reports none of a token without text."""
    assert len(found) >= 6
    assert found == pytest.approx(expected[: len(found)], abs=1e-4)


def test_each_name_has_its_own_replies(live: Live, expected: dict[str, list[float]]) -> None:
    for name in ("one", "small", "two", "one", "small"):
        assert_same(logprobs(live, name), expected[name])
    listed = [model["id"] for model in live.http.get("/v1/models").json()["data"]]
    assert listed == ["small", "One", "two"]
    assert len(live.registry.loaded()) == 1  # the weights are there once


def test_requests_for_all_of_them_at_once(live: Live, expected: dict[str, list[float]]) -> None:
    names = ["one", "small", "two"] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: logprobs(live, name), names))
    for name, values in zip(names, found, strict=True):
        assert_same(values, expected[name])


def test_tokens_need_no_adapter(live: Live) -> None:
    (loaded,) = live.registry.loaded()
    assert loaded.engine is not None
    logprobs(live, "two")
    for name in ("one", "small", ""):
        answer = live.post("/tokenize", {"model": name, "content": "a b c"})
        assert answer.json()["tokens"]
    assert str(loaded.engine.adapters._applied).endswith("two.gguf:0.5")


def test_who_needs_another_waits_and_nobody_for_ever() -> None:
    class Model:
        def __init__(self) -> None:
            self.applied: list[Any] = []

        def set_lora(self, lora: Any) -> None:
            self.applied.append(lora)

    model: Any = Model()
    order: list[str] = []

    async def main() -> None:
        adapters = Adapters(model, ["always"])
        begun, end = asyncio.Event(), asyncio.Event()

        async def use(adapter: str) -> None:
            async with adapters.applied(adapter):
                order.append(adapter)
                begun.set()
                await end.wait()

        tasks = [asyncio.create_task(use("a")) for _ in range(2)]
        await begun.wait()
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(use(adapter)) for adapter in ("b", "a", "")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a", "a"]  # the third one waits behind who needs another
        end.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order == ["a", "a", "b", "a", ""]
    assert model.applied == [["always", "a"], ["always", "b"], ["always", "a"], ["always"]]


def test_an_adapter_that_cannot_be_applied_is_tried_again() -> None:
    class Model:
        fails = True

        def set_lora(self, _: Any) -> None:
            if self.fails:
                raise InputError("It cannot be read.")

    model: Any = Model()

    async def main() -> None:
        adapters = Adapters(model)
        with pytest.raises(InputError, match="cannot be read"):
            async with adapters.applied("a"):
                pass
        model.fails = False
        async with adapters.applied(""), adapters.applied(""):
            pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("models", "adapters", "sentence"),
    [
        (["small.gguf"], ["one"], "NAME=PATH"),
        (["small.gguf"], ["=one"], "NAME=PATH"),
        (["small.gguf"], ["a b=one"], "NAME=PATH"),
        (["small.gguf"], ["small=one"], "small would name two of the adapters"),
        ([], ["a=one"], "belong to one model"),
        (["small.gguf", "-"], ["a=one"], "belong to one model"),
    ],
)
def test_wrong_adapters(
    models: list[str], adapters: list[str], sentence: str, folder: Path
) -> None:
    named = [text.replace("=one", f"={folder / 'one'}") for text in adapters]
    with pytest.raises(InputError, match=sentence):
        Registry(
            [str(folder / model) if model != "-" else model for model in models], adapters=named
        )
