"""Sums of a product whose k was split among workgroups, for its reader to add up."""

from dataclasses import dataclass

from webgemma.graph import Tensor


@dataclass(eq=False, slots=True)
class SplitSums(Tensor):
    """Rows as sums over parts of k: all rows of the first part, then those of the next.

    Who reads them adds the parts up in this order, which saves a dispatch that does only that."""

    splits: int = 1

    @classmethod
    def scratch(cls, splits: int, rows: int, width: int) -> "SplitSums":
        """Return a scratch tensor."""
        return cls((rows, width), 4 * splits * rows * width, splits=splits)


def splits_of(tensor: Tensor) -> int:
    """Return the parts of k that a reader of a tensor adds up: 1 where all is added up."""
    return tensor.splits if isinstance(tensor, SplitSums) else 1
