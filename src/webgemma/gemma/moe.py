"""Mixture of experts: each token is routed to a few experts, beside the dense branch."""

from webgemma.errors import DeviceError
from webgemma.gemma.config import Experts, Layer
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.expert_matmul import (
    MAX_EXPERTS,
    SORTED_SLOTS,
    ExpertMatmul,
    Routing,
    SortedSlots,
)
from webgemma.gemma.record.matmul import THREADS
from webgemma.gemma.record.operands import Operand
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.quantised import HalfTensor, QuantisedTensor
from webgemma.gemma.weights import Model
from webgemma.graph import Tensor

UNITS_GAIN = 2  # matrix units multiply a sorted batch so much faster


class ExpertLayer:
    """The experts of one layer; a slot is one of the `used` experts of a token."""

    def __init__(self, ops: Ops, model: Model, layer: Layer) -> None:
        self.ops = ops
        self.products = ExpertMatmul(ops.matmul)
        self.model = model
        self.index = layer.index
        self.name = f"blk.{layer.index}."
        self.router = self.name + "ffn_gate_inp.weight"
        self.experts = _checked(model.config.experts)
        self.width = model.config.width
        matrices = model.matrices
        self.down = matrices[self.name + "ffn_down_exps.weight"]
        if self.experts.fused:
            self.gate = self.up = matrices[self.name + "ffn_gate_up_exps.weight"]
        else:
            self.gate = matrices[self.name + "ffn_gate_exps.weight"]
            self.up = matrices[self.name + "ffn_up_exps.weight"]

    def fork(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor, Tensor, Operand]:
        """Record x + rms(attended) * post; return it and the inputs of the three branches.

        They are the normed rows for the dense branch, for the experts and for the router; the
        router's product may be left to make all of them."""
        ops, name, shape = self.ops, self.name, (self.ops.rows, self.width)
        n = ops.input_for(self.width, name + "ffn_gate_up.weight", name + "ffn_up.weight")
        m, s = ops.scratch(*shape), ops.scratch(*shape)
        if isinstance(n, QuantisedTensor):
            m = ops.input_for(self.width, self.gate.name, self.up.name)
        post, norms = name + "post_attention_norm.weight", self.model.branch_norms[self.index]
        summed, scored = ops.fork(x, attended, post, norms, (n, m, s), self.router)
        return summed, n, m, scored

    def scores(self, s: Operand) -> Tensor:
        """Record the router's scores: [rows, experts]."""
        return self.ops.linear(s, self.model.matrices[self.router])

    def record(self, m: Tensor, scores: Tensor, beside: Tensor | None = None) -> Tensor:
        """Record the weighted sum of each token's experts: [rows, width].

        `beside` is scratch that will be read when the experts' own is."""
        # While an expert has one token on the average, sorting by expert saves no reading.
        adapted = {self.gate.name, self.up.name, self.down.name} & self.ops.matmul.lora.keys()
        slots = self.ops.rows * self.experts.used * (UNITS_GAIN if self.ops.matmul.units else 1)
        if (slots <= self.experts.count or self.ops.matmul.apart) and not adapted:
            return self.slot_by_slot(m, scores, beside)
        return self.sorted_by_expert(m, self.route(scores))

    def routing(self, scores: Tensor) -> Routing:
        """Return where the experts of each token and their shares go."""
        name, shape = self.name + "ffn_down_exps.scale", (self.ops.rows, self.experts.used)
        return Routing(
            scores,
            scale=self.model.vector(name),
            ids=self.ops.scratch(*shape),
            shares=self.ops.scratch(*shape),
            experts=self.experts.count,
            scale_step=int(name in self.model.vectors),
        )

    def route(self, scores: Tensor) -> Routing:
        """Record each token's experts (u32) and their shares: two of [rows, used]."""
        routing = self.routing(scores)
        self.ops.recorder.call(
            "route",
            (self.ops.rows,),
            batch=self.ops.batch,
            scores=scores,
            scale=routing.scale,
            ids=routing.ids,
            shares=routing.shares,
            experts=routing.experts,
            used=routing.used,
            scale_step=routing.scale_step,
            **MAX_EXPERTS,
        )
        return routing

    def slot_by_slot(self, m: Tensor, scores: Tensor, beside: Tensor | None = None) -> Tensor:
        """Record products in which every slot finds its expert and reads its weights."""
        ops, routing = self.ops, self.routing(scores)
        hidden = ops.scratch(ops.rows, self.experts.used * self.experts.ffn)
        if self.experts.fused and len(self.gate.parts) == 1:
            hidden = ops.input_for(hidden.shape[1], self.down.name)
        if beside is not None:  # one barrier then serves both
            ops.recorder.share_buffer(beside, hidden)
        self.products.expert_up(self.gate, self.up, m, hidden, routing)
        y = ops.scratch(ops.rows, self.width)
        self.products.expert_down(self.down, hidden, routing, y)
        return y

    def sorted_by_expert(self, m: Tensor, routing: Routing) -> Tensor:
        """Record products in which the weights of an expert are read for all its slots together."""
        ops, used, ffn = self.ops, self.experts.used, self.experts.ffn
        order = self.sort(routing.ids)
        m = self.products.expert_input(order, m, self.gate, self.up)
        both = self.gate_and_up(order, routing, m)
        hidden = ops.input_for(used * ffn, self.down.name)
        if order.on_units and self.down.name not in ops.matmul.lora:
            hidden = HalfTensor.scratch(ops.rows * used, ffn)
        gate, up = Columns(both, 2 * ffn, 0), Columns(both, 2 * ffn, ffn)
        ops.geglu(gate, up, ffn, hidden, used)
        return self.sum(routing, self.outputs(order, routing, hidden))

    def gate_and_up(self, order: SortedSlots, routing: Routing, m: Tensor) -> Tensor:
        """Record W_gate m and W_up m of each slot's expert: [rows, used * 2 * ffn]."""
        ops, used, ffn = self.ops, self.experts.used, self.experts.ffn
        both = ops.scratch(ops.rows, used * 2 * ffn)
        out = Columns(both, 2 * ffn, 0)
        linear, count = self.products.expert_linear, self.experts.count
        linear(order, self.gate, count, routing.ids, m, used, out)
        if not self.experts.fused:
            linear(order, self.up, count, routing.ids, m, used, out._replace(first=ffn))
        return both

    def outputs(self, order: SortedSlots, routing: Routing, hidden: Tensor) -> Tensor:
        """Record W_down hidden of each slot's expert: [rows, used * width]."""
        ops = self.ops
        parts = ops.scratch(ops.rows, self.experts.used * self.width)
        out, count = Columns(parts, self.width, 0), self.experts.count
        self.products.expert_linear(order, self.down, count, routing.ids, hidden, 1, out)
        return parts

    def sum(self, routing: Routing, parts: Tensor) -> Tensor:
        """Record the sum over slots of share * part: [rows, width]."""
        y = self.ops.scratch(self.ops.rows, self.width)
        self.ops.recorder.call(
            "expert_sum",
            (-(-self.width // THREADS), self.ops.rows),
            batch=self.ops.batch,
            shares=routing.shares,
            parts=parts,
            y=y,
            width=self.width,
            used=self.experts.used,
        )
        return y

    def sort(self, ids: Tensor) -> SortedSlots:
        """Record the slots expert by expert, in tiles about as large as an expert's average.

        On matrix units they are twice as large: decoding an expert's weights for a second tile
        costs more than multiplying by nothing."""
        rows, used = ids.shape
        count = self.experts.count
        on_units = self.products.matrix_slots(self.gate, self.up, self.down)
        sizes = on_units or SORTED_SLOTS
        wanted = rows * used * (2 if on_units else 1)
        tile = next((n for n in sizes if wanted <= n * count), sizes[-1])
        slots = self.ops.scratch(rows, used)
        tiles = self.ops.scratch(min(rows * used, rows * used // tile + count), 4)
        self.ops.recorder.call(
            "expert_sort",
            (1,),
            batch=self.ops.batch,
            ids=ids,
            slots=slots,
            tiles=tiles,
            experts=count,
            used=used,
            tile_count=tiles.shape[0],
            TOKENS=tile,
            MAX_EXPERTS=MAX_EXPERTS["MAX_EXPERTS"],
        )
        return SortedSlots(slots, tiles, tile, bool(on_units))


def _checked(experts: Experts | None) -> Experts:
    assert experts is not None
    max_count, max_used = MAX_EXPERTS["MAX_EXPERTS"], MAX_EXPERTS["MAX_USED"]
    if experts.count > max_count or experts.used > max_used:
        raise DeviceError(
            f"This model uses {experts.used} of {experts.count} experts; the kernels support "
            f"{max_used} of {max_count}. Use another model, or raise MAX_EXPERTS in "
            "gemma/record/expert_matmul.py."
        )
    return experts
