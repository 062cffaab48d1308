"""Activations in the forms that large products read instead of float32: integers, or float16."""

from dataclasses import dataclass
from typing import Literal

from webgemma.gguf.formats import Format
from webgemma.graph import Argument, Tensor

HALVES = ("F16", "BF16")  # formats with no more bits than float16 has; of weights, it has the range
GROUP = 32  # values that share a scale
GROUPS = 8  # that are stored together
VALUE_NBYTES = {"int16": 2, "int8": 1}
GROUP_NBYTES = {name: GROUP * nbytes + 16 for name, nbytes in VALUE_NBYTES.items()}

Slot = Literal["input", "input_vec4", "store", "store_row", "tile"]


@dataclass(eq=False, slots=True)
class QuantisedTensor(Tensor):
    """Rows of integers in groups of 32: of each group the values, then a scale and two sums.

    Eight groups are stored together: see group_place/planes.wgsl."""

    precision: str = "int16"

    @classmethod
    def scratch(cls, rows: int, width: int, precision: str) -> "QuantisedTensor":
        """Return a scratch tensor."""
        groups = -(-rows * width // GROUP // GROUPS) * GROUPS
        return cls((rows, width), groups * GROUP_NBYTES[precision], precision=precision)


@dataclass(eq=False, slots=True)
class HalfTensor(Tensor):
    """Rows of float16, then a scale of each row: see round_f16.wgsl.

    If it is split, each row is followed by what its float16 leave, in float16 again."""

    split: bool = False

    @classmethod
    def scratch(cls, rows: int, width: int, *, split: bool = False) -> "HalfTensor":
        """Return a scratch tensor."""
        return cls((rows, width), (2 << split) * rows * width + 4 * rows, split=split)

    @property
    def unscaled(self) -> dict[str, Argument]:
        """The arguments with which a kernel stores values that need no scale: see store/half."""
        rows, width = self.shape
        return {"store": "half", "h_rows": rows, "h_vec4s": width // 4}

    def arguments(
        self, fmt: Format, first: int = 0, *, split: bool | None = None
    ) -> dict[str, Argument]:
        """Return how matrix units read it, from column `first` on, and a weight of this format.

        A weight is split, too, or if `split` says so, unless its values are float16 themselves."""
        rows, width = self.shape
        shape = {"x_rows": rows, "x_width": width, "x_first": first}
        split_weight = (self.split if split is None else split) and fmt.name not in HALVES
        return {"x": self, **shape, "SPLIT_X": self.split, "SPLIT_W": split_weight}


def providers(slot: Slot, tensor: Tensor) -> dict[str, str]:
    """Return the providers with which a kernel reads or writes a tensor through this slot.

    A tile of a product also decides how it is multiplied."""
    if slot == "tile":
        if isinstance(tensor, HalfTensor):
            return {"tiled_product": "matrix_units"}
        return {"tiled_product": "slices", **_forms(slot, tensor)}
    return _forms(slot, tensor)


def _forms(slot: Slot, tensor: Tensor) -> dict[str, str]:
    if isinstance(tensor, QuantisedTensor):
        return {slot: "integer", "integer_width": tensor.precision}
    return {slot: "float"}


def multiplies_integers(fmt: Format) -> bool:
    """Return whether a format has a product of integers; float formats have none."""
    return fmt.block > 1
