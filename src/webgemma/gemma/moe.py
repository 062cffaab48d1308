"""The mixture of experts over a Recorder: each token asks a few experts beside the dense branch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from webgemma.errors import DeviceError
from webgemma.gemma.config import Experts, Layer
from webgemma.gemma.lora_weights import adapt_experts
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.quantised import (
    GROUP,
    GROUP_NBYTES,
    Integers,
    multiplies_integers,
    pieces_of,
)
from webgemma.gemma.record.tiling import Tile
from webgemma.graph import Tensor
from webgemma.kernels import link
from webgemma.kernels import unit as unit_of

if TYPE_CHECKING:
    from webgemma.gemma.text import TextRecorder

THREADS = 64
ROW_THREADS = 256  # where one workgroup handles a whole row, or each finds its expert by itself
UP_LANES = 8  # of a pair of rows; with 32 pairs for a workgroup, as many threads as it may have
DOWN = {"LANES": 32, "EACH": 1, "THREADS": 64}  # threads that share some rows
TILES = (8, 16, 32)  # places that a tile of a batch may have
MOST = {"MOST_EXPERTS": 256, "MOST_USED": 16}
ROUTE = ("state", "order", "route")
NOWHERE = 1 << 31  # a row that no part of a weight holds


class Branches(NamedTuple):
    """What a layer with experts adds to the residual: see y_two.wgsl."""

    dense: Tensor
    chosen: Tensor
    norms: Tensor


def feed_forward_with_experts(text: "TextRecorder", layer: Layer, x: Tensor, a: Tensor) -> Branches:
    """Adds attention's a to the residual x; then the dense branch and the experts, from x."""
    mixture = Mixture(text, layer)
    n, m, s = mixture.fork(x, a)
    # What needs nothing of each other comes one after the other, so that it may run side by side.
    scores = mixture.scores(s)
    hidden = text.hidden(layer, n)
    chosen = mixture.answer(m, scores, hidden)
    down = text.model.matrices[f"blk.{layer.index}.ffn_down.weight"]
    return Branches(text.linear(hidden, down), chosen, text.model.join_norms[layer.index])


@dataclass(frozen=True, slots=True)
class Order:
    """A batch gathered by expert: see expert_sort.wgsl."""

    places: Tensor
    tiles: Tensor  # [most tiles there can be, 4]
    tokens: int  # places in a tile


