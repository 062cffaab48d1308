"""The text model over a Recorder: ids in, logits out, whatever the batch."""

import math
from dataclasses import dataclass

from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.matrices import Weight
from webgemma.gemma.moe import Branches, feed_forward_with_experts
from webgemma.gemma.record.ops import THREADS, Steps
from webgemma.gemma.record.quantised import pieces_of
from webgemma.gemma.record.tiling import FEW_TOKENS, Team
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import unit as unit_of


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step reads and leaves: batch state, token ids, and each layer's cache."""

    state: Tensor  # first position, count
    ids: Tensor  # [batch]
    caches: dict[int, tuple[Tensor, Tensor]]  # keys and values of the layers that own them
    ring: dict[int, int]  # positions each of those caches holds
    soft: Tensor | None = None  # [batch, width], rows that take the place of embeddings


class TextRecorder(Steps):
    """Records the forward pass of a batch of at most `batch` tokens."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        inputs: Inputs,
        batch: int,
        kv: str,
        precision: str = "exact",
    ) -> None:
        super().__init__(model, recorder, inputs.state, batch, model.config.eps, precision)
        self.model = model
        self.config: Config = model.config
        self.inputs = inputs
        self.kv = kv

    def body(self, out: Tensor | None = None) -> Tensor:
        """Everything below the head: [batch, width], normed, into `out` if it is to be kept."""
        x = self.opening()
        ple = self.per_layer_embeddings(x)
        h = self.norm(x, "blk.0.attn_norm.weight", self._input_of(0))
        for layer in self.config.layers:
            last = layer.index + 1 == len(self.config.layers)
            h = self.block(layer, x, h, ple, out if last else None)
        return h

    def opening(self) -> Tensor:
        """What the first layer reads: the tokens' embeddings, or soft tokens in their place."""
        x = self.embed("token_embd.weight", math.sqrt(self.config.width))
        self._adapt_embedding(x)
        if self.inputs.soft is not None:
            width, tensors = self.config.width, (self.state, self.inputs.soft, x)
            grid = (-(-width // (4 * THREADS)), self.batch)
            self.call("place", grid, [width], *tensors, pieces=("state_soft",))
        return x

    def sees(self, layer: Layer) -> str:
        """The piece of attention's kernel that says how far a token sees."""
        both_ways = self.config.images_attend_both_ways and layer.sliding
        return "sees_blocks" if both_ways and self.inputs.soft is not None else "sees_past"

    @property
    def output_scale(self) -> str:
        """What a layer's output is multiplied by; DiffusionGemma reads with its encoder's."""
        return "enc_" * bool(self.config.diffusion) + "layer_output_scale.weight"

    def head(self, h: Tensor) -> Tensor:
        """Raw logits [rows of h, vocab]; the softcap is the sampler's, or `softcap`'s."""
        return self.linear(h, self.model.matrices[self._head_name])

    def last_row(self, h: Tensor) -> Tensor:
        """The last token's row: [1, width]."""
        width = self.config.width
        row = self.recorder.scratch(1, width)
        grid = (-(-width // THREADS),)
        self.call("last_row", grid, [width], self.inputs.state, h, row, pieces=("state",))
        return row

    def softcap(self, logits: Tensor) -> Tensor:
        """cap * tanh(logits / cap), in place."""
        count = logits.nbytes // 4
        self.call(
            "softcap", self.flat(count), [count, self.config.softcap], logits, pieces=("finite",)
        )
        return logits

    def block(
        self, layer: Layer, x: Tensor, h: Tensor, ple: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """One layer: x [batch, width] is changed in place; gives the next layer's normed input."""
        name = f"blk.{layer.index}."
        following = layer.index + 1
        last = following == len(self.config.layers)
        next_norm = "output_norm.weight" if last else f"blk.{following}.attn_norm.weight"
        scale = name + self.output_scale
        out = out or self._input_of(following)
        a = Attention(self, layer).answer(h)
        f: Tensor | Branches
        if layer.experts:
            f = feed_forward_with_experts(self, layer, x, a)
        else:
            n = self.room(self.config.width, name + "ffn_gate_up.weight", name + "ffn_up.weight")
            post, norm = name + "post_attention_norm.weight", name + "ffn_norm.weight"
            f = self.feed_forward(layer, self.residual(x, a, post, norm, out=n))
        if ple is None:
            return self.residual(x, f, name + "post_ffw_norm.weight", next_norm, scale, out)
        self.residual(x, f, name + "post_ffw_norm.weight")
        width = self.config.ple
        up = (ple, len(self.config.layers) * width, layer.index * width)
        gated = self.linear(x, self.model.matrices[name + "inp_gate.weight"], up=up)
        p = self.linear(gated, self.model.matrices[name + "proj.weight"])
        return self.residual(x, p, name + "post_norm.weight", next_norm, scale, out)

    def embed(self, name: str, scale: float, ids: Tensor | None = None) -> Tensor:
        """Rows of a table for the ids, the batch's tokens if not told: [batch, width]."""
        return self.rows_of(self.model.matrices[name], ids or self.inputs.ids, scale)

    def _adapt_embedding(self, x: Tensor) -> None:
        """x[t] += √d B A[id], of the adapters that change it."""
        low, width = self.model.adapters.embedding, self.config.width
        if low is not None:
            grid = (-(-width // THREADS), self.batch)
            params = [width, low.ranks // 4, math.sqrt(width)]
            tensors = (low.a, low.b, low.scales, self.inputs.state, self.inputs.ids, x)
            self.call("adapter_embed", grid, params, *tensors, pieces=("state",))

    def _input_of(self, index: int) -> Tensor:
        """Where to put what a layer reads, or the head after the last one."""
        names = [f"blk.{index}.{part}.weight" for part in ("attn_qkv", "attn_k", "attn_v")]
        last = index == len(self.config.layers)
        return self.room(self.config.width, *([self._head_name] if last else names))

    @property
    def _head_name(self) -> str:
        return "token_embd.weight" if self.config.tied else "output.weight"

    def feed_forward(self, layer: Layer, n: Tensor) -> Tensor:
        """W_down(gelu(W_gate n) * W_up n)."""
        hidden = self.hidden(layer, n)
        return self.linear(hidden, self.model.matrices[f"blk.{layer.index}.ffn_down.weight"])

    def hidden(self, layer: Layer, n: Tensor) -> Tensor:
        """gelu(W_gate n) * W_up n: [batch, ffn]."""
        name = f"blk.{layer.index}."
        matrices = self.model.matrices
        weight = matrices[name + "ffn_gate_up.weight"]
        both = weight.rows == 2 * layer.ffn
        alone = len(weight.parts) == 1 and weight.name not in self.model.low
        hidden = self.room(layer.ffn, name + "ffn_down.weight")
        if both and alone and self.batch <= FEW_TOKENS and not self.software:
            self.gate_up(n, weight, hidden)
        else:
            gate = self.linear(n, weight)
            split = weight.rows == layer.ffn
            up = self.linear(n, matrices[name + "ffn_up.weight"]) if split else gate
            first = 0 if split else layer.ffn
            self.geglu(gate, gate.shape[1], up, up.shape[1], first, layer.ffn, hidden)
        return hidden

    def gate_up(self, n: Tensor, weight: Weight, out: Tensor) -> None:
        """gelu(W_gate n) * W_up n, from both matrices in one."""
        ffn = weight.rows // 2
        units = weight.width // unit_of(weight.format.name)
        team = Team.for_pairs(weight)
        products = ("lanes", "row_products", *pieces_of("x", n))
        parts = ("state", "gelu", *products, *pieces_of("row", out))
        shape = {"THREADS": team.threads, "LANES": team.lanes}
        kernel = self.link("gate_up", weight.format.name, parts, **shape)
        part = weight.parts[0]
        params = [weight.width // weight.format.block, *part.planes, ffn, units]
        grid = (*self.fold(-(-ffn // team.rows)), self.batch)
        self.recorder.call(kernel, grid, params, part.data, self.inputs.state, n, out)

    def per_layer_embeddings(self, x: Tensor) -> Tensor | None:
        """One vector for each token and layer: [batch, layers * ple]."""
        if not self.config.ple:
            return None
        return self.blend(self.linear(x, self.model.matrices["per_layer_model_proj.weight"]))

    def blend(self, context: Tensor) -> Tensor:
        """The tokens' own rows and what their context says, as the layers read it."""
        config, table = self.config, self.model.table
        layers = len(config.layers)
        places = table.places if table else None  # of the rows that the host brings
        token = self.embed("per_layer_token_embd.weight", math.sqrt(config.ple), places)
        ple = self.recorder.scratch(self.batch, layers * config.ple)
        params = [config.ple, layers, config.eps, 1 / math.sqrt(config.width)]
        norm = self.model.vector("per_layer_proj_norm.weight")
        self.call(
            "per_layer",
            (layers, self.batch),
            params,
            self.inputs.state,
            context,
            token,
            norm,
            ple,
            pieces=("sum", "state"),
            THREADS=self.row_threads(THREADS),
        )
        return ple
