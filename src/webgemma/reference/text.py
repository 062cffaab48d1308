"""Text model of Gemma 4 and Gemma 3: token ids in, logits out.

Shapes: T tokens of this call, S positions in the KV cache, d = `width` of the residual stream. The
file's tensors are named as in GGUF. A linear layer W maps x [T, in] to x Wᵀ [T, out] and is written
W x below; there are no biases. Products of two vectors, gelu(·) · u, are elementwise.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.tensors import check_rope_factors
from webgemma.reference.blas import few_threads
from webgemma.reference.weights import Floats, Weights

QUERY_CHUNK = 256  # queries whose scores are computed at a time: memory grows linearly with T

PADDING = 0  # token id whose per-layer embedding soft tokens use


class Soft(NamedTuple):
    """Soft tokens of an image or audio encoder, in place of ids[first : first + len(rows)]."""

    first: int
    rows: Floats  # [n, width], the output of the encoder's projection
    image: bool = False  # in the large models, tokens of one image attend to each other


class Cache:
    """KV cache of one conversation: keys and values of all its positions.

    Layers that share a KV cache read that of their donor layer."""

    def __init__(self, config: Config) -> None:
        self.length = 0  # positions stored
        shapes = {x.index: (x.kv_heads, x.head_dim) for x in config.layers if not x.shares_kv}
        # Per layer [2, capacity, kv_heads, head_dim]: keys, then values.
        self._stored = {i: np.empty((2, 64, *shape), np.float32) for i, shape in shapes.items()}

    def append(self, layer: Layer, k: Floats, v: Floats) -> None:
        """Store k and v [T, kv_heads, head_dim] at the positions from `length` on.

        The length stays as it is until every layer has stored its own."""
        end = self.length + len(k)
        stored = self._stored[layer.index]
        if end > stored.shape[1]:
            stored = np.empty((2, max(end, 2 * stored.shape[1]), *stored.shape[2:]), np.float32)
            stored[:, : self.length] = self._stored[layer.index][:, : self.length]
            self._stored[layer.index] = stored
        stored[0, self.length : end], stored[1, self.length : end] = k, v

    def read(self, layer: Layer, end: int) -> tuple[Floats, Floats]:
        """Return keys and values of the positions below `end`: two of [end, kv_heads, head_dim]."""
        k, v = self._stored[layer.kv_donor][:, :end]
        return k, v

    def truncate(self, length: int) -> None:
        """Drop every position from `length` on."""
        self.length = min(self.length, length)


class TextModel:
    """Text model: a configuration and its weights. The state of a conversation is in `Cache`."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        # DiffusionGemma's encoder has output scales of its own: see diffusion.py.
        self.output_scale = "enc_" * bool(config.diffusion) + "layer_output_scale.weight"
        kinds = {layer.sliding: layer.head_dim for layer in config.layers}
        self.frequencies = {kind: self._rope_frequencies(kind, kinds[kind]) for kind in kinds}

    @few_threads
    @np.errstate(over="ignore", invalid="ignore")  # `head` raises for values that are not finite
    def forward(
        self,
        ids: Sequence[int],
        cache: Cache | None = None,
        *,
        soft: Sequence[Soft] = (),
        last_only: bool = False,
        head: bool = True,
        trace: list[Floats] | None = None,
    ) -> Floats:
        """Return logits [T, vocab] of tokens that follow the cache; with `last_only` [1, vocab].

        The tokens are appended to the cache. Each item of `soft` must lie within this call.
        Without `head`, return what its linear layer would read: DiffusionGemma's encoder has none.
        `trace` receives the scaled embeddings, every layer's output and the final RMSNorm's."""
        cache = Cache(self.config) if cache is None else cache
        x = self.embed(ids)  # [T, width]
        ids, ends = self.insert_soft_tokens(x, ids, soft, cache.length)
        ple = self.per_layer_embeddings(x, ids)  # [T, layers, ple]
        if trace is not None:
            trace.append(x)
        for layer in self.config.layers:
            x = self.layer_output(layer, x, ple, cache, ends)
            if trace is not None:
                trace.append(x)
        cache.length += len(ids)
        h = rms(x[-1:] if last_only else x, self.weights["output_norm.weight"], self.config.eps)
        if trace is not None:
            trace.append(h)
        return self.head(h) if head else h

    # Input

    def embed(self, ids: Sequence[int]) -> Floats:
        """Return x = √d · E[id]: [T, width]."""
        scale = np.float32(math.sqrt(self.config.width))
        return self.weights.rows("token_embd.weight", ids) * scale

    def insert_soft_tokens(
        self, x: Floats, ids: Sequence[int], soft: Sequence[Soft], first: int
    ) -> tuple[list[int], np.ndarray]:
        """Write soft tokens, unscaled, over their rows of x; return ids and ends [T].

        The ids of soft tokens become the padding's. On sliding layers a token attends to the
        positions before its end: p + 1 for causal attention, the position after the image for the
        tokens of an image in the large models. InputError for soft tokens outside of x."""
        ids, ends = list(ids), np.arange(first, first + len(ids)) + 1
        for at, rows, image in soft:
            if at < 0 or at + len(rows) > len(ids) or rows.shape[1:] != x.shape[1:]:
                raise InputError(
                    f"Soft tokens of shape {rows.shape} at {at} do not fit into {len(ids)} tokens "
                    f"of width {self.config.width}."
                )
            span = slice(at, at + len(rows))
            x[span], ids[span] = rows, [PADDING] * len(rows)
            if image and self.config.bidirectional_images:
                ends[span] = first + at + len(rows)
        return ids, ends

    def per_layer_embeddings(self, x: Floats, ids: Sequence[int]) -> Floats | None:
        """Return (√ple · table[id] + rms(W x / √d)) / √2, a vector per layer: [T, layers, ple].

        None for models without per-layer embeddings."""
        width, ple = self.config.width, self.config.ple
        if not ple:
            return None
        shape = (len(ids), len(self.config.layers), ple)
        token = self.weights.rows("per_layer_token_embd.weight", ids) * np.float32(math.sqrt(ple))
        context = self.weights.linear(x, "per_layer_model_proj.weight") / np.float32(
            math.sqrt(width)
        )
        normed = rms(
            context.reshape(shape), self.weights["per_layer_proj_norm.weight"], self.config.eps
        )
        return (normed + token.reshape(shape)) * np.float32(math.sqrt(0.5))

    # Layers

    def layer_output(
        self, layer: Layer, x: Floats, ple: Floats | None, cache: Cache, ends: np.ndarray
    ) -> Floats:
        """Return a layer's output for its input x: [T, width].

        x = x + rms(attention(rms(x)))
        x = x + rms(f), f = feed_forward(rms(x)); with experts f = rms(f) + rms(experts(x))
        x = x + rms(W_proj(gelu(W_gate x) · ple)), with per-layer embeddings
        x = x · output scale"""
        name = f"blk.{layer.index}."
        norm = self._norm
        a = self.attention(layer, norm(x, name + "attn_norm"), cache, ends)
        x = x + norm(a, name + "post_attention_norm")
        f = self.feed_forward(name, norm(x, name + "ffn_norm"))
        if layer.experts:
            f = norm(f, name + "post_ffw_norm_1") + norm(
                self.experts(name, x), name + "post_ffw_norm_2"
            )
        x = x + norm(f, name + "post_ffw_norm")
        if ple is not None:
            gate = gelu(self.weights.linear(x, name + "inp_gate.weight")) * ple[:, layer.index]
            x = x + norm(self.weights.linear(gate, name + "proj.weight"), name + "post_norm")
        if name + self.output_scale in self.weights:
            x = x * self.weights[name + self.output_scale]
        return x

    def attention(self, layer: Layer, h: Floats, cache: Cache, ends: np.ndarray) -> Floats:
        """Return W_o softmax(q kᵀ) v over the cache and these tokens: [T, width].

        Appends k and v to the cache, unless the layer shares its donor's. Full layers are causal;
        sliding layers attend to the last `window` positions before `ends`."""
        first, count = cache.length, len(h)
        q = self.queries(layer, h, first)
        if not layer.shares_kv:
            cache.append(layer, *self.keys_and_values(layer, h, first))
        k, v = cache.read(layer, first + count)
        window = self.config.window if layer.sliding else first + count
        out = attend(
            q, k, v, first, window, ends if layer.sliding else None
        )  # [T, heads, head_dim]
        return self.weights.linear(out.reshape(count, -1), f"blk.{layer.index}.attn_output.weight")

    def queries(self, layer: Layer, h: Floats, first: int) -> Floats:
        """Return q = rope(s · rms(W_q h)) at the positions from `first` on: [T, heads, head_dim].

        The scale s is 1 in Gemma 4."""
        name = f"blk.{layer.index}.attn_q"
        q = self.weights.linear(h, name + ".weight").reshape(len(h), layer.heads, layer.head_dim)
        weight = np.float32(self.config.query_scale) * self.weights[name + "_norm.weight"]
        return self._rope(layer, rms(q, weight, self.config.eps), first)

    def keys_and_values(self, layer: Layer, h: Floats, first: int) -> tuple[Floats, Floats]:
        """Return k = rope(rms(W_k h)) and v = rms(W_v h), two of [T, kv_heads, head_dim].

        Full layers of the large models have no W_v: v = rms(W_k h). The RMSNorm of v has no
        weight; in Gemma 3 there is none."""
        name = f"blk.{layer.index}.attn_"
        shape = (len(h), layer.kv_heads, layer.head_dim)
        k = self.weights.linear(h, name + "k.weight").reshape(shape)
        v = k if layer.k_is_v else self.weights.linear(h, name + "v.weight").reshape(shape)
        k = self._rope(layer, self._norm(k, name + "k_norm"), first)
        return k, rms(v, None, self.config.eps) if self.config.value_norm else v

    def _rope(self, layer: Layer, x: Floats, first: int) -> Floats:
        angles = np.arange(first, first + len(x))[:, None] * self.frequencies[layer.sliding]
        return rope(x, angles)

    def feed_forward(self, name: str, n: Floats) -> Floats:
        """Return W_down(gelu(W_gate n) · W_up n), a GeGLU: [T, width]."""
        linear = self.weights.linear
        hidden = gelu(linear(n, name + "ffn_gate.weight")) * linear(n, name + "ffn_up.weight")
        return linear(hidden, name + "ffn_down.weight")

    # Mixture of experts

    def experts(self, name: str, r: Floats) -> Floats:
        """Return Σ wₑ · expertₑ(rms(r)) over each token's routed experts e: [T, width].

        r [T, width] is the residual stream; every expert is a GeGLU of its own."""
        experts = self.config.experts
        assert experts is not None
        routed, routing_weights = self.route(name, r)  # both [T, used]
        m = self._norm(r, name + "pre_ffw_norm_2")
        out = np.zeros_like(r)
        for expert in np.unique(routed):
            tokens, slot = np.nonzero(routed == expert)
            hidden = self._expert_hidden(name, m[tokens], int(expert))
            down = self.weights.linear(
                hidden, name + "ffn_down_exps.weight", int(expert), experts.count
            )
            out[tokens] += routing_weights[tokens, slot, None] * down
        return out

    def route(self, name: str, r: Floats) -> tuple[np.ndarray, Floats]:
        """Return each token's experts and their routing weights, two of [T, used].

        The router's probabilities are p = softmax(W (rms(r) / √d)) over all experts, where the
        RMSNorm has the weight `ffn_gate_inp.scale`. A token uses the `used` experts of the largest
        p, with weights p / Σ p over those, times the expert's scale."""
        experts = self.config.experts
        assert experts is not None
        scale = self.weights[name + "ffn_gate_inp.scale"] / np.float32(math.sqrt(self.config.width))
        scores = self.weights.linear(rms(r, scale, self.config.eps), name + "ffn_gate_inp.weight")
        p = softmax(scores)  # [T, experts]
        routed = np.argsort(-scores, axis=-1, kind="stable")[:, : experts.used]
        routing_weights = np.take_along_axis(p, routed, axis=-1)
        routing_weights /= routing_weights.sum(axis=-1, keepdims=True)
        if name + "ffn_down_exps.scale" in self.weights:
            routing_weights *= self.weights[name + "ffn_down_exps.scale"][routed]
        return routed, routing_weights

    def _expert_hidden(self, name: str, m: Floats, expert: int) -> Floats:
        """Return gelu(W_gate m) · W_up m of one expert: [tokens, expert width].

        A fused tensor holds the rows of W_gate, then those of W_up."""
        experts = self.config.experts
        assert experts is not None
        linear, count = self.weights.linear, experts.count
        if experts.fused:
            both = linear(m, name + "ffn_gate_up_exps.weight", expert, count)
            gate, up = both[:, : experts.ffn], both[:, experts.ffn :]
        else:
            gate = linear(m, name + "ffn_gate_exps.weight", expert, count)
            up = linear(m, name + "ffn_up_exps.weight", expert, count)
        return gelu(gate) * up

    # Output

    def head(self, h: Floats) -> Floats:
        """Return logits cap · tanh(W h / cap) [T, vocab], suppressed tokens at -inf.

        W is the embedding table in tied models. Gemma 3 has no cap: its logits are W h. GgufError
        when a logit is not finite."""
        table = "token_embd.weight" if self.config.tied else "output.weight"
        logits = self.weights.linear(h, table)
        if not np.isfinite(logits).all():
            raise GgufError(
                f"{self.weights.gguf.name} computes NaN or infinity: its weights are "
                "damaged; check the file with `webgemma verify`."
            )
        if self.config.softcap:
            cap = np.float32(self.config.softcap)
            logits = cap * np.tanh(logits / cap)
        logits[:, list(self.config.suppressed)] = -np.inf
        return logits

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.weights[name + ".weight"], self.config.eps)

    def _rope_frequencies(self, sliding: bool, size: int) -> np.ndarray:
        """Return base^(-2j / size) in radians per position for each pair j of a head: [size / 2].

        Full layers of Gemma 4 divide them by the factors of `rope_freqs.weight`: 1 for the first
        quarter of the pairs and 1e30, which stops the rotation, for the rest (partial RoPE). Those
        of Gemma 3 and EmbeddingGemma 2 rotate all pairs; in the large models of Gemma 3, by
        positions divided by a scale."""
        base = self.config.rope_base_sliding if sliding else self.config.rope_base
        frequencies = base ** (-np.arange(size // 2) * 2.0 / size)
        if sliding:
            return frequencies
        if self.config.rope_share == 1:
            return frequencies / self.config.rope_scale
        if "rope_freqs.weight" in self.weights:
            factors = self.weights["rope_freqs.weight"]
            return frequencies / check_rope_factors(self.weights.gguf, factors)
        return np.where(np.arange(size // 2) < size // 8, frequencies, 0.0)


def rms(x: Floats, weight: Floats | None, eps: float) -> Floats:
    """Return x / √(mean(x²) + eps) · weight over the last axis: RMSNorm.

    The weight is used as stored, without an added 1; None stands for a weight of 1."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return normed if weight is None else normed * weight


def gelu(x: Floats) -> Floats:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))): GELU in its tanh approximation."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def rope(x: Floats, angles: np.ndarray) -> Floats:
    """Return x [T, heads, d] with each pair of dimensions (j, j + d/2) rotated: RoPE.

    (a, b) becomes (a cos θ - b sin θ, b cos θ + a sin θ), θ of `angles` [T, d/2]."""
    cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x: Floats) -> Floats:
    """Return eˣ / Σ eˣ over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(
    q: Floats, k: Floats, v: Floats, first: int, window: int, ends: np.ndarray | None = None
) -> Floats:
    """Return softmax(q kᵀ + mask) v for q [T, heads, d] and k, v [S, kv_heads, d]: [T, heads, d].

    The queries have the positions p from `first` on; the scores are not scaled. Query head j uses
    key-value head j // (heads / kv_heads) (grouped-query attention). A query attends to the
    positions p - window < s < its end: p + 1 (causal) unless `ends` [T] has another."""
    count, heads, size = q.shape
    ends = np.arange(first, first + count) + 1 if ends is None else ends
    kv_heads = k.shape[1]
    out = np.empty_like(q)
    for start in range(0, count, QUERY_CHUNK):
        stop = min(count, start + QUERY_CHUNK)
        low, high = max(0, first + start - window + 1), ends[start:stop].max()
        grouped = q[start:stop].reshape(stop - start, kv_heads, heads // kv_heads, size)
        keys, values = k[low:high].transpose(1, 2, 0), v[low:high].transpose(1, 0, 2)
        scores = grouped.transpose(1, 2, 0, 3) @ keys[:, None]  # [kv_heads, group, T, S]
        p, s = np.arange(first + start, first + stop)[:, None], np.arange(low, high)
        visible = (s > p - window) & (s < ends[start:stop, None])
        scores = np.where(visible, scores, np.float32(-np.inf))
        chunk = softmax(scores) @ values[:, None]  # [kv_heads, group, T, d]
        out[start:stop] = chunk.transpose(2, 0, 1, 3).reshape(stop - start, heads, size)
    return out
