"""Products of experts: slot by slot for a few tokens, or of a batch sorted by expert."""

from collections.abc import Iterator
from dataclasses import dataclass

from webgemma.gemma.matrices import Part, Weight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.matmul import Matmul, can_be_halves
from webgemma.gemma.record.matrix_tiling import MatrixTiling
from webgemma.gemma.record.quantised import (
    GROUP,
    QuantisedTensor,
    multiplies_integers,
    providers,
)
from webgemma.gemma.record.tiling import MatmulTiling
from webgemma.graph import Argument, Tensor

# Lanes of a pair of rows; 32 pairs of a workgroup make a group of integers.
EXPERT_UP_LANES, EXPERT_UP_SHUFFLED_LANES = 8, 16
EXPERT_DOWN = {"LANES": 32, "EACH": 1, "THREADS": 64}
SORTED_SLOTS = (8, 16, 32)  # slots that a tile of a sorted batch may have
MATRIX_SLOTS = (16, 32, 64)  # with matrix units
MAX_EXPERTS = {"MAX_EXPERTS": 256, "MAX_USED": 16}
NO_ROW = 1 << 31  # a row that no part of a weight holds


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """A batch sorted by expert: see expert_sort.wgsl. A slot is one of the experts of a token."""

    slots: Tensor
    tiles: Tensor  # [max tiles, 4]
    tile_slots: int
    on_units: bool = False  # matrix units multiply it


@dataclass(frozen=True, slots=True)
class Routing:
    """How a batch is routed to experts: the router's scores, and where ids and shares go."""

    scores: Tensor  # [rows, experts]
    scale: Tensor  # of each expert, or one for all
    ids: Tensor  # [rows, used], u32
    shares: Tensor  # [rows, used]
    experts: int
    scale_step: int  # 0: one scale for all

    @property
    def used(self) -> int:
        """Experts of a token."""
        return self.ids.shape[1]


class ExpertMatmul:
    """Records the products of experts, beside the dense ones of a `Matmul`."""

    def __init__(self, matmul: Matmul) -> None:
        self.matmul = matmul
        self.recorder = matmul.recorder
        self.batch = matmul.batch
        self.limits = matmul.limits
        self.units = matmul.units

    def expert_up(self, gate: Weight, up: Weight, x: Tensor, out: Tensor, routing: Routing) -> None:
        """Record gelu(W_gate x) * W_up x of every slot's expert, and the routing itself.

        `gate` and `up` are the same weight where the file has both in one tensor."""
        rows, ffn = x.shape[0], out.shape[1] // routing.used
        lanes = EXPERT_UP_LANES
        if "shuffle16" in self.matmul.features and self.limits.workgroup_threads >= GROUP * 16:
            lanes = EXPERT_UP_SHUFFLED_LANES
        fused = gate is up
        halves = [(gate, 0, ffn)] if fused else [(gate, 0, NO_ROW), (up, NO_ROW, 0)]
        forms = providers("input", x) | providers("store_row", out)
        for weight, gate_row, up_row in halves:
            for part, arguments in expert_parts(weight, routing.experts):
                self.recorder.call(
                    "expert_up",
                    (-(-ffn // GROUP) + 1, routing.used, rows),
                    **arguments,
                    **forms,
                    batch=self.batch,
                    x=x,
                    h=out,
                    first_row=part.first_row,
                    scores=routing.scores,
                    scale=routing.scale,
                    ids=routing.ids,
                    shares=routing.shares,
                    gate=gate_row,
                    up=up_row,
                    ffn=ffn,
                    experts=routing.experts,
                    used=routing.used,
                    scale_step=routing.scale_step,
                    LANES=lanes,
                    EACH=2 if fused else 1,
                    THREADS=GROUP * lanes,  # a workgroup computes a group of integers
                    **MAX_EXPERTS,
                )

    def expert_down(self, weight: Weight, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Record the sum over slots of share * W_down x: [rows, width]."""
        at_once = EXPERT_DOWN["THREADS"] // EXPERT_DOWN["LANES"] * EXPERT_DOWN["EACH"]
        grid = (-(-out.shape[1] // at_once), 1, out.shape[0])
        for part, arguments in expert_parts(weight, routing.experts):
            self.recorder.call(
                "expert_down",
                grid,
                **arguments,
                **providers("input", x),
                batch=self.batch,
                x=x,
                first_row=part.first_row,
                ids=routing.ids,
                shares=routing.shares,
                y=out,
                used=routing.used,
                WHOLE=len(weight.parts) == 1,
                **EXPERT_DOWN,
            )

    def matrix_slots(self, *weights: Weight) -> tuple[int, ...]:
        """Return how many slots a tile may have on matrix units; none if they cannot multiply it.

        One order serves all these products."""
        if self.units is None or not all(map(can_be_halves, weights)):
            return ()
        tilings = [MatrixTiling.for_experts(self.units, slots) for slots in MATRIX_SLOTS]
        return tuple(tiling.tokens for tiling in tilings if tiling.fits(self.limits))

    def expert_input(self, order: SortedSlots, x: Tensor, *weights: Weight) -> Tensor:
        """Return x in the form in which these experts multiply a sorted batch fastest."""
        if order.on_units:
            adapted = any(weight.name in self.matmul.lora for weight in weights)
            return x if adapted else self.matmul.rounded(x)  # adapters read float32
        integers = all(multiplies_integers(weight.format) for weight in weights)
        if not integers or self.matmul.precision == "exact":
            return x
        return self.matmul.quantised(x, weights[0])

    def expert_linear(
        self,
        order: SortedSlots,
        weight: Weight,
        experts: int,
        ids: Tensor,
        x: Tensor,
        fan: int,
        out: Columns,
    ) -> None:
        """Record each expert's rows times the x of its slots, into a slot's columns.

        `fan` slots share a row of x. Adapters of the experts are added."""
        tiling: MatmulTiling | MatrixTiling
        h: Tensor
        product: dict[str, Argument]
        if self.units and order.on_units:
            tiling = MatrixTiling.for_experts(self.units, order.tile_slots)
            half = self.matmul.rounded(x, ids.shape[1] // fan)
            h, product = half, half.arguments(weight.format)
        else:
            integers = isinstance(x, QuantisedTensor)
            tiling = MatmulTiling.for_experts(order.tile_slots, integers, self.matmul.software)
            h, product = x, {"x": x}
        grid = (-(-weight.rows // experts // tiling.rows), order.tiles.shape[0])
        for part, arguments in expert_parts(weight, experts):
            self.recorder.call(
                "expert_matmul",
                grid,
                **arguments,
                **providers("tile", h),
                tiles=order.tiles,
                y=out.tensor,
                slots=order.slots,
                first_row=part.first_row,
                stride=out.stride,
                column=out.first,
                fan=fan,
                **tiling.constants | product,
            )
        lora, adapters = self.matmul.lora.get(weight.name), self.matmul.adapters
        if lora and adapters:
            adapters.add_experts(lora, ids, x, fan, out, weight.rows // experts)


def expert_parts(weight: Weight, experts: int) -> Iterator[tuple[Part, dict[str, Argument]]]:
    """Yield the parts of a stack of experts; each dispatch leaves the others' rows alone."""
    for part in weight.parts:
        shared = {"rows": part.rows, "expert_rows": weight.rows // experts}
        yield part, {**weight.arguments(part), **shared}
