"""Conversion of Hugging Face models: tensors, metadata, tokenizer and errors."""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.tiny import (
    DIFFUSION,
    LARGE,
    MERGES,
    MOE,
    SMALL,
    Tiny,
    tiny_gguf,
    tiny_metadata,
    tiny_tensors,
    vocabulary,
)
from helpers.tiny_drafter import TinyDrafter, drafter_gguf, drafter_tensors
from typer.testing import CliRunner

from webgemma.cli.program import app
from webgemma.convert import convert
from webgemma.convert.names import _GLOBAL, _LAYER, gguf_name
from webgemma.convert.numbers import cast_floats
from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gemma.config import ORDERING, Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync
from webgemma.text.tokenizer import Tokenizer

KINDS = {
    "small": replace(SMALL, formats=("BF16",)),
    "large": replace(LARGE, suppressed=()),
    "moe": replace(MOE, formats=("F16",)),
    "diffusion": DIFFUSION,
}


def hugging_face_name(name: str, stem: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    if name.endswith("enc_layer_output_scale.weight"):
        return f"model.encoder.language_model.layers.{name.split('.')[1]}.layer_scalar"
    inverse = {gguf: hugging_face for hugging_face, gguf in (_GLOBAL | _LAYER).items()}
    if not name.startswith("blk."):
        return stem + inverse[name]
    _, index, rest = name.split(".", 2)
    return f"{stem}layers.{index}.{inverse[rest]}"


def safetensors(tensors: Mapping[str, NewTensor]) -> bytes:
    header, data = {}, b""
    for name, tensor in tensors.items():
        end = len(data) + len(tensor.data)
        shape = list(tensor.shape)[::-1]
        offsets = [len(data), end]
        header[name] = {"dtype": tensor.format, "shape": shape, "data_offsets": offsets}
        data += bytes(tensor.data)
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def config_of(tiny: Tiny) -> dict[str, Any]:
    text = {
        "layer_types": [
            "full_attention" if kind == "f" else "sliding_attention" for kind in tiny.pattern
        ],
        "max_position_embeddings": tiny.context,
        "sliding_window": tiny.window,
        "num_kv_shared_layers": tiny.shared,
        "rms_norm_eps": 1e-6,
        "top_k_experts": tiny.experts[1] if tiny.experts else None,
    }
    kind = "diffusion_gemma" if tiny.canvas else "gemma4"
    return {"model_type": kind, "canvas_length": tiny.canvas, "text_config": text}


def write_folder(folder: Path, tiny: Tiny, **changes: Any) -> Path:
    """Write the tiny model in the layout of transformers."""
    stem = "model.decoder." if tiny.canvas else "model.language_model."
    tensors = {
        hugging_face_name(tensor.name, stem): tensor
        for tensor in tiny_tensors(tiny)
        if tensor.name != "rope_freqs.weight"
    }
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "config.json").write_text(json.dumps(config_of(tiny) | changes))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_and_number_is_converted(kind: str, tmp_path: Path) -> None:
    tiny = KINDS[kind]
    convert(write_folder(tmp_path / "tiny", tiny), tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        weights = Weights(gguf)
        for tensor in tiny_tensors(tiny):
            shape = gguf.tensors[tensor.name].shape
            assert shape == tuple(tensor.shape), tensor.name
            values = np.frombuffer(cast_floats(bytes(tensor.data), tensor.format, "F32", ""), "<f4")
            assert np.array_equal(weights[tensor.name].ravel(), values), tensor.name
        skipped = ("tokenizer", "general.name", "diffusion.eb_max_steps")
        for key, value in tiny_metadata(tiny).items():
            if not key.startswith(skipped) and not key.endswith("head_count"):
                actual = gguf.metadata[key]
                assert (list(actual) if isinstance(value, list) else actual) == pytest.approx(value)
        config = Config.from_gguf(gguf)
        assert all(layer.heads == tiny.heads for layer in config.layers)


def drafter_folder(folder: Path, drafter: TinyDrafter, **text: Any) -> Path:
    """Write a drafter in the layout of transformers, the ids of its clusters in 64 bits."""
    tensors = {}
    for tensor in drafter_tensors(drafter):
        if tensor.name == ORDERING:
            ids = np.frombuffer(tensor.data, "<i4").astype("<i8").tobytes()
            tensor = replace(tensor, format="I64", data=ids)
        inner = tensor.name.startswith(("nextn", "masked"))
        tensors[hugging_face_name(tensor.name, "" if inner else "model.")] = tensor
    target, config = drafter.target, config_of(drafter.target)["text_config"]
    kinds = ["full_attention" if kind == "f" else "sliding_attention" for kind in drafter.pattern]
    config |= {"layer_types": kinds, "num_key_value_heads": target.kv_heads[0]} | text
    top = {"backbone_hidden_size": target.width, "centroid_intermediate_top_k": drafter.nearest}
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    whole = {"model_type": "gemma4_assistant", "text_config": config, **top}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize(
    ("drafter", "text"),
    [
        (TinyDrafter(SMALL, centroids=32), {"num_global_key_value_heads": None}),
        (TinyDrafter(LARGE), {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
        (TinyDrafter(LARGE), {"per_layer_config": {"2": {"num_key_value_heads": 1}}}),
    ],
)
def test_drafters(drafter: TinyDrafter, text: dict[str, Any], tmp_path: Path) -> None:
    convert(drafter_folder(tmp_path / "drafter", drafter, **text), tmp_path / "out.gguf")
    target = run_sync(Gguf.aopen(BytesSource(tiny_gguf(drafter.target), "target.gguf")))
    whole = run_sync(Gguf.aopen(BytesSource(drafter_gguf(drafter), "drafter.gguf")))
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        config = drafter_config(gguf, Config.from_gguf(target))
        expected = drafter_config(whole, Config.from_gguf(target))
        changed = {"name": "", "parameters": 0, "suppressed": ()}
        assert replace(config, **changed) == replace(expected, **changed)
        for name, tensor in whole.tensors.items():
            assert bytes(gguf.data(gguf.tensors[name])) == bytes(whole.data(tensor)), name


@pytest.mark.parametrize(("format", "error"), [("bf16", 2**-8), ("f16", 2**-11), ("f32", 0)])
def test_matrices_are_written_in_another_format(format: str, error: float, tmp_path: Path) -> None:
    tiny = replace(SMALL, formats=("F32",))
    convert(write_folder(tmp_path / "tiny", tiny), tmp_path / "out.gguf", format=format)
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        for tensor in tiny_tensors(tiny):
            written = gguf.tensors[tensor.name]
            assert written.format.name == (format.upper() if len(tensor.shape) > 1 else "F32")
            expected = np.frombuffer(tensor.data, "<f4")
            values = Weights(gguf)[tensor.name].ravel()
            assert (np.abs(values - expected) <= error * np.abs(expected) + 2**-25).all()


def test_rounding_is_to_nearest_even() -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], "<u4")
    rounded = np.frombuffer(cast_floats(values.tobytes(), "F32", "BF16", "x"), "<u2")
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]
    with pytest.raises(GgufError, match="too large for float16"):
        cast_floats(np.array([1e6], "<f4").tobytes(), "F32", "F16", "x")


