"""Gradients of a LoRA adapter on the text model: cross-entropy loss, forward and backward.

Notation: dy is dL/dy, the gradient of the loss with respect to y. Every method of `Backward`
returns its output y and a backward function from dy to dx, which also adds the gradients of the
adapter's A and B on its way. The derivatives of the single operations are at the end of the file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from webgemma.errors import InputError
from webgemma.gemma.config import Layer
from webgemma.reference.lora import EMBEDDING, HEAD, AdaptedWeights, Pair
from webgemma.reference.text import TextModel, attend, gelu, rms, rope, softmax
from webgemma.reference.weights import Floats

BackwardFunction: TypeAlias = Callable[[Floats], Floats]  # from dy to dx


class Example(NamedTuple):
    """Training text: token t is predicted from the tokens before it where supervised[t]."""

    ids: Sequence[int]
    supervised: Sequence[bool]


class Backward:
    """Gradients of one adapter on a frozen model, computed in the dtype of the adapter."""

    def __init__(self, model: TextModel, adapter: Mapping[str, Pair]) -> None:
        self.weights = AdaptedWeights(model.weights.gguf, [adapter], model.weights.budget_nbytes)
        self.model = TextModel(model.config, self.weights)
        self.config = model.config
        self.adapter = adapter
        self.dtype = np.result_type(np.float32, *(pair.a.dtype for pair in adapter.values()))
        self._keys_values: dict[int, tuple[Floats, Floats]] = {}
        # By layer, [dk, dv] summed over the layers that share its keys and values.
        self._keys_values_gradients: dict[int, list[Floats]] = {}

    def gradients(
        self, examples: Sequence[Example]
    ) -> tuple[float, dict[str, tuple[Floats, Floats]]]:
        """Return the mean loss over all supervised tokens, and (dA, dB) of each pair by name.

        InputError when no token is supervised."""
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
        """Return Σ loss / count over the tokens of one example; add its gradients to `sums`."""
        ids = np.array(example.ids)
        at = np.flatnonzero(example.supervised[1:])  # positions whose next token is supervised
        x, embed_backward = self.embed(ids)
        ple, ple_backward = self.per_layer_embeddings(x, ids)
        backwards = []
        for layer in self.config.layers:
            x, backward = self.layer_output(layer, x, None if ple is None else ple[:, layer.index])
            backwards.append(backward)
        h, norm_backward = self.norm(x, "output_norm")
        z, head_backward = self.linear(h[at], EMBEDDING if self.config.tied else HEAD)
        losses, dz = cross_entropy(z, ids[at + 1], self.config.softcap)
        dh = np.zeros_like(h)
        dh[at] = head_backward(dz / np.float32(count))
        dx = norm_backward(dh)
        dple = None if ple is None else np.zeros_like(ple)
        for layer, layer_backward in zip(self.config.layers[::-1], backwards[::-1], strict=True):
            dx, layer_dple = layer_backward(dx)
            if dple is not None and layer_dple is not None:
                dple[:, layer.index] = layer_dple
        embed_backward(dx if dple is None else dx + ple_backward(dple))
        return float(losses.sum()) / count

    # Input

    def embed(self, ids: np.ndarray) -> tuple[Floats, Callable[[Floats], None]]:
        """Compute x = √d (E[id] + scale · B A[id]): [T, width]."""
        scale = np.float32(math.sqrt(self.config.width))

        def backward(dx: Floats) -> None:
            if pair := self.adapter.get(EMBEDDING):
                da, db = self.sums[EMBEDDING]
                scaled = np.float32(pair.scale) * scale * dx
                np.add.at(da, ids, scaled @ pair.b)
                db += scaled.T @ pair.a[ids]

        return self.model.embed(ids.tolist()).astype(self.dtype), backward

    def per_layer_embeddings(
        self, x: Floats, ids: np.ndarray
    ) -> tuple[Floats | None, Callable[[Floats], Floats]]:
        """Compute (√ple · table[id] + rms(W x / √d)) / √2: [T, layers, ple]; backward to x."""
        if not self.config.ple:
            return None, np.zeros_like
        shape = (len(ids), len(self.config.layers), self.config.ple)
        table = self.weights.rows("per_layer_token_embd.weight", ids.tolist())
        token = table.reshape(shape) * np.float32(math.sqrt(self.config.ple))
        root, half = np.float32(math.sqrt(self.config.width)), np.float32(math.sqrt(0.5))
        context, linear_backward = self.linear(x, "per_layer_model_proj.weight")
        normed, norm_backward = self.norm((context / root).reshape(shape), "per_layer_proj_norm")

        def backward(dple: Floats) -> Floats:
            return linear_backward(norm_backward(dple * half).reshape(context.shape) / root)

        return (normed + token) * half, backward

    # Layers

    def layer_output(
        self, layer: Layer, x: Floats, ple: Floats | None
    ) -> tuple[Floats, Callable[[Floats], tuple[Floats, Floats | None]]]:
        """Compute one layer, as TextModel.layer_output does; backward to x and to ple."""
        name = f"blk.{layer.index}."
        attended, attention_backward = self.residual(
            x, name + "attn_norm", name + "post_attention_norm", lambda h: self.attention(layer, h)
        )
        if layer.experts:
            y, feed_forward_backward = self.mixture(name, attended)
        else:
            y, feed_forward_backward = self.residual(
                attended,
                name + "ffn_norm",
                name + "post_ffw_norm",
                lambda n: self.feed_forward(name, n),
            )
        out, ple_backward = self.add_per_layer_embedding(name, y, ple)
        scale_name = name + "layer_output_scale.weight"
        scale = self.weights[scale_name] if scale_name in self.weights else np.ones(1, np.float32)

        def backward(dout: Floats) -> tuple[Floats, Floats | None]:
            dy, dple = ple_backward(dout * scale)
            return attention_backward(feed_forward_backward(dy)), dple

        return out * scale, backward

    def residual(
        self,
        x: Floats,
        before: str,
        after: str,
        inner: Callable[[Floats], tuple[Floats, BackwardFunction]],
    ) -> tuple[Floats, BackwardFunction]:
        """Compute x + rms(inner(rms(x))); `before` and `after` name the weights of the RMSNorms."""
        h, before_backward = self.norm(x, before)
        y, inner_backward = inner(h)
        out, after_backward = self.norm(y, after)
        return x + out, lambda dy: dy + before_backward(inner_backward(after_backward(dy)))

    def add_per_layer_embedding(
        self, name: str, x: Floats, ple: Floats | None
    ) -> tuple[Floats, Callable[[Floats], tuple[Floats, Floats | None]]]:
        """Compute x + rms(W_proj(gelu(W_gate x) · ple)); x in models without ple."""
        if ple is None:
            return x, lambda dy: (dy, None)
        gate, gate_backward = self.linear(x, name + "inp_gate.weight")
        activated = gelu(gate)
        y, proj_backward = self.linear(activated * ple, name + "proj.weight")
        out, norm_backward = self.norm(y, name + "post_norm")

        def backward(dy: Floats) -> tuple[Floats, Floats | None]:
            dproduct = proj_backward(norm_backward(dy))
            return dy + gate_backward(dproduct * ple * gelu_derivative(gate)), dproduct * activated

        return x + out, backward

    def attention(self, layer: Layer, h: Floats) -> tuple[Floats, BackwardFunction]:
        """Compute W_o softmax(q kᵀ) v: [T, width]; k and v may be those of a donor layer.

        The layers run backward in reverse order, so a donor, which comes before the layers that
        share its keys and values, starts from the sum of all their dk and dv."""
        name = f"blk.{layer.index}."
        angles = np.arange(len(h))[:, None] * self.model.frequencies[layer.sliding]
        scale = self.config.query_scale
        q, q_backward = self.heads(h, name + "attn_q", layer.heads, angles, scale)
        kv_backward = None if layer.shares_kv else self.keys_and_values(layer, h, angles)
        k, v = self._keys_values[layer.kv_donor]
        window = self.config.window if layer.sliding else len(h)
        a = attend(q, k, v, 0, window)  # [T, heads, head_dim]
        out, out_backward = self.linear(a.reshape(len(h), -1), name + "attn_output.weight")

        def backward(dout: Floats) -> Floats:
            dq, dk, dv = attend_backward(q, k, v, window, out_backward(dout).reshape(a.shape))
            sums = self._keys_values_gradients[layer.kv_donor]
            sums[0], sums[1] = sums[0] + dk, sums[1] + dv
            dh = q_backward(dq)
            return dh if kv_backward is None else dh + kv_backward(*sums)

        return out, backward

    def keys_and_values(
        self, layer: Layer, h: Floats, angles: np.ndarray
    ) -> Callable[[Floats, Floats], Floats]:
        """Store k = rope(rms(W_k h)), v = rms(W_v h); return the function from dk, dv to dh.

        Values of Gemma 3 are not normed."""
        name, eps, normed = f"blk.{layer.index}.", self.config.eps, self.config.value_norm
        flat, k_linear_backward = self.linear(h, name + "attn_k.weight")
        raw = flat.reshape(len(h), layer.kv_heads, layer.head_dim)
        k, k_rope_backward = self.rope_normed(raw, name + "attn_k_norm", angles)
        if not layer.k_is_v:
            flat, v_linear_backward = self.linear(h, name + "attn_v.weight")
            raw = flat.reshape(raw.shape)

        def backward(dk: Floats, dv: Floats) -> Floats:
            dk, dv = k_rope_backward(dk), rms_backward(raw, None, eps, dv) if normed else dv
            if layer.k_is_v:
                return k_linear_backward((dk + dv).reshape(flat.shape))
            dk, dv = dk.reshape(flat.shape), dv.reshape(flat.shape)
            return k_linear_backward(dk) + v_linear_backward(dv)

        v = rms(raw, None, eps) if normed else raw
        self._keys_values[layer.index] = k, v
        self._keys_values_gradients[layer.index] = [np.zeros_like(k), np.zeros_like(v)]
        return backward

    def heads(
        self, h: Floats, name: str, heads: int, angles: np.ndarray, scale: float
    ) -> tuple[Floats, BackwardFunction]:
        """Compute rope(scale · rms(W h)) of each head: [T, heads, head_dim]."""
        flat, linear_backward = self.linear(h, name + ".weight")
        raw = flat.reshape(len(h), heads, -1)
        out, heads_backward = self.rope_normed(raw, name + "_norm", angles, scale)
        return out, lambda dy: linear_backward(heads_backward(dy).reshape(flat.shape))

    def rope_normed(
        self, x: Floats, norm: str, angles: np.ndarray, scale: float = 1.0
    ) -> tuple[Floats, BackwardFunction]:
        """Compute rope(scale · rms(x))."""
        normed, norm_backward = self.norm(x, norm)
        s = np.float32(scale)
        return rope(s * normed, angles), lambda dy: norm_backward(s * rope_backward(dy, angles))

    def feed_forward(self, name: str, n: Floats) -> tuple[Floats, BackwardFunction]:
        """Compute W_down(gelu(W_gate n) · W_up n), a GeGLU."""
        gate, gate_backward = self.linear(n, name + "ffn_gate.weight")
        up, up_backward = self.linear(n, name + "ffn_up.weight")
        activated = gelu(gate)
        out, down_backward = self.linear(activated * up, name + "ffn_down.weight")

        def backward(dy: Floats) -> Floats:
            dhidden = down_backward(dy)
            dgate = dhidden * up * gelu_derivative(gate)
            return gate_backward(dgate) + up_backward(dhidden * activated)

        return out, backward

    # Mixture of experts

    def mixture(self, name: str, r: Floats) -> tuple[Floats, BackwardFunction]:
        """Compute r + rms(rms(feed_forward(rms(r))) + rms(experts(r)))."""
        n, n_backward = self.norm(r, name + "ffn_norm")
        dense, dense_backward = self.feed_forward(name, n)
        dense, dense_norm_backward = self.norm(dense, name + "post_ffw_norm_1")
        sparse, experts_backward = self.experts(name, r)
        sparse, experts_norm_backward = self.norm(sparse, name + "post_ffw_norm_2")
        out, out_backward = self.norm(dense + sparse, name + "post_ffw_norm")

        def backward(dy: Floats) -> Floats:
            df = out_backward(dy)
            ddense = n_backward(dense_backward(dense_norm_backward(df)))
            return dy + ddense + experts_backward(experts_norm_backward(df))

        return r + out, backward

    def experts(self, name: str, r: Floats) -> tuple[Floats, BackwardFunction]:
        """Compute Σ wₑ · expertₑ(rms(r)) over each token's routed experts e."""
        routed, routing_weights, route_backward = self.route(name, r)  # [T, used] twice
        m, m_backward = self.norm(r, name + "pre_ffw_norm_2")
        out, runs = np.zeros_like(r), []
        for expert in map(int, np.unique(routed)):
            tokens, slots = np.nonzero(routed == expert)
            y, expert_backward = self.expert(name, m[tokens], expert)
            out[tokens] += routing_weights[tokens, slots, None] * y
            runs.append((tokens, slots, y, expert_backward))

        def backward(dy: Floats) -> Floats:
            dm, dweights = np.zeros_like(m), np.zeros_like(routing_weights)
            for tokens, slots, y, expert_backward in runs:
                dweights[tokens, slots] = (dy[tokens] * y).sum(axis=-1)
                dm[tokens] += expert_backward(routing_weights[tokens, slots, None] * dy[tokens])
            return m_backward(dm) + route_backward(dweights)

        return out, backward

    def expert(self, name: str, m: Floats, expert: int) -> tuple[Floats, BackwardFunction]:
        """Compute W_down(gelu(W_gate m) · W_up m) of one expert."""
        experts = self.config.experts
        assert experts is not None
        if experts.fused:
            both, both_backward = self.linear(m, name + "ffn_gate_up_exps.weight", expert)
            gate, up = both[:, : experts.ffn], both[:, experts.ffn :]
        else:
            gate, gate_backward = self.linear(m, name + "ffn_gate_exps.weight", expert)
            up, up_backward = self.linear(m, name + "ffn_up_exps.weight", expert)
        activated = gelu(gate)
        out, down_backward = self.linear(activated * up, name + "ffn_down_exps.weight", expert)

        def backward(dy: Floats) -> Floats:
            dhidden = down_backward(dy)
            dgate, dup = dhidden * up * gelu_derivative(gate), dhidden * activated
            if experts.fused:
                return both_backward(np.concatenate([dgate, dup], axis=-1))
            return gate_backward(dgate) + up_backward(dup)

        return out, backward

    def route(self, name: str, r: Floats) -> tuple[np.ndarray, Floats, BackwardFunction]:
        """Return each token's experts, their routing weights, and the function from dweights to dr.

        The normalised weights p / Σ p are the softmax of the routed experts' scores alone: the
        other scores get no gradient, and the selection has none."""
        scale, root = self.weights[name + "ffn_gate_inp.scale"], math.sqrt(self.config.width)
        scaled = rms(r, scale, self.config.eps) / np.float32(root)
        scores, linear_backward = self.linear(scaled, name + "ffn_gate_inp.weight")
        routed, routing_weights = self.model.route(name, r)
        expert_scale = np.ones_like(routing_weights)
        if name + "ffn_down_exps.scale" in self.weights:
            expert_scale = self.weights[name + "ffn_down_exps.scale"][routed]

        def backward(dweights: Floats) -> Floats:
            dscores = np.zeros_like(scores)
            p = routing_weights / expert_scale
            drouted = softmax_backward(p, dweights * expert_scale)
            np.put_along_axis(dscores, routed, drouted, axis=-1)
            dscaled = linear_backward(dscores) / np.float32(root)
            return rms_backward(r, scale, self.config.eps, dscaled)

        return routed, routing_weights, backward

    # Operations of every layer

    def norm(self, x: Floats, name: str) -> tuple[Floats, BackwardFunction]:
        """Compute x / √(mean(x²) + eps) · weight: RMSNorm."""
        weight, eps = self.weights[name + ".weight"], self.config.eps
        return rms(x, weight, eps), lambda dy: rms_backward(x, weight, eps, dy)

    def linear(
        self, x: Floats, name: str, expert: int | None = None
    ) -> tuple[Floats, BackwardFunction]:
        """Compute W x + scale · B (A x) of a matrix, or of one expert's.

        dx = Wᵀ dy + scale · Aᵀ Bᵀ dy, dA = scale · (Bᵀ dy) xᵀ, dB = scale · dy (A x)ᵀ."""
        index = 0 if expert is None else expert
        expert_count = 1 if expert is None else self.weights.tensors[name].shape[2]
        trained = HEAD if name == EMBEDDING else name

        def backward(dy: Floats) -> Floats:
            dx = self.weights.linear_transposed(dy, name, index, expert_count)
            if pair := self.adapter.get(trained):
                a, b = pair.of_expert(index)
                da, db = Pair(*self.sums[trained], pair.scale).of_expert(index)
                dinner: Floats = np.float32(pair.scale) * (dy @ b)  # [T, rank]
                da += dinner.T @ x
                db += np.float32(pair.scale) * dy.T @ (x @ a.T)
                dx = dx + dinner @ a
            return dx

        return self.weights.linear(x, name, index, expert_count), backward


