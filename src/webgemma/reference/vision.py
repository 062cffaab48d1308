"""Vision encoder of Gemma 4: pixels in, soft tokens out.

A transformer over patches in the small and large models, a patch embedder without layers in 12B.
Shapes: n soft tokens, `width` of the encoder, `output` of the text model; patches run row by row. A
linear layer is written W x.
"""

import math

import numpy as np

from webgemma.errors import GgufError, InputError
from webgemma.gemma.encoder_config import EncoderConfigs, VisionConfig, vision_tensors
from webgemma.gemma.tensors import BOUNDS, bound_tensors, check_bounds, check_tensors
from webgemma.gguf.reader import Gguf
from webgemma.reference.text import attend, gelu, rms, rope
from webgemma.reference.weights import Floats, Weights

EPS = 1e-6  # of every RMSNorm
LAYER_NORM_EPS = 1e-5  # of 12B's layer norms
ROPE_BASE = 100.0

# Linears of a layer in the order of `v.clamp_data`.
CLIPPED_LINEARS = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")


class VisionEncoder:
    """Vision encoder: a configuration and its weights.

    An image is a grid of patches [rows, columns, patch · patch · 3], as transformers' pixel_values:
    each patch row by row with the three colours of a pixel together, from 0 to 1."""

    def __init__(self, vision: VisionConfig, weights: Weights) -> None:
        self.vision = vision
        self.weights = weights
        check_tensors(weights.gguf, vision_tensors(vision), weights.tensors)
        self._bounds = clip_bounds(vision, weights) if vision.clipped else {}

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> "VisionEncoder":
        """Return the encoder in an mmproj, or in a file that also holds the text model (Ollama's).

        InputError when there is none."""
        vision = EncoderConfigs.from_gguf(gguf).vision
        if vision is None:
            raise InputError(f"{gguf.name} has no vision encoder.")
        return cls(vision, Weights(gguf))

    @np.errstate(over="ignore", invalid="ignore")  # values that are not finite end in an error
    def encode(self, pixels: Floats) -> Floats:
        """Return soft tokens W rms(pooled): [n, output]. GgufError when a value is not finite."""
        x = self._linear(rms(self.pooled(pixels), None, EPS), "mm.input_projection")
        if not np.isfinite(x).all():
            raise GgufError(
                f"{self.weights.gguf.name}: the vision encoder computes NaN or infinity, so its "
                "weights are damaged."
            )
        return x

    @np.errstate(over="ignore", invalid="ignore")  # likewise
    def pooled(self, pixels: Floats) -> Floats:
        """Return the encoder's features of each soft token, before the projection: [n, width]."""
        self._check(pixels)
        rows, columns = pixels.shape[:2]
        y, x = (axis.ravel() for axis in np.mgrid[:rows, :columns])  # of each patch
        if not self.vision.layers:
            return self.embed_unified(pixels, x, y)
        h = self.embed(pixels, x, y)  # [patches, width]
        for index in range(self.vision.layers):
            h = self.layer_output(f"v.blk.{index}.", h, x, y)
        h = self.pool(h, rows, columns)  # [n, width]
        if self.vision.standardised:
            h = (h - self.weights["v.std_bias"]) * self.weights["v.std_scale"]
        return h

    def embed(self, pixels: Floats, x: np.ndarray, y: np.ndarray) -> Floats:
        """Return W (2 p − 1) + X[x] + Y[y] for pixels p of a patch: [patches, width]."""
        centred: Floats = np.float32(2) * planes(pixels, self.vision.patch) - np.float32(1)
        kernel = self.weights["v.patch_embd.weight"].reshape(self.vision.width, -1)
        return centred @ kernel.T + self.position_embeddings(x, y)

    def embed_unified(self, pixels: Floats, x: np.ndarray, y: np.ndarray) -> Floats:
        """Return norm₃(norm₂(W norm₁(p) + b) + X[x] + Y[y]), all of 12B's encoder: [n, width]."""
        p = self._layer_norm(planes(pixels, self.vision.patch), 1)
        h = self.weights.linear(p, "v.patch_embd.weight") + self.weights["v.patch_embd.bias"]
        return self._layer_norm(self._layer_norm(h, 2) + self.position_embeddings(x, y), 3)

    def position_embeddings(self, x: np.ndarray, y: np.ndarray) -> Floats:
        """Return X[x] + Y[y] of the patches' columns x and rows y: [patches, width]."""
        of_columns, of_rows = self.weights["v.position_embd.weight"]
        return of_columns[x] + of_rows[y]

    def layer_output(self, name: str, x: Floats, columns: np.ndarray, rows: np.ndarray) -> Floats:
        """Return a layer's output for its input x: [patches, width].

        x = x + rms(attention(rms(x)))
        x = x + rms(feed_forward(rms(x)))
        x = x · output scale, where the file has one"""
        a = self.attention(name, self._norm(x, name + "ln1"), columns, rows)
        x = x + self._norm(a, name + "attn_post_norm")
        f = self.feed_forward(name, self._norm(x, name + "ln2"))
        x = x + self._norm(f, name + "ffn_post_norm")
        scale = name + "out_scale.weight"
        return x * self.weights[scale] if scale in self.weights else x

    def attention(self, name: str, h: Floats, columns: np.ndarray, rows: np.ndarray) -> Floats:
        """Return W_o softmax(q kᵀ) v over all patches: [patches, width].

        q and k = rope_2d(rms(W h)), v = rms(W h); the RMSNorm of v has no weight."""
        count = len(h)
        shape = (count, self.vision.heads, self.vision.width // self.vision.heads)
        q, k, v = (self._linear(h, name + part).reshape(shape) for part in CLIPPED_LINEARS[:3])
        q = rope_2d(self._norm(q, name + "attn_q_norm"), columns, rows)
        k = rope_2d(self._norm(k, name + "attn_k_norm"), columns, rows)
        out = attend(q, k, rms(v, None, EPS), 0, window=count, ends=np.full(count, count))
        return self._linear(out.reshape(count, -1), name + "attn_out")

    def feed_forward(self, name: str, n: Floats) -> Floats:
        """Return W_down(gelu(W_gate n) · W_up n), a GeGLU: [patches, width]."""
        hidden = gelu(self._linear(n, name + "ffn_gate")) * self._linear(n, name + "ffn_up")
        return self._linear(hidden, name + "ffn_down")

    def pool(self, x: Floats, rows: int, columns: int) -> Floats:
        """Return √width · mean(x) of each square of pool × pool patches, row by row: [n, width]."""
        pool = self.vision.pool
        squares = x.reshape(rows // pool, pool, columns // pool, pool, -1)
        means = squares.mean(axis=(1, 3)).reshape(-1, self.vision.width)
        return means * np.float32(math.sqrt(self.vision.width))

    def _linear(self, x: Floats, name: str) -> Floats:
        """Return W x; a clipped linear clamps its input and output to its bounds."""
        if name not in self._bounds:
            return self.weights.linear(x, name + ".weight")
        input_min, input_max, output_min, output_max = self._bounds[name]
        out = self.weights.linear(clamp(x, input_min, input_max), name + ".weight")
        return clamp(out, output_min, output_max)

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.weights[name + ".weight"], EPS)

    def _layer_norm(self, x: Floats, number: int) -> Floats:
        """Return (x − mean(x)) / √(variance(x) + eps) · weight + bias over the last axis."""
        name = f"v.patch_norm.{number}"
        x = x - x.mean(axis=-1, keepdims=True)
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(LAYER_NORM_EPS))
        return normed * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def _check(self, pixels: Floats) -> None:
        """Raise InputError unless the pixels are a grid of patches that the encoder can take."""
        patch, pool, max_side = self.vision.patch, self.vision.pool, self.vision.positions
        if pixels.ndim != 3 or pixels.shape[2] != 3 * patch * patch or not pixels.size:
            raise InputError(
                f"An image must be [rows, columns, {3 * patch * patch}], not {pixels.shape}."
            )
        rows, columns = pixels.shape[:2]
        if rows % pool or columns % pool or max(rows, columns) > max_side:
            raise InputError(
                f"An image of {columns} x {rows} patches cannot be encoded: each side must be a "
                f"multiple of {pool} patches, and at most {max_side}."
            )