class Mixture:
    """The experts of one layer; a place is one of the `used` slots of a token."""

    def __init__(self, text: "TextRecorder", layer: Layer) -> None:
        self.text = text
        self.index = layer.index
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

    def fork(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x += rms(a) * post, in place; gives what the dense branch, experts and router read."""
        text, name, shape = self.text, self.name, (self.text.batch, self.width)
        n = text.room(self.width, name + "ffn_gate_up.weight", name + "ffn_up.weight")
        m, s = text.recorder.scratch(*shape), text.recorder.scratch(*shape)
        if isinstance(n, Integers):
            m = text.room(self.width, self.gate.name, self.up.name)
        alike = isinstance(m, Integers) == isinstance(n, Integers)
        h = text.recorder.together(n, m, s)
        m_place = m.offset // 16
        if isinstance(m, Integers):
            m_place = m.offset // GROUP_NBYTES[m.precision] * (GROUP // 4)
        post = text.model.vector(name + "post_attention_norm.weight")
        params = [text.config.eps, m_place, s.offset // 16]
        tensors = (x, h, post, text.model.one, text.model.fork_norms[self.index], a)
        pieces = ("sum", "y_one", "next_weights", "next_three", *pieces_of("put", n))
        constants = {"THREADS": ROW_THREADS, "WIDTH": self.width, "ALIKE": int(alike)}
        _call(text, "residual", (text.batch,), params, tensors, pieces, constants)
        return n, m, s

    def scores(self, s: Tensor) -> Tensor:
        """The router's: [batch, experts]."""
        return self.text.linear(s, self.text.model.matrices[self.name + "ffn_gate_inp.weight"])

    def answer(self, m: Tensor, scores: Tensor, beside: Tensor | None = None) -> Tensor:
        """The weighted sum of each token's chosen experts: [batch, width].

        `beside` is scratch that will be read when the experts' own is."""
        # While an expert has one token on the average, gathering by expert spares no reading.
        adapted = {self.gate.name, self.up.name, self.down.name} & self.text.model.low.keys()
        if self.text.batch * self.experts.used <= self.experts.count and not adapted:
            return self.one_by_one(m, scores, beside)
        return self.gathered(m, *self.route(scores))

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts (u32) and their shares: two of [batch, used]."""
        text, (ids, shares) = self.text, self._asked()
        params, scale = self._routing()
        tensors = (text.inputs.state, scores, scale, ids, shares)
        _call(text, "route", (text.batch,), params, tensors, ROUTE, MOST)
        return ids, shares

    def one_by_one(self, m: Tensor, scores: Tensor, beside: Tensor | None = None) -> Tensor:
        """Every place finds its expert and reads the weights of it."""
        text, (ids, shares) = self.text, self._asked()
        hidden = text.recorder.scratch(text.batch, self.experts.used * self.experts.ffn)
        if self.experts.fused and len(self.gate.parts) == 1:
            hidden = text.room(hidden.shape[1], self.down.name)
        if beside is not None:  # the first of them that is read waits for both
            text.recorder.together(beside, hidden)
        self._up(m, hidden, scores, ids, shares)
        y = text.recorder.scratch(text.batch, self.width)
        self._down(hidden, ids, shares, y)
        return y

    def _up(self, m: Tensor, hidden: Tensor, scores: Tensor, ids: Tensor, shares: Tensor) -> None:
        """What the experts have inside: gelu(W_gate m) * W_up m."""
        text, ffn = self.text, self.experts.ffn
        routing, scale = self._routing()
        halves = [(self.gate, 0, NOWHERE), (self.up, NOWHERE, 0)]
        if self.experts.fused:
            halves = [(self.gate, 0, ffn)]
        each = 2 if self.experts.fused else 1
        # A workgroup makes a whole group of integers.
        shape = {"LANES": UP_LANES, "EACH": each, "THREADS": GROUP * UP_LANES, **MOST}
        forms = (*pieces_of("x", m), *pieces_of("row", hidden))
        pieces = (*ROUTE, "lanes", "row_products", "gelu", *forms)
        grid = (-(-ffn // GROUP) + 1, self.experts.used, text.batch)
        tensors = (text.inputs.state, m, hidden, scores, scale, ids, shares)
        for weight, *firsts in halves:
            params = [*firsts, ffn, *routing]
            self._multiply("expert_up", weight, grid, params, tensors, pieces, shape)

    def _down(self, hidden: Tensor, ids: Tensor, shares: Tensor, y: Tensor) -> None:
        """The sum over slots of share * W_down hidden."""
        text, rows = self.text, DOWN["THREADS"] // DOWN["LANES"] * DOWN["EACH"]
        grid = (-(-self.width // rows), 1, text.batch)
        pieces = ("state", "lanes", *pieces_of("x", hidden))
        tensors, params = (text.inputs.state, hidden, ids, shares, y), [self.experts.used]
        shape = {**DOWN, "WHOLE": int(len(self.down.parts) == 1)}
        self._multiply("expert_down", self.down, grid, params, tensors, pieces, shape)

    def _asked(self) -> tuple[Tensor, Tensor]:
        """Where to put each token's experts and their shares."""
        scratch, shape = self.text.recorder.scratch, (self.text.batch, self.experts.used)
        return scratch(*shape), scratch(*shape)

    def _routing(self) -> tuple[list[int], Tensor]:
        """What route.wgsl wants to know, and the experts' scales."""
        name, model = self.name + "ffn_down_exps.scale", self.text.model
        numbers = [self.experts.count, self.experts.used, int(name in model.vectors)]
        return numbers, model.vector(name)

    def gathered(self, m: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """The weights of an expert are read for all its places together."""
        text, used, ffn = self.text, self.experts.used, self.experts.ffn
        order = self._sort(ids)
        if multiplies_integers(self.up.format):
            m = text._as_integers(m, self.gate)
        both = text.recorder.scratch(text.batch, used * 2 * ffn)
        self._matmul(order, self.gate, m, used, both)
        self._adapt(self.gate, ids, m, used, both)
        if not self.experts.fused:
            self._matmul(order, self.up, m, used, both, ffn)
            self._adapt(self.up, ids, m, used, both, ffn)
        hidden = text.room(used * ffn, self.down.name)
        text.geglu(both, 2 * ffn, both, 2 * ffn, ffn, ffn, hidden, used)
        parts = text.recorder.scratch(text.batch, used * self.width)
        self._matmul(order, self.down, hidden, 1, parts)
        self._adapt(self.down, ids, hidden, 1, parts)
        y = text.recorder.scratch(text.batch, self.width)
        grid = (-(-self.width // THREADS), text.batch)
        tensors = (text.inputs.state, shares, parts, y)
        _call(text, "expert_sum", grid, [self.width, used], tensors)
        return y

    def _adapt(
        self, weight: Weight, ids: Tensor, x: Tensor, fan: int, y: Tensor, first: int = 0
    ) -> None:
        """Add what adapters have for each place's expert; otherwise as `_matmul`."""
        low = self.text.model.low.get(weight.name)
        if low is not None:
            rows = weight.rows // self.experts.count
            adapt_experts(self.text, low, ids, x, fan, y, first, rows)

    def _sort(self, ids: Tensor) -> Order:
        """The places expert by expert, in tiles about as large as an expert's average."""
        text, count, used = self.text, self.experts.count, self.experts.used
        most = text.batch * used
        tokens = next((n for n in TILES if most <= n * count), TILES[-1])
        places = text.recorder.scratch(text.batch, used)
        tiles = text.recorder.scratch(min(most, most // tokens + count), 4)
        params, tensors = [count, used, tiles.shape[0]], (text.inputs.state, ids, places, tiles)
        _call(text, "expert_sort", (1,), params, tensors, ("state",), {"TOKENS": tokens, **MOST})
        return Order(places, tiles, tokens)

    def _matmul(
        self, order: Order, weight: Weight, x: Tensor, fan: int, y: Tensor, first: int = 0
    ) -> None:
        """Each expert's rows times its places' x, into a place's columns of y from `first` on.

        `fan` places share a row of x."""
        tile = Tile.for_places(order.tokens, isinstance(x, Integers), self.text.software)
        rows = weight.rows // self.experts.count
        grid = (-(-rows // tile.rows), order.tiles.shape[0])
        params = [y.shape[1] // self.experts.used, first, fan]
        tensors, pieces = (order.tiles, x, y, order.places), ("tile", *pieces_of("tile", x))
        self._multiply("expert_matmul", weight, grid, params, tensors, pieces, tile.constants)

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
