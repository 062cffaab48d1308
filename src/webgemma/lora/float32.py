"""Arrays of float32 without numpy: converted from the formats that files store, and transposed."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

from webgemma.gguf.sources import Bytes

ELEMENT_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}


def to_float32(data: Bytes, format: str) -> bytes:
    """Convert numbers of a format to little-endian float32."""
    data = bytes(data)
    if format == "F32":
        return data
    if format == "BF16":  # a bfloat16 is the upper half of a float32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return bytes(wide)
    count = len(data) // 2
    return struct.pack(f"<{count}f", *struct.unpack(f"<{count}e", data))


def transposed(data: bytes, rows: int, columns: int) -> bytes:
    """Return a float32 matrix [rows, columns] as [columns, rows]."""
    words, result = array("I", data), array("I", bytes(len(data)))
    assert len(words) == rows * columns
    if columns < rows:
        for column in range(columns):
            result[column * rows : (column + 1) * rows] = words[column::columns]
    else:
        for row in range(rows):
            result[row::rows] = words[row * columns : (row + 1) * columns]
    return result.tobytes()


def scaled(data: bytes, factor: float) -> bytes:
    """Multiply every number by a factor."""
    return pack_floats(factor * value for value in unpack_floats(data)) if factor != 1 else data


def unpack_floats(data: bytes) -> array[float]:
    """Return the numbers of little-endian float32."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_floats(values: Iterable[float]) -> bytes:
    """Return numbers as little-endian float32."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
