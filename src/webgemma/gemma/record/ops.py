"""The ops that every part of a model is recorded with: lookups, norms, residuals, products."""

from collections.abc import Sequence

from webgemma.gemma.lora_weights import AppliedLora
from webgemma.gemma.matrices import Matrices, Weight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.matmul import THREADS, UNBOUNDED, Clamp, Matmul
from webgemma.gemma.record.operands import (
    Branches,
    ForkedSum,
    Normed,
    NormedSum,
    Operand,
    SumVectors,
    can_make,
    most_groups,
)
from webgemma.gemma.record.quantised import (
    GROUP,
    GROUP_NBYTES,
    HalfTensor,
    QuantisedTensor,
    providers,
)
from webgemma.gemma.record.rounding import whole_row
from webgemma.gemma.record.split_sums import splits_of
from webgemma.graph import Argument, Recorder, Tensor

ROW_THREADS = 256  # where one workgroup handles a whole row
# In software, a barrier costs more than everything else; eight threads need none on lavapipe.
SOFTWARE_THREADS, SOFTWARE_ROW_THREADS = 8, 32


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
        lora: AppliedLora | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.weights = weights
        self.recorder = recorder
        self.batch = batch
        self.rows = rows
        self.eps = eps
        self.device = recorder.device
        self.software = recorder.device.software
        self.matmul = Matmul(recorder, batch, rows, precision, lora, apart=apart)

    def scratch(self, *shape: int) -> Tensor:
        """Return a float32 tensor that lives from its first to its last use in the plan."""
        return self.recorder.scratch(*shape)

    def input_for(self, width: int, *readers: str) -> Tensor:
        """Return a scratch tensor [rows, width] for what these weights read, in their best form."""
        weights = (self.weights.matrices.get(name) for name in readers)
        return self.matmul.input_for(self.rows, width, *weights)

    def row_input_for(self, width: int, *readers: str) -> Tensor:
        """Return the same for an op that stores whole rows: float16 if matrix units read it."""
        weights = [w for name in readers if (w := self.weights.matrices.get(name))]
        if weights and all(self.matmul.reads_halves(weight, self.rows) for weight in weights):
            return HalfTensor.scratch(self.rows, width)
        return self.input_for(width, *readers)

    def linear(
        self,
        x: Operand,
        weight: Weight,
        out: Tensor | None = None,
        first: int = 0,
        *,
        up: Columns | None = None,
        clamp: Clamp | None = None,
    ) -> Tensor:
        """Record x Wᵀ: see `Matmul.linear`."""
        return self.matmul.linear(x, weight, out, first, up=up, clamp=clamp)

    @staticmethod
    def token_ids(ids: Tensor | None) -> dict[str, Argument]:
        """Return the arguments with which a kernel finds the id of a row; None: in the batch."""
        return {"token_ids": "rows"} if ids is None else {"token_ids": "buffer", "ids": ids}

    def lookup(
        self, weight: Weight, ids: Tensor | None, scale: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        """Record rows of a table, times a scale: [rows, width], or the first columns of `out`."""
        x = out or self.scratch(self.rows, weight.width)
        for part in weight.parts:
            self.recorder.call(
                "embed",
                (self.rows,),
                **weight.arguments(part),
                batch=self.batch,
                **self.token_ids(ids),
                x=x,
                first_row=part.first_row,
                rows=part.rows,
                stride=x.shape[1],
                scale=float(scale),
            )
        return x

    def norm(
        self, x: Tensor, w: Tensor, out: Tensor | None = None, threads: int | None = None
    ) -> Tensor:
        """Record rms(x) * w; so many threads sum a row."""
        if isinstance(out, HalfTensor):
            return self.matmul.rounded(self.norm(x, w), out=out)
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
            THREADS=threads or self.row_threads(ROW_THREADS),
        )
        return h

    def norm_for(self, x: Tensor, following: str, readers: Sequence[str]) -> Operand:
        """Return rms(x) * following, which `readers` read: recorded, or left to them."""
        form, norm = self.row_input_for(x.shape[1], *readers), self.weights.vector(following)
        vectors, reread_nbytes = self._joined(norm, norm, norm), 2 * x.nbytes
        if vectors is None or not self._can_make(form, reread_nbytes, readers):
            return self.norm(x, norm, form, self._threads_alone(form, reread_nbytes, readers))
        return Normed(form, reread_nbytes, x, vectors.whole, norm, self.eps)

    def _can_make(self, form: Tensor, reread_nbytes: int, readers: Sequence[str]) -> bool:
        """Return whether the products of these weights make what they read."""
        alone = self.rows == 1 or self.matmul.apart
        return alone and not self._adapted(readers) and can_make(self.device, form, reread_nbytes)

    def _adapted(self, readers: Sequence[str]) -> bool:
        """Return whether adapters change one of these weights: they read the same, too."""
        return any(name in self.matmul.lora for name in readers)

    def _threads_alone(
        self, form: Tensor, reread_nbytes: int, readers: Sequence[str]
    ) -> int | None:
        """Return the threads that sum a row of one token, if its product makes it: the same ones
        sum those of more conversations than a product makes, and of adapted products, so that the
        sums are the same."""
        weight = next((w for name in readers if (w := self.weights.matrices.get(name))), None)
        one, each_nbytes = form.rows(0, 1), reread_nbytes // self.rows
        alone = self.matmul.apart or (self.rows == 1 and self._adapted(readers))
        if weight is None or not alone or isinstance(form, HalfTensor):
            return None
        if not can_make(self.device, one, each_nbytes):
            return None
        return self.matmul.made_row_threads(weight, most_groups(each_nbytes))

    def add_normed(
        self,
        x: Tensor,
        added: Tensor | Branches,
        post: str,
        following: str = "",
        scale: str = "",
        readers: Sequence[str] = (),
        out: Tensor | None = None,
    ) -> tuple[Tensor, Operand]:
        """Record a sum and its norm; return x = (x + rms(added) * post) * scale and what
        `readers` read of it: rms(x) * following, or x itself.

        These products may be left to make it. Otherwise x changes in place, and the norm goes into
        `out` if that is given."""
        threads = None
        if readers and out is None:
            form, reread_nbytes = self._sum_form(x, added, following, readers)
            made = self._normed_sum(x, added, post, following, scale, readers)
            if made is not None:
                return made.summed, made
            threads = self._threads_alone(form, reread_nbytes, readers)
        if following:
            out = out or self.row_input_for(x.shape[1], *readers)
        elif readers and isinstance(half := self.row_input_for(x.shape[1], *readers), HalfTensor):
            out = half
        self.residual(x, added, post, following, scale, out, threads=threads)
        return x, x if out is None else out

    def _sum_form(
        self, x: Tensor, added: Tensor | Branches, following: str, readers: Sequence[str]
    ) -> tuple[Tensor, int]:
        """Return the form in which products read a sum, and what they read to make it."""
        form = self.input_for(x.shape[1], *readers) if following else self.scratch(*x.shape)
        # Residual, post, norm and what is added: one row, or two branches with their norms.
        rows = 2 + bool(following) + (4 if isinstance(added, Branches) else 1)
        return form, x.nbytes * rows

    def _normed_sum(
        self,
        x: Tensor,
        added: Tensor | Branches,
        post: str,
        following: str,
        scale: str,
        readers: Sequence[str],
    ) -> NormedSum | None:
        """Return the sum that these products make, if they do."""
        vector = self.weights.vector
        form, reread_nbytes = self._sum_form(x, added, following, readers)
        norm = vector(following) if following else None
        vectors = self._joined(vector(post), vector(scale), norm)
        if vectors is None or not self._can_make(form, reread_nbytes, readers):
            return None
        summed = self.scratch(*x.shape)
        return NormedSum(form, reread_nbytes, x, added, vectors, self.eps, summed)

    def fork(
        self,
        x: Tensor,
        added: Tensor,
        post: str,
        norms: Tensor,
        outs: tuple[Tensor, Tensor, Tensor],
        reader: str,
    ) -> tuple[Tensor, Operand]:
        """Record a sum and its three norms; return x = x + rms(added) * post and what `reader`, of
        the third norm, reads: the last of the outputs unless it makes its input itself.

        Of the outputs, the second may have the form of the first; the third is float."""
        n, m, s = outs
        vectors = self._joined(self.weights.vector(post), self.weights.one, norms)
        reread_nbytes = 4 * x.nbytes
        if vectors is None or not self._can_make(s, reread_nbytes, [reader]):
            threads = self._threads_alone(s, reread_nbytes, [reader])
            self.residual_branches(x, added, post, norms, outs, threads)
            return x, s
        stored = {**self._branches(n, m), **providers("store", n)}
        summed = self.scratch(*x.shape)
        return summed, ForkedSum(s, reread_nbytes, x, added, vectors, self.eps, summed, stored)

    def _joined(self, post: Tensor, scale: Tensor, following: Tensor | None) -> SumVectors | None:
        """Return vectors around a residual as parts of their buffer, if that is the same."""
        whole = self.weights.joined
        vectors = (post, scale, following or post)
        if whole is None or any(vector.allocated is not whole.allocated for vector in vectors):
            return None
        return SumVectors(whole, post, scale, following)

    def _branches(self, n: Tensor, m: Tensor, *others: Tensor) -> dict[str, Argument]:
        """Put the inputs of branches into one buffer; return it, and where the second begins."""
        alike = isinstance(m, QuantisedTensor) == isinstance(n, QuantisedTensor)
        whole = self.recorder.share_buffer(n, m, *others)
        m_first = m.offset // 16
        if isinstance(m, QuantisedTensor):
            m_first = m.offset // GROUP_NBYTES[m.precision] * (GROUP // 4)
        return {"h": whole, "m_first": m_first, "ALIKE": alike}

    def residual(
        self,
        x: Tensor,
        added: Tensor | Branches,
        post: str,
        following: str = "",
        scale: str = "",
        out: Tensor | None = None,
        clamp: Clamp = UNBOUNDED,
        threads: int | None = None,
    ) -> None:
        """Record x = (x + rms(added) * post) * scale in place, and out = rms(x) * following, or x.

        Into a tensor of float16, what is normed goes clamped, and x only there."""
        vector = self.weights.vector
        arguments = self._residual(x, added, vector(post), vector(scale))
        arguments["next_norms"] = "none"
        if isinstance(out, HalfTensor) and following:
            arguments |= {"next_norms": "whole", **whole_row(out), "next": vector(following)}
            arguments |= clamp._asdict()
        elif isinstance(out, HalfTensor):
            arguments |= {"next_norms": "itself", **whole_row(out)}
        elif out is not None:
            arguments |= {"next_norms": "one", **providers("store", out)}
            arguments |= {"h": out, "next": vector(following)}
        if threads is not None:
            arguments["THREADS"] = threads
        self.recorder.call("residual", (self.rows,), **arguments)

    def residual_branches(
        self,
        x: Tensor,
        added: Tensor,
        post: str,
        norms: Tensor,
        outs: tuple[Tensor, Tensor, Tensor],
        threads: int | None = None,
    ) -> None:
        """Record x = x + rms(added) * post, in place, and rms(x) times each of three norms.

        Of the outputs, the second may have the form of the first; the third is float."""
        n, m, s = outs
        arguments = self._residual(x, added, self.weights.vector(post), self.weights.one)
        arguments |= {"next_norms": "three", **providers("store", n), "next": norms}
        arguments |= {**self._branches(n, m, s), "s_first": s.offset // 16}
        arguments["THREADS"] = threads or ROW_THREADS
        self.recorder.call("residual", (self.rows,), **arguments)

    def _residual(
        self, x: Tensor, added: Tensor | Branches, post: Tensor, scale: Tensor
    ) -> dict[str, Argument]:
        arguments: dict[str, Argument] = {"x": x, "post": post, "scale": scale, "eps": self.eps}
        arguments |= {"WIDTH": x.shape[1], "THREADS": self.kept_row_threads}
        if isinstance(added, Branches):
            a, b, norms = added
            arguments |= {"added": "two", "a": a, "b": b, "norms": norms}
            return arguments | {"ADDED_SPLITS": splits_of(a)}
        return arguments | {"added": "one", "addend": added, "ADDED_SPLITS": splits_of(added)}

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
