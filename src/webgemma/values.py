"""Values that callers give: numbers of any kind as plain ones, and any value in a message."""

import reprlib
from numbers import Integral, Real
from typing import Any

MAX_PATH = 300  # characters in a message

_REPR = reprlib.Repr()
_REPR.maxlevel = 3  # objects may share parts, or contain themselves
_REPR.maxstring = _REPR.maxother = 80


def shown(value: object) -> str:
    """Return a short repr of any value, for a message."""
    try:
        return _REPR.repr(value)
    except Exception:  # Python does not print integers of thousands of digits
        return f"a value of type {type(value).__name__}"


def shortened(path: object) -> str:
    """Return a path for a message: as it is, unless it is very long."""
    text = str(path)
    return text if len(text) <= MAX_PATH else f"{text[:MAX_PATH]}…"


def whole_number(value: Any) -> int | None:
    """Return a whole number of any type, such as numpy's, as an int; None for anything else."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def real_number(value: Any) -> float | None:
    """Return a number of any type as a finite float; None for anything else."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None
