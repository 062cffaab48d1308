"""Products with a frozen matrix and its trained pairs, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.matmul import Matmul, flat
from webgemma.gemma.record.matmul_backward import MatmulBackward, Matrix
from webgemma.graph import Tensor
from webgemma.lora.optimiser import TrainedPair


@dataclass(frozen=True, slots=True)
class AdaptedColumns:
    """A trained pair, and the first column of the results that it adds to."""

    trained: TrainedPair
    first: int


@dataclass(slots=True)
class Product:
    """y = x Wᵀ + scale · x Aᵀ Bᵀ, and what the backward pass reads of it."""

    x: Tensor
    y: Tensor
    weights: Sequence[Weight]  # stacked
    adapted: Sequence[AdaptedColumns]
    dropped: list[Tensor] = field(default_factory=list)  # of each pair, x after dropout
    low: list[Tensor] = field(default_factory=list)  # of each pair, dropped Aᵀ: [tokens, rank]


class TrainedMatmul:
    """Records products and their backward passes; `training_step` has the dropout's seed."""

    def __init__(self, matmul: Matmul, training_step: Tensor, dropout: float) -> None:
        self.matmul = matmul
        self.products = MatmulBackward(matmul)
        self.recorder = matmul.recorder
        self.training_step = training_step
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        adapted: Sequence[AdaptedColumns],
        salt: int = 0,
    ) -> Product:
        """Record x times stacked matrices: [tokens, rows of all]. The salt varies the dropout."""
        tokens, first = x.shape[0], 0
        y = self.recorder.scratch(tokens, sum(weight.rows for weight in weights))
        rounded: Tensor | None = None
        for weight in weights:
            on_units = self.matmul.on_units(weight, tokens)
            if on_units and rounded is None:
                rounded = self.matmul.rounded(x)
            self.matmul.linear(rounded if on_units and rounded else x, weight, y, first)
            first += weight.rows
        product = Product(x, y, weights, adapted)
        for trained, first in ((each.trained, each.first) for each in adapted):
            pair = trained.pair
            dropped = self._drop(x, trained, salt)
            low = self.recorder.scratch(tokens, pair.rank)
            a, b = Matrix(trained.a, pair.inputs), Matrix(trained.b, pair.rank)
            self.products.product(
                Matrix(dropped, pair.inputs),
                a,
                Matrix(low, pair.rank),
                (tokens, pair.rank, pair.inputs),
                b_transposed=True,
            )
            self.products.product(
                Matrix(low, pair.rank),
                b,
                Matrix(y, y.shape[1], first),
                (tokens, pair.outputs, pair.rank),
                b_transposed=True,
                scale=pair.scale,
                add=True,
            )
            product.dropped.append(dropped)
            product.low.append(low)
        return product

    def backward(
        self,
        product: Product,
        dy: Tensor,
        dx: Tensor,
        *,
        add: bool = False,
        salt: int = 0,
        split: bool | None = None,
    ) -> Tensor:
        """Record dx (+)= dL/dx, given dy = dL/dy; gradients are added to those of the pairs."""
        self.products.backward(dy, product.weights, dx, add=add, split=split)
        for each, dropped, low in zip(product.adapted, product.dropped, product.low, strict=True):
            self._pair_backward(each, dropped, low, dy, dx, salt)
        return dx

    def _pair_backward(
        self,
        each: AdaptedColumns,
        dropped: Tensor,
        low: Tensor,
        dy: Tensor,
        dx: Tensor,
        salt: int,
    ) -> None:
        """Record, for g = scale · dy B: dA += gᵀ x, dB += scale · dyᵀ (x Aᵀ), dx += g A."""
        trained, pair, product = each.trained, each.trained.pair, self.products.product
        tokens, rank = low.shape
        columns, g = Matrix(dy, dy.shape[1], each.first), Matrix(self._scratch_like(low), rank)
        a, da = Matrix(trained.a, pair.inputs), Matrix(trained.a_gradient, pair.inputs)
        b, db = Matrix(trained.b, rank), Matrix(trained.b_gradient, rank)
        x, u = Matrix(dropped, pair.inputs), Matrix(low, rank)
        product(columns, b, g, (tokens, rank, pair.outputs), scale=pair.scale)
        shape = (pair.outputs, rank, tokens)
        product(columns, u, db, shape, a_transposed=True, scale=pair.scale, add=True)
        product(g, x, da, (rank, pair.inputs, tokens), a_transposed=True, add=True)
        shape = (tokens, pair.inputs, rank)
        if not self.dropout:
            product(g, a, Matrix(dx, pair.inputs), shape, add=True)
            return
        ddropped = self.recorder.scratch(tokens, pair.inputs)
        product(g, a, Matrix(ddropped, pair.inputs), shape)
        self._drop(ddropped, trained, salt, dx)

    def _drop(
        self, x: Tensor, trained: TrainedPair, salt: int, into: Tensor | None = None
    ) -> Tensor:
        """Record dropout of x, the same for a step, pair and salt; add it `into` a tensor."""
        if not self.dropout:
            return x
        y, count = into or self._scratch_like(x), x.nbytes // 4
        self.recorder.call(
            "dropout",
            flat(count),
            training_step=self.training_step,
            x=x,
            y=y,
            count=count,
            adapter=(trained.index << 12) + salt,
            dropped=float(self.dropout),
            add=int(into is not None),
        )
        return y

    def _scratch_like(self, x: Tensor) -> Tensor:
        return self.recorder.scratch(*x.shape)
