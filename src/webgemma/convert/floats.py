"""Conversion between float types; BF16 and F16 are rounded to nearest, ties to even."""

from typing import Any

from webgemma.errors import GgufError
from webgemma.gguf.sources import Bytes

FLOATS = ("F32", "F16", "BF16")


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
