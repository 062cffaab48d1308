"""DiffusionGemma: text by denoising, one canvas of tokens after another.

The encoder is the text model: it reads the prompt and finished canvases causally into the KV cache.
The decoder has the same weights: it computes logits for a canvas, whose positions attend to the
cache and to each other. Each step accepts the positions of least entropy and replaces the others
by random tokens.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from webgemma.denoising import Canvas, Denoising, position_bits
from webgemma.gemma.config import Config, Layer
from webgemma.reference.text import Cache, TextModel, attend, gelu, rms, softmax
from webgemma.reference.weights import Floats, Weights

Ids = np.ndarray  # [canvas], integers


class Draws(Protocol):
    """Source of the random tokens of a generation."""

    def noise(self, block: int, step: int) -> Ids:
        """Return a uniformly random token for each position; step 0 is the first canvas."""
        ...

    def sample(self, block: int, step: int, z: Floats) -> Ids:
        """Return a token for each position, drawn from softmax(z)."""
        ...


class SeededDraws:
    """Random tokens determined by a seed; tokens are drawn with the Gumbel-max trick."""

    def __init__(self, seed: int, canvas: int, vocab: int) -> None:
        self.seed = seed
        self.canvas = canvas
        self.vocab = vocab

    def noise(self, block: int, step: int) -> Ids:
        """Return random bits modulo the size of the vocabulary."""
        return self._bits(block, step, sampling=False) % self.vocab

    def sample(self, block: int, step: int, z: Floats) -> Ids:
        """Return argmax(z + g) with g = -ln(-ln(1 - w)), w random in (0, 1) for each logit."""
        keys = self._bits(block, step, sampling=True).astype(np.uint32)[:, None]
        random = mix(keys ^ mix(np.arange(self.vocab, dtype=np.uint32)))  # [canvas, vocab]
        w = np.minimum((random + 0.5) / 2.0**32, 1 - 2.0**-24)
        return np.argmax(z - np.log(-np.log1p(-w)), axis=-1)

    def _bits(self, block: int, step: int, *, sampling: bool) -> np.ndarray:
        positions = range(self.canvas)
        return np.array(
            [position_bits(self.seed, block, step, p, sampling=sampling) for p in positions]
        )


class Decoder(TextModel):
    """Text model over a canvas: bidirectional attention, and the decoder's output scales."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.output_scale = "layer_output_scale.weight"

    def attention(self, layer: Layer, h: Floats, cache: Cache, ends: np.ndarray) -> Floats:
        """Return W_o softmax(q kᵀ) v over the cache and the whole canvas: [canvas, width].

        Sliding layers attend to the last window - 1 positions of the cache. The cache is not
        changed, and `ends` is unused."""
        del ends
        first, count = cache.length, len(h)
        k, v = self.keys_and_values(layer, h, first)
        low = max(0, first - self.config.window + 1) if layer.sliding else 0
        cached_k, cached_v = cache.read(layer, first)
        k, v = np.concatenate([cached_k[low:], k]), np.concatenate([cached_v[low:], v])
        all_visible = np.full(count, len(k))
        q = self.queries(layer, h, first)
        out = attend(q, k, v, 0, len(k) + count, all_visible)  # [canvas, heads, head_dim]
        return self.weights.linear(out.reshape(count, -1), f"blk.{layer.index}.attn_output.weight")


