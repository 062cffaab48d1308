"""LoRA adapters as names of their own: applied for their requests, and for no others."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import Live, live_server, tiny_model
from helpers.tiny_adapter import tiny_adapter, tiny_pairs

from webgemma import Gemma, InputError
from webgemma.engine.batching import Batch
from webgemma.gguf.reader import Gguf
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.peft_folder import write_peft_folder
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


def test_requests_for_different_adapters_do_not_wait(
    folder: Path, expected: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are computed in the same steps."""
    adapters = [f"one={folder / 'one'}", f"two={folder / 'two.gguf'}:0.5"]
    steps, compute = list[int](), Batch._compute

    async def computing(batch: Batch, lines: list[Any], kind: Any) -> bool:
        choices = {str(line.generation.session.choice) for line in lines}  # type: ignore[attr-defined]
        steps.append(len(choices))
        return await compute(batch, lines, kind)

    monkeypatch.setattr(Batch, "_compute", computing)
    options = {"device": "gpu", "kv": "f32", "precision": "exact"}
    with live_server(folder / "small.gguf", adapters=adapters, **options) as server:
        names = ["one", "small", "two"]
        with ThreadPoolExecutor(len(names)) as pool:
            for _ in range(3):
                found = list(pool.map(lambda name: logprobs(server, name), names))
                for name, values in zip(names, found, strict=True):
                    assert_same(values, expected[name])
    assert max(steps) == len(names)


def test_tokens_need_no_adapter(live: Live) -> None:
    for name in ("one", "small", ""):
        answer = live.post("/tokenize", {"model": name, "content": "a b c"})
        assert answer.json()["tokens"]


def test_an_adapter_that_is_gone_is_an_error_of_loading(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", tmp_path / "one")
    with live_server(folder / "small.gguf", adapters=[f"one={tmp_path / 'one'}"]) as server:
        shutil.move(tmp_path / "one", tmp_path / "gone")
        answer = server.post("/v1/completions", {**BODY, "model": "small"})
        assert answer.status_code >= 400
        assert not server.registry.loaded()
        shutil.move(tmp_path / "gone", tmp_path / "one")
        assert logprobs(server, "one")


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
