"""Products with the pairs A and B of adapters, which are added to those of their matrices."""

from webgemma.gemma.lora_weights import RANKS_AT_ONCE, AppliedLora, LoraWeight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.quantised import providers
from webgemma.graph import Argument, Recorder, Tensor, folded

# Tokens of a batch that a workgroup computes, down and up; threads that share a row.
DOWN_TOKENS, UP_TOKENS = 8, 4
LORA_LANES, LORA_SOFTWARE_LANES = 32, 8
LORA_THREADS = 64


class LoraMatmul:
    """Records the products of adapters for the rows that `batch` counts.

    `place` says of which slots these are, whose conversations have scales of their own."""

    def __init__(self, recorder: Recorder, batch: Tensor, lora: AppliedLora, place: str) -> None:
        self.recorder = recorder
        self.batch = batch
        self.lora = lora
        self.place = place
        self.lanes = LORA_SOFTWARE_LANES if recorder.device.software else LORA_LANES

    def scales_of(self, lora: LoraWeight) -> dict[str, Argument]:
        """Return the arguments with which a kernel finds the scales of ranks in a row."""
        scales = self.lora.scales
        table: dict[str, Argument] = {"lora_scales": scales, "lora_columns": scales.shape[1]}
        return table | {"place": self.place, "columns": lora.columns}

    def down(self, x: Tensor, lora: LoraWeight) -> Tensor:
        """Record scales · A x: [tokens, segments * ranks]."""
        tokens, width = x.shape
        ranks = lora.a.shape[0]
        at_once = 1 if tokens == 1 else DOWN_TOKENS
        low = self.recorder.scratch(tokens, ranks)
        self.recorder.call(
            "lora_down",
            (ranks // RANKS_AT_ONCE, -(-tokens // at_once)),
            **providers("input_vec4", x),
            A=lora.a,
            batch=self.batch,
            x=x,
            **self.scales_of(lora),
            low=low,
            vec4s=width // 4,
            ranks=ranks,
            THREADS=self.lanes,
            LANES=self.lanes,
            EACH=RANKS_AT_ONCE,
            TOKENS=at_once,
        )
        return low

    def up(self, y: Tensor, first: int, lora: LoraWeight, low: Tensor) -> None:
        """Record y += B low, in the columns from `first` on."""
        rows, tokens = lora.b.shape[0], y.shape[0]
        columns, layers = folded(-(-rows // LORA_THREADS))
        self.recorder.call(
            "lora_up",
            (columns, -(-tokens // UP_TOKENS), layers),
            batch=self.batch,
            B=lora.b,
            low=low,
            y=y,
            **lora.segments(),
            rows=rows,
            stride=y.shape[1],
            first=first,
            rank_vec4s=lora.ranks // 4,
            THREADS=LORA_THREADS,
            TOKENS=UP_TOKENS,
        )

    def add_experts(
        self, lora: LoraWeight, ids: Tensor, x: Tensor, fan: int, columns: Columns, rows: int
    ) -> None:
        """Record y += scale · B A x with each slot's expert, which has so many `rows`.

        `fan` slots share a row of x; `columns` are those of a slot."""
        used, width = ids.shape[1], lora.a.shape[1]
        slots = ids.shape[0] * used
        low = self.recorder.scratch(slots, lora.ranks)
        self.recorder.call(
            "expert_lora_down",
            (lora.ranks // RANKS_AT_ONCE, slots),
            **providers("input_vec4", x),
            A=lora.a,
            batch=self.batch,
            x=x,
            **self.scales_of(lora),
            ids=ids,
            low=low,
            vec4s=width // 4,
            ranks=lora.ranks,
            used=used,
            fan=fan,
            THREADS=self.lanes,
            LANES=self.lanes,
            EACH=RANKS_AT_ONCE,
        )
        self.recorder.call(
            "expert_lora_up",
            (-(-rows // LORA_THREADS), slots),
            batch=self.batch,
            B=lora.b,
            ids=ids,
            low=low,
            y=columns.tensor,
            rows=rows,
            stride=columns.stride,
            first=columns.first,
            rank_vec4s=lora.ranks // 4,
            used=used,
            THREADS=LORA_THREADS,
        )
