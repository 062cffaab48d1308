"""The text model, recorded: token ids in, logits out, for any number of rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.lora_weights import AppliedLora
from webgemma.gemma.matrices import Weight
from webgemma.gemma.moe import ExpertLayer
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.matmul import THREADS, flat
from webgemma.gemma.record.operands import Branches, Operand
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gemma.weights import Model
from webgemma.graph import Argument, Recorder, Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a pass reads and leaves: the batch, token ids, and each layer's cache.

    The rows are tokens of one conversation or, without ids, the next tokens of several, perhaps
    with drafts of what follows."""

    batch: Tensor  # see lib/batch
    ids: Tensor | None  # [rows]; None: the batch holds them
    caches: Mapping[int, LayerCache]  # of the layers that have their own
    soft: Tensor | None = None  # [rows, width], rows that replace embeddings
    drafts: bool = False  # whether rows of the batch may be drafts, which attend to those before
    lora: AppliedLora | None = None  # the adapters of rows that apply some

    @property
    def chunk_ids(self) -> Tensor:
        """The ids of the tokens of one conversation."""
        assert self.ids is not None
        return self.ids

    @property
    def place(self) -> str:
        """The provider of the slot `place`, which says where a row is in its conversation."""
        return "rows" if self.ids is None else "chunk"


