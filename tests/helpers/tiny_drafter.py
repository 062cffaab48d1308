"""Tiny drafters of tiny models: their layers read the keys and values of the model's."""

from dataclasses import dataclass

import numpy as np

from helpers.tiny import Tiny, random_tensor, tiny_metadata, uniform
from webgemma.gguf.writer import NewTensor, gguf_bytes

PREFIX = "gemma4-assistant."


@dataclass(frozen=True)
class TinyDrafter:
    """Shape of a drafter."""

    target: Tiny
    pattern: str = "ssf"
    width: int = 48
    ffn: int = 64
    centroids: int = 0
    nearest: int = 4
    formats: tuple[str, ...] = ("F32",)
    seed: int = 5


def drafter_gguf(drafter: TinyDrafter, **changes: object) -> bytes:
    """Return the bytes of the file; entries of its metadata may be changed, or removed by None."""
    metadata = drafter_metadata(drafter)
    for name, value in changes.items():
        metadata[PREFIX + name.replace("__", ".")] = value
    kept = {key: value for key, value in metadata.items() if value is not None}
    return gguf_bytes(kept, drafter_tensors(drafter))


def drafter_metadata(drafter: TinyDrafter) -> dict[str, object]:
    """Return the metadata of the file, as llama.cpp's converter writes it."""
    target, sliding = drafter.target, [kind == "s" for kind in drafter.pattern]
    of_target = tiny_metadata(target)
    metadata = {
        PREFIX + key.removeprefix("gemma4."): value
        for key, value in of_target.items()
        if key.startswith("gemma4.")
    }
    metadata |= {
        PREFIX + "block_count": len(sliding),
        PREFIX + "embedding_length": drafter.width,
        PREFIX + "embedding_length_out": target.width,
        PREFIX + "embedding_length_per_layer_input": 0,
        PREFIX + "feed_forward_length": drafter.ffn,
        PREFIX + "attention.head_count_kv": [target.kv_heads[not kind] for kind in sliding],
        PREFIX + "attention.sliding_window_pattern": sliding,
        PREFIX + "attention.shared_kv_layers": len(sliding),
        PREFIX + "nextn_predict_layers": len(sliding),
    }
    if drafter.centroids:
        metadata[PREFIX + "masked_embd_top_k"] = drafter.nearest
    kept = {key: value for key, value in of_target.items() if key.startswith("tokenizer.")}
    return {
        "general.architecture": "gemma4-assistant",
        "general.name": "drafter",
        **kept,
        **metadata,
    }


def drafter_tensors(drafter: TinyDrafter) -> list[NewTensor]:
    """Return all weights."""
    tensors: list[NewTensor] = []
    target, width, seed = drafter.target, drafter.width, drafter.seed

    def matrix(name: str, *shape: int) -> None:
        format = drafter.formats[len(tensors) % len(drafter.formats)]
        tensors.append(random_tensor(seed, name, shape, format))

    def vector(name: str, size: int) -> None:
        values = 1 + 0.1 * uniform(seed, name, size)
        tensors.append(NewTensor(name, (size,), "F32", values.astype("<f4").tobytes()))

    matrix("token_embd.weight", width, target.vocab)
    vector("output_norm.weight", width)
    matrix("nextn.pre_projection.weight", 2 * target.width, width)
    matrix("nextn.post_projection.weight", width, target.width)
    for index, kind in enumerate(drafter.pattern):
        name, size = f"blk.{index}.", target.head_dims[kind == "f"]
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            vector(f"{name}{norm}.weight", width)
        vector(f"{name}attn_q_norm.weight", size)
        vector(f"{name}layer_output_scale.weight", 1)
        matrix(f"{name}attn_q.weight", width, target.heads * size)
        matrix(f"{name}attn_output.weight", target.heads * size, width)
        matrix(f"{name}ffn_gate.weight", width, drafter.ffn)
        matrix(f"{name}ffn_up.weight", width, drafter.ffn)
        matrix(f"{name}ffn_down.weight", drafter.ffn, width)
    if drafter.centroids:
        matrix("masked_embd_centroids.weight", width, drafter.centroids)
        ids = np.argsort(uniform(seed, "ordering", target.vocab)).astype("<i4")
        tensors.append(NewTensor("masked_embd_ordering", (target.vocab,), "I32", ids.tobytes()))
    return tensors
