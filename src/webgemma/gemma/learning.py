"""A text's gradients over a Recorder: forward, and back layer by layer, each computed again there.

Between the two only the layers' inputs are kept, and the keys and values. The base weights stay as
they are in their file; what is learnt are the low-rank pairs that the model has on.
"""

from dataclasses import dataclass

from webgemma.gemma import gradients as back
from webgemma.gemma.adapters import Low, narrow
from webgemma.gemma.attention import Attention, Heads, attend
from webgemma.gemma.config import Layer
from webgemma.gemma.matrices import Part, Weight
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link

COPY = {"THREADS": 64, "EACH": 4}


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a text is learnt from, and where what comes of it goes."""

    spans: Tensor  # [batch, 2]: (0, length) of each of its tokens, (0, 0) beyond
    targets: Tensor  # [batch]: the token after each
    weights: Tensor  # [batch]: 1 where it is to be foreseen, else 0
    losses: Tensor  # [batch]
    owed: dict[int, tuple[Tensor, Tensor]]  # of each layer with keys and values, zero before
    gradients: dict[str, tuple[Tensor, Tensor]]  # of A and B, by the device's matrix
    scale: float  # of the adapter


@dataclass(slots=True)
class _Kept:
    """What a layer has computed on the way."""

    h: Tensor
    raw: Tensor
    q: Tensor
    out: Tensor
    a: Tensor
    x1: Tensor
    n: Tensor
    gate: Tensor
    up: Tensor
    up_first: int
    hidden: Tensor
    f: Tensor
    x2: Tensor
    ple_gate: Tensor | None = None
    gated: Tensor | None = None
    p: Tensor | None = None


class Learner(TextRecorder):
    """Records the gradients of a text of at most `batch` tokens; the caches must hold them all."""

    def __init__(
        self, model: Model, recorder: Recorder, inputs: Inputs, batch: int, lesson: Lesson
    ) -> None:
        super().__init__(model, recorder, inputs, batch, "kv_f32", "exact")
        self.lesson = lesson

    def record(self) -> None:
        """Forward, the loss, and all the way back."""
        x = self.opening()
        ple = self.per_layer_embeddings(x)
        inputs = []
        for layer in self.config.layers:
            inputs.append(x)
            _, x = self.forward(layer, x, ple)
        h = self.norm(x, "output_norm.weight")
        z = self.head(h)
        lesson, cap = self.lesson, self.config.softcap
        back.cross_entropy(self, z, lesson.targets, lesson.weights, lesson.losses, cap)
        dh = self.linear_back(h, z, self.model.matrices[self._head_name])
        width = self.config.width
        dx = back.rms_back(self, x, dh, self.model.vector("output_norm.weight"), width)
        for layer, x in zip(self.config.layers[::-1], inputs[::-1], strict=True):
            kept, _ = self.forward(layer, x, ple)
            dx = self.backward(layer, x, ple, kept, dx)

    def forward(self, layer: Layer, x: Tensor, ple: Tensor | None) -> tuple[_Kept, Tensor]:
        """One layer, with all that its way back needs."""
        name, width, matrices = f"blk.{layer.index}.", self.config.width, self.model.matrices
        attention = Attention(self, layer)
        h = self.norm(x, name + "attn_norm.weight")
        raw = attention.project(h)
        q = attention.queries(raw)
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        cache, ring, window = attention.cache, attention.ring, attention.window
        out = attend(self, q, cache, heads, ring, window, self.kv)
        a = self.linear(out, matrices[name + "attn_output.weight"])
        x1 = self.copy(x)
        n = self.recorder.scratch(self.batch, width)
        post = name + "post_attention_norm.weight"
        self.residual(x1, a, post, name + "ffn_norm.weight", out=n)
        gate, up, up_first = self.gate_and_up(layer, n)
        hidden = self.geglu(gate, gate.shape[1], up, up.shape[1], up_first, layer.ffn)
        f = self.linear(hidden, matrices[name + "ffn_down.weight"])
        x2 = self.copy(x1)
        scale = name + "layer_output_scale.weight"
        last = "" if ple is not None else scale
        self.residual(x2, f, name + "post_ffw_norm.weight", scale=last)
        kept = _Kept(h, raw, q, out, a, x1, n, gate, up, up_first, hidden, f, x2)
        if ple is None:
            return kept, x2
        size = self.config.ple
        kept.ple_gate = self.linear(x2, matrices[name + "inp_gate.weight"])
        column = layer.index * size
        kept.gated = self.geglu(kept.ple_gate, size, ple, ple.shape[1], column, size)
        kept.p = self.linear(kept.gated, matrices[name + "proj.weight"])
        x3 = self.copy(x2)
        self.residual(x3, kept.p, name + "post_norm.weight", scale=scale)
        return kept, x3

    def gate_and_up(self, layer: Layer, n: Tensor) -> tuple[Tensor, Tensor, int]:
        """Both, and the column at which up begins."""
        name, matrices = f"blk.{layer.index}.", self.model.matrices
        gate = self.linear(n, matrices[name + "ffn_gate_up.weight"])
        if gate.shape[1] == 2 * layer.ffn:
            return gate, gate, layer.ffn
        return gate, self.linear(n, matrices[name + "ffn_up.weight"]), 0

    def backward(
        self, layer: Layer, x: Tensor, ple: Tensor | None, kept: _Kept, dx: Tensor
    ) -> Tensor:
        """What the layer's input owes, from what its output does (which is changed)."""
        name, width, matrices = f"blk.{layer.index}.", self.config.width, self.model.matrices
        vector = self.model.vector
        if name + "layer_output_scale.weight" in self.model.vectors:
            back.rescale(self, dx, vector(name + "layer_output_scale.weight"))
        if ple is not None and kept.p and kept.gated and kept.ple_gate:
            dp = back.rms_back(self, kept.p, dx, vector(name + "post_norm.weight"), width)
            dgated = self.linear_back(kept.gated, dp, matrices[name + "proj.weight"])
            column = layer.index * self.config.ple
            both = back.geglu_back(self, kept.ple_gate, ple, column, dgated)
            self.linear_back(kept.x2, both, matrices[name + "inp_gate.weight"], dx=dx)
        df = back.rms_back(self, kept.f, dx, vector(name + "post_ffw_norm.weight"), width)
        dhidden = self.linear_back(kept.hidden, df, matrices[name + "ffn_down.weight"])
        both = back.geglu_back(self, kept.gate, kept.up, kept.up_first, dhidden)
        dn = self.linear_back(kept.n, both, matrices[name + "ffn_gate_up.weight"])
        if name + "ffn_up.weight" in matrices:
            self.linear_back(kept.n, both, matrices[name + "ffn_up.weight"], layer.ffn, dn)
        back.rms_back(self, kept.x1, dn, vector(name + "ffn_norm.weight"), width, dx)
        post = vector(name + "post_attention_norm.weight")
        da = back.rms_back(self, kept.a, dx, post, width)
        dh = self.attention_back(layer, kept, da)
        back.rms_back(self, x, dh, vector(name + "attn_norm.weight"), width, dx)
        return dx

    def attention_back(self, layer: Layer, kept: _Kept, da: Tensor) -> Tensor:
        """What attention's normed input owes; keys and values wait for their last reader."""
        name, size, spans = f"blk.{layer.index}.", layer.head_dim, self.lesson.spans
        attention = Attention(self, layer)
        dout = self.linear_back(kept.out, da, self.model.matrices[name + "attn_output.weight"])
        heads = Heads(layer.heads, layer.kv_heads, size)
        k, v = (shaped(x, self.batch, heads.keys * size) for x in attention.cache)
        dk, dv = self.lesson.owed[layer.kv_donor]
        inputs, owed = (kept.q, k, v), (dk, dv)
        dq = back.attend_back(self, heads, attention.window, spans, inputs, dout, owed)
        norms, turns = attention.norms, attention.turns
        raw, draw = kept.raw, self.recorder.scratch(*kept.raw.shape)
        back.rope_back(self, dq, spans, turns, size)
        back.rms_back(self, raw, dq, norms, size, draw, add=False)
        if not layer.shares_kv:
            back.rope_back(self, dk, spans, turns, size)
            back.rms_back(
                self, raw, dk, norms, size, draw, first=layer.heads, add=False, weight_first=size
            )
            first = layer.heads + (0 if layer.k_is_v else layer.kv_heads)
            back.rms_back(self, raw, dv, None, size, draw, first=first, add=layer.k_is_v)
        dh: Tensor | None = None
        column = 0
        for part in ("attn_qkv", "attn_k", "attn_v"):
            weight = self.model.matrices.get(f"{name}{part}.weight")
            if weight is not None and column < raw.shape[1]:
                dh = self.linear_back(kept.h, draw, weight, column, dh)
                column += weight.rows
        assert dh is not None
        return dh

    def linear_back(
        self, x: Tensor, dy: Tensor, weight: Weight, first: int = 0, dx: Tensor | None = None
    ) -> Tensor:
        """What x owes of the product and of its adapters, whose own gradients are added up."""
        dx = back.linear_back(self, dy, weight, first, dx)
        low = self.model.low.get(weight.name)
        if low is not None and weight.name in self.lesson.gradients:
            self._pair_back(x, dy, low, weight, first, dx)
        return dx

    def _pair_back(
        self, x: Tensor, dy: Tensor, low: Low, weight: Weight, first: int, dx: Tensor
    ) -> None:
        """dB = dy (s A x)ᵀ, d(A x) = s Bᵀ dy, dA = d(A x) xᵀ, dx += Aᵀ d(A x), by segments."""
        da, db = self.lesson.gradients[weight.name]
        inner, ranks = narrow(self, x, low), low.ranks
        ends = (*low.firsts[1:], weight.rows)
        for segment, (row, end) in enumerate(zip(low.firsts, ends, strict=True)):
            columns = (dy, first + row, end - row)
            back.outer(self, columns, (inner, segment * ranks, ranks), 1.0, db, row)
            dinner = back.linear_back(
                self, dy, floats(low.b), first + row, rows=(row, end), scale=self.lesson.scale
            )
            back.outer(self, (dinner, 0, ranks), (x, 0, x.shape[1]), 1.0, da, segment * ranks)
            of_segment = (segment * ranks, (segment + 1) * ranks)
            back.linear_back(self, dinner, floats(low.a), 0, dx, rows=of_segment)

    def copy(self, x: Tensor) -> Tensor:
        """The same numbers again."""
        out = self.recorder.scratch(*x.shape)
        fours = x.nbytes // 16
        kernel = link("copy", self.features, constants=COPY)
        grid = self.fold(-(-fours // (COPY["THREADS"] * COPY["EACH"])))
        self.recorder.call(kernel, grid, [fours], x, out)
        return out


def floats(tensor: Tensor) -> Weight:
    """A matrix of float32 as a weight."""
    rows, width = tensor.shape
    return Weight("", FORMATS["F32"], width, rows, (Part(tensor, 0, rows, (0, 0)),))


def shaped(tensor: Tensor, rows: int, width: int) -> Tensor:
    """The same memory as so many rows."""
    return Tensor((rows, width), 4 * rows * width, tensor.buffer, tensor.offset)
