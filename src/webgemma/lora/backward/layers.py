"""The passes of training over a Recorder: whole sequences forward to the loss, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from webgemma.gemma.config import Layer
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.ops import ROW_THREADS, THREADS
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.lora.adapter import HEAD
from webgemma.lora.backward.attention import Looking, Seen
from webgemma.lora.backward.embedding import Bottom
from webgemma.lora.backward.matmul import Adapted, Linear, Product
from webgemma.lora.backward.moe import Asked, Asking
from webgemma.lora.parameters import Parameters

LOGITS_NBYTES = 128 << 20  # of the tokens whose logits are made at a time
CHUNK = 64  # their number is a multiple of it: rows of any width then begin where a binding may


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step reads and leaves: `sequences` of `length` tokens, one after the other."""

    sequences: int
    length: int
    state: Tensor  # 0, tokens
    ids: Tensor  # [tokens]
    targets: Tensor  # [tokens], u32: what each is to foresee, or 2**32 - 1
    losses: Tensor  # [tokens]
    pace: Tensor  # see pace.wgsl


@dataclass(slots=True)
class Kept:
    """What the way back through a layer reads."""

    x: Tensor
    heads: Product
    seen: Seen
    output: Product
    middle: Tensor  # the residual after attention
    both: Product  # gate and up
    down: Product
    asked: Asked | None = None  # experts
    gate: Product | None = None  # of the per-layer embedding
    proj: Product | None = None

    @property
    def forwarded(self) -> Tensor:
        """What the feed-forward part adds to the residual, before its norm."""
        return self.down.y if self.asked is None else self.asked.sum


