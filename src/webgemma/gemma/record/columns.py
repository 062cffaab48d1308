"""Some columns of rows, which products read and write."""

from typing import NamedTuple

from webgemma.graph import Argument, Tensor


class Columns(NamedTuple):
    """Some columns of a tensor's rows."""

    tensor: Tensor
    stride: int
    first: int

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments with which a product writes them."""
        return {"y": self.tensor, "stride": self.stride, "first_row": self.first}
