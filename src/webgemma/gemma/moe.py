"""The mixture of experts over a Recorder: each token asks a few experts beside the dense branch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from webgemma.errors import DeviceError
from webgemma.gemma.config import Experts, Layer
from webgemma.gemma.weights import Weight
from webgemma.graph import Tensor
from webgemma.kernels import link
from webgemma.kernels import unit as unit_of

if TYPE_CHECKING:
    from webgemma.gemma.text import TextRecorder

THREADS = 64
UP_LANES, DOWN_LANES = 16, 32  # threads that share a row: enough to fill a GPU
TILE_ROWS = 32  # of expert_matmul.wgsl
MOST = {"MOST_EXPERTS": 256, "MOST_USED": 16}
NOWHERE = 1 << 31  # a row that no part of a weight holds


def feed_forward_with_experts(text: "TextRecorder", layer: Layer, x: Tensor, n: Tensor) -> Tensor:
    """The dense branch of n plus the experts of the residual x, both normed: [batch, width]."""
    name = f"blk.{layer.index}."
    dense = text.feed_forward(layer, n)
    chosen = experts(text, layer, x)
    return merge_norms(
        text, dense, chosen, name + "post_ffw_norm_1.weight", name + "post_ffw_norm_2.weight"
    )


def merge_norms(text: "TextRecorder", a: Tensor, b: Tensor, a_norm: str, b_norm: str) -> Tensor:
    """rms(a) * a_norm + rms(b) * b_norm: [batch, width]."""
    vector = text.model.vector
    out = text.recorder.scratch(*a.shape)
    tensors = (a, b, vector(a_norm), vector(b_norm), out)
    params = [a.shape[1], text.config.eps]
    _call(text, "merge_norms", (text.batch,), params, tensors, ("sum",))
    return out


def experts(text: "TextRecorder", layer: Layer, x: Tensor) -> Tensor:
    """The weighted sum of each token's chosen experts, from the residual x: [batch, width]."""
    mixture = Mixture(text, layer)
    s, m = mixture.norms(x)
    ids, shares = mixture.route(s)
    # While an expert has one token on the average, gathering tokens by expert spares no reading.
    if text.batch * mixture.experts.used <= mixture.experts.count:
        return mixture.one_by_one(m, ids, shares)
    return mixture.gathered(m, ids, shares)


@dataclass(frozen=True, slots=True)
class _Order:
    """A batch gathered by expert: see expert_sort.wgsl."""

    places: Tensor
    tiles: Tensor  # [most tiles there can be, 4]
    tokens: int  # places in a tile


