"""The passes of training: whole sequences forward to the loss, and backward through the layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from webgemma.gemma.config import Layer
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.lora.adapter import HEAD
from webgemma.lora.backward.attention import Attended, KeysValues, TrainingAttention
from webgemma.lora.backward.embedding import TrainingEmbedding
from webgemma.lora.backward.matmul import AdaptedColumns, Product
from webgemma.lora.backward.moe import ExpertPass, TrainingExperts
from webgemma.lora.backward.ops import TrainingOps
from webgemma.lora.optimiser import Parameters

LOGITS_NBYTES = 128 << 20  # of the tokens whose logits are computed at once
# Their number is a multiple of this: rows of any width then begin where a binding may.
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What a step reads and leaves: `sequences` of `length` tokens, one after the other."""

    sequences: int
    length: int
    batch: Tensor  # first position 0, count: see lib/batch
    ids: Tensor  # [tokens]
    targets: Tensor  # [tokens], u32: the token to predict, or NO_TARGET
    losses: Tensor  # [tokens]
    training_step: Tensor  # see lib/training_step


@dataclass(slots=True)
class LayerPass:
    """What the backward pass through a layer reads."""

    x: Tensor
    heads: Product
    attended: Attended
    output: Product
    middle: Tensor  # the residual after attention
    both: Product  # gate and up
    down: Product
    experts: ExpertPass | None = None
    gate: Product | None = None  # of the per-layer embedding
    proj: Product | None = None

    @property
    def forwarded(self) -> Tensor:
        """What the feed-forward network adds to the residual, before its norm."""
        return self.down.y if self.experts is None else self.experts.output


