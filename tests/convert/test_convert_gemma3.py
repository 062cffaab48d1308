"""Conversion of a Gemma 3 in Hugging Face's layout: norms, old and new keys, tokenizer, errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert.test_convert import hugging_face_name, safetensors
from helpers.sessions import open_tiny
from helpers.tiny import GEMMA3, LETTERS, MERGES, RUNS, Tiny, gemma3_vocabulary, tiny_tensors

from webgemma.convert import convert
from webgemma.errors import GgufError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.text.tokenizer import Tokenizer

IDS = [2, *range(40, 60)]
FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
NEW: dict[str, Any] = {
    "layer_types": [
        "full_attention" if kind == "f" else "sliding_attention" for kind in GEMMA3.pattern
    ],
    "rope_parameters": {"full_attention": FULL, "sliding_attention": {"rope_theta": 1e4}},
    "query_pre_attn_scalar": 32,
}
OLD: dict[str, Any] = {
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "final_logit_softcapping": None,
}
LEAST: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}


def write_folder(
    folder: Path, text: dict[str, Any], stem: str = "model.", tiny: Tiny = GEMMA3
) -> Path:
    """Write the tiny model as transformers does: norms are less by 1."""
    tensors = {}
    for tensor in tiny_tensors(tiny):
        if tensor.name.endswith("norm.weight"):
            less = np.frombuffer(tensor.data, "<f4") - np.float32(1)
            tensor = replace(tensor, data=less.tobytes())
        tensors[hugging_face_name(tensor.name, stem)] = tensor
    for name in ("vision_tower.vision_model.a.weight", "multi_modal_projector.b.weight"):
        tensors[name] = replace(tensor, name=name)
    config = {"sliding_window": tiny.window, "max_position_embeddings": tiny.context} | text
    whole = {"model_type": "gemma3_text", **config}
    if stem != "model.":
        whole = {"model_type": "gemma3", "text_config": config}
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("stem", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("text", [NEW, OLD, LEAST], ids=["new", "old", "least"])
def test_a_converted_model_computes_the_same(
    text: dict[str, Any], stem: str, tmp_path: Path
) -> None:
    convert(write_folder(tmp_path / "hf", text, stem), tmp_path / "out.gguf")
    file, config = open_tiny(GEMMA3)
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        found = Config.from_gguf(gguf)
        assert replace(found, name="tiny") == config
        logits = TextModel(found, Weights(gguf)).forward(IDS)
    expected = TextModel(config, Weights(file)).forward(IDS)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_a_model_without_scaling_says_so(tmp_path: Path) -> None:
    """A file of 34 layers that does not is taken for Ollama's, of a model that scales."""
    tiny = replace(GEMMA3, pattern=("sssssf" * 6)[:34], ffn=32)
    convert(write_folder(tmp_path / "hf", {}, tiny=tiny), tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        assert Config.from_gguf(gguf).rope_scale == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "scales RoPE by 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "linear scaling of Google's"),
        ({"query_pre_attn_scalar": 168}, "query_pre_attn_scalar 168; a Gemma 3 of 7 layers has 32"),
        ({"final_logit_softcapping": 30.0}, "which no Gemma 3 has"),
        ({"layer_types": ["other"] * 7}, "no valid list layer_types"),
        ({"sliding_window": None}, "sliding_window None"),
        ({"sliding_window": 0}, "sliding_window 0; a model has 1 to"),
    ],
    ids=str,
)
def test_what_no_file_can_say(text: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=message):
        convert(write_folder(tmp_path / "hf", text), tmp_path / "out.gguf")


def test_merges_become_scores(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", NEW)
    tokens = gemma3_vocabulary(GEMMA3.vocab)
    added = [
        {"id": at, "content": token.replace(" ", "▁"), "special": token.startswith(("<e", "<s"))}
        for at, token in enumerate(tokens)
        if token in RUNS or (token.startswith("<") and "0x" not in token)
    ]
    vocab = {token: at for at, token in enumerate(tokens)}
    model = {"vocab": vocab, "merges": [pair.split(" ") for pair in MERGES]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    convert(folder, tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    assert set(LETTERS[-5:]) <= set(tokens)
    pieces = [tokenizer.piece(token) for token in tokenizer.encode(" there  <td>in\n\n\n")]
    assert pieces == ["▁the", "r", "e", "  ", "<td>", "in", "\n\n\n"]
    assert "<unused0>" in tokenizer.special_ids
    assert tokenizer.special_ids["<start_of_turn>"] not in tokenizer.encode("<start_of_turn>")