class TextRecorder(Ops):
    """Records the forward pass of at most `rows` tokens."""

    joins_layers = True  # the sum that ends a layer may be left to the next one

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        inputs: Inputs,
        rows: int,
        kv: str,
        precision: str = "exact",
    ) -> None:
        eps = model.config.eps
        apart = inputs.ids is None
        batch, lora = inputs.batch, inputs.lora
        super().__init__(model, recorder, batch, rows, eps, precision, lora, apart=apart)
        self.model = model
        self.config: Config = model.config
        self.inputs = inputs
        self.kv = kv
        self.stream: Tensor  # the residual stream after the last layer, once `body` has recorded it

    def body(self, out: Tensor | None = None) -> Tensor:
        """Record everything below the head: [rows, width], normed, into `out` if that is given."""
        x = self.embedding()
        ple = self.per_layer_embeddings(x)
        h = self.norm_for(x, "blk.0.attn_norm.weight", self.layer_readers(0))
        for layer in self.config.layers:
            last = layer.index + 1 == len(self.config.layers)
            x, h = self.layer(layer, x, h, ple, out if last else None)
        self.stream = x
        assert isinstance(h, Tensor)  # the head reads it from a buffer
        return h

    def embedding(self) -> Tensor:
        """Record the first layer's input: the tokens' embeddings, or soft tokens instead."""
        x = self.embed("token_embd.weight", math.sqrt(self.config.width))
        self._adapt_embedding(x)
        if self.inputs.soft is not None:
            width = self.config.width
            self.recorder.call(
                "insert_soft_tokens",
                self.vec4_grid(width),
                batch=self.soft_batch,
                soft=self.inputs.soft,
                x=x,
                width=width,
            )
        return x

    @property
    def soft_batch(self) -> Tensor:
        """The batch that says which rows are soft tokens: see lib/batch/soft_tokens."""
        return self.batch

    def mask(self, layer: Layer) -> str:
        """Return the provider of attention's mask on a layer."""
        bidirectional = self.config.bidirectional_images and layer.sliding
        return "image_blocks" if bidirectional and self.inputs.soft is not None else "causal"

    @property
    def output_scale(self) -> str:
        """The scale of a layer's output; DiffusionGemma reads prompts with its encoder's."""
        return "enc_" * bool(self.config.diffusion) + "layer_output_scale.weight"

    def head(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Record raw logits [rows of h, vocab]; the softcap is the sampler's, or `softcap`'s."""
        return self.linear(h, self.model.head, out)

    def last_row(self, h: Tensor) -> Tensor:
        """Record the last token's row: [1, width]."""
        width = self.config.width
        row = self.scratch(1, width)
        grid = (-(-width // THREADS),)
        self.recorder.call("last_row", grid, batch=self.batch, h=h, row=row, width=width)
        return row

    def softcap(self, logits: Tensor) -> Tensor:
        """Record cap * tanh(logits / cap), in place; nothing for a model without a cap."""
        count, cap = logits.nbytes // 4, self.config.softcap
        if cap:
            self.recorder.call("softcap", flat(count), count=count, cap=cap, logits=logits)
        return logits

    def layer(
        self, layer: Layer, x: Tensor, h: Operand, ple: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, Operand]:
        """Record a layer of x [rows, width] and its norm h; return the next layer's x and h."""
        name = f"blk.{layer.index}."
        following = layer.index + 1
        last = following == len(self.config.layers)
        next_norm = "output_norm.weight" if last else f"blk.{following}.attn_norm.weight"
        scale = name + self.output_scale
        following_readers: tuple[str, ...] = ()
        if not last and self.joins_layers:
            following_readers = self.layer_readers(following)
        out = out or (None if following_readers else self.layer_input(following))
        cache = self.inputs.caches[layer.kv_donor]
        inputs = self.inputs
        attention = Attention(
            self, self.model, layer, cache, self.kv, inputs.place, drafts=inputs.drafts
        )
        attended = attention.record(h, self.mask(layer))
        forwarded: Tensor | Branches
        if layer.experts:
            x, forwarded = self.feed_forward_with_experts(layer, x, attended)
        else:
            post, norm = name + "post_attention_norm.weight", name + "ffn_norm.weight"
            readers = (name + "ffn_gate_up.weight", name + "ffn_up.weight")
            x, n = self.add_normed(x, attended, post, norm, readers=readers)
            forwarded = self.feed_forward(layer, n)
        end: tuple[str, str, tuple[str, ...]] = (next_norm, scale, following_readers)
        if ple is None:
            return self.add_normed(x, forwarded, name + "post_ffw_norm.weight", *end, out)
        gate = name + "inp_gate.weight"
        x, summed = self.add_normed(x, forwarded, name + "post_ffw_norm.weight", readers=(gate,))
        width = self.config.ple
        up = Columns(ple, len(self.config.layers) * width, layer.index * width)
        gated = self.gated(summed, self.model.matrices[gate], up, name + "proj.weight")
        projected = self.matmul.in_splits(gated, self.model.matrices[name + "proj.weight"])
        return self.add_normed(x, projected, name + "post_norm.weight", *end, out)

    def gated(self, x: Operand, weight: Weight, up: Columns, reader: str) -> Tensor:
        """Record gelu(W x) * up, which `reader` reads."""
        form = self.row_input_for(weight.rows, reader)
        if not isinstance(form, HalfTensor) or not self.matmul.on_units(weight, self.rows):
            return self.linear(x, weight, up=up)
        gate = self.matmul.in_splits(x, weight)
        return self.geglu(Columns(gate, weight.rows, 0), up, weight.rows, form)

    def embed(self, name: str, scale: float, ids: Tensor | None = None) -> Tensor:
        """Record rows of a table for the ids, by default the batch's tokens: [rows, width]."""
        return self.lookup(self.model.matrices[name], ids or self.inputs.ids, scale)

    def _adapt_embedding(self, x: Tensor) -> None:
        """Record x[t] += √width B A[id], of the adapters that change the embedding."""
        adapters, width = self.matmul.adapters, self.config.width
        if adapters and (lora := adapters.lora.embedding):
            self.recorder.call(
                "lora_embed",
                (-(-width // THREADS), self.rows),
                A=lora.a,
                B=lora.b,
                **adapters.scales_of(lora),
                x=x,
                batch=self.batch,
                **self.token_ids(self.inputs.ids),
                width=width,
                rank_vec4s=lora.ranks // 4,
                factor=math.sqrt(width),
            )

    def layer_input(self, index: int) -> Tensor:
        """Return a scratch tensor for what a layer reads, or the head after the last one."""
        if index == len(self.config.layers):
            return self.input_for(self.config.width, self.model.head.name)
        return self.row_input_for(self.config.width, *self.layer_readers(index))

    def layer_readers(self, index: int) -> tuple[str, ...]:
        """Return the matrices that read a layer's normed input."""
        return tuple(f"blk.{index}.{part}.weight" for part in ("attn_qkv", "attn_k", "attn_v"))

    def feed_forward(self, layer: Layer, n: Operand) -> Tensor:
        """Record W_down(gelu(W_gate n) * W_up n)."""
        hidden = self.hidden(layer, n)
        down = self.model.matrices[f"blk.{layer.index}.ffn_down.weight"]
        return self.matmul.in_splits(hidden, down)

    def feed_forward_with_experts(
        self, layer: Layer, x: Tensor, attended: Tensor
    ) -> tuple[Tensor, Branches]:
        """Record adding attention to the residual x, then the dense branch and the experts."""
        experts = ExpertLayer(self, self.model, layer)
        x, n, m, s = experts.fork(x, attended)
        # Independent calls follow each other, so that the device may run them side by side.
        scores = experts.scores(s)
        hidden = self.hidden(layer, n)
        expert_sum = experts.record(m, scores, hidden)
        down = self.model.matrices[f"blk.{layer.index}.ffn_down.weight"]
        norms = self.model.join_norms[layer.index]
        return x, Branches(self.matmul.in_splits(hidden, down), expert_sum, norms)

    def hidden(self, layer: Layer, n: Operand) -> Tensor:
        """Record gelu(W_gate n) * W_up n: [rows, ffn]."""
        name, matrices = f"blk.{layer.index}.", self.model.matrices
        weight = matrices[name + "ffn_gate_up.weight"]
        stacked = weight.rows == 2 * layer.ffn
        hidden = self.row_input_for(layer.ffn, name + "ffn_down.weight")
        if stacked and self.matmul.can_fuse_gate_up(weight, self.rows):
            self.matmul.gate_up(n, weight, hidden)
            return hidden
        # Only where the rows are rounded, too, they are added up on the way.
        if stacked and (lanes := self.matmul.gate_up_lanes(weight, self.rows)):
            gate = up = self.matmul.linear(n, weight, lanes=lanes)  # adapted
        else:
            product = self.matmul.in_splits if isinstance(hidden, HalfTensor) else self.linear
            gate = product(n, weight)
            up = gate if stacked else product(n, matrices[name + "ffn_up.weight"])
        first = layer.ffn if stacked else 0
        gate_columns, up_columns = Columns(gate, gate.shape[1], 0), Columns(up, up.shape[1], first)
        self.geglu(gate_columns, up_columns, layer.ffn, hidden)
        return hidden

    def per_layer_embeddings(self, x: Tensor) -> Tensor | None:
        """Record one vector for each token and layer: [rows, layers * ple]; None without PLE."""
        if not self.config.ple:
            return None
        context = self.linear(x, self.model.matrices["per_layer_model_proj.weight"])
        return self.combine_per_layer(context)

    def combine_per_layer(self, context: Tensor) -> Tensor:
        """Record the per-layer embeddings of the context combined with the tokens', if any."""
        config, table = self.config, self.model.table
        layers = len(config.layers)
        token: dict[str, Argument] = {"token_ple": "none"}
        if config.has_token_ple:
            ids = table.ids if table else None  # of the rows that are uploaded for each batch
            rows = self.embed("per_layer_token_embd.weight", math.sqrt(config.ple), ids)
            token = {"token_ple": "rows", "token": rows}
        ple = self.scratch(self.rows, layers * config.ple)
        self.recorder.call(
            "per_layer_embedding",
            (layers, self.rows),
            context=context,
            **token,
            ple=ple,
            w=self.model.vector("per_layer_proj_norm.weight"),
            width=config.ple,
            layers=layers,
            eps=config.eps,
            context_scale=1 / math.sqrt(config.width),
            THREADS=self.row_threads(THREADS),
        )
        return ple
