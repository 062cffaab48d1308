"""Conversion of EmbeddingGemma in sentence-transformers' layout: its vectors, modules, errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from convert.test_convert import hugging_face_name, safetensors
from helpers.sessions import open_tiny
from helpers.tiny import EMBEDDING, EMBEDDING2, OLLAMA_EMBEDDING, Tiny

from webgemma.convert import convert
from webgemma.convert.vocabulary import adds_eos
from webgemma.errors import GgufError, ModelNotFoundError, WebgemmaError
from webgemma.gemma.config import DENSE, Config
from webgemma.gemma.tensors import canonical_tensors
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import NewTensor
from webgemma.reference.embedding import EmbeddingModel
from webgemma.reference.weights import Floats, Weights

KINDS = {"dense": EMBEDDING, "ollama": OLLAMA_EMBEDDING, "projection": EMBEDDING2}
TEXTS = [[2], [2, *range(40, 75)], [2, 50, 1]]
FOLDERS = ("2_Dense", "3_Dense")
MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "include_prompt": True}
IDENTITY = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
KIND = "sentence_transformers.models."


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def change(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def write_folder(folder: Path, gguf: Gguf) -> Path:
    """Write an embedding model as Google publishes it: matrices and norms in float32."""
    config, weights = Config.from_gguf(gguf), Weights(gguf)
    second = config.architecture == "embedding-gemma2"
    tensors, dense = {}, {}
    for name in canonical_tensors(gguf):
        values = weights[name]
        if name.endswith("norm.weight") and not second:
            values = values - np.float32(1)
        tensor = NewTensor(name, values.shape[::-1], "F32", values.astype("<f4").tobytes())
        if name in DENSE:
            dense[name] = tensor
            continue
        stored = hugging_face_name(name, "language_model." if second else "")
        if second and "per_layer" in stored:
            at = stored.index(".per_layer" if "post_per" not in stored else ".post_per") + 1
            stored = stored[:at] + ("ple_block." if "layers." in stored else "ple.") + stored[at:]
        tensors[stored] = tensor
    layers = ["sliding_attention" if x.sliding else "full_attention" for x in config.layers]
    text: dict[str, Any] = {
        "layer_types": layers,
        "max_position_embeddings": config.context,
        "sliding_window": config.window - 1 if second else 2 * (config.window - 1),
        "rms_norm_eps": config.eps,
    }
    whole = {"model_type": "gemma3_text", "use_bidirectional_attention": True, **text}
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "4_Normalize")]
    if second:
        whole = {"model_type": "embedding_gemma2", "text_config": text}
        tensors["embed_vision.embedding_projection.weight"] = tensor
    else:
        kinds[2:2] = [("Dense", "2_Dense"), ("Dense", "3_Dense")]
    write_json(folder / "config.json", whole)
    write_json(folder / "1_Pooling" / "config.json", MEAN)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    for name, path in zip(DENSE, FOLDERS, strict=True):
        if name in dense:
            write_json(folder / path / "config.json", IDENTITY)
            data = safetensors({"linear.weight": dense[name]})
            (folder / path / "model.safetensors").write_bytes(data)
    modules = [
        {"idx": i, "type": KIND + kind, "path": path} for i, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    return folder


def vectors(path: Path, texts: list[list[int]]) -> Floats:
    with Gguf.open(path) as gguf:
        model = EmbeddingModel(Config.from_gguf(gguf), Weights(gguf))
        return np.stack([model.vector(ids) for ids in texts])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", open_tiny(EMBEDDING)[0])


@needs_shared
@pytest.mark.parametrize("name", ["v1", "v1-ollama", "v2"])
def test_a_converted_folder_gives_transformers_vectors(name: str, tmp_path: Path) -> None:
    files = SHARED / "embed" / name
    with Gguf.open(next(files.glob("*.gguf"))) as gguf:
        convert(write_folder(tmp_path / "hf", gguf), tmp_path / "out.gguf")
    texts = [list(map(int, line.split())) for line in (files / "ids.txt").read_text().splitlines()]
    truth = np.load(files / "truth.npz")["embeddings"]
    np.testing.assert_allclose(vectors(tmp_path / "out.gguf", texts), truth, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_computes_the_same(kind: str, tmp_path: Path) -> None:
    tiny: Tiny = KINDS[kind]
    gguf, config = open_tiny(tiny)
    convert(write_folder(tmp_path / "hf", gguf), tmp_path / "out.gguf", format="f32")
    with Gguf.open(tmp_path / "out.gguf") as converted:
        found = Config.from_gguf(converted)
    same = {"name": "", "architecture": "", "embedding": None}  # Ollama's has another name
    assert replace(found, **same) == replace(config, **same)
    assert found.embedding is not None
    assert config.embedding is not None
    assert replace(found.embedding, ends_with_eos=True) == replace(
        config.embedding, ends_with_eos=True
    )
    model = EmbeddingModel(config, Weights(gguf))
    expected = np.stack([model.vector(ids) for ids in TEXTS])
    np.testing.assert_allclose(vectors(tmp_path / "out.gguf", TEXTS), expected, rtol=0, atol=1e-5)


def test_newer_modules(folder: Path, tmp_path: Path) -> None:
    """Sentence-transformers 6 has other paths of modules, and one key for the mode of pooling."""
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = module["type"].replace(KIND, "sentence_transformers.base.modules.")
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    convert(folder, tmp_path / "out.gguf")
    with Gguf.open(tmp_path / "out.gguf") as gguf:
        assert Config.from_gguf(gguf).architecture == "gemma-embedding"


def no_modules(folder: Path) -> None:
    (folder / "modules.json").unlink()


def one_dense_layer(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [x for x in modules if x["path"] != "3_Dense"])


def outside(folder: Path) -> None:
    write_json(folder / "modules.json", [{"type": KIND + "Dense", "path": "../2_Dense"}])


def other_kind(folder: Path) -> None:
    write_json(folder / "modules.json", [{"type": KIND + "LayerNorm", "path": "2_LayerNorm"}])


def no_list(folder: Path) -> None:
    write_json(folder / "modules.json", {"type": KIND + "Dense"})


def another_pooling(folder: Path) -> None:
    change(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=True)


def without_prompt(folder: Path) -> None:
    change(folder / "1_Pooling" / "config.json", include_prompt=False)


def an_activation(folder: Path) -> None:
    change(folder / "3_Dense" / "config.json", activation_function="torch.nn.Tanh")


def a_bias(folder: Path) -> None:
    bias = NewTensor("linear.bias", (4,), "F32", bytes(16))
    (folder / "2_Dense" / "model.safetensors").write_bytes(safetensors({"linear.bias": bias}))


def no_matrix(folder: Path) -> None:
    flat = NewTensor("linear.weight", (4,), "F32", bytes(16))
    (folder / "2_Dense" / "model.safetensors").write_bytes(safetensors({"linear.weight": flat}))


def integers(folder: Path) -> None:
    matrix = NewTensor("linear.weight", (2, 2), "I32", bytes(16))
    (folder / "2_Dense" / "model.safetensors").write_bytes(safetensors({"linear.weight": matrix}))


def no_weights(folder: Path) -> None:
    (folder / "2_Dense" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (no_modules, ModelNotFoundError, "has no modules.json, so its dense layers are unknown"),
        (one_dense_layer, GgufError, "has 1 dense layers; EmbeddingGemma has two"),
        (outside, GgufError, r"modules.json lists .*\.\./2_Dense"),
        (other_kind, GgufError, "modules.json lists .*LayerNorm"),
        (no_list, GgufError, "modules.json lists None"),
        (another_pooling, GgufError, "1_Pooling/config.json does not pool by the mean"),
        (without_prompt, GgufError, "mean of all tokens"),
        (an_activation, GgufError, "3_Dense has .*Tanh"),
        (a_bias, GgufError, "2_Dense has the tensors .*linear.bias"),
        (no_matrix, GgufError, "2_Dense: linear.weight has the shape"),
        (integers, GgufError, "is stored as I32"),
        (no_weights, ModelNotFoundError, "2_Dense has no model.safetensors.index.json"),
    ],
)
def test_other_modules_are_refused(
    damage: Callable[[Path], None],
    error: type[WebgemmaError],
    message: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_scaled_rope_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", open_tiny(EMBEDDING2)[0])
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text["rope_parameters"] = {"full_attention": {"rope_type": "proportional"}}
    change(folder / "config.json", text_config=text)
    with pytest.raises(GgufError, match="rope_type 'proportional'"):
        convert(folder, tmp_path / "out.gguf")


TEMPLATE = {"single": [{"SpecialToken": {"id": "<bos>"}}, {"Sequence": {"id": "A"}}]}
ENDING = {"single": [*TEMPLATE["single"], {"SpecialToken": {"id": "<eos>"}}]}


@pytest.mark.parametrize(
    ("tokenizer", "settings", "expected"),
    [
        (None, None, True),
        ({}, {"add_eos_token": False}, False),
        ({"post_processor": TEMPLATE}, {"add_eos_token": True}, False),
        ({"post_processor": ENDING}, {"add_eos_token": False}, True),
        ({"post_processor": {"processors": [{"type": "ByteLevel"}, ENDING]}}, None, True),
        ({"post_processor": {"processors": 5}}, {"add_eos_token": True}, True),
    ],
)
def test_whether_a_text_ends_with_eos(
    tokenizer: dict[str, Any] | None, settings: dict[str, Any] | None, expected: bool
) -> None:
    assert adds_eos(tokenizer, settings) is expected
