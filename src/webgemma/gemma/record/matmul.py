"""Products x Wᵀ: the one place that knows their tilings, forms of x and epilogues.

Text, encoders, diffusion and training record all their products here. Those of experts are in
expert_matmul.py, of adapters in lora_matmul.py; those that sum over the rows of a matrix, dy W, in
matmul_backward.py."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from webgemma.gemma.lora_weights import AppliedLora, LoraWeight
from webgemma.gemma.matrices import Part, Weight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.lora_matmul import LoraMatmul
from webgemma.gemma.record.matrix_tiling import (
    MAX_SPLITS,
    AttentionTiling,
    MatrixTiling,
    MatrixUnits,
)
from webgemma.gemma.record.operands import MadeRow, Operand
from webgemma.gemma.record.quantised import (
    HalfTensor,
    QuantisedTensor,
    multiplies_integers,
    providers,
)
from webgemma.gemma.record.rounding import round_rows
from webgemma.gemma.record.split_sums import SplitSums, splits_of
from webgemma.gemma.record.tiling import (
    FEW_TOKENS,
    MATVEC_TOKENS,
    MOST_MATVEC_TOKENS,
    MatmulTiling,
    MatvecTiling,
    SoftwareTiling,
)
from webgemma.gguf.formats import FORMATS
from webgemma.graph import MAX_GRID, Argument, Recorder, Tensor, folded
from webgemma.kernels import unit as unit_of

THREADS = 64  # of an op whose threads are independent
# Rows of gate and up from which on those of more than a few tokens are faster multiplied as rows of
# one matrix, whose tiling is better for them, and gated afterwards.
GATED_APART = 1 << 15
LONG_ROW, LONG_ROW_THREADS = 1 << 15, 1024  # rows of a vocabulary are few: many threads read each
DEQUANTISED_TOKENS = 256  # from which on it pays to dequantise a matrix of this size at most
DEQUANTISED_NBYTES = 256 << 20

# Precisions on matrix units, and what becomes of them where those do not multiply. Split, factors
# are sums of two float16: as precise as the products of float32 that training needs.
ON_UNITS = {"f16": "int16", "split": "exact"}
FEWEST_PRODUCTS = 3 << 22  # of weights and tokens, that keep matrix units busy when they decode


class Clamp(NamedTuple):
    """Bounds that values are clamped to."""

    low: float
    high: float


UNBOUNDED = Clamp(-math.inf, math.inf)


class Matmul:
    """Records the products of one pass over at most `rows` rows, counted by `batch`."""

    def __init__(
        self,
        recorder: Recorder,
        batch: Tensor,
        rows: int,
        precision: str = "exact",
        lora: AppliedLora | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """Multiply rows that are tokens of one sequence or, `apart`, of different conversations.

        Of those, each is computed as it would be alone, unless matrix units multiply them."""
        self.recorder = recorder
        self.batch = batch
        self.lora: Mapping[str, LoraWeight] = lora.weights if lora else {}
        place = "rows" if apart else "chunk"
        self.adapters = LoraMatmul(recorder, batch, lora, place) if lora else None
        self.features = recorder.device.features
        self.limits = recorder.device.limits
        self.software = recorder.device.software
        smallest, largest = recorder.device.subgroup_sizes
        self.subgroup = largest if smallest == largest else 0  # its threads, if all have as many
        self.units = MatrixUnits.of(recorder.device) if precision in ON_UNITS else None
        few = MOST_MATVEC_TOKENS if apart else FEW_TOKENS  # for which reading weights takes longest
        if self.units is None or rows <= few:
            self.units, precision = None, ON_UNITS.get(precision, precision)
        self.apart = apart and self.units is None
        self.apart_on_units = apart and self.units is not None
        self.split = precision == "split"  # what matrix units multiply, into two float16
        # Where packed dots are made of other instructions, a batch is slower with them.
        emulated = rows > 1 and "packed-dots" not in self.features and not self.apart
        floats = self.units is not None or emulated
        self.precision = "exact" if floats else precision  # of what they do not multiply
        self._made: set[MadeRow] = set()  # rows that a product has made for itself

    def linear(
        self,
        x: Operand,
        weight: Weight,
        out: Tensor | None = None,
        first: int = 0,
        *,
        up: Columns | None = None,
        clamp: Clamp | None = None,
        lanes: int = 0,
    ) -> Tensor:
        """Record x Wᵀ: [tokens, rows], or into the columns from `first` on of a wider `out`.

        With `up` the result is gelu(x Wᵀ) * up, with `clamp` it is clamped. Adapters of the weight
        are added. `lanes` are those of matvec, where another matrix decides them."""
        tokens = x.shape[0]
        lora = self.lora.get(weight.name)
        assert not (clamp and (lora or up))
        if lora and up:
            return self.geglu(Columns(self.linear(x, weight), weight.rows, 0), up, weight.rows, out)
        # In a batch, adding B low to every value of a tile would unroll into minutes of compiling.
        one_by_one = self.one_by_one(tokens, weight)
        fused = lora if one_by_one and not self.software else None
        low = None
        if isinstance(x, MadeRow):
            assert lora is None  # it would read the row, too
        else:
            low = self.adapters.down(x, lora) if self.adapters and lora else None
            if not one_by_one:
                x = self.quantised(x, weight)
                if not isinstance(x, QuantisedTensor | HalfTensor):
                    weight = self.dequantised(weight, tokens)
        y = out or self.recorder.scratch(tokens, weight.rows)
        for part in weight.parts:
            epilogue: dict[str, Argument] = {"epilogue": "none"}
            if up:
                epilogue = {"epilogue": "geglu", "up": up.tensor}
                epilogue |= {"up_stride": up.stride, "up_first": up.first}
            elif clamp:
                epilogue = {"epilogue": "clamp", "low": clamp.low, "high": clamp.high}
            elif fused and low:
                epilogue = {"epilogue": "lora", "B": fused.b, "low": low}
                epilogue |= {"rank_vec4s": fused.ranks // 4, "matrix_row": part.first_row}
                epilogue |= fused.segments()
            columns = Columns(y, y.shape[1], first + part.first_row)
            self._multiply(x, weight, part, columns, epilogue, lanes)
        if self.adapters and lora and low and not fused:
            self.adapters.up(y, first, lora, low)
        return y

    def _multiply(
        self,
        x: Operand,
        weight: Weight,
        part: Part,
        y: Columns,
        epilogue: Mapping[str, Argument],
        lanes: int = 0,
    ) -> None:
        """Record the product of x and one part of a weight with the fastest kernel for it."""
        tokens, name, integers = x.shape[0], weight.format.name, isinstance(x, QuantisedTensor)
        shared: dict[str, Argument] = {**weight.arguments(part), **epilogue}
        shared |= {"rows": part.rows, **y.arguments}
        if isinstance(x, MadeRow):
            alone = x.most_groups_alone
            team = MatvecTiling.for_made_row(weight, self.features, self.limits, alone)
            team = team.of_made_tokens(tokens)
            self._call_matvec(x.op, -(-part.rows // team.rows), x, team, **shared)
            return
        shared |= {"batch": self.batch, "x": x}
        if isinstance(x, HalfTensor):
            self._multiply_halves(x, weight, part, y, shared | x.arguments(weight.format))
            return
        software = SoftwareTiling.for_tokens(tokens, self.features, self.software)
        if software is not None and not integers:
            columns, layers = folded(-(-part.rows // (software.threads * software.rows_each)))
            grid = (columns, -(-tokens // software.tokens), layers)
            shared |= {"tokens": tokens, **software.constants}
            self.recorder.call("matmul_software", grid, **shared)
            return
        if not self.one_by_one(tokens, weight):
            tiling: MatmulTiling | None = None
            if not integers and unit_of(name) == 4:
                tiling = MatmulTiling.for_vec4(weight.rows, tokens, self.limits.workgroup_nbytes)
                shared |= {"tile": "vec4"} if tiling else {}
            tiling = tiling or MatmulTiling.for_product(weight.rows, tokens, integers)
            self._multiply_tiles(x, weight, part, tiling, shared)
            return
        team = MatvecTiling.for_weight(weight, self.features, self.software)
        if lanes:
            team = replace(team, lanes=lanes)
        if tokens == 1:
            team = team.of_one_token(self.subgroup)
        elif self.apart or self.apart_on_units:
            team = team.of_tokens(tokens, weight.rows, self.features, floats=not integers)
        self._call_matvec("matvec", -(-part.rows // team.rows), x, team, **shared)

    def _multiply_halves(
        self,
        x: HalfTensor,
        weight: Weight,
        part: Part,
        y: Columns,
        arguments: Mapping[str, Argument],
    ) -> None:
        """Record a product of `_multiply` on matrix units; k may be split among workgroups."""
        aligned = (part.rows | y.stride | y.first) % 4 == 0
        splits = aligned and arguments["epilogue"] == "none"
        tiling = self.matrix_tiling(weight, x.shape[0], splits=splits)
        assert tiling is not None  # else x would not be rounded
        if tiling.splits == 1:
            self._multiply_tiles(x, weight, part, tiling, arguments)
            return
        sums = self.recorder.scratch(tiling.splits, x.shape[0] * part.rows)
        into = Columns(sums, part.rows, 0)
        self._multiply_tiles(x, weight, part, tiling, {**arguments, **into.arguments})
        self.add_splits(sums, part.rows, y)

    def _multiply_tiles(
        self,
        x: Tensor,
        weight: Weight,
        part: Part,
        tiling: MatmulTiling | MatrixTiling,
        arguments: Mapping[str, Argument],
    ) -> None:
        """Record a product of `_multiply` in tiles."""
        tokens = x.shape[0]
        splits = tiling.splits if isinstance(tiling, MatrixTiling) else 1
        grid = (-(-part.rows // tiling.rows), -(-tokens // tiling.tokens), splits)
        shared = {**providers("tile", x), "tokens": tokens, **tiling.constants, **arguments}
        shared["split_slices"] = tiling.split_slices(weight.width)
        self.recorder.call("matmul", grid, **shared)

    def add_splits(self, parts: Tensor, width: int, out: Columns, *, add: bool = False) -> None:
        """Record the sum over the splits of parts [splits, rows * width] into columns of rows."""
        splits = parts.shape[0]
        vec4s = parts.nbytes // 16 // splits
        self.recorder.call(
            "sum_splits",
            flat(vec4s),
            parts=parts,
            y=out.tensor,
            vec4s=vec4s,
            splits=splits,
            row_vec4s=width // 4,
            stride=out.stride // 4,
            first=out.first // 4,
            add=int(add),
        )

    def in_splits(self, x: Operand, *weights: Weight) -> Tensor:
        """Record x Wᵀ of matrices on top of each other: [tokens, all rows].

        Where k is split among workgroups, their sums are left for the reader: see `SplitSums`."""
        tokens, rows = x.shape[0], sum(weight.rows for weight in weights)
        tiling = None
        whole = all(len(w.parts) == 1 and w.name not in self.lora for w in weights)
        if whole and rows % 4 == 0 and all(self.on_units(weight, tokens) for weight in weights):
            tiling = self._tiling((rows, weights[0].width), tokens, splits=True)
        if tiling is None or tiling.splits == 1 or not isinstance(x, Tensor):
            return self._stacked(x, weights)
        h, out = self.rounded(x), SplitSums.scratch(tiling.splits, tokens, rows)
        first = 0
        for weight in weights:
            arguments: dict[str, Argument] = {"epilogue": "none", "batch": self.batch}
            arguments |= {**weight.arguments(weight.parts[0]), **h.arguments(weight.format)}
            arguments |= {"rows": weight.rows, **Columns(out, rows, first).arguments}
            self._multiply_tiles(h, weight, weight.parts[0], tiling, arguments)
            first += weight.rows
        return out

    def one_by_one(self, tokens: int, weight: Weight) -> bool:
        """Return whether so many tokens are multiplied as single ones are, by matvec.

        Beside matrix units, so are matrices that are too small for those to be busy with."""
        if self.apart_on_units:
            return not self.on_units(weight, tokens)
        return tokens <= FEW_TOKENS or self.apart

    def _call_matvec(
        self, op: str, groups: int, x: Operand, team: MatvecTiling, /, **arguments: Argument
    ) -> None:
        """Record matvec or its like in so many workgroups; fewer, if each has to make x."""
        arguments |= {**team.constants, "row_products": team.products}
        if isinstance(x, Tensor):
            grid = (*folded(groups), x.shape[0] // team.tokens)
            arguments |= {"live": "counted", "batch": self.batch}
            self.recorder.call(op, grid, **arguments | self._operand(x))
            return
        groups = -(-groups // -(-groups // x.most_groups))
        self.recorder.call(op, folded(groups), **arguments | {"live": "always"} | self._operand(x))

    def _operand(self, x: Operand) -> dict[str, Argument]:
        """Return the arguments with which a kernel reads or makes x."""
        if isinstance(x, Tensor):
            return {**providers("input", x), "operand": "buffer", "x": x}
        made = x.again() if x in self._made else x
        self._made.add(x)
        return made.arguments

    def _stacked(self, x: Operand, weights: Sequence[Weight]) -> Tensor:
        """Record x Wᵀ of matrices on top of each other, of two formats in one dispatch if possible.

        Those of one format are one matrix already: see `weights.stacks`."""
        if len(weights) == 1:
            return self.linear(x, weights[0])
        out = self.recorder.scratch(x.shape[0], sum(weight.rows for weight in weights))
        whole = all(len(w.parts) == 1 for w in weights)
        few = out.shape[1] <= MAX_GRID  # workgroups, at the very most
        joined = len(weights) == 2 and whole and few and not self.software
        adapted = any(w.name in self.lora for w in weights)
        if joined and not adapted and (x.shape[0] == 1 or isinstance(x, MadeRow)):
            self._multiply_two(x, weights[0], weights[1], out)
            return out
        lanes = 0
        if joined and (self.apart or x.shape[0] == 1):
            lanes = MatvecTiling.for_weight(weights[0], self.features, software=False).lanes
        first = 0
        for weight in weights:
            self.linear(x, weight, out, first, lanes=lanes)
            first += weight.rows
        return out

    def _multiply_two(self, x: Operand, first: Weight, second: Weight, out: Tensor) -> None:
        """Record the products of one token, or a few that are made, and two matrices."""
        most_groups = x.most_groups if isinstance(x, MadeRow) else MAX_GRID
        alone = x.most_groups_alone if isinstance(x, MadeRow) else MAX_GRID
        team = MatvecTiling.for_made_row(first, self.features, self.limits, alone)
        team = team.of_made_tokens(x.shape[0])
        counts = [-(-weight.rows // team.rows) for weight in (first, second)]
        rounds = -(-sum(counts) // most_groups)
        counts = [-(-count // rounds) for count in counts]
        named = {**second.arguments(second.parts[0]), "rows": second.rows}
        self.recorder.call(
            "matvec_two",
            (sum(counts),),
            **first.arguments(first.parts[0]),
            **{f"{name}_second": value for name, value in named.items()},
            **self._operand(x),
            y=out,
            rows=first.rows,
            groups=counts[0],
            first_row=0,
            stride=out.shape[1],
            row_products=team.products,
            **team.constants,
        )

    def gate_up(self, x: Operand, weight: Weight, out: Tensor) -> None:
        """Record gelu(W_gate x) * W_up x for a few tokens, from both matrices in one part."""
        alone = x.most_groups_alone if isinstance(x, MadeRow) else MAX_GRID
        team = MatvecTiling.for_gate_up(weight, self.features, self.limits, alone)
        if isinstance(x, MadeRow):
            team = team.of_made_tokens(x.shape[0])
        elif self.apart or self.apart_on_units:
            team = team.of_gated_tokens(x.shape[0], weight.rows)
        ffn = weight.rows // 2
        # Of a few tokens, x waits in registers for the rows; of more, it would need too many.
        order: dict[str, Argument] = {}
        if isinstance(x, QuantisedTensor):
            order = {"TOKENS_FIRST": team.tokens <= MATVEC_TOKENS}
        self._call_matvec(
            "gate_up",
            -(-ffn // team.rows),
            x,
            replace(team, each=2),  # of a pair
            **weight.arguments(weight.parts[0]),
            **providers("store_row", out),
            h=out,
            ffn=ffn,
            **order,
        )

    def made_row_threads(self, weight: Weight, most_groups: int) -> int:
        """Return the threads of a workgroup that makes the row which this weight multiplies."""
        gates = weight.name.endswith("ffn_gate_up.weight") and self.gate_up_lanes(weight, 1) > 0
        choose = MatvecTiling.for_gate_up if gates else MatvecTiling.for_made_row
        return choose(weight, self.features, self.limits, most_groups).threads

    def can_fuse_gate_up(self, weight: Weight, rows: int) -> bool:
        """Return whether `gate_up` can compute this product for so many rows."""
        apart = rows > FEW_TOKENS and weight.rows >= GATED_APART
        return not apart and weight.name not in self.lora and self.gate_up_lanes(weight, rows) > 0

    def gate_up_lanes(self, weight: Weight, rows: int) -> int:
        """Return the lanes of `gate_up`, if that computes this product where it is not adapted.

        Adapted, it is added up in the same order then; 0: in any."""
        if len(weight.parts) > 1 or self.software or not self.one_by_one(rows, weight):
            return 0
        return MatvecTiling.for_gate_up(weight, self.features, self.limits, MAX_GRID).lanes

    def geglu(
        self,
        gate: Columns,
        up: Columns,
        width: int,
        out: Tensor | None = None,
        token_rows: int = 1,
    ) -> Tensor:
        """Record gelu(gate) * up, `width` columns of each; a token has so many rows."""
        assert gate.first == 0
        tokens = gate.tensor.shape[0]
        columns: dict[str, Argument] = {"gate": gate.tensor, "gate_stride": gate.stride}
        columns |= {"up": up.tensor, "up_stride": up.stride, "up_first": up.first}
        splits = {"GATE_SPLITS": splits_of(gate.tensor), "UP_SPLITS": splits_of(up.tensor)}
        if isinstance(out, HalfTensor):
            source = {"row_source": "geglu", **columns, **splits, **UNBOUNDED._asdict()}
            return round_rows(self.recorder, self.batch, out, source, token_rows)
        assert set(splits.values()) == {1}
        h = out or self.recorder.scratch(tokens, token_rows * width)
        self.recorder.call(
            "geglu",
            (-(-width // (4 * THREADS)), tokens, token_rows),
            **providers("store", h),
            **columns,
            batch=self.batch,
            h=h,
            width=width,
        )
        return h

    def input_for(self, rows: int, width: int, *readers: Weight | None) -> Tensor:
        """Return a scratch tensor for what these weights read: integers if all multiply those."""
        floats = any(w is not None and not multiplies_integers(w.format) for w in readers)
        if self.precision == "exact" or floats:
            return self.recorder.scratch(rows, width)
        return QuantisedTensor.scratch(rows, width, self.precision)

    def quantised(self, x: Tensor, weight: Weight) -> Tensor:
        """Return x in the form in which this weight is multiplied fastest."""
        tokens, width = x.shape
        if self.on_units(weight, tokens):
            return self.rounded(x)
        floats = self.precision == "exact" or not multiplies_integers(weight.format)
        if floats or isinstance(x, QuantisedTensor):
            return x
        h = QuantisedTensor.scratch(tokens, width, self.precision)
        grid = (-(-width // (4 * THREADS)), tokens)
        self.recorder.call(
            "quantise",
            grid,
            integer_width=self.precision,
            batch=self.batch,
            x=x,
            h=h,
            width=width,
        )
        return h

    def reads_halves(self, weight: Weight, tokens: int) -> bool:
        """Return whether all that reads x, where a weight multiplies it, reads it in float16."""
        return self.on_units(weight, tokens) and weight.name not in self.lora

    def on_units(self, weight: Weight, tokens: int) -> bool:
        """Return whether matrix units multiply a weight with so many tokens."""
        if self.apart_on_units and weight.rows * weight.width * tokens < FEWEST_PRODUCTS:
            return False
        return can_be_halves(weight) and self.matrix_tiling(weight, tokens) is not None

    def matrix_tiling(
        self, weight: Weight, tokens: int, *, splits: bool = False
    ) -> MatrixTiling | None:
        """Return how matrix units divide a product; None where they do not compute it."""
        return self._tiling((weight.rows, weight.width), tokens, splits=splits)

    def _tiling(self, shape: tuple[int, int], tokens: int, *, splits: bool) -> MatrixTiling | None:
        if self.units is None:
            return None
        most_splits = MAX_SPLITS if splits else 1
        return MatrixTiling.for_product(self.units, shape, tokens, self.limits, most_splits)

    def attention_tiling(self, size: int) -> AttentionTiling | None:
        """Return how matrix units divide attention; None where they do not compute it."""
        if self.units is None:
            return None
        return AttentionTiling.for_heads(self.units, size, self.limits)

    def rounded(
        self,
        x: Tensor,
        token_rows: int = 1,
        out: HalfTensor | None = None,
        *,
        width: int = 0,
        split: bool | None = None,
    ) -> HalfTensor:
        """Record x in float16, for matrix units; a token has so many rows of the result.

        With a width, it is only the first columns. Unless `out` or `split` says otherwise, it is
        split where this pass splits."""
        if isinstance(x, HalfTensor):
            return x
        rows, stride = x.shape[0] * token_rows, x.shape[1] // token_rows
        split = self.split if split is None else split
        h = out or HalfTensor.scratch(rows, width or stride, split=split)
        source: dict[str, Argument] = {"row_source": "plain", "x": x, "stride": stride}
        return round_rows(self.recorder, self.batch, h, source, token_rows)

    def row_threads(self, width: int, usual: int) -> int:
        """Return the threads of a workgroup that reads a row of this width."""
        long = width >= LONG_ROW and self.limits.workgroup_threads >= LONG_ROW_THREADS
        return LONG_ROW_THREADS if long and not self.software else usual

    def dequantised(self, weight: Weight, tokens: int) -> Weight:
        """Return the matrix in float32, if so many tokens are multiplied faster with that."""
        largest = max(part.rows for part in weight.parts) * 4 * weight.width
        few = tokens < DEQUANTISED_TOKENS
        few |= largest > min(DEQUANTISED_NBYTES, self.limits.binding_nbytes)
        if few or self.software or unit_of(weight.format.name) == 4:
            return weight
        parts = []
        for part in weight.parts:
            out = self.recorder.scratch(part.rows, weight.width)
            arguments = {**weight.arguments(part), "rows": part.rows, "out": out}
            self.recorder.call("dequantise", flat(part.rows * weight.units), **arguments)
            parts.append(replace(part, data=out, planes=()))
        return replace(weight, format=FORMATS["F32"], parts=tuple(parts))


def can_be_halves(weight: Weight) -> bool:
    """Return whether matrix units may multiply a weight, eight values at a time.

    What a file keeps in float32, as it does routers, must not be rounded."""
    return weight.format.name != "F32" and weight.width % 8 == 0


def flat(count: int) -> tuple[int, int]:
    """Return the grid of so many independent threads."""
    return folded(-(-count // THREADS))