def test_a_tokenizer_json_is_converted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", DIFFUSION, eos_token_id=[1, 9])
    tokens = vocabulary(DIFFUSION.vocab)[:-5]  # the model has more rows than tokens
    special = [token for token in tokens if token.startswith("<") and "0x" not in token]
    tokenizer = {
        "model": {
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in MERGES],
        },
        "added_tokens": [
            {"id": tokens.index(token), "content": token, "special": True} for token in special
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert(folder, tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        Config.from_gguf(gguf)
        written = Tokenizer.from_gguf(gguf)
    assert (written.bos, written.eos, written.pad, written.unknown) == (2, 1, 0, 3)
    assert {1, 9} <= written.ends
    ids = written.encode("the thin", special=True)
    assert written.decode(ids) == "the thin"
    assert written.piece(ids[0]) == "the"
    assert written.piece(DIFFUSION.vocab - 1) == f"[PAD{DIFFUSION.vocab - 1}]"


@pytest.mark.parametrize("tied", [True, False])
def test_a_separate_head_is_written_only_if_the_model_has_one(tied: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", SMALL, tie_word_embeddings=tied)
    table = next(x for x in tiny_tensors(SMALL) if x.name == "token_embd.weight")
    more = safetensors({"lm_head.weight": table})
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(more)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(folder, tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        assert ("output.weight" in gguf.tensors) != tied


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", SMALL)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(folder, tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        assert len(gguf.tensors) == len(tiny_tensors(SMALL))
    index = {"weight_map": {"x": "../a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(GgufError, match="files outside its own folder"):
        convert(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "only Gemma 4, its drafters, Diff"),
        ({"text_config": {}}, "no valid list layer_types"),
        ({"canvas_length": 0}, "canvas_length 0"),
        ({"text_config": config_of(DIFFUSION)["text_config"] | {"sliding_window": "8"}}, "window"),
    ],
)
def test_invalid_configs_raise_an_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "tiny", DIFFUSION, **changes)
    with pytest.raises(GgufError, match=message):
        convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_other_mistakes_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "out.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors\.index\.json"):
        convert(tmp_path, tmp_path / "out.gguf")
    with pytest.raises(InputError, match="choose stored, f32"):
        convert(tmp_path, tmp_path / "out.gguf", format="q4_k")
    with pytest.raises(GgufError, match="not part of any supported Gemma;"):
        gguf_name("model.decoder.layers.0.mamba.weight")
    assert gguf_name("model.encoder.vision_tower.std_bias") is None
    assert gguf_name("model.encoder.language_model.norm.weight") is None


@needs_shared
def test_the_command_line(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    arguments = ["convert", str(SHARED / "diffusion"), str(target)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "28.3 MB" in first.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "--force replaces it" in again.output
    replaced = CliRunner().invoke(app, [*arguments, "--force", "--json"])
    facts = {"out": str(target), "nbytes": target.stat().st_size, "format": "stored"}
    assert json.loads(replaced.stdout) == facts
    with Gguf.open(target) as gguf:
        config = Config.from_gguf(gguf)
    assert config.diffusion is not None
    assert (config.diffusion.canvas, config.diffusion.ffn, config.vocab) == (32, 512, 2048)
