"""The text model over a Recorder: ids in, logits out, whatever the batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from webgemma.device import Kernel
from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.integers import Integers, multiplies_integers, pieces_of
from webgemma.gemma.matrices import Weight
from webgemma.gemma.moe import Branches, feed_forward_with_experts
from webgemma.gemma.tiles import FEW_TOKENS, Cut, Team, Tile
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.kernels import unit as unit_of

THREADS = 64
ROW_THREADS = 256  # where one workgroup handles a whole row
# In software, a barrier costs more than all else; among eight threads, lavapipe needs none.
SOFTWARE_THREADS, SOFTWARE_TILE = 8, 32


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step reads and leaves: batch state, token ids, and each layer's cache."""

    state: Tensor  # first position, count
    ids: Tensor  # [batch]
    caches: dict[int, tuple[Tensor, Tensor]]  # keys and values of the layers that own them
    ring: dict[int, int]  # positions each of those caches holds


class TextRecorder:
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
        self.model = model
        self.config: Config = model.config
        self.recorder = recorder
        self.inputs = inputs
        self.batch = batch
        self.kv = kv
        self.features = model.device.features
        # Where packed dots are made of other instructions, a batch is slower with them.
        self.precision = precision if batch == 1 or "packed-dots" in self.features else "exact"
        self.software = model.device.software

    def body(self, out: Tensor | None = None) -> Tensor:
        """Everything below the head: [batch, width], normed, into `out` if it is to be kept."""
        x = self.embed("token_embd.weight", math.sqrt(self.config.width))
        ple = self.per_layer_embeddings(x)
        h = self.norm(x, "blk.0.attn_norm.weight", self._input_of(0))
        for layer in self.config.layers:
            last = layer.index + 1 == len(self.config.layers)
            h = self.block(layer, x, h, ple, out if last else None)
        return h

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
            "softcap", self._flat(count), [count, self.config.softcap], logits, pieces=("finite",)
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
        scale = name + "layer_output_scale.weight"
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
        weight = self.model.matrices[name]
        x = self.recorder.scratch(self.batch, weight.width)
        kernel = self.link("embed", weight.format.name, pieces=("state",))
        unit = unit_of(weight.format.name)
        for part in weight.parts:
            blocks = weight.width // weight.format.block
            params = [
                blocks,
                *part.planes,
                part.first_row,
                part.rows,
                weight.width // unit,
                float(scale),
            ]
            tensors = (part.data, self.inputs.state, ids or self.inputs.ids, x)
            self.recorder.call(kernel, (self.batch,), params, *tensors)
        return x

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        out: Tensor | None = None,
        first: int = 0,
        up: tuple[Tensor, int, int] | None = None,
    ) -> Tensor:
        """x Wᵀ: [tokens, rows], or into the columns from `first` on of a wider `out`.

        With `up` (a tensor, its stride, its first column) the result is gelu(x Wᵀ) * up."""
        tokens = x.shape[0]
        if tokens > FEW_TOKENS:
            x = self._as_integers(x, weight)
        y = out or self.recorder.scratch(tokens, weight.rows)
        finish = ("linear", "gelu", "finish_gated") if up else ("linear", "finish_plain")
        kernel, rows_at_once, tokens_at_once = self._multiplier(x, weight, finish)
        units = weight.width // unit_of(weight.format.name)
        others = (up[0],) if up else ()
        for part in weight.parts:
            params = [
                *(weight.width // weight.format.block, *part.planes),
                *(first + part.first_row, part.rows, units, y.shape[1]),
                *(up[1:] if up else (0, 0)),
                tokens,
            ]
            columns, layers = self._fold(-(-part.rows // rows_at_once))
            grid = (columns, layers, tokens)
            if tokens_at_once:
                grid = (columns, -(-tokens // tokens_at_once), layers)
            self.recorder.call(kernel, grid, params, part.data, self.inputs.state, x, y, *others)
        return y

    def _multiplier(
        self, x: Tensor, weight: Weight, finish: tuple[str, ...]
    ) -> tuple[Kernel, int, int]:
        """A kernel for x Wᵀ, and how many rows and tokens a workgroup of it computes.

        No tokens: they are layers of the grid."""
        tokens, name, integers = x.shape[0], weight.format.name, isinstance(x, Integers)
        cut = None if integers else Cut.for_tokens(tokens, self.features, self.software)
        if cut is not None:
            kernel = self.link("matmul_lanes", name, ("state", *finish), **cut.constants)
            return kernel, cut.threads * cut.rows_each, cut.tokens
        tile = Tile.for_product(weight.rows, tokens, integers)
        if tile is not None:
            parts = ("state", "tile", *pieces_of("tile", x), *finish)
            return self.link("matmul", name, parts, **tile.constants), tile.rows, tile.tokens
        team = Team.for_weight(weight, self.features, self.software)
        parts = ("state", "lanes", "row_products", *pieces_of("x", x), *finish)
        return self.link("matvec", name, parts, **team.constants), team.rows, 0

    def room(self, width: int, *readers: str) -> Tensor:
        """Where to put what these matrices read: integers if all of them can multiply those."""
        weights = [self.model.matrices[name] for name in readers if name in self.model.matrices]
        if self.precision == "exact" or not all(multiplies_integers(w.format) for w in weights):
            return self.recorder.scratch(self.batch, width)
        return Integers.of((self.batch, width), self.precision)

    def _as_integers(self, x: Tensor, weight: Weight) -> Tensor:
        """x as this weight is best multiplied with it."""
        floats = self.precision == "exact" or not multiplies_integers(weight.format)
        if floats or isinstance(x, Integers):
            return x
        tokens, width = x.shape
        h = Integers.of((tokens, width), self.precision)
        grid = (-(-width // (4 * THREADS)), tokens)
        pieces = ("state", *pieces_of("put", h))
        self.call("quantise", grid, [width], self.inputs.state, x, h, pieces=pieces)
        return h

    def _input_of(self, index: int) -> Tensor:
        """Where to put what a layer reads, or the head after the last one."""
        names = [f"blk.{index}.{part}.weight" for part in ("attn_qkv", "attn_k", "attn_v")]
        last = index == len(self.config.layers)
        return self.room(self.config.width, *([self._head_name] if last else names))

    @property
    def _head_name(self) -> str:
        return "token_embd.weight" if self.config.tied else "output.weight"

    def norm(self, x: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        """rms(x) * w."""
        h = out or self.recorder.scratch(*x.shape)
        params = [x.shape[1], self.config.eps]
        self.call(
            "norm",
            (self.batch,),
            params,
            self.inputs.state,
            x,
            self.model.vector(name),
            h,
            pieces=("sum", "state", *pieces_of("put", h)),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return h

    def residual(
        self,
        x: Tensor,
        y: Tensor | Branches,
        post: str,
        following: str = "",
        scale: str = "",
        out: Tensor | None = None,
    ) -> Tensor:
        """x = (x + rms(y) * post) * scale, in place; gives rms(x) * next, if there is one."""
        h = out or self.recorder.scratch(*(x.shape if following else (4,)))
        put = ("next_weights", "next_one", *pieces_of("put", h)) if following else ("next_none",)
        vector = self.model.vector
        added = (y,) if isinstance(y, Tensor) else y
        form = "y_one" if len(added) == 1 else "y_two"
        self.call(
            "residual",
            (self.batch,),
            [self.config.eps, 0, 0],
            *(x, h, vector(post), vector(scale), vector(following), *added),
            pieces=("sum", form, *put),
            THREADS=SOFTWARE_TILE if self.software else ROW_THREADS,
            WIDTH=x.shape[1],
        )
        return h

    def geglu(
        self,
        gate: Tensor,
        gate_stride: int,
        up: Tensor,
        up_stride: int,
        up_first: int,
        width: int,
        out: Tensor | None = None,
        rows: int = 1,
    ) -> Tensor:
        """gelu(gate) * up, each the first `width` columns (up: from `up_first` on) of its rows.

        A token has so many `rows`."""
        h = out or self.recorder.scratch(self.batch, rows * width)
        grid = (-(-width // (4 * THREADS)), self.batch, rows)
        params = [width, gate_stride, up_stride, up_first]
        pieces = ("state", "gelu", *pieces_of("put", h))
        self.call("geglu", grid, params, self.inputs.state, gate, up, h, pieces=pieces)
        return h

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
        hidden = self.room(layer.ffn, name + "ffn_down.weight")
        if both and len(weight.parts) == 1 and self.batch <= FEW_TOKENS and not self.software:
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
        grid = (*self._fold(-(-ffn // team.rows)), self.batch)
        self.recorder.call(kernel, grid, params, part.data, self.inputs.state, n, out)

    def per_layer_embeddings(self, x: Tensor) -> Tensor | None:
        """One vector for each token and layer: [batch, layers * ple]."""
        config = self.config
        if not config.ple:
            return None
        layers = len(config.layers)
        table = self.model.table
        places = table.places if table else None  # of the rows that the host brings
        token = self.embed("per_layer_token_embd.weight", math.sqrt(config.ple), places)
        context = self.linear(x, self.model.matrices["per_layer_model_proj.weight"])
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

    def row_threads(self, usual: int) -> int:
        """Of a workgroup that adds up a row."""
        return SOFTWARE_THREADS if self.software else usual

    def _flat(self, count: int) -> tuple[int, int]:
        return self._fold(-(-count // THREADS))

    def _fold(self, groups: int) -> tuple[int, int]:
        """More workgroups than one axis allows, over two."""
        return min(groups, 32768), -(-groups // 32768)

    def link(
        self, op: str, format: str = "", pieces: tuple[str, ...] = (), **constants: int
    ) -> Kernel:
        numbers = {"THREADS": THREADS, **constants}
        return link(op, self.features, format=format, constants=numbers, pieces=pieces)

    def call(
        self,
        op: str,
        grid: tuple[int, ...],
        params: Sequence[int | float],
        *tensors: Tensor,
        pieces: tuple[str, ...] = (),
        **constants: int,
    ) -> None:
        kernel = self.link(op, "", pieces, **constants)
        self.recorder.call(kernel, grid, params, *tensors)
