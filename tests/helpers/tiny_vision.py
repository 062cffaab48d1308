"""Tiny vision encoders of every kind, as an mmproj; seed and tensor name determine the weights."""

from dataclasses import dataclass

import numpy as np

from helpers.tiny import random_bytes, random_tensor, uniform
from webgemma.gguf.writer import NewTensor, gguf_bytes


@dataclass(frozen=True)
class TinyVision:
    """Shape of a vision encoder; without layers it is 12B's patch embedder."""

    width: int
    layers: int = 2
    heads: int = 2
    ffn: int = 80
    patch: int = 4
    pool: int = 3
    positions: int = 16
    output: int = 64
    clipped: bool = False
    standardised: bool = False
    seed: int = 3
    same_bounds: bool = False  # of all clipped linears
    format: str = "F32"  # of the matrices, but not of patches and positions


SMALL_VISION = TinyVision(width=64, clipped=True)
LARGE_VISION = TinyVision(width=48, standardised=True)
EMBEDDER = TinyVision(width=64, layers=0, patch=48, pool=1, positions=6)

# (columns, rows) in soft tokens of the recorded images: one is wider than the tiny window of 8.
IMAGE_SIZES = ((4, 3), (2, 1))


def tiny_image(vision: TinyVision, columns: int, rows: int) -> np.ndarray:
    """Return an image of so many soft tokens as RGB bytes [height, width, 3]."""
    side = vision.patch * vision.pool
    shape = (rows * side, columns * side, 3)
    # The recorded fixtures depend on this name.
    data = random_bytes(vision.seed, f"picture {columns} x {rows}", 3 * shape[0] * shape[1])
    return np.frombuffer(data, np.uint8).reshape(shape)


def vision_gguf(vision: TinyVision) -> bytes:
    """Return the bytes of an mmproj."""
    return gguf_bytes(
        {"general.architecture": "clip", **vision_metadata(vision, "clip.")},
        vision_weights(vision),
    )


def vision_metadata(vision: TinyVision, prefix: str) -> dict[str, object]:
    """Return the metadata of the encoder under a prefix ("clip.", "gemma4.")."""
    return {
        f"{prefix}vision.block_count": vision.layers,
        f"{prefix}vision.embedding_length": vision.width,
        f"{prefix}vision.feed_forward_length": vision.ffn,
        f"{prefix}vision.attention.head_count": vision.heads,
        f"{prefix}vision.patch_size": vision.patch,
    }


def vision_weights(vision: TinyVision) -> list[NewTensor]:
    """Return all weights."""
    tensors: list[NewTensor] = []

    def matrix(name: str, *shape: int) -> None:
        format = "F32" if name.endswith("_embd.weight") else vision.format
        tensors.append(random_tensor(vision.seed, name, shape, format))

    def vector(name: str, width: int, mean: float = 1.0, spread: float = 0.1) -> None:
        values = mean + spread * uniform(vision.seed, name, width)
        tensors.append(NewTensor(name, (width,), "F32", values.astype("<f4").tobytes()))

    width, pixels = vision.width, 3 * vision.patch**2
    matrix("v.position_embd.weight", width, vision.positions, 2)
    matrix("mm.input_projection.weight", width, vision.output)
    if not vision.layers:
        matrix("v.patch_embd.weight", pixels, width)
        vector("v.patch_embd.bias", width, 0.0)
        for number, size in ((1, pixels), (2, width), (3, width)):
            vector(f"v.patch_norm.{number}.weight", size)
            vector(f"v.patch_norm.{number}.bias", size, 0.0)
        return tensors
    matrix("v.patch_embd.weight", vision.patch, vision.patch, 3, width)
    if vision.standardised:
        vector("v.std_bias", width, 0.0, 4.0)
        vector("v.std_scale", width, 0.2)
    for index in range(vision.layers):
        _layer(vision, f"v.blk.{index}.", matrix, vector)
    return tensors


def _layer(vision: TinyVision, name: str, matrix, vector) -> None:
    width = vision.width
    for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
        vector(f"{name}{norm}.weight", width)
    for norm in ("attn_q_norm", "attn_k_norm"):
        vector(f"{name}{norm}.weight", width // vision.heads)
    linears = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (width, width))
    linears |= {"ffn_gate": (width, vision.ffn), "ffn_up": (width, vision.ffn)}
    linears |= {"ffn_down": (vision.ffn, width)}
    for part, shape in linears.items():
        matrix(f"{name}{part}.weight", *shape)
        if vision.clipped:  # narrow enough to clamp some values
            spread = 0.0 if vision.same_bounds else 0.3
            for end in ("input", "output"):
                vector(f"{name}{part}.{end}_min", 1, -1.0, spread)
                vector(f"{name}{part}.{end}_max", 1, 1.0, spread)
