"""Activations quantised to integers, which the large products read instead of floats."""

from dataclasses import dataclass
from typing import Literal

from webgemma.errors import InputError
from webgemma.gguf.formats import Format
from webgemma.graph import Tensor
from webgemma.values import shown

GROUP = 32  # values that share a scale
VALUE_NBYTES = {"int16": 2, "int8": 1}
GROUP_NBYTES = {name: GROUP * nbytes + 16 for name, nbytes in VALUE_NBYTES.items()}

Slot = Literal["input", "input_vec4", "store", "store_row", "tile"]


@dataclass(eq=False, slots=True)
class QuantisedTensor(Tensor):
    """Rows of integers in groups of 32: of each group the values, then a scale and two sums."""

    precision: str = "int16"

    @classmethod
    def scratch(cls, rows: int, width: int, precision: str) -> "QuantisedTensor":
        """Return a scratch tensor."""
        nbytes = rows * width // GROUP * GROUP_NBYTES[precision]
        return cls((rows, width), nbytes, precision=precision)


def providers(slot: Slot, tensor: Tensor) -> dict[str, str]:
    """Return the providers with which a kernel reads or writes a tensor through this slot."""
    if isinstance(tensor, QuantisedTensor):
        return {slot: "integer", "integer_width": tensor.precision}
    return {slot: "float"}


def choose_precision(precision: str, software: bool) -> str:
    """Resolve "auto": int16, but exact on a software GPU, which int16 makes no faster."""
    if not isinstance(precision, str) or precision not in ("auto", "exact", *VALUE_NBYTES):
        raise InputError(
            f"The precision {shown(precision)} does not exist; use auto, exact, int16 or int8."
        )
    if precision == "auto":
        return "exact" if software else "int16"
    return precision


def multiplies_integers(fmt: Format) -> bool:
    """Return whether a format has a product of integers; float formats have none."""
    return fmt.block > 1
