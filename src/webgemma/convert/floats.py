"""Floats from one type to another: BF16 and F16 are rounded to the nearest, ties to even."""

from typing import Any

from webgemma.errors import GgufError
from webgemma.gguf.sources import Bytes

FLOATS = ("F32", "F16", "BF16")


def stored_as(data: Bytes, dtype: str, target: str, name: str) -> Bytes:
    """The values of a tensor in another type; GgufError where one is too large for it."""
    if dtype == target:
        return data
    import numpy as np  # natively only, as all of converting

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
        raise GgufError(f"{name} holds numbers that float16 cannot; take bf16 or f32.")
    return bytes(halves)