class TrainingPass:
    """Records the loss of a batch and, where there is something to train, its gradients."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        batch: TrainingBatch,
        parameters: Parameters,
        dropout: float = 0.0,
        recompute: bool = True,
        precision: str = "exact",
    ) -> None:
        self.model = model
        self.config = model.config
        self.batch = batch
        self.ops = TrainingOps(
            model,
            recorder,
            Inputs(batch.batch, batch.ids, {}),
            batch.sequences,
            batch.length,
            parameters,
            batch.training_step,
            dropout,
            precision,
        )
        self.parameters = parameters
        self.recompute = recompute
        self.embedding = TrainingEmbedding(self.ops)
        self.donors = {layer.kv_donor for layer in self.config.layers if layer.shares_kv}
        self._shared: dict[int, KeysValues] = {}  # keys and values that other layers attend to
        self._shared_gradients: dict[int, KeysValues] = {}  # of all layers so far

    def record(self, *, backward: bool) -> None:
        """Record the losses of the batch; with `backward`, gradients are added to the pairs'."""
        x, ple = self.embedding.forward()
        inputs, passes = [], list[LayerPass]()
        for layer in self.config.layers:
            inputs.append(x)
            saved = self.layer(layer, x, ple)
            x = self.layer_output(layer, saved)
            if backward and not self.recompute:
                passes.append(saved)
        h = self.ops.normed(x, "output_norm.weight")
        dh = self.head_loss(h, backward=backward)
        lowest = self.lowest_layer()
        if not backward or lowest is None:
            return
        dx = self.ops.norm_backward(x, "output_norm.weight", dh)
        for layer in reversed(self.config.layers[lowest:]):
            index = layer.index
            saved = passes[index] if passes else self.layer(layer, inputs[index], ple)
            self.layer_backward(layer, saved, ple, dx)
        if self.embedding.is_trained:
            self.embedding.backward(dx)

    def lowest_layer(self) -> int | None:
        """Return the first layer that is adapted: nothing below it needs a gradient."""
        if self.embedding.is_trained:
            return 0
        indices = [
            layer.index
            for layer in self.config.layers
            if any(name.startswith(f"blk.{layer.index}.") for name in self.parameters.pairs)
        ]
        return min(indices, default=None)

    # The head

    def head_loss(self, h: Tensor, *, backward: bool) -> Tensor:
        """Record the losses of all rows of h, and return dL/dh; logits of some rows at once.

        Layers amplify only little what rounding does to dL/dh: one float16 is enough for that."""
        ops, (tokens, width), vocab = self.ops, h.shape, self.config.vocab
        adapted = ops.adapted((HEAD, 0))
        available = min(LOGITS_NBYTES, self.model.device.limits.binding_nbytes) // (4 * vocab)
        at_once = max(ROWS_AT_ONCE, available - available % ROWS_AT_ONCE)
        dh = ops.scratch(tokens, width)
        for salt, first in enumerate(range(0, tokens, at_once)):
            count = min(at_once, tokens - first)
            rows, head = h.rows(first, count), [self.model.head]
            saved = ops.products.forward(rows, head, adapted, salt)
            self._cross_entropy(saved.y, first)
            if backward:
                into = dh.rows(first, count)
                ops.products.backward(saved, saved.y, into, salt=salt, split=False)
        return dh

    def _cross_entropy(self, z: Tensor, first: int) -> None:
        """Record losses; dL/dz replaces the logits z."""
        count, vocab = z.shape
        self.ops.recorder.call(
            "cross_entropy",
            (count,),
            training_step=self.batch.training_step,
            targets=self.batch.targets,
            z=z,
            losses=self.batch.losses,
            vocab=vocab,
            first=first,
            cap=float(self.config.softcap),
            nan=math.nan,
            THREADS=self.ops.matmul.row_threads(vocab, self.ops.row_threads(ROW_THREADS)),
        )

    # A layer forward

    def layer(self, layer: Layer, x: Tensor, ple: Tensor | None) -> LayerPass:
        """Record a layer up to its last sum."""
        ops, name = self.ops, f"blk.{layer.index}."
        shared = self._shared.get(layer.kv_donor)
        heads = ops.stacked_product(ops.normed(x, name + "attn_norm.weight"), *self._heads(layer))
        attended, out = TrainingAttention(ops, layer).forward(heads.y, shared)
        if layer.index in self.donors and shared is None:
            self._shared[layer.index] = attended.k, attended.v
        output = ops.product(out, name + "attn_output.weight")
        middle = ops.add_norm(x, output.y, name + "post_attention_norm.weight")
        both, down = self.feed_forward(layer, ops.normed(middle, name + "ffn_norm.weight"))
        saved = LayerPass(x, heads, attended, output, middle, both, down)
        if layer.experts:
            saved.experts = TrainingExperts(ops, layer).forward(middle, down.y)
        if ple is not None:
            after = ops.add_norm(middle, saved.forwarded, name + "post_ffw_norm.weight")
            width = self.config.ple
            saved.gate = ops.product(after, name + "inp_gate.weight")
            up = Columns(ple, len(self.config.layers) * width, layer.index * width)
            gated = ops.geglu(Columns(saved.gate.y, width, 0), up, width)
            saved.proj = ops.product(gated, name + "proj.weight")
        return saved

    def feed_forward(self, layer: Layer, n: Tensor) -> tuple[Product, Product]:
        """Record gate and up side by side, then down of gelu(gate) * up."""
        ops, name, ffn = self.ops, f"blk.{layer.index}.", layer.ffn
        weights = ops.stack(name, "ffn_gate_up", "ffn_up")
        adapted = ops.adapted((name + "ffn_gate.weight", 0), (name + "ffn_up.weight", ffn))
        both = ops.stacked_product(n, weights, adapted)
        hidden = ops.geglu(Columns(both.y, 2 * ffn, 0), Columns(both.y, 2 * ffn, ffn), ffn)
        return both, ops.product(hidden, name + "ffn_down.weight")

    def layer_output(self, layer: Layer, saved: LayerPass) -> Tensor:
        """Record the layer's last sum, which the next layer reads."""
        name = f"blk.{layer.index}."
        x, y, post = saved.middle, saved.forwarded, "post_ffw_norm.weight"
        if saved.gate is not None and saved.proj is not None:
            x, y, post = saved.gate.x, saved.proj.y, "post_norm.weight"
        return self.ops.add_norm(x, y, name + post, name + "layer_output_scale.weight")

    def _heads(self, layer: Layer) -> tuple[list[Weight], list[AdaptedColumns]]:
        """Return the projections to raw heads, and the first column of each trained pair."""
        name, size = f"blk.{layer.index}.", layer.head_dim
        own = () if layer.shares_kv else (("attn_k",) if layer.k_is_v else ("attn_k", "attn_v"))
        firsts = {"attn_q": 0, "attn_k": layer.heads, "attn_v": layer.heads + layer.kv_heads}
        columns = [(f"{name}{part}.weight", firsts[part] * size) for part in ("attn_q", *own)]
        return self.ops.stack(name, "attn_qkv", *own), self.ops.adapted(*columns)

    # A layer backward

    def layer_backward(
        self, layer: Layer, saved: LayerPass, ple: Tensor | None, dx: Tensor
    ) -> None:
        """Record dx, the gradient of the layer's output, becoming that of its input."""
        ops, name = self.ops, f"blk.{layer.index}."
        ops.scale_by(dx, self.model.vector(name + "layer_output_scale.weight"))
        if ple is not None and saved.gate is not None and saved.proj is not None:
            width = self.config.ple
            dprojected = ops.norm_backward(saved.proj.y, name + "post_norm.weight", dx)
            dgated = ops.product_backward(saved.proj, dprojected)
            stride, first = len(self.config.layers) * width, layer.index * width
            d = ops.geglu_backward(saved.gate.y, width, ple, stride, first, dgated)
            self.embedding.keep_gradient(layer.index, d)
            ops.product_backward(saved.gate, d, dx)
        self.feed_forward_backward(layer, saved, dx)
        doutput = ops.norm_backward(saved.output.y, name + "post_attention_norm.weight", dx)
        dattended = ops.product_backward(saved.output, doutput)
        dheads = self.attention_backward(layer, saved, dattended)
        dh = ops.product_backward(saved.heads, dheads)
        ops.norm_backward(saved.x, name + "attn_norm.weight", dh, dx)

    def feed_forward_backward(self, layer: Layer, saved: LayerPass, dx: Tensor) -> None:
        """Record dx, the gradient after the feed-forward sum, becoming the one before it."""
        ops, name, ffn = self.ops, f"blk.{layer.index}.", layer.ffn
        df = ops.norm_backward(saved.forwarded, name + "post_ffw_norm.weight", dx)
        if saved.experts is not None:
            TrainingExperts(ops, layer).backward(saved.middle, saved.experts, df, dx)
            df = ops.norm_backward(saved.down.y, name + "post_ffw_norm_1.weight", df)
        dhidden = ops.product_backward(saved.down, df)
        both = saved.both.y
        dboth = ops.geglu_backward(both, 2 * ffn, both, 2 * ffn, ffn, dhidden)
        dn = ops.product_backward(saved.both, dboth)
        ops.norm_backward(saved.middle, name + "ffn_norm.weight", dn, dx)

    def attention_backward(self, layer: Layer, saved: LayerPass, dout: Tensor) -> Tensor:
        """Record the gradient of the raw heads, from that of attention's result."""
        attention, gradients = TrainingAttention(self.ops, layer), self._shared_gradients
        first = layer.kv_donor not in gradients
        if first:
            shape = saved.attended.k.shape
            gradients[layer.kv_donor] = self.ops.scratch(*shape), self.ops.scratch(*shape)
        shared = gradients[layer.kv_donor]
        dq = attention.softmax_backward(saved.attended, dout, shared, add=not first)
        return attention.rope_backward(saved.heads.y, dq, shared)
