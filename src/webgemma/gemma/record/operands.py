"""Rows that the workgroups of a product make for themselves, which saves a dispatch before it.

Every workgroup reads again what the row is made of, mostly from the GPU's cache, and keeps the row
in its own memory. `can_make` decides where that is done; everything else follows from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from webgemma.device import Device
from webgemma.gemma.record.quantised import QuantisedTensor, providers
from webgemma.graph import Argument, Tensor

# What all workgroups of a product may read again together: about what a dispatch costs on an H200,
# whose cache gives 5 bytes a picosecond. With 0 every row is made by a dispatch of its own.
REREAD_NBYTES = 24 << 20
MOST_ROWS = 2  # that a workgroup makes: tokens of different conversations
FEWEST_GROUPS = 48  # with fewer workgroups, a product would leave most of a GPU idle
THREADS, MOST_THREADS = 256, 512  # of a workgroup that makes a row
SUMS_NBYTES = 16 * MOST_THREADS  # memory of its sums and exchanges, where threads cannot shuffle
SHUFFLED_NBYTES = 512  # where they can


def most_groups(reread_nbytes: int) -> int:
    """Return how many workgroups may make a row for which each reads so many bytes."""
    return REREAD_NBYTES // reread_nbytes


def can_make(device: Device, form: Tensor, reread_nbytes: int) -> bool:
    """Return whether the workgroups of a product make the rows that they read, in this form."""
    # On a software GPU they would do so one after the other.
    if device.software or form.shape[0] > MOST_ROWS or most_groups(reread_nbytes) < FEWEST_GROUPS:
        return False
    sums_nbytes = SHUFFLED_NBYTES if "shuffle32" in device.features else SUMS_NBYTES
    row_nbytes = form.nbytes
    if not isinstance(form, QuantisedTensor):
        row_nbytes += row_nbytes // 16  # see kept/float
    return row_nbytes + sums_nbytes <= device.limits.workgroup_nbytes


class Branches(NamedTuple):
    """What a layer with experts adds to the residual: see added/two.wgsl."""

    dense: Tensor
    experts: Tensor
    norms: Tensor


@dataclass(frozen=True, slots=True)
class SumVectors:
    """The vectors around a residual: parts of `whole`, in which one binding reads all of them."""

    whole: Tensor
    post: Tensor
    scale: Tensor
    next: Tensor | None = None  # of one norm that follows, or of several

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of norm_weights/together."""
        following = self.next.offset // 16 if self.next else 0
        first = {"post": self.post.offset // 16, "scale": self.scale.offset // 16}
        return {"vectors": self.whole, **first, "next": following}


@dataclass(frozen=True, eq=False, slots=True)
class MadeRow(ABC):
    """Rows that a product makes, of so many bytes; `form` is a tensor like what it would read.

    It is one row, or one for each of a few conversations."""

    form: Tensor
    reread_nbytes: int
    op: ClassVar[str] = "matvec"  # with which its product is recorded

    @property
    def shape(self) -> tuple[int, ...]:
        """The rows, and their values."""
        return self.form.shape

    @property
    def most_groups(self) -> int:
        """How many workgroups may make it."""
        return most_groups(self.reread_nbytes)

    @property
    def most_groups_alone(self) -> int:
        """How many might make one row: by that their threads are chosen, which sum it up."""
        return most_groups(self.reread_nbytes // self.shape[0])

    @property
    @abstractmethod
    def arguments(self) -> dict[str, Argument]:
        """The arguments with which a kernel makes it."""

    def again(self) -> "MadeRow":
        """Return the same row, for a second product that makes it."""
        return self

    @property
    def _kept(self) -> dict[str, Argument]:
        return {**providers("input", self.form), "WIDTH": self.shape[1]}


@dataclass(frozen=True, eq=False, slots=True)
class Normed(MadeRow):
    """The residual, normed: see operand/normed.wgsl."""

    residual: Tensor
    vectors: Tensor  # the buffer of all
    next: Tensor
    eps: float

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of operand/normed."""
        arguments = {**self._kept, "operand": "normed", "residual": self.residual}
        return arguments | {
            "vectors": self.vectors,
            "next": self.next.offset // 16,
            "eps": self.eps,
        }


@dataclass(frozen=True, eq=False, slots=True)
class NormedSum(MadeRow):
    """The residual with something added, normed if a norm follows: see operand/normed_sum.wgsl.

    The first product that makes it stores the sum in `summed`."""

    residual: Tensor
    added: Tensor | Branches
    vectors: SumVectors
    eps: float
    summed: Tensor

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of operand/normed_sum."""
        normed = self.vectors.next is not None
        return self._sum() | {"operand": "normed_sum", "NORMED": normed}

    def again(self) -> "NormedSum":
        """Return the same row, whose sum is stored where nobody reads it."""
        return replace(self, summed=Tensor(self.summed.shape, self.summed.nbytes))

    def _sum(self) -> dict[str, Argument]:
        arguments = {**self._kept, **self.vectors.arguments, "eps": self.eps}
        arguments |= {"residual": self.residual, "summed": self.summed}
        if isinstance(self.added, Branches):
            a, b, norms = self.added
            return arguments | {"added": "two", "a": a, "b": b, "norms": norms.offset // 16}
        return arguments | {"added": "one", "addend": self.added}


@dataclass(frozen=True, eq=False, slots=True)
class ForkedSum(NormedSum):
    """What the router of a layer with experts reads: see fork_scores.wgsl.

    Its product also stores the inputs of the other two branches."""

    stored: Mapping[str, Argument] = field(default_factory=dict)  # the arguments for that
    op: ClassVar[str] = "fork_scores"

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of fork_scores."""
        return {**self._sum(), **self.stored}


@dataclass(frozen=True, eq=False, slots=True)
class MergedSplits(MadeRow):
    """Attention's result, put together from its splits: see operand/merged_splits.wgsl."""

    parts: Tensor
    sums: Tensor
    head_dim: int
    splits: int

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of operand/merged_splits."""
        arguments = {**self._kept, "operand": "merged_splits", "parts": self.parts}
        return arguments | {"sums": self.sums, "HEAD_DIM": self.head_dim, "SPLITS": self.splits}


Operand = Tensor | MadeRow
