"""What is below the layers, forward and backward: embeddings and per-layer embeddings."""

from __future__ import annotations

import math

from webgemma.gemma.record.matmul import flat
from webgemma.gemma.record.matmul_backward import Matrix
from webgemma.graph import Tensor
from webgemma.lora.adapter import EMBEDDING
from webgemma.lora.backward.matmul import Product
from webgemma.lora.backward.ops import TrainingOps
from webgemma.lora.optimiser import TrainedPair

PROJECTION = "per_layer_model_proj.weight"


class TrainingEmbedding:
    """The embedding E[id] + scale · B A[id], and the per-layer embeddings computed from it."""

    def __init__(self, ops: TrainingOps) -> None:
        self.ops = ops
        self._trained = ops.parameters.pairs.get(EMBEDDING)
        self.is_trained = self._trained is not None or PROJECTION in ops.parameters.pairs
        self._low: Tensor | None = None  # A[id] of each token: [tokens, rank]
        self._context: Product | None = None
        self._dple: Tensor | None = None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Record the first layer's input and the per-layer embeddings: [tokens, layers * ple]."""
        ops = self.ops
        x = ops.embed(EMBEDDING, math.sqrt(ops.config.width))
        if self._trained is not None:
            rank, width = self._trained.pair.rank, ops.config.width
            self._low = ops.scratch(ops.rows, rank)
            self._move_rows("gather_rows", self._trained.a, self._low, rank)
            ops.products.products.product(
                Matrix(self._low, rank),
                Matrix(self._trained.b, rank),
                Matrix(x, width),
                (ops.rows, width, rank),
                b_transposed=True,
                scale=self._scale(self._trained),
                add=True,
            )
        if not ops.config.ple:
            return x, None
        self._context = ops.product(x, PROJECTION)
        return x, ops.combine_per_layer(self._context.y)

    def keep_gradient(self, layer: int, d: Tensor) -> None:
        """Record keeping the second half of d, [tokens, 2 * ple], as a layer's gradient."""
        if not self.is_trained:
            return
        ops, ple, layers = self.ops, self.ops.config.ple, len(self.ops.config.layers)
        self._dple = self._dple or ops.scratch(ops.rows, layers * ple)
        ops.recorder.call(
            "copy_columns",
            flat(ops.rows * ple),
            x=d,
            y=self._dple,
            width=ple,
            tokens=ops.rows,
            x_stride=2 * ple,
            x_first=ple,
            y_stride=layers * ple,
            y_first=layer * ple,
        )

    def backward(self, dx: Tensor) -> None:
        """Record the gradients of what is trained here, from dL/dx of the first layer's input."""
        ops = self.ops
        if self._dple is not None and self._context is not None:
            ple, layers = ops.config.ple, len(ops.config.layers)
            ops.scale_by(self._dple, ops.model.one, math.sqrt(0.5))
            dcontext = ops.scratch(*self._dple.shape)
            ops.norm_rows_backward(
                self._context.y,
                "per_layer_proj_norm.weight",
                self._dple,
                dcontext,
                (layers, ops.rows),
                ple,
                scale=1 / math.sqrt(ops.config.width),
            )
            ops.product_backward(self._context, dcontext, dx)
        if self._trained is not None and self._low is not None:
            self._pair_backward(self._trained, self._low, dx)

    def _pair_backward(self, trained: TrainedPair, low: Tensor, dx: Tensor) -> None:
        """Record, for s = √d · scale: dB += s dxᵀ A[id], dA[id] += s dx B."""
        ops, product, scale = self.ops, self.ops.products.products.product, self._scale(trained)
        width, rank, rows = ops.config.width, trained.pair.rank, ops.rows
        b, db = Matrix(trained.b, rank), Matrix(trained.b_gradient, rank)
        g = ops.scratch(rows, rank)
        gradient = Matrix(dx, width)
        product(gradient, b, Matrix(g, rank), (rows, rank, width), scale=scale)
        shape = (width, rank, rows)
        product(gradient, Matrix(low, rank), db, shape, a_transposed=True, scale=scale, add=True)
        self._move_rows("scatter_rows", g, trained.a_gradient, rank)

    def _scale(self, trained: TrainedPair) -> float:
        return trained.pair.scale * math.sqrt(self.ops.config.width)

    def _move_rows(self, op: str, x: Tensor, y: Tensor, width: int) -> None:
        ops, ids = self.ops, self.ops.inputs.chunk_ids
        grid = flat(ops.rows * width)
        ops.recorder.call(op, grid, ids=ids, x=x, y=y, width=width, tokens=ops.rows)
