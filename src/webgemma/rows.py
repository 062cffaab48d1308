"""Rows of numbers as they come from a device, with numpy where there is one."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def rows_of(values: bytes, width: int) -> Any:
    """Float32 numbers as an array of rows or, without numpy, as a list of rows."""
    try:
        import numpy as np
    except ImportError:
        flat = memoryview(values).cast("f")
        return [flat[at : at + width] for at in range(0, len(flat), width)]
    return np.frombuffer(values, np.float32).reshape(-1, width)


def are_numbers(rows: Any, but: Sequence[int] = ()) -> bool:
    """Whether all are finite, except in columns `but`, which are at -inf."""
    if isinstance(rows, list):
        # A sum of float32 in float64 is finite if and only if all of them are.
        edges = sorted({-1, *but, len(rows[0])})
        return all(math.isfinite(sum(row[a + 1 : b])) for row in rows for a, b in pairwise(edges))
    import numpy as np

    wrong = ~np.isfinite(rows)
    wrong[:, list(but)] = False
    return not wrong.any()
