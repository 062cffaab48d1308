"""Products of training over a Recorder: a frozen matrix with its adapters, forward and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from webgemma.device import Kernel
from webgemma.gemma.matrices import Part, Weight
from webgemma.gemma.record.ops import Steps
from webgemma.gemma.record.outer import FEW, Outer
from webgemma.graph import Tensor
from webgemma.kernels import unit as unit_of
from webgemma.lora.parameters import Trained

BUSY_GROUPS = 256  # workgroups that fill a large GPU
MANY_ROWS, MANY_SUMS = 512, 256  # of a matrix and of k, that are worth a share of their own
FEW_SUMS = 64  # of k, the same for a narrow result
# In software: threads that need not wait, tokens that a decoded weight serves, and how much is
# added up before an invocation ends (see gemma/loops.py): rows of a matrix, and of other products.
SOFTWARE_THREADS, SOFTWARE_TOKENS, SOFTWARE_ROWS, SOFTWARE_SUMS = 8, 4, 512, 4096


class Matrix(NamedTuple):
    """Rows of a tensor, as product.wgsl finds them."""

    tensor: Tensor
    outer: int  # from row to row, or from token to token
    first: int = 0
    inner: int = 1  # rows of a token
    step: int = 0  # from one of them to the next
    z_outer: int = 0
    z_step: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """The numbers alone."""
        return (self.first, self.inner, self.outer, self.step, self.z_outer, self.z_step)


class Times(NamedTuple):
    """How many matrices a product has: `outer` times `inner` of them."""

    outer: int
    inner: int


ONCE = Times(1, 1)


def product(
    steps: Steps,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    shape: tuple[int, int, int],
    *,
    a_turned: bool = False,
    b_turned: bool = False,
    scale: float = 1.0,
    add: bool = False,
    times: Times = ONCE,
) -> None:
    """c (+)= scale · a b for `shape` = (m, n, k); turned matrices are read by columns."""
    m, n, k = shape
    tile = Outer.for_product(m, n, steps.software)
    forms = {"A_TURNED": int(a_turned), "B_TURNED": int(b_turned)}
    heads = (("A_HEADS", a), ("B_HEADS", b), ("C_HEADS", c))
    forms |= {name: int(matrix.inner > 1) for name, matrix in heads}
    kernel = steps.link("product", "", ("outer",), **tile.constants, **forms)
    grid = (-(-n // tile.n), -(-m // tile.m), times.outer * times.inner)
    whole = times == ONCE and c.first == 0 and c.outer == n and m * n % 4 == 0
    shares = 1
    if whole and not steps.software:
        shares = _product_shares(grid[0] * grid[1], k, narrow=min(m, n) <= FEW)
    if shares > 1:
        share_k = -(-k // (shares * tile.slice)) * tile.slice
        shares = -(-k // share_k)
        parts, fours = steps.recorder.scratch(shares, m * n), m * n // 4
        params = [m, n, 0, k, share_k, 1, 0, float(scale)]
        params += [*a.place, *b.place, *Matrix(parts, n).place]
        steps.recorder.call(kernel, (*grid[:2], shares), params, a.tensor, b.tensor, parts)
        total = [fours, shares, int(add)]
        steps.call("sum_shares", steps.flat(fours), total, parts, c.tensor)
        return
    most = SOFTWARE_SUMS if steps.software else k
    for first in range(0, k, most):
        numbers = [m, n, first, min(k, first + most), 0, times.inner, int(add or first > 0)]
        params = [*numbers, float(scale), *a.place, *b.place, *c.place]
        steps.recorder.call(kernel, grid, params, a.tensor, b.tensor, c.tensor)


def _product_shares(groups: int, k: int, *, narrow: bool) -> int:
    """Into how many k is cut, so that narrow results keep a GPU busy too.

    Those are as fast as memory if enough of it is on its way, and their shares are small."""
    if narrow:
        return max(1, min(4 * BUSY_GROUPS // groups, k // FEW_SUMS, 32))
    return max(1, min(2 * BUSY_GROUPS // groups, k // MANY_SUMS, 16))


def matmul_back(
    steps: Steps, dy: Tensor, weights: Sequence[Weight], dx: Tensor, *, add: bool = False
) -> None:
    """dx (+)= dy W for matrices on top of each other; dy may have columns to spare at its end."""
    tokens, width = dx.shape
    weights = [steps.unpacked(weight, tokens) for weight in weights]
    parts = [
        (weight, part, first + part.first_row)
        for weight, first in zip(weights, _firsts(weights), strict=True)
        for part in weight.parts
    ]
    tile = Outer.large()
    groups = -(-width // tile.n) * -(-tokens // tile.m) * len(parts)
    shares = [_shares(part.rows, groups) for _, part, _ in parts]
    total = sum(shares)
    limit = steps.weights.device.limits.binding_nbytes
    if steps.software or total == 1 or 4 * total * tokens * width > limit:
        _one_after_the_other(steps, dy, parts, dx, add=add)
        return
    out = steps.recorder.scratch(total, tokens, width)
    for i, ((weight, part, first), count) in enumerate(zip(parts, shares, strict=True)):
        share_rows = -(-part.rows // (count * tile.slice)) * tile.slice
        rows = _Rows(0, part.rows, share_rows, sum(shares[:i]), count)
        _call_back(steps, weight, part, first, rows, dy, out)
    fours = tokens * width // 4
    steps.call("sum_shares", steps.flat(fours), [fours, total, int(add)], out, dx)


class _Rows(NamedTuple):
    """Rows of a part that a dispatch adds up, in so many shares."""

    begin: int
    end: int
    share_rows: int
    first_share: int = 0
    shares: int = 1


def _one_after_the_other(
    steps: Steps, dy: Tensor, parts: list[tuple[Weight, Part, int]], dx: Tensor, *, add: bool
) -> None:
    """Each dispatch adds to what those before have left."""
    for weight, part, first in parts:
        most = SOFTWARE_ROWS if steps.software else part.rows
        for begin in range(0, part.rows, most):
            rows = _Rows(begin, min(begin + most, part.rows), most)
            _call_back(steps, weight, part, first, rows, dy, dx, add=add)
            add = True


def _call_back(
    steps: Steps,
    weight: Weight,
    part: Part,
    first: int,
    rows: _Rows,
    dy: Tensor,
    out: Tensor,
    *,
    add: bool = False,
) -> None:
    """One dispatch; `first` is the column of dy for the part's first row."""
    tokens, width = out.shape[-2:]
    blocks, units = width // weight.format.block, width // unit_of(weight.format.name)
    own = [first, rows.begin, rows.end, units, dy.shape[1], tokens]
    params = [blocks, *part.planes, *own, rows.share_rows, rows.first_share, int(add)]
    kernel, grid = _multiplier(steps, weight, tokens, Outer.large())
    steps.recorder.call(kernel, (*grid, rows.shares), params, part.data, dy, out)


