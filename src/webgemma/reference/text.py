"""The text model of Gemma 4, formula by formula: ids in, logits out."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.tensors import check_rope_factors
from webgemma.reference.weights import Floats, Weights

QUERY_BLOCK = (
    256  # queries whose scores are held at once, so that memory grows with the length only
)

PADDING = 0  # the id whose per-layer embedding soft tokens take


class Soft(NamedTuple):
    """What a tower saw or heard: it takes the place of ids[first : first + len(rows)]."""

    first: int
    rows: Floats  # [n, width], as the projector made them
    picture: bool = False  # the large models let the tokens of one picture see each other


class Cache:
    """The keys and values of one conversation; layers that share read their donor's."""

    def __init__(self, config: Config) -> None:
        self.length = 0  # positions held
        shapes = {x.index: (x.kv_heads, x.head_dim) for x in config.layers if not x.shares_kv}
        self._held = {i: np.empty((2, 64, *shape), np.float32) for i, shape in shapes.items()}

    def append(self, layer: Layer, k: Floats, v: Floats) -> None:
        """Keep k and v [T, kv_heads, head_dim] of the positions from `length` on."""
        end = self.length + len(k)
        held = self._held[layer.index]
        if end > held.shape[1]:
            held = np.empty((2, max(end, 2 * held.shape[1]), *held.shape[2:]), np.float32)
            held[:, : self.length] = self._held[layer.index][:, : self.length]
            self._held[layer.index] = held
        held[0, self.length : end], held[1, self.length : end] = k, v

    def read(self, layer: Layer, end: int) -> tuple[Floats, Floats]:
        """Keys and values of the positions below `end`: two of [end, kv_heads, head_dim]."""
        k, v = self._held[layer.kv_donor][:, :end]
        return k, v

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = min(self.length, length)


