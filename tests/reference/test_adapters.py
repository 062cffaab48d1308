"""Adapters in the reference against PEFT, transformers, autograd and llama.cpp."""

from pathlib import Path

import numpy as np
import pytest
from conftest import FIXTURES, needs_shared
from helpers.adapter_cases import CASES, LLAMA_CASES
from helpers.tiny_adapter import tiny_adapter, tiny_pairs
from tolerance import GRADIENTS_OF_TRANSFORMERS, LOGITS_OF_LLAMA_CPP, LOGITS_OF_TRANSFORMERS

from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.safetensors import Safetensors
from webgemma.lora.adapter import Adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.reference import text
from webgemma.reference.backward import Backward, Example
from webgemma.reference.lora import AdaptedWeights, Pair
from webgemma.reference.text import TextModel, gelu
from webgemma.reference.weights import Weights

NAMES = [
    pytest.param(name, marks=[needs_shared] if name.startswith("shared") else []) for name in CASES
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_agree_with_transformers(name: str, tmp_path: Path) -> None:
    case, recorded = CASES[name], np.load(FIXTURES / "lora" / f"{name}.npz")
    gguf = Gguf.open(case.path(tmp_path))
    pairs = tiny_pairs(gguf, case.targets)
    config = Config.from_gguf(gguf)
    adapted = TextModel(config, AdaptedWeights(gguf, [pairs]))
    logits = adapted.forward(case.ids)[case.first_logits :]
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=LOGITS_OF_TRANSFORMERS)

    backward = Backward(TextModel(config, Weights(gguf)), pairs)
    loss, gradients = backward.gradients([Example(case.ids, case.supervised)])
    assert loss == pytest.approx(float(recorded["loss"]), rel=1e-5)
    found = in_peft_layout(gradients, tmp_path)
    expected = [key for key in recorded.files if "lora_" in key]
    assert len(expected) >= 12
    for key in expected:
        bound = GRADIENTS_OF_TRANSFORMERS * np.abs(recorded[key]).max()
        assert bound > 0, key
        np.testing.assert_allclose(found[key], recorded[key], rtol=0, atol=bound, err_msg=key)


def in_peft_layout(
    gradients: dict[str, tuple[np.ndarray, np.ndarray]], folder: Path
) -> dict[str, np.ndarray]:
    """Return gradients under PEFT's names and in its shapes, written and read as an adapter."""
    pairs = {name: Pair(da, db, 1.0) for name, (da, db) in gradients.items()}
    adapter: Adapter = tiny_adapter(pairs)
    write_peft_folder(adapter, folder / "gradients", text_only=True)
    with Safetensors.open(folder / "gradients" / "adapter_model.safetensors") as file:
        return {
            name: np.frombuffer(file.read(name), "<f4").reshape(file.shape(name))
            for name in file.names
        }


@pytest.mark.parametrize("name", LLAMA_CASES)
def test_gguf_adapters_agree_with_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "gelu", llama_gelu)
    recorded = np.load(FIXTURES / "lora" / f"llama_{name}.npz")
    case, targets = CASES[name], LLAMA_CASES[name]
    gguf = Gguf.open(case.path(tmp_path))
    first, second = (tiny_pairs(gguf, targets, seed=seed) for seed in (1, 2))
    half, quarter = (
        {key: pair._replace(scale=factor * pair.scale) for key, pair in pairs.items()}
        for pairs, factor in ((first, 0.5), (second, -0.25))
    )
    for key, adapters in {"plain": [], "one": [first], "two": [half, quarter]}.items():
        adapted = TextModel(Config.from_gguf(gguf), AdaptedWeights(gguf, adapters))
        logits = adapted.forward(case.ids)[-2:]
        assert np.sqrt(np.mean(np.square(logits - recorded[key]))) < LOGITS_OF_LLAMA_CPP
        assert key == "plain" or np.abs(logits - recorded["plain"]).max() > 1


def llama_gelu(x: np.ndarray) -> np.ndarray:
    """Return GELU as llama.cpp computes it, from a table of float16."""
    halves = gelu(x.astype(np.float16).astype(np.float32)).astype(np.float16)
    return np.where(x <= -10, 0, np.where(x >= 10, x, halves.astype(np.float32)))
