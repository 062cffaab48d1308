"""The ops that training is recorded with: products of named matrices, norms, gates, both ways."""

from __future__ import annotations

from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.matmul import THREADS, flat
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.lora.backward.matmul import AdaptedColumns, Product, TrainedMatmul
from webgemma.lora.optimiser import Parameters


class TrainingOps(TextRecorder):
    """Records ops of whole sequences of `length` tokens, one after the other in a batch."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        inputs: Inputs,
        sequences: int,
        length: int,
        parameters: Parameters,
        training_step: Tensor,
        dropout: float = 0.0,
        precision: str = "exact",
    ) -> None:
        super().__init__(model, recorder, inputs, sequences * length, "f32", precision)
        self.sequences = sequences
        self.length = length
        self.parameters = parameters
        self.products = TrainedMatmul(self.matmul, training_step, dropout)

    # Products

    def product(self, x: Tensor, name: str) -> Product:
        """Record x times one matrix with its pair."""
        return self.products.forward(x, [self.model.matrices[name]], self.adapted((name, 0)))

    def stacked_product(
        self, x: Tensor, weights: list[Weight], adapted: list[AdaptedColumns]
    ) -> Product:
        """Record x times stacked matrices with their pairs."""
        return self.products.forward(x, weights, adapted)

    def product_backward(self, product: Product, dy: Tensor, into: Tensor | None = None) -> Tensor:
        """Record dL/dx of a product, added to `into` if that is given."""
        dx = into or self.scratch(*product.x.shape)
        return self.products.backward(product, dy, dx, add=into is not None)

    def adapted(self, *columns: tuple[str, int]) -> list[AdaptedColumns]:
        """Return the pairs that are trained, of the named matrices and their first columns."""
        pairs = self.parameters.pairs
        return [AdaptedColumns(pairs[name], first) for name, first in columns if name in pairs]

    def stack(self, layer: str, *parts: str) -> list[Weight]:
        """Return those of a layer's matrices that the device has; it stacks some into others."""
        found = [self.model.matrices.get(f"{layer}{part}.weight") for part in parts]
        return [weight for weight in found if weight is not None]

    # Norms and gates

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Record rms(x) * w."""
        return self.norm(x, self.model.vector(name))

    def add_norm(self, x: Tensor, y: Tensor, post: str, scale: str = "") -> Tensor:
        """Record (x + rms(y) * post) * scale."""
        out = self.scratch(*x.shape)
        self.recorder.call(
            "add_norm",
            (self.rows,),
            x=x,
            y=y,
            w=self.model.vector(post),
            scale=self.model.vector(scale),
            out=out,
            width=x.shape[1],
            eps=self.eps,
            THREADS=self.row_threads(ROW_THREADS),
        )
        return out

    def norm_backward(self, x: Tensor, name: str, dy: Tensor, into: Tensor | None = None) -> Tensor:
        """Record dL/dx of rms(x) * w, added to `into` if that is given."""
        dx = into or self.scratch(*x.shape)
        self.norm_rows_backward(x, name, dy, dx, (self.rows,), x.shape[1], add=into is not None)
        return dx

    def norm_rows_backward(
        self,
        x: Tensor,
        name: str,
        dy: Tensor,
        dx: Tensor,
        grid: tuple[int, ...],
        width: int,
        *,
        scale: float = 1.0,
        add: bool = False,
    ) -> None:
        """Record dx (+)= dL/dx of rms(scale · x) * w, for a grid of rows of this width."""
        self.recorder.call(
            "norm_backward",
            grid,
            input=x,
            w=self.model.vector(name),
            dy=dy,
            dx=dx,
            width=width,
            eps=self.eps,
            scale=scale,
            add=int(add),
            THREADS=self.row_threads(ROW_THREADS),
        )

    def geglu_backward(
        self, gate: Tensor, gate_stride: int, up: Tensor, up_stride: int, up_first: int, dh: Tensor
    ) -> Tensor:
        """Record dL/dgate and dL/dup side by side: [rows, 2 * width]."""
        rows, width = dh.shape
        d = self.scratch(rows, 2 * width)
        self.recorder.call(
            "geglu_backward",
            (-(-width // THREADS), rows),
            gate=gate,
            up=up,
            dh=dh,
            d=d,
            width=width,
            gate_stride=gate_stride,
            up_stride=up_stride,
            up_first=up_first,
        )
        return d

    def scale_by(self, x: Tensor, scale: Tensor, factor: float = 1.0) -> None:
        """Record x = x * scale * factor, in place."""
        vec4s = x.nbytes // 16
        self.recorder.call("scale", flat(vec4s), scale=scale, x=x, vec4s=vec4s, factor=factor)
