"""The ops that every part of a model is recorded with: lookups, norms, residuals, products."""

from typing import NamedTuple

from webgemma.gemma.lora_weights import LoraWeights
from webgemma.gemma.matrices import Matrices, Weight
from webgemma.gemma.record.matmul import THREADS, Clamp, Columns, Matmul
from webgemma.gemma.record.quantised import GROUP, GROUP_NBYTES, QuantisedTensor, providers
from webgemma.graph import Argument, Recorder, Tensor

ROW_THREADS = 256  # where one workgroup handles a whole row
# In software, a barrier costs more than everything else; eight threads need none on lavapipe.
SOFTWARE_THREADS, SOFTWARE_ROW_THREADS = 8, 32


class Branches(NamedTuple):
    """What a layer with experts adds to the residual: see added/two.wgsl."""

    dense: Tensor
    experts: Tensor
    norms: Tensor


class Ops:
    """Records ops for at most `rows` rows; `batch` counts the rows that are there."""

    def __init__(
        self,
        weights: Matrices,
        recorder: Recorder,
        batch: Tensor,
        rows: int,
        eps: float,
        precision: str = "exact",
        lora: LoraWeights | None = None,
    ) -> None:
        self.weights = weights
        self.recorder = recorder
        self.batch = batch
        self.rows = rows
        self.eps = eps
        self.software = recorder.device.software
        self.lora = lora
        self.matmul = Matmul(recorder, batch, rows, precision, lora.weights if lora else None)

    def scratch(self, *shape: int) -> Tensor:
        """Return a float32 tensor that lives from its first to its last use in the plan."""
        return self.recorder.scratch(*shape)

    def input_for(self, width: int, *readers: str) -> Tensor:
        """Return a scratch tensor [rows, width] for what these weights read, in their best form."""
        weights = (self.weights.matrices.get(name) for name in readers)
        return self.matmul.input_for(self.rows, width, *weights)

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        out: Tensor | None = None,
        first: int = 0,
        *,
        up: Columns | None = None,
        clamp: Clamp | None = None,
    ) -> Tensor:
        """Record x Wᵀ: see `Matmul.linear`."""
        return self.matmul.linear(x, weight, out, first, up=up, clamp=clamp)

    def lookup(self, weight: Weight, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Record rows of a table, times a scale: [rows, width]."""
        x = self.scratch(self.rows, weight.width)
        for part in weight.parts:
            self.recorder.call(
                "embed",
                (self.rows,),
                **weight.arguments(part),
                batch=self.batch,
                ids=ids,
                x=x,
                first_row=part.first_row,
                rows=part.rows,
                scale=float(scale),
            )
        return x

    def norm(self, x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        """Record rms(x) * w."""
        h = out or self.scratch(*x.shape)
        self.recorder.call(
            "norm",
            (self.rows,),
            **providers("store", h),
            x=x,
            w=w,
            h=h,
            width=x.shape[1],
            eps=self.eps,
            THREADS=self.row_threads(ROW_THREADS),
        )
        return h

    def residual(
        self,
        x: Tensor,
        added: Tensor | Branches,
        post: str,
        following: str = "",
        scale: str = "",
        out: Tensor | None = None,
    ) -> None:
        """Record x = (x + rms(added) * post) * scale in place, and out = rms(x) * following."""
        vector = self.weights.vector
        arguments = self._residual(x, added, vector(post), vector(scale))
        arguments["next_norms"] = "none"
        if out is not None:
            arguments |= {"next_norms": "one", **providers("store", out)}
            arguments |= {"h": out, "next": vector(following)}
        self.recorder.call("residual", (self.rows,), **arguments)

    def residual_branches(
        self,
        x: Tensor,
        added: Tensor,
        post: str,
        norms: Tensor,
        outs: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Record x = x + rms(added) * post, in place, and rms(x) times each of three norms.

        Of the outputs, the second may have the form of the first; the third is float."""
        n, m, s = outs
        alike = isinstance(m, QuantisedTensor) == isinstance(n, QuantisedTensor)
        whole = self.recorder.share_buffer(n, m, s)
        m_first = m.offset // 16
        if isinstance(m, QuantisedTensor):
            m_first = m.offset // GROUP_NBYTES[m.precision] * (GROUP // 4)
        arguments = self._residual(x, added, self.weights.vector(post), self.weights.one)
        arguments |= {"next_norms": "three", **providers("store", n), "h": whole, "next": norms}
        arguments |= {"m_first": m_first, "s_first": s.offset // 16, "ALIKE": alike}
        self.recorder.call("residual", (self.rows,), **arguments | {"THREADS": ROW_THREADS})

    def _residual(
        self, x: Tensor, added: Tensor | Branches, post: Tensor, scale: Tensor
    ) -> dict[str, Argument]:
        arguments: dict[str, Argument] = {"x": x, "post": post, "scale": scale, "eps": self.eps}
        arguments |= {"WIDTH": x.shape[1], "THREADS": self.kept_row_threads}
        if isinstance(added, Branches):
            a, b, norms = added
            return arguments | {"added": "two", "a": a, "b": b, "norms": norms}
        return arguments | {"added": "one", "y": added}

    def geglu(
        self, gate: Columns, up: Columns, width: int, out: Tensor | None = None, token_rows: int = 1
    ) -> Tensor:
        """Record gelu(gate) * up: see `Matmul.geglu`."""
        return self.matmul.geglu(gate, up, width, out, token_rows)

    def row_threads(self, usual: int) -> int:
        """Return the threads of a workgroup that sums a row."""
        return SOFTWARE_THREADS if self.software else usual

    @property
    def kept_row_threads(self) -> int:
        """Threads of a workgroup whose threads keep their shares of a row in registers."""
        return SOFTWARE_ROW_THREADS if self.software else ROW_THREADS

    def vec4_grid(self, width: int) -> tuple[int, int]:
        """Return the grid in which a thread takes four values of a row."""
        return -(-width // (4 * THREADS)), self.rows
