"""Products that sum over the rows of a matrix: dy W of the backward pass, p E of diffusion.

They share the outer-product tiles; `Matmul` has the products x Wᵀ."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from webgemma.gemma.matrices import Part, Weight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.expert_matmul import SortedSlots, expert_parts
from webgemma.gemma.record.matmul import THREADS, Matmul, can_be_halves
from webgemma.gemma.record.matrix_tiling import MatrixTiling
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gemma.record.rounding import round_rows
from webgemma.gemma.record.tiling import BUSY_GROUPS, NARROW, OuterTiling
from webgemma.graph import Argument, Tensor

# How much of k is worth a split.
SPLIT_K, NARROW_SPLIT_K = 256, 64
# In software: threads that need no barrier, tokens that a decoded weight serves, and how much is
# added up before an invocation ends (see loop_limits.py).
SOFTWARE_THREADS, SOFTWARE_TOKENS, SOFTWARE_ROWS, SOFTWARE_K = 8, 4, 512, 4096
# Ids of the vocabulary that one workgroup of expected_embedding adds up.
SPLIT_IDS, SOFTWARE_SPLIT_IDS = 8192, 2048
ROUNDING = 2**-24  # of a float32

Tiling = MatrixTiling | OuterTiling


class Matrix(NamedTuple):
    """Rows of a float tensor, as product.wgsl addresses them."""

    tensor: Tensor
    outer: int  # from row to row, or from token to token
    first: int = 0
    inner: int = 1  # rows of a token
    step: int = 0  # from one of them to the next
    z_outer: int = 0
    z_step: int = 0

    def arguments(self, name: str) -> dict[str, Argument]:
        """Return the arguments of the matrix a, b or c."""
        numbers = {f"{name}_{field}": getattr(self, field) for field in self._fields[1:]}
        return {name: self.tensor, **numbers}


class Stack(NamedTuple):
    """How many matrices a product has: `outer` times `inner` of them."""

    outer: int
    inner: int


ONE_MATRIX = Stack(1, 1)
NOWHERE, KEYS_ALONG_K, KEYS_ALONG_N, QUERIES_ALONG_K = range(4)  # as in product.wgsl


class Mask(NamedTuple):
    """Where a product of attention is 0: where queries do not attend to keys."""

    kind: int  # where the keys or queries are; the rows m are the others
    group: int = 1  # queries of a token
    first_token: int = 0  # the first query's
    window: int = 0


NO_MASK = Mask(NOWHERE)


class MatmulBackward:
    """Records products over the rows of matrices, beside the products of a `Matmul`."""

    def __init__(self, matmul: Matmul) -> None:
        self.matmul = matmul
        self.recorder = matmul.recorder
        self.limits = matmul.limits
        self.software = matmul.software

    def backward(
        self,
        dy: Tensor,
        weights: Sequence[Weight],
        dx: Tensor,
        *,
        add: bool = False,
        split: bool | None = None,
    ) -> None:
        """Record dx (+)= dy W for stacked matrices; dy may have spare columns at its end.

        Matrix units read dy rounded: `split` is for `Matmul.rounded`, and for dy alone."""
        tokens, width = dx.shape
        tiling: Tiling | None = self._matrix_tiling(dy, weights, tokens)
        if tiling is not None:
            parts = self._stacked_parts(weights)
            columns = sum(weight.rows for weight in weights)
            dy = self.matmul.rounded(dy, width=columns, split=split)
        else:
            tiling = OuterTiling.large()
            dequantised = [self.matmul.dequantised(weight, tokens) for weight in weights]
            parts = self._stacked_parts(dequantised)
        groups = math.prod(tiling.grid(width, tokens)) * len(parts)
        splits = [tiling.row_splits(groups, part.rows) for _, part, _ in parts]
        total = sum(splits)
        fits = 4 * total * tokens * width <= self.limits.binding_nbytes
        one_by_one = self.software and isinstance(tiling, OuterTiling)
        if one_by_one or total == 1 or not fits:
            for weight, part, first in parts:
                at_once = SOFTWARE_ROWS if one_by_one else part.rows
                for begin in range(0, part.rows, at_once):
                    rows = _RowRange(begin, min(begin + at_once, part.rows), at_once)
                    self._backward_part(dy, weight, part, first, tiling, rows, dx, add=add)
                    add = True  # to what those before have left
            return
        out = self.recorder.scratch(total, tokens, width)
        for i, ((weight, part, first), count) in enumerate(zip(parts, splits, strict=True)):
            split_rows = -(-part.rows // (count * tiling.slice)) * tiling.slice
            rows = _RowRange(0, part.rows, split_rows, sum(splits[:i]), count)
            self._backward_part(dy, weight, part, first, tiling, rows, out)
        self.sum_splits(out, dx, add=add)

    def _matrix_tiling(
        self, dy: Tensor, weights: Sequence[Weight], tokens: int
    ) -> MatrixTiling | None:
        """Return how matrix units divide dy W; None where they do not compute it."""
        units = self.matmul.units
        if units is None or not all(map(can_be_halves, weights)) or dy.shape[1] % 4:
            return None
        firsts = [first for _, _, first in self._stacked_parts(weights)]
        if any(column % 8 for column in (*firsts, sum(weight.rows for weight in weights))):
            return None  # eight values of dy are read at once
        return MatrixTiling.for_backward(units, weights, tokens, self.limits)

    @staticmethod
    def _stacked_parts(weights: Sequence[Weight]) -> list[tuple[Weight, Part, int]]:
        """Return all parts, each with the column of dy for its first row."""
        firsts = [sum(weight.rows for weight in weights[:i]) for i in range(len(weights))]
        return [
            (weight, part, first + part.first_row)
            for weight, first in zip(weights, firsts, strict=True)
            for part in weight.parts
        ]

    def _backward_part(
        self,
        dy: Tensor,
        weight: Weight,
        part: Part,
        first: int,
        tiling: Tiling,
        rows: "_RowRange",
        out: Tensor,
        *,
        add: bool = False,
    ) -> None:
        """Record one dispatch; `first` is the column of dy for the part's first row."""
        tokens, width = out.shape[-2:]
        grid = tiling.grid(width, tokens)
        shared: dict[str, Argument] = {
            **weight.arguments(part),
            "dx": out,
            "tokens": tokens,
            "first_split": rows.first_split,
            "add": int(add),
            **tiling.constants,
        }
        if isinstance(tiling, MatrixTiling):
            assert isinstance(dy, HalfTensor)
            op = "matmul_backward_matrix_units"
            factors = dy.arguments(weight.format, first, split=self.matmul.split)
            shared |= {"rows": part.rows, **factors}
            shared["split_slices"] = -(-rows.split_rows // tiling.slice)
        else:
            op = "matmul_backward"
            shared |= {"dy": dy, "stride": dy.shape[1], "first_row": first}
            shared |= {"begin": rows.begin, "end": rows.end, "split_rows": rows.split_rows}
            if self.software:
                op = "matmul_backward_software"
                grid = (-(-weight.units // SOFTWARE_THREADS), -(-tokens // SOFTWARE_TOKENS))
                shared = {name: shared[name] for name in shared.keys() - tiling.constants.keys()}
                shared |= {"THREADS": SOFTWARE_THREADS, "TOKENS": SOFTWARE_TOKENS}
        self.recorder.call(op, (*grid, rows.splits), **shared)

    def expert_backward(
        self,
        order: SortedSlots,
        weight: Weight,
        experts: int,
        dy: Tensor,
        dx: Tensor,
        fan: int,
        column: int = 0,
        *,
        add: bool = False,
    ) -> None:
        """Record dx (+)= dy W of each slot's expert; with `fan`, rows of one slot are together."""
        tiling = OuterTiling.for_experts(order.tile_slots, self.software)
        tokens = order.slots.shape[0]
        for part, arguments in expert_parts(weight, experts):
            self.recorder.call(
                "expert_matmul_backward",
                (-(-weight.width // tiling.n), order.tiles.shape[0]),
                **arguments,
                tiles=order.tiles,
                slots=order.slots,
                dy=dy,
                dx=dx,
                first_row=part.first_row,
                stride=dy.shape[1],
                column=column,
                fan=fan,
                tokens=tokens,
                add=int(add),
                **tiling.constants,
            )

    def product(
        self,
        a: Matrix,
        b: Matrix,
        c: Matrix,
        shape: tuple[int, int, int],
        *,
        a_transposed: bool = False,
        b_transposed: bool = False,
        scale: float = 1.0,
        add: bool = False,
        stack: Stack = ONE_MATRIX,
        mask: Mask = NO_MASK,
    ) -> None:
        """Record c (+)= scale · a b of float matrices, for `shape` = (m, n, k)."""
        m, n, k = shape
        tiling = OuterTiling.for_product(m, n, self.software)
        forms: dict[str, Argument] = {
            "A_TRANSPOSED": a_transposed,
            "B_TRANSPOSED": b_transposed,
            "A_HEADS": a.inner > 1,
            "B_HEADS": b.inner > 1,
            "C_HEADS": c.inner > 1,
            "MASK": mask.kind,
            **tiling.constants,
        }
        shared: dict[str, Argument] = {**a.arguments("a"), **b.arguments("b"), "m": m, "n": n}
        shared |= {"scale": float(scale), "group": mask.group, **forms}
        shared |= {"first_token": mask.first_token, "window": mask.window}
        grid = (-(-n // tiling.n), -(-m // tiling.m), stack.outer * stack.inner)
        whole = stack == ONE_MATRIX and c.first == 0 and c.outer == n and m * n % 4 == 0
        splits = 1
        if whole and not self.software:
            splits = _k_splits(grid[0] * grid[1], k, narrow=min(m, n) <= NARROW)
        if splits > 1:
            split_k = -(-k // (splits * tiling.slice)) * tiling.slice
            splits = -(-k // split_k)
            parts = self.recorder.scratch(splits, m * n)
            shared |= {**Matrix(parts, n).arguments("c"), "k_first": 0, "k_end": k}
            shared |= {"split_k": split_k, "z_inner": 1, "add": 0}
            self.recorder.call("product", (*grid[:2], splits), **shared)
            self.sum_splits(parts, c.tensor, add=add)
            return
        at_once = SOFTWARE_K if self.software else k
        for first in range(0, k, at_once):
            shared |= {**c.arguments("c"), "k_first": first, "k_end": min(k, first + at_once)}
            shared |= {"split_k": 0, "z_inner": stack.inner, "add": int(add or first > 0)}
            self.recorder.call("product", grid, **shared)

    def sum_splits(self, parts: Tensor, out: Tensor, *, add: bool) -> None:
        """Record out (+)= the sum of parts [splits, …] over the splits."""
        width = parts.nbytes // 4 // parts.shape[0]
        self.matmul.add_splits(parts, width, Columns(out, width, 0), add=add)

    def expected_embedding(
        self,
        weight: Weight,
        logits: Tensor,
        stats: Tensor,
        denoising: Tensor,
        first: int,
        expected: Tensor,
    ) -> None:
        """Record softmax(logits / temperature) E √width, into `expected` from row `first` on.

        Matrix units read the probabilities in float16; otherwise they are never stored."""
        rows, vocab = logits.shape
        shared: dict[str, Argument] = {"stats": stats, "first": first}
        if self._matrix_tiling(logits, [weight], rows) is not None:
            source = {"row_source": "softmax", "logits": logits, "denoising": denoising, **shared}
            p = HalfTensor.scratch(rows, vocab)
            round_rows(self.recorder, self.matmul.batch, p, source)
            sums = self.recorder.scratch(rows, weight.width)
            self.backward(p, [weight], sums)
            self._expectation(sums, (1, rows), shared, expected, math.sqrt(weight.width))
            return
        width, at_once = weight.width, SOFTWARE_SPLIT_IDS if self.software else SPLIT_IDS
        tiling, first_split = OuterTiling.large(), 0
        sums = self.recorder.scratch(
            sum(-(-part.rows // at_once) for part in weight.parts), rows, width
        )
        for part in weight.parts:
            splits = -(-part.rows // at_once)
            self.recorder.call(
                "expected_embedding",
                (-(-width // tiling.n), -(-rows // tiling.m), splits),
                **weight.arguments(part),
                **shared,
                denoising=denoising,
                logits=logits,
                sums=sums,
                first_row=part.first_row,
                rows=part.rows,
                vocab=vocab,
                tokens=rows,
                split_rows=at_once,
                first_split=first_split,
                min_weight=ROUNDING / vocab,  # all below it together would be lost in rounding
                scale=math.sqrt(width),
                **tiling.constants | {"SKIP": True},
            )
            first_split += splits
        self._expectation(sums, (first_split, rows), shared, expected)

    def _expectation(
        self,
        sums: Tensor,
        shape: tuple[int, int],
        arguments: Mapping[str, Argument],
        expected: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Record the sum over splits of rows, divided by the total of their probabilities."""
        (splits, rows), width = shape, expected.shape[1]
        self.recorder.call(
            "expected_embedding_sum",
            (-(-width // (4 * THREADS)), rows),
            **arguments,
            sums=sums,
            expected=expected,
            vec4s=width // 4,
            splits=splits,
            tokens=rows,
            scale=scale,
        )


class _RowRange(NamedTuple):
    """Rows of a part that a dispatch adds up, in so many splits."""

    begin: int
    end: int
    split_rows: int
    first_split: int = 0
    splits: int = 1


def _k_splits(groups: int, k: int, *, narrow: bool) -> int:
    """Return into how many splits k is divided, so that narrow results keep a GPU busy too.

    Those are as fast as memory if enough of it is on its way, and their splits are small."""
    if narrow:
        return max(1, min(4 * BUSY_GROUPS // groups, k // NARROW_SPLIT_K, 32))
    return max(1, min(2 * BUSY_GROUPS // groups, k // SPLIT_K, 16))
