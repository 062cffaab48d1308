"""The precision of activations in products: which there are, and which a device multiplies best."""

from webgemma.device import Device
from webgemma.errors import InputError
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.values import shown

PRECISIONS = ("auto", "exact", "int16", "int8", "f16")
TRAINING_PRECISIONS = ("auto", "exact", "f16")


def check_precision(precision: str) -> None:
    """Raise InputError unless there is such a precision."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise InputError(
            f"The precision {shown(precision)} does not exist; use auto, exact, int16, int8 or f16."
        )


def choose_precision(precision: str, device: Device) -> str:
    """Resolve "auto", and what a device cannot do.

    It is f16 on a GPU with matrix units, else int16; exact on a software GPU, which neither makes
    faster. Without matrix units, f16 becomes int16, which is as precise or better."""
    check_precision(precision)
    has_units = MatrixUnits.of(device) is not None
    if precision == "auto":
        precision = "exact" if device.software else "f16"
    return "int16" if precision == "f16" and not has_units else precision


def check_training_precision(precision: str) -> None:
    """Raise InputError unless training has such a precision."""
    if not isinstance(precision, str) or precision not in TRAINING_PRECISIONS:
        raise InputError(f"Training has no precision {shown(precision)}; use auto, exact or f16.")


def choose_training_precision(precision: str, device: Device) -> str:
    """Return the precision of a `Matmul` for training: exact, split or f16.

    On matrix units, "auto" splits factors into two float16, which keeps the gradients of float32;
    "f16" rounds them to one, which is faster. Without them both are exact, and so is "auto" on a
    software GPU."""
    check_training_precision(precision)
    if precision == "exact" or MatrixUnits.of(device) is None:
        return "exact"
    if precision == "auto":
        return "exact" if device.software else "split"
    return precision
