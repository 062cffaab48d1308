"""Write the trained weights as GGUF files of the architecture diffusion-gemma, F32 and Q8_0."""

import argparse
from pathlib import Path

import numpy as np
from shape import BUNDLED, Shape

from demo_model.checkpoint import load
from demo_model.export import tensor
from webgemma.denoising import Denoising
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import Typed, write_gguf

NAME = "webgemma-focus"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="the folder that train.py wrote")
    parser.add_argument("out", type=Path, help="the folder to write to")
    options = parser.parse_args()
    shape, tensors = load(options.weights, Shape)
    for format in ("F32", "Q8_0"):
        path = options.out / f"{NAME}-{format}.gguf"
        export(path, shape, tensors, format)
        print(f"{path}: {path.stat().st_size:,} bytes")


def export(path: Path, shape: Shape, tensors: dict[str, np.ndarray], format: str) -> None:
    """Write one file: matrices in the given format; vectors, scales and routers as float32."""
    new = [
        tensor(name, values, "F32" if "ffn_gate_inp" in name else format)
        for name, values in tensors.items()
    ]
    half = shape.head_dim // 2
    factors = np.where(np.arange(half) < half // 4, 1, 1e30)  # 1: rotated, 1e30: not rotated
    new.append(tensor("rope_freqs.weight", factors, "F32"))
    write_gguf(path, metadata(shape, format), new)


def metadata(shape: Shape, format: str) -> dict[str, object]:
    """Return the metadata of the file; the vocabulary is the bundled model's."""
    layers, schedule = range(shape.layers), Denoising()
    model = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.ffn,
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "expert_feed_forward_length": shape.expert_ffn,
        "attention.causal": False,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": [shape.kv_heads_of(layer) for layer in layers],
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.key_length_swa": shape.head_dim_sliding,
        "attention.value_length_swa": shape.head_dim_sliding,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": [not shape.is_full(layer) for layer in layers],
        "rope.freq_base": shape.rope_base,
        "rope.freq_base_swa": shape.rope_base_sliding,
        "rope.dimension_count": shape.head_dim,
        "rope.dimension_count_swa": shape.head_dim_sliding,
        "final_logit_softcapping": shape.softcap,
    }
    diffusion = {
        "canvas_length": shape.canvas,
        "eb_max_steps": schedule.steps,
        "eb_t_min": shape.t_min,
        "eb_t_max": shape.t_max,
        "eb_entropy_bound": schedule.entropy_bound,
        "eb_stability_threshold": schedule.stability_threshold,
        "eb_confidence_threshold": schedule.confidence_threshold,
    }
    return {
        "general.architecture": "diffusion-gemma",
        "general.type": "model",
        "general.name": "webgemma focus",
        "general.description": "A tiny DiffusionGemma that knows some short stories by heart.",
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        "general.file_type": {"F32": 0, "Q8_0": 7}[format],
        "general.quantization_version": 2,
        **{f"diffusion-gemma.{key}": value for key, value in model.items()},
        **{f"diffusion.{key}": value for key, value in diffusion.items()},
        **vocabulary(),
    }


def vocabulary() -> dict[str, object]:
    """Return the bundled file's metadata of its tokenizer."""
    with Gguf.open(BUNDLED) as gguf:
        values = {k: value for k, value in gguf.metadata.items() if k.startswith("tokenizer.")}
    scores = "tokenizer.ggml.scores"
    return {**values, scores: Typed(list(values[scores]), "FLOAT32")}


if __name__ == "__main__":
    main()
