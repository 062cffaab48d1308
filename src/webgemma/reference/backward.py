"""The gradients of an adapter: the text model forward over whole sequences, and back.

Every function here returns what it computes and the way back: a function from dL/dy to dL/dx, which
also adds what falls to the adapter's A and B. The way back runs through a layer from bottom to top.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from webgemma.errors import InputError
from webgemma.gemma.config import Layer
from webgemma.reference.gradients import (
    attend_back,
    cross_entropy,
    gelu_slope,
    rms_back,
    rope_back,
    softmax_back,
)
from webgemma.reference.lora import EMBEDDING, HEAD, AdaptedWeights, Pair
from webgemma.reference.text import TextModel, attend, gelu, rms, rope
from webgemma.reference.weights import Floats

Back = Callable[[Floats], Floats]


class Example(NamedTuple):
    """A text to learn: token t is to be foreseen from those before it where supervised[t]."""

    ids: Sequence[int]
    supervised: Sequence[bool]


class Backward:
    """Gradients of one adapter on a frozen model; computes in the dtype of the adapter."""

    def __init__(self, model: TextModel, adapter: Mapping[str, Pair]) -> None:
        self.weights = AdaptedWeights(model.weights.gguf, [adapter], model.weights.budget_nbytes)
        self.model = TextModel(model.config, self.weights)
        self.config = model.config
        self.adapter = adapter
        self.dtype = np.result_type(np.float32, *(pair.a.dtype for pair in adapter.values()))
        self._keys_values: dict[int, tuple[Floats, Floats]] = {}
        self._owed: dict[int, list[Floats]] = {}  # layer -> dk, dv that its readers asked for

    def gradients(
        self, examples: Sequence[Example]
    ) -> tuple[float, dict[str, tuple[Floats, Floats]]]:
        """The mean loss over all supervised tokens, and dL/dA, dL/dB of each pair."""
        count = sum(sum(map(bool, example.supervised[1:])) for example in examples)
        if not count:
            raise InputError("No token is supervised: there is nothing to learn.")
        self.sums = {
            name: (np.zeros_like(pair.a), np.zeros_like(pair.b))
            for name, pair in self.adapter.items()
        }
        loss = sum(self.example(example, count) for example in examples)
        return loss, self.sums

    def example(self, example: Example, count: int) -> float:
        """One sequence's part of the loss, forward and back."""
        ids = np.array(example.ids)
        at = np.flatnonzero(example.supervised[1:])  # the positions that foresee
        x, embed_back = self.embed(ids)
        ple, ple_back = self.per_layer_embeddings(x, ids)
        backs = []
        for layer in self.config.layers:
            x, back = self.block(layer, x, None if ple is None else ple[:, layer.index])
            backs.append(back)
        h, norm_back = self.norm(x, "output_norm")
        z, head_back = self.linear(h[at], EMBEDDING if self.config.tied else HEAD)
        losses, dz = cross_entropy(z, ids[at + 1], self.config.softcap)
        dh = np.zeros_like(h)
        dh[at] = head_back(dz / np.float32(count))
        dx = norm_back(dh)
        dple = None if ple is None else np.zeros_like(ple)
        for layer, layer_back in zip(self.config.layers[::-1], backs[::-1], strict=True):
            dx, layer_dple = layer_back(dx)
            if dple is not None and layer_dple is not None:
                dple[:, layer.index] = layer_dple
        embed_back(dx if dple is None else dx + ple_back(dple))
        return float(losses.sum()) / count

    # The two ends

    def embed(self, ids: np.ndarray) -> tuple[Floats, Callable[[Floats], None]]:
        """x = √d (E[id] + scale · B A[id])."""
        scale = np.float32(math.sqrt(self.config.width))

        def back(dx: Floats) -> None:
            if pair := self.adapter.get(EMBEDDING):
                da, db = self.sums[EMBEDDING]
                step = np.float32(pair.scale) * scale * dx
                np.add.at(da, ids, step @ pair.b)
                db += step.T @ pair.a[ids]

        return self.model.embed(ids.tolist()).astype(self.dtype), back

    def per_layer_embeddings(
        self, x: Floats, ids: np.ndarray
    ) -> tuple[Floats | None, Callable[[Floats], Floats]]:
        """(table row · √ple + rms(W x / √d)) / √2: [T, layers, ple]; x gets its gradient here."""
        if not self.config.ple:
            return None, np.zeros_like
        shape = (len(ids), len(self.config.layers), self.config.ple)
        table = self.weights.rows("per_layer_token_embd.weight", ids.tolist())
        token = table.reshape(shape) * np.float32(math.sqrt(self.config.ple))
        root, half = np.float32(math.sqrt(self.config.width)), np.float32(math.sqrt(0.5))
        context, linear_back = self.linear(x, "per_layer_model_proj.weight")
        normed, norm_back = self.norm((context / root).reshape(shape), "per_layer_proj_norm")

        def back(dple: Floats) -> Floats:
            return linear_back(norm_back(dple * half).reshape(context.shape) / root)

        return (normed + token) * half, back

    # A layer

    def block(
        self, layer: Layer, x: Floats, ple: Floats | None
    ) -> tuple[Floats, Callable[[Floats], tuple[Floats, Floats | None]]]:
        """One layer; its way back ends in dx and the gradient of its per-layer embedding."""
        name = f"blk.{layer.index}."
        middle, attention_back = self.residual(
            x, name + "attn_norm", name + "post_attention_norm", lambda h: self.attention(layer, h)
        )
        if layer.experts:
            y, forward_back = self.mixture(name, middle)
        else:
            y, forward_back = self.residual(
                middle,
                name + "ffn_norm",
                name + "post_ffw_norm",
                lambda n: self.feed_forward(name, n),
            )
        out, inject_back = self.inject(name, y, ple)
        scaled = name + "layer_output_scale.weight"
        scale = self.weights[scaled] if scaled in self.weights else np.ones(1, np.float32)

        def back(dout: Floats) -> tuple[Floats, Floats | None]:
            dy, dple = inject_back(dout * scale)
            return attention_back(forward_back(dy)), dple

        return out * scale, back

    def residual(
        self, x: Floats, before: str, after: str, inner: Callable[[Floats], tuple[Floats, Back]]
    ) -> tuple[Floats, Back]:
        """x + rms(inner(rms(x)))."""
        h, before_back = self.norm(x, before)
        y, inner_back = inner(h)
        out, after_back = self.norm(y, after)
        return x + out, lambda dy: dy + before_back(inner_back(after_back(dy)))

    def inject(
        self, name: str, x: Floats, ple: Floats | None
    ) -> tuple[Floats, Callable[[Floats], tuple[Floats, Floats | None]]]:
        """x + rms(W_proj(gelu(W_gate x) · ple)), where there are per-layer embeddings."""
        if ple is None:
            return x, lambda dy: (dy, None)
        gate, gate_back = self.linear(x, name + "inp_gate.weight")
        bent = gelu(gate)
        y, proj_back = self.linear(bent * ple, name + "proj.weight")
        out, norm_back = self.norm(y, name + "post_norm")

        def back(dy: Floats) -> tuple[Floats, Floats | None]:
            dproduct = proj_back(norm_back(dy))
            return dy + gate_back(dproduct * ple * gelu_slope(gate)), dproduct * bent

        return x + out, back

    def attention(self, layer: Layer, h: Floats) -> tuple[Floats, Back]:
        """softmax(q kᵀ) v, then the output projection; keys and values may be a donor's."""
        name = f"blk.{layer.index}."
        angles = np.arange(len(h))[:, None] * self.model.frequencies[layer.sliding]
        q, q_back = self.heads(h, name + "attn_q", layer.heads, angles)
        kv_back = None if layer.shares_kv else self.keys_values(layer, h, angles)
        k, v = self._keys_values[layer.kv_donor]
        window = self.config.window if layer.sliding else len(h)
        a = attend(q, k, v, 0, window)  # [T, heads, head_dim]
        out, out_back = self.linear(a.reshape(len(h), -1), name + "attn_output.weight")

        def back(dout: Floats) -> Floats:
            dq, dk, dv = attend_back(q, k, v, window, out_back(dout).reshape(a.shape))
            owed = self._owed[layer.kv_donor]
            owed[0], owed[1] = owed[0] + dk, owed[1] + dv
            dh = q_back(dq)
            return dh if kv_back is None else dh + kv_back(*owed)

        return out, back

    def keys_values(
        self, layer: Layer, h: Floats, angles: np.ndarray
    ) -> Callable[[Floats, Floats], Floats]:
        """Keeps the layer's keys and values; the way back starts from what all readers owe."""
        name, eps = f"blk.{layer.index}.", self.config.eps
        flat, k_linear_back = self.linear(h, name + "attn_k.weight")
        raw = flat.reshape(len(h), layer.kv_heads, layer.head_dim)
        k, turn_back = self.turn(raw, name + "attn_k_norm", angles)
        if not layer.k_is_v:
            flat, v_linear_back = self.linear(h, name + "attn_v.weight")
            raw = flat.reshape(raw.shape)

        def back(dk: Floats, dv: Floats) -> Floats:
            dk, dv = turn_back(dk), rms_back(raw, None, eps, dv)
            if layer.k_is_v:
                return k_linear_back((dk + dv).reshape(flat.shape))
            return k_linear_back(dk.reshape(flat.shape)) + v_linear_back(dv.reshape(flat.shape))

        v = rms(raw, None, eps)
        self._keys_values[layer.index] = k, v
        self._owed[layer.index] = [np.zeros_like(k), np.zeros_like(v)]
        return back

    def heads(self, h: Floats, name: str, heads: int, angles: np.ndarray) -> tuple[Floats, Back]:
        """rope(rms(W h)), head by head: [T, heads, head_dim]."""
        flat, linear_back = self.linear(h, name + ".weight")
        out, turn_back = self.turn(flat.reshape(len(h), heads, -1), name + "_norm", angles)
        return out, lambda dy: linear_back(turn_back(dy).reshape(flat.shape))

    def turn(self, x: Floats, norm: str, angles: np.ndarray) -> tuple[Floats, Back]:
        """rope(rms(x))."""
        normed, norm_back = self.norm(x, norm)
        return rope(normed, angles), lambda dy: norm_back(rope_back(dy, angles))

    def feed_forward(self, name: str, n: Floats) -> tuple[Floats, Back]:
        """GeGLU: W_down(gelu(W_gate n) · W_up n)."""
        gate, gate_back = self.linear(n, name + "ffn_gate.weight")
        up, up_back = self.linear(n, name + "ffn_up.weight")
        bent = gelu(gate)
        out, down_back = self.linear(bent * up, name + "ffn_down.weight")

        def back(dy: Floats) -> Floats:
            dhidden = down_back(dy)
            return gate_back(dhidden * up * gelu_slope(gate)) + up_back(dhidden * bent)

        return out, back

    # The mixture of experts

    def mixture(self, name: str, r: Floats) -> tuple[Floats, Back]:
        """r + rms(rms(dense branch) + rms(experts)), both from the residual r."""
        n, n_back = self.norm(r, name + "ffn_norm")
        dense, dense_back = self.feed_forward(name, n)
        first, first_back = self.norm(dense, name + "post_ffw_norm_1")
        experts, experts_back = self.experts(name, r)
        second, second_back = self.norm(experts, name + "post_ffw_norm_2")
        out, out_back = self.norm(first + second, name + "post_ffw_norm")

        def back(dy: Floats) -> Floats:
            df = out_back(dy)
            return dy + n_back(dense_back(first_back(df))) + experts_back(second_back(df))

        return r + out, back

    def experts(self, name: str, r: Floats) -> tuple[Floats, Back]:
        """Σ share · expert(rms(r)) over each token's chosen experts."""
        chosen, share, route_back = self.route(name, r)  # [T, used] twice
        m, m_back = self.norm(r, name + "pre_ffw_norm_2")
        out, runs = np.zeros_like(r), []
        for expert in map(int, np.unique(chosen)):
            tokens, slots = np.nonzero(chosen == expert)
            y, expert_back = self.expert(name, m[tokens], expert)
            out[tokens] += share[tokens, slots, None] * y
            runs.append((tokens, slots, y, expert_back))

        def back(dy: Floats) -> Floats:
            dm, dshare = np.zeros_like(m), np.zeros_like(share)
            for tokens, slots, y, expert_back in runs:
                dshare[tokens, slots] = (dy[tokens] * y).sum(axis=-1)
                dm[tokens] += expert_back(share[tokens, slots, None] * dy[tokens])
            return m_back(dm) + route_back(dshare)

        return out, back

    def expert(self, name: str, m: Floats, expert: int) -> tuple[Floats, Back]:
        """One expert's GeGLU."""
        experts = self.config.experts
        assert experts is not None
        if experts.fused:
            both, both_back = self.linear(m, name + "ffn_gate_up_exps.weight", expert)
            gate, up = both[:, : experts.ffn], both[:, experts.ffn :]
        else:
            gate, gate_back = self.linear(m, name + "ffn_gate_exps.weight", expert)
            up, up_back = self.linear(m, name + "ffn_up_exps.weight", expert)
        bent = gelu(gate)
        out, down_back = self.linear(bent * up, name + "ffn_down_exps.weight", expert)

        def back(dy: Floats) -> Floats:
            dhidden = down_back(dy)
            dgate, dup = dhidden * up * gelu_slope(gate), dhidden * bent
            if experts.fused:
                return both_back(np.concatenate([dgate, dup], axis=-1))
            return gate_back(dgate) + up_back(dup)

        return out, back

    def route(self, name: str, r: Floats) -> tuple[np.ndarray, Floats, Back]:
        """Each token's experts, their shares, and the way back from the shares to r.

        Renormalised, the shares are the softmax of the chosen scores alone: the others get no
        gradient, and the choice itself has none."""
        scale, root = self.weights[name + "ffn_gate_inp.scale"], math.sqrt(self.config.width)
        scaled = rms(r, scale, self.config.eps) / np.float32(root)
        scores, linear_back = self.linear(scaled, name + "ffn_gate_inp.weight")
        chosen, share = self.model.route(name, r)
        factor = np.ones_like(share)
        if name + "ffn_down_exps.scale" in self.weights:
            factor = self.weights[name + "ffn_down_exps.scale"][chosen]

        def back(dshare: Floats) -> Floats:
            dscores = np.zeros_like(scores)
            dchosen = softmax_back(share / factor, dshare * factor)
            np.put_along_axis(dscores, chosen, dchosen, axis=-1)
            dscaled = linear_back(dscores) / np.float32(root)
            return rms_back(r, scale, self.config.eps, dscaled)

        return chosen, share, back

    # What every layer is made of

    def norm(self, x: Floats, name: str) -> tuple[Floats, Back]:
        """x / √(mean(x²) + eps), times the weight."""
        weight, eps = self.weights[name + ".weight"], self.config.eps
        return rms(x, weight, eps), lambda dy: rms_back(x, weight, eps, dy)

    def linear(self, x: Floats, name: str, expert: int | None = None) -> tuple[Floats, Back]:
        """W x + scale · B A x: dx = Wᵀ dy + scale · Aᵀ Bᵀ dy, dA = scale · (Bᵀ dy) xᵀ,
        dB = scale · dy (A x)ᵀ."""
        part, parts = (0, 1) if expert is None else (expert, self.weights.tensors[name].shape[2])
        trained = HEAD if name == EMBEDDING else name

        def back(dy: Floats) -> Floats:
            dx = self.weights.transposed(dy, name, part, parts)
            if pair := self.adapter.get(trained):
                a, b = pair.of(part)
                da, db = Pair(*self.sums[trained], pair.scale).of(part)
                dinner: Floats = np.float32(pair.scale) * (dy @ b)  # [T, rank]
                da += dinner.T @ x
                db += np.float32(pair.scale) * dy.T @ (x @ a.T)
                dx = dx + dinner @ a
            return dx

        return self.weights.linear(x, name, part, parts), back
