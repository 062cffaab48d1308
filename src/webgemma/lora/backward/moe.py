"""The mixture of experts in training over a Recorder: forward and back, the experts frozen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from webgemma.gemma.config import Layer
from webgemma.gemma.matrices import Weight
from webgemma.gemma.moe import ROW_THREADS, THREADS, Mixture, Order
from webgemma.gemma.record.outer import Outer
from webgemma.graph import Tensor
from webgemma.kernels import unit as unit_of
from webgemma.lora.backward.matmul import Product

if TYPE_CHECKING:
    from webgemma.lora.backward.layers import Passes


class Asked(NamedTuple):
    """What the way back through a layer's experts reads; a place is a slot of a token."""

    router: Product
    ids: Tensor
    shares: Tensor
    order: Order
    both: Tensor  # [batch, used * 2 * ffn], gate and up of each place
    parts: Tensor  # [batch, used * width], each expert's answer
    answer: Tensor  # [batch, width]
    sum: Tensor  # of the normed dense branch and the normed answer


class Asking(Mixture):
    """The experts of one layer, beside the dense branch."""

    def __init__(self, passes: Passes, layer: Layer) -> None:
        super().__init__(passes, layer)
        self.passes = passes

    def forward(self, r: Tensor, dense: Tensor) -> Asked:
        """What is added to the residual r before its norm, given the dense branch's answer."""
        passes, used, ffn = self.passes, self.experts.used, self.experts.ffn
        s = passes.norm(r, self.name + "ffn_gate_inp.scale")
        router = passes.linear_of(s, self.name + "ffn_gate_inp.weight")
        self._shrink(router.y)
        ids, shares = self.route(router.y)
        order = self._sort(ids)
        m = passes.norm(r, self.name + "pre_ffw_norm_2.weight")
        both = passes.recorder.scratch(passes.batch, used * 2 * ffn)
        self._matmul(order, self.gate, m, used, both)
        if not self.experts.fused:
            self._matmul(order, self.up, m, used, both, ffn)
        hidden = passes.geglu(both, 2 * ffn, both, 2 * ffn, ffn, ffn, rows=used)
        parts = passes.recorder.scratch(passes.batch, used * self.width)
        self._matmul(order, self.down, hidden, 1, parts)
        answer = self._sum(shares, parts)
        first = passes.norm(dense, self.name + "post_ffw_norm_1.weight")
        joined = passes.add_norm(first, answer, self.name + "post_ffw_norm_2.weight")
        return Asked(router, ids, shares, order, both, parts, answer, joined)

    def back(self, r: Tensor, asked: Asked, df: Tensor, dx: Tensor) -> None:
        """Adds to dx, the gradient of the residual r, what comes back through the experts."""
        passes, used, ffn = self.passes, self.experts.used, self.experts.ffn
        dy = passes.norm_back(asked.answer, self.name + "post_ffw_norm_2.weight", df)
        dparts, dshares = self._sum_back(asked, dy)
        dhidden = passes.recorder.scratch(passes.batch * used, ffn)
        self._matmul_back(asked.order, self.down, dparts, dhidden, 1)
        dboth = passes.geglu_back(asked.both, 2 * ffn, asked.both, 2 * ffn, ffn, dhidden)
        slots = passes.recorder.scratch(used, passes.batch, self.width)
        self._matmul_back(asked.order, self.gate, dboth, slots, used)
        if not self.experts.fused:
            self._matmul_back(asked.order, self.up, dboth, slots, used, ffn, add=True)
        dm = passes.recorder.scratch(passes.batch, self.width)
        fours = dm.nbytes // 16
        passes.call("sum_shares", passes.flat(fours), [fours, used, 0], slots, dm)
        passes.norm_back(r, self.name + "pre_ffw_norm_2.weight", dm, dx)
        ds = passes.back_of(asked.router, self._route_back(asked, dshares))
        passes.norm_back(r, self.name + "ffn_gate_inp.scale", ds, dx)

    def _shrink(self, scores: Tensor) -> None:
        """The router reads rms(r) / √d; its scores are divided instead."""
        self.passes.multiply(scores, self.passes.model.one, 1 / math.sqrt(self.width))

    def _sum(self, shares: Tensor, parts: Tensor) -> Tensor:
        passes, y = self.passes, self.passes.recorder.scratch(self.passes.batch, self.width)
        grid, params = (-(-self.width // THREADS), passes.batch), [self.width, self.experts.used]
        tensors = (passes.state, shares, parts, y)
        passes.call("expert_sum", grid, params, *tensors, pieces=("state",))
        return y

    def _sum_back(self, asked: Asked, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of each place's answer and of its share."""
        passes, used = self.passes, self.experts.used
        dparts = passes.recorder.scratch(passes.batch * used, self.width)
        dshares = passes.recorder.scratch(passes.batch, used)
        passes.call(
            "expert_sum_back",
            (used, passes.batch),
            [self.width, used],
            *(asked.shares, asked.parts, dy, dparts, dshares),
            pieces=("sum",),
            THREADS=passes.row_threads(ROW_THREADS),
        )
        return dparts, dshares

    def _route_back(self, asked: Asked, dshares: Tensor) -> Tensor:
        """The gradient of the router's scores."""
        passes, dscores = self.passes, self.passes.recorder.scratch(*asked.router.y.shape)
        params, scale = self._routing()
        tensors = (asked.router.y, scale, asked.ids, dshares, dscores)
        passes.call("route_back", (-(-passes.batch // THREADS),), [*params, passes.batch], *tensors)
        self._shrink(dscores)
        return dscores

    def _matmul_back(
        self,
        order: Order,
        weight: Weight,
        dy: Tensor,
        dx: Tensor,
        fan: int,
        column: int = 0,
        *,
        add: bool = False,
    ) -> None:
        """dx (+)= dy W of each place's expert; with `fan` slots those of one slot lie together."""
        passes, fmt, width = self.passes, weight.format, weight.width
        tile = Outer.for_places(order.tokens, passes.software)
        pieces = ("outer", "outer_weights")
        kernel = passes.link("expert_matmul_back", fmt.name, pieces, **tile.constants)
        grid = (-(-width // tile.n), order.tiles.shape[0])
        blocks, units = width // fmt.block, width // unit_of(fmt.name)
        expert_rows = weight.rows // self.experts.count
        last = [expert_rows, dy.shape[1], column, fan, passes.batch, int(add)]
        for part in weight.parts:
            params = [blocks, *part.planes, part.first_row, part.rows, units, *last]
            tensors = (part.data, order.tiles, order.places, dy, dx)
            passes.recorder.call(kernel, grid, params, *tensors)
