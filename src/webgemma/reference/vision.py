"""The eyes of Gemma 4, formula by formula: pixels in, soft tokens out."""

import math

import numpy as np

from webgemma.errors import GgufError, InputError
from webgemma.gemma.encoder_config import EncoderConfigs, VisionConfig, vision_tensors
from webgemma.gemma.tensors import check_tensors
from webgemma.gguf.reader import Gguf
from webgemma.reference.text import attend, gelu, rms, rope
from webgemma.reference.weights import Floats, Weights

EPS = 1e-6  # of every rms; the layer norms of the 12B have their own
LAYER_NORM_EPS = 1e-5
ROPE_BASE = 100.0

# The order in which `v.clamp_data` keeps the bounds of a block's linears.
CLAMPED = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class VisionModel:
    """A picture encoder: a blueprint and its weights.

    A picture is given as patches in their places, [rows, columns, patch · patch · 3], each patch
    row by row with the colours of a pixel together, from 0 to 1: transformers' pixel_values.
    """

    def __init__(self, vision: VisionConfig, weights: Weights) -> None:
        self.vision = vision
        self.weights = weights
        check_tensors(weights.gguf, vision_tensors(vision), weights.tensors)
        self._bounds = bounds(vision, weights) if vision.clipped else {}

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> "VisionModel":
        """The tower of an mmproj, or of a file that holds text and towers in one (Ollama's)."""
        vision = EncoderConfigs.from_gguf(gguf).vision
        if vision is None:
            raise InputError(f"{gguf.name} cannot see: there is no vision tower in it.")
        return cls(vision, Weights(gguf))

    def encode(self, pixels: Floats) -> Floats:
        """Soft tokens: W rms(pooled), in the width of the text model: [n, output]."""
        x = self._linear(rms(self.pooled(pixels), None, EPS), "mm.input_projection")
        if not np.isfinite(x).all():
            raise GgufError(
                f"{self.weights.gguf.name} sees NaN or infinity: its weights are damaged."
            )
        return x

    @np.errstate(over="ignore", invalid="ignore")  # `encode` notices what came of it
    def pooled(self, pixels: Floats) -> Floats:
        """What the tower makes of a picture, before the projector: [n, width]."""
        self._check(pixels)
        rows, columns = pixels.shape[:2]
        y, x = (axis.ravel() for axis in np.mgrid[:rows, :columns])  # of each patch
        if not self.vision.layers:
            return self.embed_large_patches(pixels, x, y)
        h = self.embed(pixels, x, y)  # [patches, width]
        for index in range(self.vision.layers):
            h = self.block(f"v.blk.{index}.", h, x, y)
        h = self.pool(h, rows, columns)  # [n, width]
        if self.vision.standardised:
            h = (h - self.weights["v.std_bias"]) * self.weights["v.std_scale"]
        return h

    def embed(self, pixels: Floats, x: np.ndarray, y: np.ndarray) -> Floats:
        """W (2 p − 1) + X[x] + Y[y]: [patches, width]."""
        centred: Floats = np.float32(2) * planes(pixels, self.vision.patch) - np.float32(1)
        kernel = self.weights["v.patch_embd.weight"].reshape(self.vision.width, -1)
        return centred @ kernel.T + self.positions(x, y)

    def positions(self, x: np.ndarray, y: np.ndarray) -> Floats:
        """The sum of a row of the table of columns and one of the table of rows."""
        of_columns, of_rows = self.weights["v.position_embd.weight"]
        return of_columns[x] + of_rows[y]

    def block(self, name: str, x: Floats, columns: np.ndarray, rows: np.ndarray) -> Floats:
        """One layer: attention and feed-forward, each normed before and after."""
        a = self.attention(name, self._norm(x, name + "ln1"), columns, rows)
        x = x + self._norm(a, name + "attn_post_norm")
        f = self.feed_forward(name, self._norm(x, name + "ln2"))
        x = x + self._norm(f, name + "ffn_post_norm")
        scale = name + "out_scale.weight"
        return x * self.weights[scale] if scale in self.weights else x

    def attention(self, name: str, h: Floats, columns: np.ndarray, rows: np.ndarray) -> Floats:
        """softmax(q kᵀ) v, every patch seeing every other: [patches, width]."""
        count = len(h)
        shape = (count, self.vision.heads, self.vision.width // self.vision.heads)
        q, k, v = (self._linear(h, name + part).reshape(shape) for part in CLAMPED[:3])
        q = rope_2d(self._norm(q, name + "attn_q_norm"), columns, rows)
        k = rope_2d(self._norm(k, name + "attn_k_norm"), columns, rows)
        out = attend(q, k, rms(v, None, EPS), 0, window=count, ends=np.full(count, count))
        return self._linear(out.reshape(count, -1), name + "attn_out")

    def feed_forward(self, name: str, n: Floats) -> Floats:
        """GeGLU: W_down(gelu(W_gate n) · W_up n)."""
        hidden = gelu(self._linear(n, name + "ffn_gate")) * self._linear(n, name + "ffn_up")
        return self._linear(hidden, name + "ffn_down")

    def pool(self, x: Floats, rows: int, columns: int) -> Floats:
        """√width · the mean of each square of pool × pool patches, row by row."""
        pool = self.vision.pool
        squares = x.reshape(rows // pool, pool, columns // pool, pool, -1)
        means = squares.mean(axis=(1, 3)).reshape(-1, self.vision.width)
        return means * np.float32(math.sqrt(self.vision.width))

    def embed_large_patches(self, pixels: Floats, x: np.ndarray, y: np.ndarray) -> Floats:
        """The 12B has no layers: norm₃(norm₂(W norm₁(p) + b) + X[x] + Y[y])."""
        p = self._layer_norm(planes(pixels, self.vision.patch), 1)
        h = self.weights.linear(p, "v.patch_embd.weight") + self.weights["v.patch_embd.bias"]
        return self._layer_norm(self._layer_norm(h, 2) + self.positions(x, y), 3)

    def _linear(self, x: Floats, name: str) -> Floats:
        """W x; a clipped linear keeps what goes in and what comes out between its bounds."""
        if name not in self._bounds:
            return self.weights.linear(x, name + ".weight")
        input_min, input_max, output_min, output_max = self._bounds[name]
        out = self.weights.linear(np.clip(x, input_min, input_max), name + ".weight")
        return np.clip(out, output_min, output_max)

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.weights[name + ".weight"], EPS)

    def _layer_norm(self, x: Floats, number: int) -> Floats:
        """(x − mean) / √(variance + eps), times the weight, plus the bias."""
        name = f"v.patch_norm.{number}"
        x = x - x.mean(axis=-1, keepdims=True)
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(LAYER_NORM_EPS))
        return normed * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def _check(self, pixels: Floats) -> None:
        patch, pool, most = self.vision.patch, self.vision.pool, self.vision.positions
        if pixels.ndim != 3 or pixels.shape[2] != 3 * patch * patch or not pixels.size:
            raise InputError(
                f"A picture must be [rows, columns, {3 * patch * patch}], not {pixels.shape}."
            )
        rows, columns = pixels.shape[:2]
        if rows % pool or columns % pool or max(rows, columns) > most:
            raise InputError(
                f"A picture of {columns} x {rows} patches cannot be seen: each side must be a "
                f"multiple of {pool} patches, and at most {most}."
            )


