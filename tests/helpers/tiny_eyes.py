"""Tiny picture encoders whose weights come from a seed and a name: every kind, as an mmproj."""

from dataclasses import dataclass

import numpy as np

from helpers.tiny import random_bytes, random_tensor, uniform
from webgemma.gguf.writer import NewTensor, gguf_bytes


@dataclass(frozen=True)
class Eyes:
    """The shape of a picture encoder; without layers it is the 12B's."""

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
    alike: bool = False  # all clipped linears have the same bounds


SMALL_EYES = Eyes(width=64, clipped=True)
LARGE_EYES = Eyes(width=48, standardised=True)
EMBEDDER = Eyes(width=64, layers=0, patch=48, pool=1, positions=6)

# (columns, rows) in soft tokens of the pictures in the truth: one wider than the tiny window of 8.
PICTURES = ((4, 3), (2, 1))


def picture(eyes: Eyes, columns: int, rows: int) -> np.ndarray:
    """A picture of so many soft tokens, as RGB bytes [height, width, 3]."""
    side = eyes.patch * eyes.pool
    shape = (rows * side, columns * side, 3)
    data = random_bytes(eyes.seed, f"picture {columns} x {rows}", 3 * shape[0] * shape[1])
    return np.frombuffer(data, np.uint8).reshape(shape)


def eyes_gguf(eyes: Eyes) -> bytes:
    """The whole mmproj."""
    return gguf_bytes(
        {"general.architecture": "clip", **eyes_metadata(eyes, "clip.")}, eyes_tensors(eyes)
    )


def eyes_metadata(eyes: Eyes, prefix: str) -> dict[str, object]:
    """What the file says of the encoder."""
    return {
        f"{prefix}vision.block_count": eyes.layers,
        f"{prefix}vision.embedding_length": eyes.width,
        f"{prefix}vision.feed_forward_length": eyes.ffn,
        f"{prefix}vision.attention.head_count": eyes.heads,
        f"{prefix}vision.patch_size": eyes.patch,
    }


def eyes_tensors(eyes: Eyes) -> list[NewTensor]:
    """All weights in float32."""
    made: list[NewTensor] = []

    def matrix(name: str, *shape: int) -> None:
        made.append(random_tensor(eyes.seed, name, shape, "F32"))

    def vector(name: str, width: int, mean: float = 1.0, spread: float = 0.1) -> None:
        values = mean + spread * uniform(eyes.seed, name, width)
        made.append(NewTensor(name, (width,), "F32", values.astype("<f4").tobytes()))

    width, pixels = eyes.width, 3 * eyes.patch**2
    matrix("v.position_embd.weight", width, eyes.positions, 2)
    matrix("mm.input_projection.weight", width, eyes.output)
    if not eyes.layers:
        matrix("v.patch_embd.weight", pixels, width)
        vector("v.patch_embd.bias", width, 0.0)
        for number, size in ((1, pixels), (2, width), (3, width)):
            vector(f"v.patch_norm.{number}.weight", size)
            vector(f"v.patch_norm.{number}.bias", size, 0.0)
        return made
    matrix("v.patch_embd.weight", eyes.patch, eyes.patch, 3, width)
    if eyes.standardised:
        vector("v.std_bias", width, 0.0, 4.0)
        vector("v.std_scale", width, 0.2)
    for index in range(eyes.layers):
        _layer(eyes, f"v.blk.{index}.", matrix, vector)
    return made


def _layer(eyes: Eyes, name: str, matrix, vector) -> None:
    width = eyes.width
    for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
        vector(f"{name}{norm}.weight", width)
    for norm in ("attn_q_norm", "attn_k_norm"):
        vector(f"{name}{norm}.weight", width // eyes.heads)
    linears = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (width, width))
    linears |= {"ffn_gate": (width, eyes.ffn), "ffn_up": (width, eyes.ffn)}
    linears |= {"ffn_down": (eyes.ffn, width)}
    for part, shape in linears.items():
        matrix(f"{name}{part}.weight", *shape)
        if eyes.clipped:  # closely enough to cut off a part of what passes
            spread = 0.0 if eyes.alike else 0.3
            for end in ("input", "output"):
                vector(f"{name}{part}.{end}_min", 1, -1.0, spread)
                vector(f"{name}{part}.{end}_max", 1, 1.0, spread)