class Mixture:
    """The experts of one layer; a place is one of the `used` slots of a token."""

    def __init__(self, text: "TextRecorder", layer: Layer) -> None:
        self.text = text
        self.name = f"blk.{layer.index}."
        self.experts = _checked(text.config.experts)
        self.width = text.config.width
        matrices = text.model.matrices
        self.down = matrices[self.name + "ffn_down_exps.weight"]
        if self.experts.fused:
            self.gate = self.up = matrices[self.name + "ffn_gate_up_exps.weight"]
        else:
            self.gate = matrices[self.name + "ffn_gate_exps.weight"]
            self.up = matrices[self.name + "ffn_up_exps.weight"]

    def norms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the router and of the experts: two of [batch, width]."""
        text, vector = self.text, self.text.model.vector
        s, m = text.recorder.scratch(*x.shape), text.recorder.scratch(*x.shape)
        scale = vector(self.name + "ffn_gate_inp.scale")
        norm = vector(self.name + "pre_ffw_norm_2.weight")
        params = [self.width, text.config.eps, 1 / math.sqrt(self.width)]
        tensors = (x, scale, norm, s, m)
        _call(text, "expert_norms", (text.batch,), params, tensors, ("sum",))
        return s, m

    def route(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts (u32) and their shares: two of [batch, used]."""
        text, model, used = self.text, self.text.model, self.experts.used
        scores = text.linear(s, model.matrices[self.name + "ffn_gate_inp.weight"])
        ids = text.recorder.scratch(text.batch, used)
        shares = text.recorder.scratch(text.batch, used)
        scale = self.name + "ffn_down_exps.scale"
        params = [self.experts.count, used, int(scale in model.vectors)]
        tensors = (text.inputs.state, scores, model.vector(scale), ids, shares)
        _call(text, "route", (text.batch,), params, tensors, ("state",), MOST)
        return ids, shares

    def one_by_one(self, m: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Every place reads the weights of its expert."""
        text, used, ffn = self.text, self.experts.used, self.experts.ffn
        state = text.inputs.state
        hidden = text.recorder.scratch(text.batch, used * ffn)
        y = text.recorder.scratch(text.batch, self.width)
        up, down = (state, ids, m, hidden), (state, ids, shares, hidden, y)
        halves = [(self.gate, 0, NOWHERE), (self.up, NOWHERE, 0)]
        if self.experts.fused:
            halves = [(self.gate, 0, ffn)]
        grid = (-(-ffn * UP_LANES // THREADS), used, text.batch)
        lanes = {"LANES": UP_LANES}
        for weight, *firsts in halves:
            self._multiply("expert_up", weight, grid, [*firsts, ffn], up, ("state", "gelu"), lanes)
        grid = (-(-self.width * DOWN_LANES // THREADS), 1, text.batch)
        lanes = {"LANES": DOWN_LANES}
        self._multiply("expert_down", self.down, grid, [used], down, ("state",), lanes)
        return y

    def gathered(self, m: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """The weights of an expert are read for all its places together."""
        used, ffn = self.experts.used, self.experts.ffn
        order = self._sort(ids)
        gate = self._matmul(order, self.gate, 0, ffn, m, used)
        up = self._matmul(order, self.up, ffn if self.experts.fused else 0, ffn, m, used)
        hidden = self.text.geglu(gate, used * ffn, up, used * ffn, 0, used * ffn)
        parts = self._matmul(order, self.down, 0, self.width, hidden, 1)
        y = self.text.recorder.scratch(self.text.batch, self.width)
        grid = (-(-self.width // THREADS), self.text.batch)
        tensors = (self.text.inputs.state, shares, parts, y)
        _call(self.text, "expert_sum", grid, [self.width, used], tensors)
        return y

    def _sort(self, ids: Tensor) -> _Order:
        """The places expert by expert, in tiles about as large as an expert's average."""
        text, count, used = self.text, self.experts.count, self.experts.used
        most = text.batch * used
        tokens = next((n for n in (8, 16) if most <= n * count), 32)
        places = text.recorder.scratch(text.batch, used)
        tiles = text.recorder.scratch(min(most, most // tokens + count), 4)
        params, tensors = [count, used, tiles.shape[0]], (text.inputs.state, ids, places, tiles)
        _call(text, "expert_sort", (1,), params, tensors, ("state",), {"TOKENS": tokens, **MOST})
        return _Order(places, tiles, tokens)

    def _matmul(
        self, order: _Order, weight: Weight, first: int, columns: int, x: Tensor, fan: int
    ) -> Tensor:
        """Rows of each expert from its `first` on, times its places' x: [batch, used * columns]."""
        y = self.text.recorder.scratch(self.text.batch, self.experts.used * columns)
        grid = (-(-columns // TILE_ROWS), order.tiles.shape[0])
        tensors = (order.tiles, order.places, x, y)
        params, constants = [first, columns, fan], {"TOKENS": order.tokens}
        self._multiply("expert_matmul", weight, grid, params, tensors, (), constants)
        return y

    def _multiply(
        self,
        op: str,
        weight: Weight,
        grid: tuple[int, ...],
        params: list[int],
        tensors: tuple[Tensor, ...],
        pieces: tuple[str, ...],
        constants: Mapping[str, int],
    ) -> None:
        """One dispatch for each part of the weight; each leaves alone what the others hold."""
        name, width = weight.format.name, weight.width
        blocks, units = width // weight.format.block, width // unit_of(name)
        expert_rows = weight.rows // self.experts.count
        for part in weight.parts:
            own = [blocks, *part.planes, part.first_row, part.rows, units, expert_rows, *params]
            _call(self.text, op, grid, own, (part.data, *tensors), pieces, constants, name)


def _checked(experts: Experts | None) -> Experts:
    assert experts is not None
    most, most_used = MOST["MOST_EXPERTS"], MOST["MOST_USED"]
    if experts.count > most or experts.used > most_used:
        raise DeviceError(
            f"This model uses {experts.used} of {experts.count} experts; the kernels have room for "
            f"{most_used} of {most}. Take another model, or raise both in gemma/moe.py."
        )
    return experts


def _call(
    text: "TextRecorder",
    op: str,
    grid: tuple[int, ...],
    params: Sequence[int | float],
    tensors: tuple[Tensor, ...],
    pieces: tuple[str, ...] = ("state",),
    constants: Mapping[str, int] | None = None,
    format: str = "",
) -> None:
    numbers = {"THREADS": THREADS, **(constants or {})}
    kernel = link(op, text.features, format=format, constants=numbers, pieces=pieces)
    text.recorder.call(kernel, grid, params, *tensors)
