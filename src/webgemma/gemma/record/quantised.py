"""Activations as integers: what the big products read instead of floats."""

from dataclasses import dataclass

from webgemma.errors import InputError
from webgemma.gguf.formats import Format
from webgemma.graph import Tensor

GROUP = 32  # values with one scale
VALUE_NBYTES = {"int16": 2, "int8": 1}
GROUP_NBYTES = {name: GROUP * nbytes + 16 for name, nbytes in VALUE_NBYTES.items()}


@dataclass(eq=False, slots=True)
class Integers(Tensor):
    """Rows of values in groups of 32, as integer.wgsl reads them; `precision` is their size."""

    precision: str = "int16"

    @classmethod
    def of(cls, shape: tuple[int, int], precision: str) -> "Integers":
        """A scratch tensor: of each group the integers, then a scale and two sums."""
        rows, width = shape
        return cls(shape, rows * width // GROUP * GROUP_NBYTES[precision], precision=precision)


def chosen_precision(precision: str, software: bool) -> str:
    """What is asked for; "auto" is int16, but exact in software, which int16 makes no faster."""
    if precision == "auto":
        return "exact" if software else "int16"
    if precision != "exact" and precision not in VALUE_NBYTES:
        raise InputError(f"There is no precision {precision!r}; choose auto, exact, int16 or int8.")
    return precision


def multiplies_integers(fmt: Format) -> bool:
    """Whether there is a formats/integer/ file; weights that are floats themselves have none."""
    return fmt.block > 1


def pieces_of(role: str, tensor: Tensor) -> tuple[str, ...]:
    """What of lib/ reads a tensor ("x", "tile", "four") or writes it ("put", "row") in its form."""
    if not isinstance(tensor, Integers):
        return (f"{role}_float",)
    below = {
        "row": ("eight", "put_integer"),
        "put": ("eight",),
        "x": ("integer",),
        "tile": ("integer",),
        "four": (),
    }[role]
    return tensor.precision, *below, f"{role}_integer"
