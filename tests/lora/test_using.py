"""Adapters of a loaded model: applied when loading and by the command line, replaced, removed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny import MOE, SMALL, tiny_gguf
from helpers.tiny_adapter import tiny_adapter, tiny_pairs
from tolerance import GPU_LOGITS
from typer.testing import CliRunner

from webgemma import Gemma
from webgemma.cli.program import app
from webgemma.errors import InputError, ModelNotFoundError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.loading import open_adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.reference.lora import AdaptedWeights
from webgemma.reference.text import TextModel

IDS = [2, *(24 + i * 7 % 280 for i in range(1, 12))]
TARGETS = ("attn_q", "ffn_down", "token_embd.weight", "output.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model and two adapters, one as PEFT writes it and one as GGUF."""
    path = tmp_path_factory.mktemp("lora")
    (path / "model.gguf").write_bytes(tiny_gguf(SMALL))
    gguf = Gguf.open(path / "model.gguf")
    write_peft_folder(tiny_adapter(tiny_pairs(gguf, TARGETS)), path / "peft")
    write_gguf_adapter(tiny_adapter(tiny_pairs(gguf, TARGETS, seed=2)), path / "other.gguf")
    return path


def expected(folder: Path, *scales: float) -> np.ndarray:
    """Return the logits of the reference, with these scales of the two adapters."""
    gguf = Gguf.open(folder / "model.gguf")
    adapters = [
        {name: pair._replace(scale=scale * pair.scale) for name, pair in pairs.items()}
        for scale, pairs in zip(
            scales, (tiny_pairs(gguf, TARGETS, seed=seed) for seed in (1, 2)), strict=False
        )
    ]
    return TextModel(Config.from_gguf(gguf), AdaptedWeights(gguf, adapters)).forward(IDS)


def has_logits(gemma: Gemma, expected: np.ndarray) -> bool:
    logits = np.asarray(gemma.logits(IDS))
    return bool(np.abs(logits - expected).max() <= GPU_LOGITS * np.abs(expected).max())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_adapters_are_applied_replaced_and_removed(folder: Path, device: str) -> None:
    with Gemma.load(folder / "model.gguf", device, kv="f32", lora=folder / "peft") as gemma:
        assert has_logits(gemma, expected(folder, 1.0))
        greedy = gemma.generate(IDS, max_tokens=3, temperature=0)
        list(greedy)
        gemma.set_lora([f"{folder / 'peft'}:0.5", (folder / "other.gguf", -0.25)])
        assert has_logits(gemma, expected(folder, 0.5, -0.25))
        gemma.set_lora(open_adapter(folder / "other.gguf"))
        assert has_logits(gemma, expected(folder, 0.0, 1.0))
        gemma.set_lora(None)
        assert has_logits(gemma, expected(folder))


def said(gemma: Gemma, **options: Any) -> list[float]:
    pieces = gemma.generate(IDS, max_tokens=4, temperature=0, **options)
    return [piece.logprob for piece in pieces]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_call_chooses_among_attached_adapters(folder: Path, device: str) -> None:
    one, two = folder / "peft", f"{folder / 'other.gguf'}:0.5"
    with Gemma.load(folder / "model.gguf", device, kv="f32") as gemma:
        alone = []
        for lora in (None, one, two, [(one, 0.5), (folder / "other.gguf", -1.0)]):
            gemma.set_lora(lora)
            alone.append(said(gemma))
        gemma.set_lora(None)
        gemma.attach_lora({"one": one, "two": two})
        assert has_logits(gemma, expected(folder))
        both = {"one": 0.5, "two": -2.0}
        for _ in range(2):
            for number, lora in enumerate((None, "one", {"two": 1}, both)):
                assert said(gemma, lora=lora) == pytest.approx(alone[number], abs=2e-4)
        assert said(gemma, lora={"one": 0.0}) == pytest.approx(alone[0], abs=2e-4)
        gemma.set_lora((folder / "other.gguf", -1.0))  # beside which they stay
        assert said(gemma, lora={"one": 0.5}) == pytest.approx(alone[3], abs=2e-4)
        assert has_logits(gemma, expected(folder, 0.0, -1.0))
        gemma.attach_lora({})
        gemma.set_lora(None)
        with pytest.raises(InputError, match="no adapter 'one'; those attached: none"):
            said(gemma, lora="one")
        assert said(gemma) == pytest.approx(alone[0], abs=2e-4)


def test_wrong_choices_of_adapters(folder: Path) -> None:
    with Gemma.load(folder / "model.gguf", "cpu") as gemma:
        gemma.attach_lora({"one": folder / "peft"})
        wrong: list[tuple[Any, str]] = [
            ("two", "no adapter 'two'; those attached: one"),
            (3, "the name of an adapter"),
            ({"one": "much"}, "must be a number, not 'much'"),
            ({"one": float("nan")}, "must be a number, not nan"),
        ]
        for lora, message in wrong:
            with pytest.raises(InputError, match=message):
                said(gemma, lora=lora)
            with pytest.raises(InputError, match=message):
                list(gemma.chat("hello", lora=lora))
            with pytest.raises(InputError, match=message):
                list(gemma.batch(["hello"], lora=lora))
        attached: list[tuple[Any, str]] = [
            ([folder / "peft"], "a dict of names and adapters"),
            ({"": folder / "peft"}, "must be a text"),
            ({"two": [folder / "peft", folder / "peft"]}, "given to 2 adapters"),
            ({"two": None}, "given to 0 adapters"),
        ]
        for adapters, message in attached:
            with pytest.raises(InputError, match=message):
                gemma.attach_lora(adapters)
        assert said(gemma, lora="one") != said(gemma)


def test_invalid_adapters_raise_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "moe.gguf").write_bytes(tiny_gguf(MOE))
    with pytest.raises(InputError, match="belongs to another model"):
        Gemma.load(tmp_path / "moe.gguf", "cpu", lora=[folder / "peft"])
    with Gemma.load(folder / "model.gguf", "cpu") as gemma:
        for invalid, message in (
            (3, "must be a path, not int"),
            ((folder / "peft", "much"), "must be a number, not 'much'"),
            ((folder / "peft", float("nan")), "must be a number, not nan"),
        ):
            with pytest.raises(InputError, match=message):
                gemma.set_lora(invalid)  # type: ignore[arg-type]
        with pytest.raises(ModelNotFoundError, match="no file"):
            gemma.set_lora("nowhere:0.5")
        assert has_logits(gemma, expected(folder))


@pytest.mark.parametrize("adapter", ["peft:1", "peft"])
def test_the_command_line_applies_adapters(
    folder: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    fixed = ["--device", "cpu", "--raw", "--max-tokens", "4", "--temperature", "0", "--json"]
    texts = []
    for more in (["--lora", adapter], []):
        result = CliRunner().invoke(app, ["run", "model.gguf", "the inner", *fixed, *more])
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    with Gemma.load("model.gguf", "cpu", lora="peft") as gemma:
        pieces = gemma.generate("the inner", max_tokens=4, temperature=0)
        assert "".join(piece.text for piece in pieces) == texts[0]
    assert texts[0] != texts[1]