class Passes(TextRecorder):
    """Records a batch forward, and back where there is something to train."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        batch: Batch,
        parameters: Parameters,
        dropout: float = 0.0,
        checkpoint: bool = True,
    ) -> None:
        inputs = Inputs(batch.state, batch.ids, {}, {})
        super().__init__(model, recorder, inputs, batch.sequences * batch.length, "kv_f32")
        self.length = batch.length
        self.data = batch
        self.parameters = parameters
        self.checkpoint = checkpoint
        self.products = Linear(self, batch.pace, dropout)
        self.bottom = Bottom(self)
        self.lent: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values that others look at
        self.owed: dict[int, tuple[Tensor, Tensor]] = {}  # their gradients so far
        self.donors = {layer.kv_donor for layer in self.config.layers if layer.shares_kv}

    def loss(self, *, back: bool) -> None:
        """The whole batch to its losses; with `back`, gradients grow."""
        x, ple = self.bottom.forward()
        inputs, kept = [], list[Kept]()
        for layer in self.config.layers:
            inputs.append(x)
            made = self.layer(layer, x, ple)
            x = self.layer_output(layer, made)
            if back and not self.checkpoint:
                kept.append(made)
        h = self.norm(x, "output_norm.weight")
        dh = self.head_loss(h, back=back)
        lowest = self.lowest_layer()
        if not back or lowest is None:
            return
        dx = self.norm_back(x, "output_norm.weight", dh)
        for layer in reversed(self.config.layers[lowest:]):
            index = layer.index
            again = kept[index] if kept else self.layer(layer, inputs[index], ple)
            self.layer_back(layer, again, ple, dx)
        if self.bottom.trained:
            self.bottom.back(dx)

    def lowest_layer(self) -> int | None:
        """The first layer that has an adapter: nothing below it needs a gradient."""
        if self.bottom.trained:
            return 0
        indices = [
            layer.index
            for layer in self.config.layers
            if any(name.startswith(f"blk.{layer.index}.") for name in self.parameters.pairs)
        ]
        return min(indices, default=None)

    # The head

    def head_loss(self, h: Tensor, *, back: bool) -> Tensor:
        """The losses of all rows of h, and dL/dh; logits are made for some rows at a time."""
        width, vocab = self.config.width, self.config.vocab
        weight = self.model.matrices[self._head_name]
        adapted = self._adapted((HEAD, 0))
        most = min(LOGITS_NBYTES, self.model.device.limits.binding_nbytes) // (4 * vocab)
        step = max(CHUNK, most - most % CHUNK)
        dh = self.recorder.scratch(self.batch, width)
        for salt, first in enumerate(range(0, self.batch, step)):
            count = min(step, self.batch - first)
            rows = self.recorder.rows(h, first, count)
            made = self.products.forward(rows, [weight], adapted, salt)
            self._cross_entropy(made.y, first)
            if back:
                to = self.recorder.rows(dh, first, count)
                self.products.back(made, made.y, to, salt=salt)
        return dh

    def _cross_entropy(self, z: Tensor, first: int) -> None:
        """Losses; in place of the logits z, dL/dz."""
        data, (count, vocab) = self.data, z.shape
        self.call(
            "cross_entropy",
            (count,),
            [vocab, first, float(self.config.softcap), math.nan],
            *(data.pace, data.targets, z, data.losses),
            pieces=("sum", "largest", "pace", "finite"),
            THREADS=self.row_threads(ROW_THREADS),
        )

    # A layer

    def layer(self, layer: Layer, x: Tensor, ple: Tensor | None) -> Kept:
        """All of a layer but the last sum."""
        name = f"blk.{layer.index}."
        looking, lent = Looking(self, layer), self.lent.get(layer.kv_donor)
        heads = self.linear_with(self.norm(x, name + "attn_norm.weight"), *self._heads(layer))
        seen, gathered = looking.forward(heads.y, lent)
        if layer.index in self.donors and lent is None:
            self.lent[layer.index] = seen.k, seen.v
        output = self.linear_of(gathered, name + "attn_output.weight")
        middle = self.add_norm(x, output.y, name + "post_attention_norm.weight")
        both, down = self.gated(layer, self.norm(middle, name + "ffn_norm.weight"))
        kept = Kept(x, heads, seen, output, middle, both, down)
        if layer.experts:
            kept.asked = Asking(self, layer).forward(middle, down.y)
        if ple is not None:
            after = self.add_norm(middle, kept.forwarded, name + "post_ffw_norm.weight")
            width = self.config.ple
            kept.gate = self.linear_of(after, name + "inp_gate.weight")
            first, stride = layer.index * width, len(self.config.layers) * width
            gated = self.geglu(kept.gate.y, width, ple, stride, first, width)
            kept.proj = self.linear_of(gated, name + "proj.weight")
        return kept

    def gated(self, layer: Layer, n: Tensor) -> tuple[Product, Product]:
        """Gate and up side by side, then down of gelu(gate) * up."""
        name, ffn = f"blk.{layer.index}.", layer.ffn
        weights = self._weights(name, "ffn_gate_up", "ffn_up")
        adapted = self._adapted((name + "ffn_gate.weight", 0), (name + "ffn_up.weight", ffn))
        both = self.linear_with(n, weights, adapted)
        hidden = self.geglu(both.y, 2 * ffn, both.y, 2 * ffn, ffn, ffn)
        return both, self.linear_of(hidden, name + "ffn_down.weight")

    def layer_output(self, layer: Layer, kept: Kept) -> Tensor:
        """What the next layer reads."""
        name = f"blk.{layer.index}."
        scale = name + "layer_output_scale.weight"
        if kept.proj is None or kept.gate is None:
            return self.add_norm(kept.middle, kept.forwarded, name + "post_ffw_norm.weight", scale)
        return self.add_norm(kept.gate.x, kept.proj.y, name + "post_norm.weight", scale)

    def layer_back(self, layer: Layer, kept: Kept, ple: Tensor | None, dx: Tensor) -> None:
        """dx is the gradient of the layer's output, and becomes its input's."""
        name = f"blk.{layer.index}."
        self.multiply(dx, self.model.vector(name + "layer_output_scale.weight"))
        if ple is not None and kept.gate is not None and kept.proj is not None:
            width = self.config.ple
            dp = self.norm_back(kept.proj.y, name + "post_norm.weight", dx)
            dgated = self.back_of(kept.proj, dp)
            place = (len(self.config.layers) * width, layer.index * width)
            d = self.geglu_back(kept.gate.y, width, ple, *place, dgated)
            self.bottom.keep(layer.index, d)
            self.back_of(kept.gate, d, dx)
        self.feed_forward_back(layer, kept, dx)
        do = self.norm_back(kept.output.y, name + "post_attention_norm.weight", dx)
        draw = self.attention_back(layer, kept, self.back_of(kept.output, do))
        dh = self.back_of(kept.heads, draw)
        self.norm_back(kept.x, name + "attn_norm.weight", dh, dx)

    def feed_forward_back(self, layer: Layer, kept: Kept, dx: Tensor) -> None:
        """dx, the gradient after the feed-forward sum, becomes the one before it."""
        name, ffn = f"blk.{layer.index}.", layer.ffn
        df = self.norm_back(kept.forwarded, name + "post_ffw_norm.weight", dx)
        if kept.asked is not None:
            Asking(self, layer).back(kept.middle, kept.asked, df, dx)
            df = self.norm_back(kept.down.y, name + "post_ffw_norm_1.weight", df)
        dhidden = self.back_of(kept.down, df)
        both = kept.both.y
        dn = self.back_of(kept.both, self.geglu_back(both, 2 * ffn, both, 2 * ffn, ffn, dhidden))
        self.norm_back(kept.middle, name + "ffn_norm.weight", dn, dx)

    def attention_back(self, layer: Layer, kept: Kept, da: Tensor) -> Tensor:
        """From the gradient of what was gathered to that of the raw heads."""
        looking, owed = Looking(self, layer), self.owed.get(layer.kv_donor)
        new = owed is None
        if owed is None:
            shape = kept.seen.k.shape
            owed = self.recorder.scratch(*shape), self.recorder.scratch(*shape)
            self.owed[layer.kv_donor] = owed
        dq = looking.softmax_back(kept.seen, da, owed, add=not new)
        return looking.turn_back(kept.heads.y, dq, owed)

    # What layers are made of

    def _heads(self, layer: Layer) -> tuple[list[Weight], list[Adapted]]:
        """The projections to raw heads, and where each adapter's columns begin."""
        name, size = f"blk.{layer.index}.", layer.head_dim
        own = () if layer.shares_kv else (("attn_k",) if layer.k_is_v else ("attn_k", "attn_v"))
        firsts = {"attn_q": 0, "attn_k": layer.heads, "attn_v": layer.heads + layer.kv_heads}
        places = [(f"{name}{part}.weight", firsts[part] * size) for part in ("attn_q", *own)]
        return self._weights(name, "attn_qkv", *own), self._adapted(*places)

    def _weights(self, name: str, *parts: str) -> list[Weight]:
        """Those of the matrices that are not stacked under another one."""
        found = [self.model.matrices.get(f"{name}{part}.weight") for part in parts]
        return [weight for weight in found if weight is not None]

    def _adapted(self, *places: tuple[str, int]) -> list[Adapted]:
        pairs = self.parameters.pairs
        return [Adapted(pairs[name], first) for name, first in places if name in pairs]

    def linear_of(self, x: Tensor, name: str) -> Product:
        return self.linear_with(x, [self.model.matrices[name]], self._adapted((name, 0)))

    def linear_with(self, x: Tensor, weights: list[Weight], adapted: list[Adapted]) -> Product:
        return self.products.forward(x, weights, adapted)

    def back_of(self, made: Product, dy: Tensor, into: Tensor | None = None) -> Tensor:
        """dL/dx of a product, added to what `into` holds, if given."""
        dx = into or self.recorder.scratch(*made.x.shape)
        return self.products.back(made, dy, dx, add=into is not None)

    def multiply(self, x: Tensor, scale: Tensor, factor: float = 1.0) -> None:
        """x = x * scale * factor, in place."""
        fours = x.nbytes // 16
        self.call("multiply", self.flat(fours), [fours, factor], scale, x)

    def add_norm(self, x: Tensor, y: Tensor, post: str, scale: str = "") -> Tensor:
        """(x + rms(y) * post) * scale."""
        out, vector = self.recorder.scratch(*x.shape), self.model.vector
        self.call(
            "add_norm",
            (self.batch,),
            [x.shape[1], self.eps],
            *(x, y, vector(post), vector(scale), out),
            pieces=("sum",),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return out

    def norm_back(self, x: Tensor, name: str, dy: Tensor, into: Tensor | None = None) -> Tensor:
        """dL/dx of rms(x) * w, added to what `into` holds, if given."""
        dx = into or self.recorder.scratch(*x.shape)
        self.call(
            "norm_back",
            (self.batch,),
            [x.shape[1], self.eps, 1.0, int(into is not None)],
            *(x, self.model.vector(name), dy, dx),
            pieces=("sum",),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return dx

    def geglu_back(
        self,
        gate: Tensor,
        gate_stride: int,
        up: Tensor,
        up_stride: int,
        up_first: int,
        dh: Tensor,
    ) -> Tensor:
        """dL/dgate and dL/dup side by side: [rows, 2 * width]."""
        rows, width = dh.shape
        d = self.recorder.scratch(rows, 2 * width)
        params = [width, gate_stride, up_stride, up_first]
        grid = (-(-width // THREADS), rows)
        self.call("geglu_back", grid, params, gate, up, dh, d, pieces=("gelu_slope",))
        return d