class DiffusionModel:
    """DiffusionGemma: the encoder and the decoder over one set of weights."""

    def __init__(self, config: Config, weights: Weights) -> None:
        assert config.diffusion is not None
        self.config = config
        self.weights = weights
        self.canvas = config.diffusion.canvas
        self.encoder = TextModel(config, weights)
        self.decoder = Decoder(config, weights)

    def encode(self, ids: Sequence[int], cache: Cache) -> Floats:
        """Append tokens to the cache; return their states after the final RMSNorm: [T, width]."""
        return self.encoder.forward(ids, cache, head=False)

    @np.errstate(over="ignore", invalid="ignore")  # `head` raises for values that are not finite
    def logits(self, canvas: Sequence[int], cache: Cache, expected: Floats | None) -> Floats:
        """Return logits [canvas, vocab] of a canvas after the cache, which is not changed.

        The input is rms(√d E[id] + self_condition(expected)), where `expected` [canvas, width] is
        the expected embedding after the previous step; None, for zeros, on the first step."""
        config, decoder = self.config, self.decoder
        x = decoder.embed(canvas)  # [canvas, width]
        x = x + self.self_condition(np.zeros_like(x) if expected is None else expected)
        x = rms(x, None, config.eps)
        ends = np.empty(0)
        for layer in config.layers:
            x = decoder.layer_output(layer, x, None, cache, ends)
        return decoder.head(rms(x, self.weights["output_norm.weight"], config.eps))

    def expected_embedding(self, z: Floats) -> Floats:
        """Return √d · softmax(z) E, the embedding expected under z: [canvas, width]."""
        scale = np.float32(math.sqrt(self.config.width))
        return self.weights.weighted_rows(softmax(z), "token_embd.weight") * scale

    def self_condition(self, expected: Floats) -> Floats:
        """Return W_down(gelu(W_gate n) · W_up n) for n = rms(expected): [canvas, width]."""
        linear = self.weights.linear
        n = rms(expected, self.weights["self_cond_pre_norm.weight"], self.config.eps)
        hidden = gelu(linear(n, "self_cond_gate.weight")) * linear(n, "self_cond_up.weight")
        return linear(hidden, "self_cond_down.weight")

    def denoise(
        self, cache: Cache, denoising: Denoising, draws: Draws, block: int = 0
    ) -> Iterator[Canvas]:
        """Yield the canvas after each step of one block that follows the cache; the last is done.

        z = logits / temperature, H = entropy(softmax(z)) of each position. Positions accepted by H
        get tokens drawn from softmax(z), the others random ones. The block is done when argmax(z)
        is stable and the mean of H below its threshold, or after the last step; its text is
        argmax(z)."""
        canvas, expected = draws.noise(block, 0), None
        best, stable = np.empty(0), 0
        for step in range(1, denoising.steps + 1):
            logits = self.logits(canvas.tolist(), cache, expected)
            z = logits / np.float32(denoising.temperature(step))
            h = entropy(z)
            accepted = accept(h, denoising.entropy_bound)
            canvas = np.where(accepted, draws.sample(block, step, z), draws.noise(block, step))
            previous, best = best, np.argmax(z, axis=-1)
            stable = stable + 1 if np.array_equal(previous, best) else 0
            confident = h.mean() < denoising.confidence_threshold
            settled = stable >= denoising.stability_threshold and bool(confident)
            yield Canvas(
                block,
                step,
                tuple(canvas.tolist()),
                tuple(accepted.tolist()),
                tuple(best.tolist()),
                tuple(np.log(softmax(logits).max(axis=-1)).tolist()),
                float(h.mean()),
                settled or step == denoising.steps,
            )
            if settled:
                return
            expected = self.expected_embedding(z)


def entropy(z: Floats) -> Floats:
    """Return −Σ p ln p of p = softmax(z) over the last axis, in nats."""
    shifted = z - z.max(axis=-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(axis=-1)
    inner = (e * np.where(e > 0, shifted, np.float32(0))).sum(axis=-1)
    return np.maximum(np.log(total) - inner / total, 0)


def accept(h: Floats, bound: float) -> np.ndarray:
    """Return which positions are accepted, in order of entropy h: Σ h before them ≤ bound."""
    order = np.argsort(h, kind="stable")
    before = np.cumsum(np.append(0.0, h[order][:-1]))
    accepted = np.empty(len(h), bool)
    accepted[order] = before <= bound
    return accepted


def mix(x: np.ndarray) -> np.ndarray:
    """Return the bijection of 32-bit integers that `webgemma.sampler` uses, of each element."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)
