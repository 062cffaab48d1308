"""The mixture of experts, forward and backward; the experts themselves are frozen."""

from __future__ import annotations

import math
from typing import NamedTuple

from webgemma.gemma.config import Layer
from webgemma.gemma.moe import ExpertLayer
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.expert_matmul import Routing, SortedSlots
from webgemma.gemma.record.matmul import THREADS
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.graph import Tensor
from webgemma.lora.backward.matmul import Product
from webgemma.lora.backward.ops import TrainingOps


class ExpertPass(NamedTuple):
    """What the backward pass through a layer's experts reads; a slot is an expert of a token."""

    router: Product
    routing: Routing
    order: SortedSlots
    both: Tensor  # [rows, used * 2 * ffn], gate and up of each slot
    parts: Tensor  # [rows, used * width], the output of each slot's expert
    expert_sum: Tensor  # [rows, width]
    output: Tensor  # the sum of the normed dense branch and the normed expert_sum


class TrainingExperts(ExpertLayer):
    """The experts of one layer, beside the dense branch."""

    def __init__(self, ops: TrainingOps, layer: Layer) -> None:
        super().__init__(ops, ops.model, layer)
        self.training = ops

    def forward(self, r: Tensor, dense: Tensor) -> ExpertPass:
        """Record what is added to the residual r before its norm; `dense` is the other branch."""
        ops, ffn = self.training, self.experts.ffn
        s = ops.normed(r, self.name + "ffn_gate_inp.scale")
        router = ops.product(s, self.name + "ffn_gate_inp.weight")
        self._scale_scores(router.y)
        routing = self.route(router.y)
        order = self.sort(routing.ids)
        m = ops.normed(r, self.name + "pre_ffw_norm_2.weight")
        both = self.gate_and_up(order, routing, m)
        gate, up = Columns(both, 2 * ffn, 0), Columns(both, 2 * ffn, ffn)
        hidden = ops.geglu(gate, up, ffn, token_rows=self.experts.used)
        parts = self.outputs(order, routing, hidden)
        expert_sum = self.sum(routing, parts)
        first = ops.normed(dense, self.name + "post_ffw_norm_1.weight")
        output = ops.add_norm(first, expert_sum, self.name + "post_ffw_norm_2.weight")
        return ExpertPass(router, routing, order, both, parts, expert_sum, output)

    def backward(self, r: Tensor, saved: ExpertPass, df: Tensor, dx: Tensor) -> None:
        """Record the gradient that flows through the experts, added to dx, that of r."""
        ops, used, ffn, count = (
            self.training,
            self.experts.used,
            self.experts.ffn,
            self.experts.count,
        )
        products = ops.products.products
        dy = ops.norm_backward(saved.expert_sum, self.name + "post_ffw_norm_2.weight", df)
        dparts, dshares = self._sum_backward(saved, dy)
        dhidden = ops.scratch(ops.rows * used, ffn)
        products.expert_backward(saved.order, self.down, count, dparts, dhidden, 1)
        dboth = ops.geglu_backward(saved.both, 2 * ffn, saved.both, 2 * ffn, ffn, dhidden)
        slots = ops.scratch(used, ops.rows, self.width)
        products.expert_backward(saved.order, self.gate, count, dboth, slots, used)
        if not self.experts.fused:
            products.expert_backward(saved.order, self.up, count, dboth, slots, used, ffn, add=True)
        dm = ops.scratch(ops.rows, self.width)
        products.sum_splits(slots, dm, add=False)
        ops.norm_backward(r, self.name + "pre_ffw_norm_2.weight", dm, dx)
        ds = ops.product_backward(saved.router, self._route_backward(saved, dshares))
        ops.norm_backward(r, self.name + "ffn_gate_inp.scale", ds, dx)

    def _scale_scores(self, scores: Tensor) -> None:
        """Record dividing by √d: the router reads rms(r) / √d."""
        self.training.scale_by(scores, self.model.one, 1 / math.sqrt(self.width))

    def _sum_backward(self, saved: ExpertPass, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Record the gradients of each slot's output and of its share."""
        ops, used = self.training, self.experts.used
        dparts, dshares = ops.scratch(ops.rows * used, self.width), ops.scratch(ops.rows, used)
        ops.recorder.call(
            "expert_sum_backward",
            (used, ops.rows),
            shares=saved.routing.shares,
            parts=saved.parts,
            dy=dy,
            dparts=dparts,
            dshares=dshares,
            width=self.width,
            used=used,
            THREADS=ops.row_threads(ROW_THREADS),
        )
        return dparts, dshares

    def _route_backward(self, saved: ExpertPass, dshares: Tensor) -> Tensor:
        """Record the gradient of the router's scores."""
        ops, routing = self.training, saved.routing
        dscores = ops.scratch(*routing.scores.shape)
        ops.recorder.call(
            "route_backward",
            (-(-ops.rows // THREADS),),
            scores=routing.scores,
            scale=routing.scale,
            ids=routing.ids,
            dshares=dshares,
            dscores=dscores,
            experts=routing.experts,
            used=routing.used,
            scale_step=routing.scale_step,
            tokens=ops.rows,
        )
        self._scale_scores(dscores)
        return dscores