# Derivatives of single operations


def rms_backward(x: Floats, weight: Floats | None, eps: float, dy: Floats) -> Floats:
    """Return dx = r (g − x r² mean(g x)) for y = w x r, r = 1 / √(mean(x²) + eps), g = w dy."""
    g = dy if weight is None else dy * weight
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return r * (g - x * (r * r * np.mean(g * x, axis=-1, keepdims=True)))


def gelu_derivative(x: Floats) -> Floats:
    """Return ½ (1 + t) + ½ x (1 − t²) u′ for t = tanh(u), u = √(2/π) (x + 0.044715 x³)."""
    root, cubic = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
    t = np.tanh(root * (x + cubic * x * x * x))
    du = root * (1 + 3 * cubic * x * x)
    return np.float32(0.5) * (1 + t + x * (1 - t * t) * du)


def rope_backward(dy: Floats, angles: np.ndarray) -> Floats:
    """Return dx = rope(dy, -angles): the transpose of a rotation is its inverse."""
    return rope(dy, -angles)


def softmax_backward(p: Floats, dp: Floats) -> Floats:
    """Return ds = p (dp − Σ p dp) for p = softmax(s)."""
    return p * (dp - (p * dp).sum(axis=-1, keepdims=True))


def attend_backward(
    q: Floats, k: Floats, v: Floats, window: int, dout: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return dq [T, heads, d], dk and dv [T, kv_heads, d] for out = softmax(q kᵀ + mask) v.

    dv = pᵀ dout, ds = softmax_backward(p, dout vᵀ), dq = ds k, dk = dsᵀ q, where p is computed
    again and a key-value head sums over the query heads that use it."""
    count, heads, size = q.shape
    shape = (count, k.shape[1], heads // k.shape[1], size)
    queries, douts = (x.reshape(shape).transpose(1, 2, 0, 3) for x in (q, dout))
    keys, values = (x.transpose(1, 0, 2)[:, None] for x in (k, v))  # [kv_heads, 1, T, d]
    at = np.arange(count)
    visible = (at <= at[:, None]) & (at > at[:, None] - window)
    scores = np.where(visible, queries @ keys.swapaxes(-1, -2), np.float32(-np.inf))
    p = softmax(scores)  # [kv_heads, group, T, T]
    ds = softmax_backward(p, douts @ values.swapaxes(-1, -2))
    dq = (ds @ keys).transpose(2, 0, 1, 3).reshape(q.shape)
    dk = (ds.swapaxes(-1, -2) @ queries).sum(axis=1).transpose(1, 0, 2)
    dv = (p.swapaxes(-1, -2) @ douts).sum(axis=1).transpose(1, 0, 2)
    return dq, dk, dv


def cross_entropy(z: Floats, targets: np.ndarray, cap: float) -> tuple[Floats, Floats]:
    """Return the losses −ln softmax(cap · tanh(z / cap))[target] [n] of z [n, vocab], and dz.

    A cap of 0 stands for none: −ln softmax(z)[target]."""
    capped = np.tanh(z / np.float32(cap)) if cap else np.zeros_like(z)
    logits = np.float32(cap) * capped if cap else z
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    rows = np.arange(len(z))
    dlogits = np.exp(logs)
    dlogits[rows, targets] -= 1
    return -logs[rows, targets], dlogits * (1 - capped * capped)