def bounds(vision: VisionConfig, weights: Weights) -> dict[str, Floats]:
    """For each clipped linear its (input_min, input_max, output_min, output_max).

    They are scalars beside the weight or, in older files of Ollama's, rows of one tensor, where
    four zeros say that a linear is not clipped."""
    names = [f"v.blk.{index}.{part}" for index in range(vision.layers) for part in CLAMPED]
    names.append("mm.input_projection")
    found: dict[str, Floats] = {}
    for name in names:
        if any(f"{name}.{bound}" in weights for bound in BOUNDS):
            found[name] = np.array([-np.inf, np.inf, -np.inf, np.inf], np.float32)
            for at, bound in enumerate(BOUNDS):
                if f"{name}.{bound}" in weights:
                    found[name][at] = weights[f"{name}.{bound}"].item()
    if "v.clamp_data" in weights:
        table = weights["v.clamp_data"]
        if table.size != 4 * len(names):
            raise GgufError(
                f"{weights.gguf.name}: v.clamp_data holds {table.size} numbers, "
                f"not four for each of {len(names)} linears."
            )
        rows = zip(names, table.reshape(-1, 4), strict=True)
        found |= {name: row for name, row in rows if row.any()}
    return found


def planes(pixels: Floats, patch: int) -> Floats:
    """Patches with each colour on its own, as files keep the embedding's weights: [patches, …]."""
    colours_last = pixels.reshape(-1, patch * patch, 3)
    return colours_last.transpose(0, 2, 1).reshape(len(colours_last), -1)


def rope_2d(x: Floats, columns: np.ndarray, rows: np.ndarray) -> Floats:
    """Turn each head of x [patches, heads, d]: one half by the column, the other by the row."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-np.arange(half // 2) * 2.0 / half)
    parts = zip(np.split(x, 2, axis=-1), (columns, rows), strict=True)
    return np.concatenate([rope(part, at[:, None] * frequencies) for part, at in parts], axis=-1)