def _multiplier(
    steps: Steps, weight: Weight, tokens: int, tile: Outer
) -> tuple[Kernel, tuple[int, int]]:
    """A kernel for dy W, and its grid for all columns and tokens."""
    name, width = weight.format.name, weight.width
    if steps.software:
        units = width // unit_of(name)
        shape = {"THREADS": SOFTWARE_THREADS, "TOKENS": SOFTWARE_TOKENS}
        kernel = steps.link("matmul_back_units", name, (), **shape)
        return kernel, (-(-units // SOFTWARE_THREADS), -(-tokens // SOFTWARE_TOKENS))
    kernel = steps.link("matmul_back", name, ("outer", "outer_weights"), **tile.constants)
    return kernel, (-(-width // tile.n), -(-tokens // tile.m))


def _firsts(weights: Sequence[Weight]) -> list[int]:
    return [sum(weight.rows for weight in weights[:i]) for i in range(len(weights))]


def _shares(rows: int, groups: int) -> int:
    """Into how many the rows are cut, to keep a GPU busy."""
    return max(1, min(BUSY_GROUPS // groups, rows // MANY_ROWS, 16))


@dataclass(frozen=True, slots=True)
class Adapted:
    """A pair, and the first column of the results that it adds to."""

    trained: Trained
    first: int


@dataclass(slots=True)
class Product:
    """y = W x + scale · B A x, and what its way back reads."""

    x: Tensor
    y: Tensor
    weights: Sequence[Weight]
    adapted: Sequence[Adapted]
    dropped: list[Tensor] = field(default_factory=list)  # of each pair, what of x it reads
    inner: list[Tensor] = field(default_factory=list)  # and A x: [tokens, rank]


class Linear:
    """Makes products and their ways back; `pace` holds the step's seed for the dropout."""

    def __init__(self, steps: Steps, pace: Tensor, dropout: float) -> None:
        self.steps = steps
        self.pace = pace
        self.dropout = dropout

    def forward(
        self, x: Tensor, weights: Sequence[Weight], adapted: Sequence[Adapted], salt: int = 0
    ) -> Product:
        """The products of x with matrices on top of each other: [tokens, rows of all]."""
        steps, tokens = self.steps, x.shape[0]
        y = steps.recorder.scratch(tokens, sum(weight.rows for weight in weights))
        for weight, first in zip(weights, _firsts(weights), strict=True):
            steps.linear(x, weight, y, first)
        made = Product(x, y, weights, adapted)
        for trained, first in ((each.trained, each.first) for each in adapted):
            pair = trained.pair
            read = self._drop(x, trained, salt)
            inner = steps.recorder.scratch(tokens, pair.rank)
            a, b = Matrix(trained.a, pair.inputs), Matrix(trained.b, pair.rank)
            rows, u, out = Matrix(read, pair.inputs), Matrix(inner, pair.rank), y.shape[1]
            product(steps, rows, a, u, (tokens, pair.rank, pair.inputs), b_turned=True)
            product(
                steps,
                *(u, b, Matrix(y, out, first), (tokens, pair.outputs, pair.rank)),
                b_turned=True,
                scale=pair.scale,
                add=True,
            )
            made.dropped.append(read)
            made.inner.append(inner)
        return made

    def back(
        self, made: Product, dy: Tensor, dx: Tensor, *, add: bool = False, salt: int = 0
    ) -> Tensor:
        """dx (+)= dL/dx, given dy = dL/dy; the pairs' gradients grow."""
        matmul_back(self.steps, dy, made.weights, dx, add=add)
        for each, read, inner in zip(made.adapted, made.dropped, made.inner, strict=True):
            self._pair_back(each, read, inner, dy, dx, salt)
        return dx

    def _pair_back(
        self, each: Adapted, read: Tensor, inner: Tensor, dy: Tensor, dx: Tensor, salt: int
    ) -> None:
        """g = scale · dy B: dA += gᵀ x, dB += scale · dyᵀ (A x), dx += g A."""
        steps, trained, pair = self.steps, each.trained, each.trained.pair
        tokens, rank = inner.shape
        g = steps.recorder.scratch(tokens, rank)
        steep, u = Matrix(dy, dy.shape[1], each.first), Matrix(inner, rank)
        dinner, rows = Matrix(g, rank), Matrix(read, pair.inputs)
        b, db = Matrix(trained.b, rank), Matrix(trained.b_gradient, rank)
        a, da = Matrix(trained.a, pair.inputs), Matrix(trained.a_gradient, pair.inputs)
        product(steps, steep, b, dinner, (tokens, rank, pair.outputs), scale=pair.scale)
        shape = (pair.outputs, rank, tokens)
        product(steps, steep, u, db, shape, a_turned=True, scale=pair.scale, add=True)
        product(steps, dinner, rows, da, (rank, pair.inputs, tokens), a_turned=True, add=True)
        shape = (tokens, pair.inputs, rank)
        if not self.dropout:
            product(steps, dinner, a, Matrix(dx, pair.inputs), shape, add=True)
            return
        part = steps.recorder.scratch(tokens, pair.inputs)
        product(steps, dinner, a, Matrix(part, pair.inputs), shape)
        self._drop(part, trained, salt, dx)

    def _drop(self, x: Tensor, trained: Trained, salt: int, into: Tensor | None = None) -> Tensor:
        """x with some of it dropped, the same for the same step, pair and salt."""
        if not self.dropout:
            return x
        y, count = into or self.steps.recorder.scratch(*x.shape), x.nbytes // 4
        number = (trained.number << 12) + salt
        params = [count, number, float(self.dropout), int(into is not None)]
        grid = self.steps.flat(count)
        self.steps.call("dropout", grid, params, self.pace, x, y, pieces=("pace",))
        return y
