"""Conversion between types of numbers; BF16 and F16 are rounded to nearest, ties to even."""

from typing import Any

from webgemma.errors import GgufError
from webgemma.gguf.sources import Bytes

FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I32", "I64")


def cast_floats(data: Bytes, dtype: str, target: str, name: str) -> Bytes:
    """Return the values of tensor `name` in another type; GgufError if float16 cannot hold one."""
    if dtype == target:
        return data
    import numpy as np  # not installed in a browser, where nothing is converted

    values: Any
    if dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype("<f4")
    if target == "F32":
        return bytes(values)
    if target == "BF16":
        bits = values.view("<u4").astype("<u8")  # rounding up may carry beyond 32 bits
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        return bytes(rounded)
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise GgufError(f"{name} has numbers too large for float16; use bf16 or f32.")
    return bytes(halves)


def plus_one(data: Bytes) -> Bytes:
    """Return float32 values, each with 1 added."""
    import numpy as np

    return bytes(np.frombuffer(data, "<f4") + np.float32(1))


def cast_integers(data: Bytes, dtype: str, target: str, name: str) -> Bytes:
    """Return the values of tensor `name` as I32; GgufError if one needs more bits."""
    if dtype == target:
        return data
    import numpy as np

    values = np.frombuffer(data, "<i8")
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise GgufError(f"{name} has numbers too large for 32 bits: download the model again.")
    return bytes(values.astype("<i4"))
