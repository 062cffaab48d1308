"""DiffusionGemma, formula by formula: a canvas of noise comes into focus, block after block."""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from webgemma.denoising import Canvas, Denoising, position_bits
from webgemma.gemma.config import Config, Layer
from webgemma.reference.text import Cache, TextModel, attend, gelu, rms, softmax
from webgemma.reference.weights import Floats, Weights

Ids = np.ndarray  # [canvas], whole numbers


class Draws(Protocol):
    """Where the random tokens of a generation come from."""

    def noise(self, block: int, step: int) -> Ids:
        """A token for each position, all equally likely; step 0 is the first canvas."""
        ...

    def sample(self, block: int, step: int, z: Floats) -> Ids:
        """A token for each position, of the probabilities softmax(z)."""
        ...


class SeededDraws:
    """Draws that a seed decides, by Gumbel's trick: the largest z + g, each g its own number."""

    def __init__(self, seed: int, canvas: int, vocab: int) -> None:
        self.seed = seed
        self.canvas = canvas
        self.vocab = vocab

    def noise(self, block: int, step: int) -> Ids:
        """Random bits, modulo the vocabulary."""
        return self._bits(block, step, sampling=False) % self.vocab

    def sample(self, block: int, step: int, z: Floats) -> Ids:
        """argmax(z + g) with g = -log(-log(1 - w)), w random in (0, 1)."""
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
    """The same weights, looking at a canvas: every position sees all of it and what is read."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.output_scale = "layer_output_scale.weight"

    def attention(self, layer: Layer, h: Floats, cache: Cache, ends: np.ndarray) -> Floats:
        """softmax(q kᵀ) v over the cache (on sliding layers its last window - 1) and the canvas."""
        del ends  # nothing of a canvas is hidden from it
        first, count = cache.length, len(h)
        k, v = self.keys_and_values(layer, h, first)
        low = max(0, first - self.config.window + 1) if layer.sliding else 0
        held_k, held_v = cache.read(layer, first)
        k, v = np.concatenate([held_k[low:], k]), np.concatenate([held_v[low:], v])
        everything = np.full(count, len(k))
        q = self.queries(layer, h, first)
        out = attend(q, k, v, 0, len(k) + count, everything)  # [canvas, heads, head_dim]
        return self.weights.linear(out.reshape(count, -1), f"blk.{layer.index}.attn_output.weight")


class DiffusionModel:
    """An encoder that reads tokens into a cache, and a decoder that sees a canvas after them."""

    def __init__(self, config: Config, weights: Weights) -> None:
        assert config.diffusion is not None
        self.config = config
        self.weights = weights
        self.canvas = config.diffusion.canvas
        self.encoder = TextModel(config, weights)
        self.decoder = Decoder(config, weights)

    def encode(self, ids: Sequence[int], cache: Cache) -> Floats:
        """Read tokens that follow what the cache holds; gives the normed states: [T, width]."""
        trace: list[Floats] = []
        self.encoder.forward(ids, cache, last_only=True, trace=trace)
        return rms(trace[-2], self.weights["output_norm.weight"], self.config.eps)

    def logits(self, canvas: Sequence[int], cache: Cache, expected: Floats | None) -> Floats:
        """[canvas, vocab] for a canvas after the cache, which it does not change."""
        config, decoder = self.config, self.decoder
        x = decoder.embed(canvas)  # [canvas, width]
        if expected is not None:
            x = x + self.condition(expected)
        x = rms(x, None, config.eps)
        ends = np.empty(0)
        for layer in config.layers:
            x = decoder.block(layer, x, None, cache, ends)
        return decoder.head(rms(x, self.weights["output_norm.weight"], config.eps))

    def expect(self, z: Floats) -> Floats:
        """The embedding that the next step may expect: softmax(z) E √d, [canvas, width]."""
        scale = np.float32(math.sqrt(self.config.width))
        return self.weights.blend(softmax(z), "token_embd.weight") * scale

    def condition(self, expected: Floats) -> Floats:
        """W_down(gelu(W_gate n) · W_up n) of the normed expectation n: [canvas, width]."""
        linear = self.weights.linear
        n = rms(expected, self.weights["self_cond_pre_norm.weight"], self.config.eps)
        hidden = gelu(linear(n, "self_cond_gate.weight")) * linear(n, "self_cond_up.weight")
        return linear(hidden, "self_cond_down.weight")

    def denoise(
        self, cache: Cache, denoising: Denoising, draws: Draws, block: int = 0
    ) -> Iterator[Canvas]:
        """One block after what the cache holds, step by step; the last canvas is done."""
        canvas, expected = draws.noise(block, 0), None
        best, stable = np.empty(0), 0
        for step in range(1, denoising.steps + 1):
            logits = self.logits(canvas.tolist(), cache, expected)
            z = logits / np.float32(denoising.temperature(step))
            h = entropy(z)
            accepted = accept(h, denoising.entropy_bound)
            canvas = np.where(accepted, draws.sample(block, step, z), draws.noise(block, step))
            last, best = best, np.argmax(z, axis=-1)
            stable = stable + 1 if np.array_equal(last, best) else 0
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
            expected = self.expect(z)


def entropy(z: Floats) -> Floats:
    """Of softmax(z), in nats, over the last axis."""
    shifted = z - z.max(axis=-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(axis=-1)
    inner = (e * np.where(e > 0, shifted, np.float32(0))).sum(axis=-1)
    return np.maximum(np.log(total) - inner / total, 0)


def accept(h: Floats, bound: float) -> np.ndarray:
    """Which positions stay: the least uncertain, while those before them sum up to the bound."""
    order = np.argsort(h, kind="stable")
    before = np.cumsum(np.append(0.0, h[order][:-1]))
    accepted = np.empty(len(h), bool)
    accepted[order] = before <= bound
    return accepted


def mix(x: np.ndarray) -> np.ndarray:
    """`webgemma.sampler`'s bijection of 32-bit integers, of an array."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)
