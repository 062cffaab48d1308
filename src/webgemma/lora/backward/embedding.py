"""Below the layers over a Recorder: embeddings and per-layer embeddings, forward and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.graph import Tensor
from webgemma.lora.adapter import EMBEDDING
from webgemma.lora.backward.matmul import Matrix, Product, product

if TYPE_CHECKING:
    from webgemma.lora.backward.layers import Passes

PROJECTION = "per_layer_model_proj.weight"


class Bottom:
    """The embedding E[id] + scale · B A[id], and what every layer gets of it directly."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.pair = passes.parameters.pairs.get(EMBEDDING)
        self.trained = self.pair is not None or PROJECTION in passes.parameters.pairs
        self._inner: Tensor | None = None  # A[id] of each token: [tokens, rank]
        self._context: Product | None = None
        self._dple: Tensor | None = None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """The first layer's input, and the per-layer embeddings: [tokens, layers * ple]."""
        passes = self.passes
        x = passes.embed(EMBEDDING, math.sqrt(passes.config.width))
        if self.pair is not None:
            pair, width = self.pair.pair, passes.config.width
            self._inner = passes.recorder.scratch(passes.batch, pair.rank)
            self._rows("gather_rows", self.pair.a, self._inner)
            u, b = Matrix(self._inner, pair.rank), Matrix(self.pair.b, pair.rank)
            shape = (passes.batch, width, pair.rank)
            product(
                passes, u, b, Matrix(x, width), shape, b_turned=True, scale=self._scale, add=True
            )
        if not passes.config.ple:
            return x, None
        self._context = passes.linear_of(x, PROJECTION)
        return x, passes.blend(self._context.y)

    def keep(self, layer: int, d: Tensor) -> None:
        """Of d, [tokens, 2 * ple], the second half is the gradient of a layer's embedding."""
        if not self.trained:
            return
        passes, ple, layers = self.passes, self.passes.config.ple, len(self.passes.config.layers)
        self._dple = self._dple or passes.recorder.scratch(passes.batch, layers * ple)
        params = [ple, passes.batch, 2 * ple, ple, layers * ple, layer * ple]
        passes.call("copy_columns", passes.flat(passes.batch * ple), params, d, self._dple)

    def back(self, dx: Tensor) -> None:
        """From dL/dx of the first layer's input to the gradients of what is trained down here."""
        passes = self.passes
        if self._dple is not None and self._context is not None:
            ple, layers = passes.config.ple, len(passes.config.layers)
            passes.multiply(self._dple, passes.model.one, math.sqrt(0.5))
            dcontext = passes.recorder.scratch(*self._dple.shape)
            norm = passes.model.vector("per_layer_proj_norm.weight")
            passes.call(
                "norm_back",
                (layers, passes.batch),
                [ple, passes.eps, 1 / math.sqrt(passes.config.width), 0],
                *(self._context.y, norm, self._dple, dcontext),
                pieces=("sum",),
                THREADS=passes.row_threads(ROW_THREADS),
            )
            passes.back_of(self._context, dcontext, dx)
        if self.pair is not None and self._inner is not None:
            self._embedding_back(dx, self._inner)

    def _embedding_back(self, dx: Tensor, inner: Tensor) -> None:
        """dB += step dxᵀ A[id], dA[id] += step dx B, for step = √d · scale."""
        assert self.pair is not None
        passes, width, rank = self.passes, self.passes.config.width, self.pair.pair.rank
        g = passes.recorder.scratch(passes.batch, rank)
        steep, u = Matrix(dx, width), Matrix(inner, rank)
        b, db = Matrix(self.pair.b, rank), Matrix(self.pair.b_gradient, rank)
        shape = (passes.batch, rank, width)
        product(passes, steep, b, Matrix(g, rank), shape, scale=self._scale)
        shape = (width, rank, passes.batch)
        product(passes, steep, u, db, shape, a_turned=True, scale=self._scale, add=True)
        self._rows("scatter_rows", g, self.pair.a_gradient)

    @property
    def _scale(self) -> float:
        assert self.pair is not None
        return self.pair.pair.scale * math.sqrt(self.passes.config.width)

    def _rows(self, op: str, x: Tensor, y: Tensor) -> None:
        assert self.pair is not None
        passes, rank = self.passes, self.pair.pair.rank
        grid = passes.flat(passes.batch * rank)
        passes.call(op, grid, [rank, passes.batch], passes.inputs.ids, x, y)
