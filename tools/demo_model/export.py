"""Step 5: write the trained weights as GGUF files, F32 and Q8_0; compare.py checks them."""

import argparse
import json
from pathlib import Path

import numpy as np
from checkpoint import load
from settings import DATA, VOCABULARY, Shape
from template import TEMPLATE

from webgemma.gguf.writer import NewTensor, Typed, write_gguf

NAME = "webgemma-demo"
BLOCK = 32  # weights of a Q8_0 block, which share a scale


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="the folder that train.py wrote")
    parser.add_argument("out", type=Path, help="the folder to write to")
    options = parser.parse_args()
    shape, tensors = load(options.weights)
    for format in ("F32", "Q8_0"):
        path = options.out / f"{NAME}-{format}.gguf"
        export(path, shape, tensors, format)
        print(f"{path}: {path.stat().st_size:,} bytes")


def export(path: Path, shape: Shape, tensors: dict[str, np.ndarray], format: str) -> None:
    """Write one file: matrices in the given format, vectors and scales as float32."""
    new = [tensor(name, values, format) for name, values in tensors.items()]
    half = shape.head_dim // 2
    factors = np.where(np.arange(half) < half // 4, 1, 1e30)  # 1: rotated, 1e30: not rotated
    new.append(tensor("rope_freqs.weight", factors, "F32"))
    write_gguf(path, metadata(shape, format), new)


def tensor(name: str, values: np.ndarray, format: str) -> NewTensor:
    """Return a tensor as a file stores it: the fastest dimension first."""
    if values.ndim == 1 or format == "F32":
        return NewTensor(name, values.shape[::-1], "F32", values.astype("<f4").tobytes())
    return NewTensor(name, values.shape[::-1], format, q8_0(values))


def q8_0(values: np.ndarray) -> bytes:
    """Quantise in blocks of 32: the largest weight becomes ±127, the scale is a float16."""
    blocks = values.astype(np.float32).reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
    divisors = scales.astype(np.float32)
    inverse = np.divide(1.0, divisors, out=np.zeros_like(divisors), where=divisors > 0)
    integers = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), integers.view(np.uint8)], 1).tobytes()


def metadata(shape: Shape, format: str) -> dict[str, object]:
    """Return the metadata of the file, with the keys of llama.cpp's converter."""
    vocabulary = json.loads((DATA / VOCABULARY).read_text())
    tokens = vocabulary["tokens"]
    ids = {token: at for at, token in enumerate(tokens[:64])}
    layers = range(shape.layers)
    model = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": [shape.ffn_of(layer) for layer in layers],
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.key_length_swa": shape.head_dim_sliding,
        "attention.value_length_swa": shape.head_dim_sliding,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": [not shape.is_full(layer) for layer in layers],
        "attention.shared_kv_layers": shape.shared,
        "rope.freq_base": shape.rope_base,
        "rope.freq_base_swa": shape.rope_base_sliding,
        "rope.dimension_count": shape.head_dim,
        "rope.dimension_count_swa": shape.head_dim_sliding,
        "final_logit_softcapping": shape.softcap,
        "embedding_length_per_layer_input": shape.ple,
    }
    tokenizer = {
        "model": "gemma4",
        "pre": "gemma4",
        "tokens": tokens,
        "scores": Typed(
            [-1000.0 if kind != 1 else 0.0 for kind in vocabulary["token_type"]], "FLOAT32"
        ),
        "token_type": vocabulary["token_type"],
        "merges": vocabulary["merges"],
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
        "eot_token_id": ids["<turn|>"],
        "unknown_token_id": ids["<unk>"],
        "padding_token_id": ids["<pad>"],
        "mask_token_id": ids["<mask>"],
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    return {
        "general.architecture": "gemma4",
        "general.type": "model",
        "general.name": "webgemma demo",
        "general.description": "A tiny demo model that chats a little and tells simple stories.",
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        "general.file_type": {"F32": 0, "Q8_0": 7}[format],
        "general.quantization_version": 2,
        **{f"gemma4.{key}": value for key, value in model.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        "tokenizer.chat_template": TEMPLATE,
    }


if __name__ == "__main__":
    main()