class TextModel:
    """A text model: a blueprint and its weights. It holds no conversation."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        # DiffusionGemma reads with other scales than it writes with: see diffusion.py.
        self.output_scale = "enc_" * bool(config.diffusion) + "layer_output_scale.weight"
        kinds = {layer.sliding: layer.head_dim for layer in config.layers}
        self.frequencies = {kind: self._rope_frequencies(kind, kinds[kind]) for kind in kinds}

    @np.errstate(over="ignore", invalid="ignore")  # `head` notices what came of it
    def forward(
        self,
        ids: Sequence[int],
        cache: Cache | None = None,
        *,
        soft: Sequence[Soft] = (),
        last_only: bool = False,
        trace: list[Floats] | None = None,
    ) -> Floats:
        """Logits [T, vocab] of tokens that follow what the cache holds; `last_only`: [1, vocab].

        `soft` tokens come whole: a picture is not to be cut by a call.
        `trace` receives the scaled embedding, every layer's output, and the final norm's."""
        cache = Cache(self.config) if cache is None else cache
        x = self.embed(ids)  # [T, width]
        ids, ends = self.merge(x, ids, soft, cache.length)
        ple = self.per_layer_embeddings(x, ids)  # [T, layers, ple]
        if trace is not None:
            trace.append(x)
        for layer in self.config.layers:
            x = self.block(layer, x, ple, cache, ends)
            if trace is not None:
                trace.append(x)
        cache.length += len(ids)
        h = rms(x[-1:] if last_only else x, self.weights["output_norm.weight"], self.config.eps)
        if trace is not None:
            trace.append(h)
        return self.head(h)

    def embed(self, ids: Sequence[int]) -> Floats:
        """x = E[id] · √d: [T, width]."""
        scale = np.float32(math.sqrt(self.config.width))
        return self.weights.rows("token_embd.weight", ids) * scale

    def merge(
        self, x: Floats, ids: Sequence[int], soft: Sequence[Soft], first: int
    ) -> tuple[list[int], np.ndarray]:
        """Write soft tokens into x, unscaled; their ids become the padding's.

        The ends [T] say before which position each token stops looking on sliding layers: after
        itself, or, in a picture of a large model, after the picture."""
        ids, ends = list(ids), np.arange(first, first + len(ids)) + 1
        for at, rows, picture in soft:
            if at < 0 or at + len(rows) > len(ids) or rows.shape[1:] != x.shape[1:]:
                raise InputError(
                    f"Soft tokens of shape {rows.shape} at {at} do not fit into {len(ids)} tokens "
                    f"of width {self.config.width}."
                )
            place = slice(at, at + len(rows))
            x[place], ids[place] = rows, [PADDING] * len(rows)
            if picture and self.config.images_attend_both_ways:
                ends[place] = first + at + len(rows)
        return ids, ends

    def per_layer_embeddings(self, x: Floats, ids: Sequence[int]) -> Floats | None:
        """(table row · √ple + rms(W x / √d)) / √2, one vector for each layer: [T, layers, ple]."""
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

    def block(
        self, layer: Layer, x: Floats, ple: Floats | None, cache: Cache, ends: np.ndarray
    ) -> Floats:
        """One layer: attention, feed-forward, per-layer embedding, each normed before and after."""
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
        """softmax(q kᵀ) v over all positions so far, then the output projection: [T, width]."""
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
        """q = rope(rms(W_q h)) of positions from `first` on: [T, heads, head_dim]."""
        name = f"blk.{layer.index}.attn_q"
        q = self.weights.linear(h, name + ".weight").reshape(len(h), layer.heads, layer.head_dim)
        return self._turned(layer, self._norm(q, name + "_norm"), first)

    def keys_and_values(self, layer: Layer, h: Floats, first: int) -> tuple[Floats, Floats]:
        """k = rope(rms(W_k h)) and v = rms(W_v h), two of [T, kv_heads, head_dim]."""
        name = f"blk.{layer.index}.attn_"
        shape = (len(h), layer.kv_heads, layer.head_dim)
        k = self.weights.linear(h, name + "k.weight").reshape(shape)
        v = k if layer.k_is_v else self.weights.linear(h, name + "v.weight").reshape(shape)
        k = self._turned(layer, self._norm(k, name + "k_norm"), first)
        return k, rms(v, None, self.config.eps)

    def _turned(self, layer: Layer, x: Floats, first: int) -> Floats:
        angles = np.arange(first, first + len(x))[:, None] * self.frequencies[layer.sliding]
        return rope(x, angles)

    def feed_forward(self, name: str, n: Floats) -> Floats:
        """GeGLU: W_down(gelu(W_gate n) · W_up n)."""
        linear = self.weights.linear
        hidden = gelu(linear(n, name + "ffn_gate.weight")) * linear(n, name + "ffn_up.weight")
        return linear(hidden, name + "ffn_down.weight")

    def experts(self, name: str, r: Floats) -> Floats:
        """The weighted sum of each token's chosen experts, from the residual r [T, width]."""
        experts = self.config.experts
        assert experts is not None
        chosen, share = self.route(name, r)  # both [T, used]
        m = self._norm(r, name + "pre_ffw_norm_2")
        out = np.zeros_like(r)
        for expert in np.unique(chosen):
            tokens, slot = np.nonzero(chosen == expert)
            hidden = self._expert_hidden(name, m[tokens], int(expert))
            down = self.weights.linear(
                hidden, name + "ffn_down_exps.weight", int(expert), experts.count
            )
            out[tokens] += share[tokens, slot, None] * down
        return out

    def route(self, name: str, r: Floats) -> tuple[np.ndarray, Floats]:
        """Each token's experts and their shares: softmax, the best few, renormalised, scaled."""
        experts = self.config.experts
        assert experts is not None
        scaled = rms(r, self.weights[name + "ffn_gate_inp.scale"], self.config.eps)
        scores = self.weights.linear(
            scaled / np.float32(math.sqrt(self.config.width)), name + "ffn_gate_inp.weight"
        )
        p = softmax(scores)  # [T, experts]
        chosen = np.argsort(-p, axis=-1, kind="stable")[:, : experts.used]
        share = np.take_along_axis(p, chosen, axis=-1)
        share /= share.sum(axis=-1, keepdims=True)
        if name + "ffn_down_exps.scale" in self.weights:
            share *= self.weights[name + "ffn_down_exps.scale"][chosen]
        return chosen, share

    def _expert_hidden(self, name: str, m: Floats, expert: int) -> Floats:
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

    def head(self, h: Floats) -> Floats:
        """Logits: the tied table (or its own), softly capped; suppressed tokens at -inf."""
        table = "token_embd.weight" if self.config.tied else "output.weight"
        cap = np.float32(self.config.softcap)
        logits = self.weights.linear(h, table)
        if not np.isfinite(logits).all():
            raise GgufError(
                f"{self.weights.gguf.name} computes NaN or infinity: its weights are "
                "damaged; check the file with `webgemma verify`."
            )
        logits = cap * np.tanh(logits / cap)
        logits[:, list(self.config.suppressed)] = -np.inf
        return logits

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.weights[name + ".weight"], self.config.eps)

    def _rope_frequencies(self, sliding: bool, size: int) -> np.ndarray:
        """Radians per position of each pair of a head's `size` dimensions: [size / 2]."""
        base = self.config.rope_base_sliding if sliding else self.config.rope_base
        frequencies = base ** (-np.arange(size // 2) * 2.0 / size)
        if sliding:
            return frequencies
        if "rope_freqs.weight" in self.weights:  # 1 rotates, 1e30 stands still
            factors = self.weights["rope_freqs.weight"]
            return frequencies / check_rope_factors(self.weights.gguf, factors)
        return np.where(np.arange(size // 2) < size // 8, frequencies, 0.0)


def rms(x: Floats, weight: Floats | None, eps: float) -> Floats:
    """x / √(mean(x²) + eps), times the weight as it is stored."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return normed if weight is None else normed * weight


def gelu(x: Floats) -> Floats:
    """The tanh approximation of x Φ(x)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def rope(x: Floats, angles: np.ndarray) -> Floats:
    """Rotate dimensions j and j + d/2 of x [T, heads, d] together by angles [T, d/2]."""
    cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x: Floats) -> Floats:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(
    q: Floats, k: Floats, v: Floats, first: int, window: int, ends: np.ndarray | None = None
) -> Floats:
    """Attention of q [T, heads, d] from position first on over k, v [S, kv_heads, d].

    Query head j uses key-value head j // (heads / kv_heads); p sees p - window < s < its end,
    which is p + 1 (causal attention) unless `ends` [T] says otherwise."""
    count, heads, size = q.shape
    ends = np.arange(first, first + count) + 1 if ends is None else ends
    kv_heads = k.shape[1]
    out = np.empty_like(q)
    for start in range(0, count, QUERY_BLOCK):
        stop = min(count, start + QUERY_BLOCK)
        low, high = max(0, first + start - window + 1), ends[start:stop].max()
        grouped = q[start:stop].reshape(stop - start, kv_heads, heads // kv_heads, size)
        keys, values = k[low:high].transpose(1, 2, 0), v[low:high].transpose(1, 0, 2)
        scores = grouped.transpose(1, 2, 0, 3) @ keys[:, None]  # [kv_heads, group, T, S]
        p, s = np.arange(first + start, first + stop)[:, None], np.arange(low, high)
        seen = (s > p - window) & (s < ends[start:stop, None])
        scores = np.where(seen, scores, np.float32(-np.inf))
        block = softmax(scores) @ values[:, None]  # [kv_heads, group, T, d]
        out[start:stop] = block.transpose(2, 0, 1, 3).reshape(stop - start, heads, size)
    return out