def clip_bounds(vision: VisionConfig, weights: Weights) -> dict[str, Floats]:
    """Return (input_min, input_max, output_min, output_max) of each linear by name.

    Files hold them as scalars beside the weight or, older ones of Ollama's, as rows of
    `v.clamp_data`, where four zeros mean that a linear is not clipped. GgufError when that table
    has another size."""
    names = [f"v.blk.{index}.{part}" for index in range(vision.layers) for part in CLIPPED_LINEARS]
    names.append("mm.input_projection")
    bounds = scalar_bounds(weights, names)
    if "v.clamp_data" in weights:
        table = weights["v.clamp_data"]
        if table.size != 4 * len(names):
            raise GgufError(
                f"{weights.gguf.name}: v.clamp_data holds {table.size} numbers, "
                f"not four for each of {len(names)} linears."
            )
        for name, row in zip(names, table.reshape(-1, 4), strict=True):
            if row.any():
                check_bounds(weights.gguf, name, row.tolist())
                bounds[name] = row
    return bounds


def scalar_bounds(weights: Weights, linears: list[str]) -> dict[str, Floats]:
    """Return the four bounds beside the weight of each linear; a missing one is infinite."""
    check_tensors(weights.gguf, bound_tensors(linears), weights.tensors)
    found: dict[str, Floats] = {}
    for name in linears:
        found[name] = np.array([-np.inf, np.inf, -np.inf, np.inf], np.float32)
        for at, bound in enumerate(BOUNDS):
            if f"{name}.{bound}" in weights:
                found[name][at] = weights[f"{name}.{bound}"].item()
        check_bounds(weights.gguf, name, found[name].tolist())
    return found


def clamp(x: Floats, low: float, high: float) -> Floats:
    """Return x clamped to bounds; what is not finite stays, so that a damaged weight is noticed."""
    return np.where(np.isfinite(x), np.clip(x, np.float32(low), np.float32(high)), x)


def planes(pixels: Floats, patch: int) -> Floats:
    """Return patches with all red, then all green, then all blue values: [patches, 3 · patch²].

    Files order the weights of the patch embedding so."""
    colours_last = pixels.reshape(-1, patch * patch, 3)
    return colours_last.transpose(0, 2, 1).reshape(len(colours_last), -1)


def rope_2d(x: Floats, columns: np.ndarray, rows: np.ndarray) -> Floats:
    """Return x [patches, heads, d] with RoPE: half of d by the column, half by the row."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-np.arange(half // 2) * 2.0 / half)
    parts = zip(np.split(x, 2, axis=-1), (columns, rows), strict=True)
    return np.concatenate([rope(part, at[:, None] * frequencies) for part, at in parts], axis=-1)
