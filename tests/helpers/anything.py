"""Values of every wrong kind, for whatever takes values from callers."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st


class Unprintable:
    """An object without a repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def shared(depth: int) -> list[Any]:
    """Return lists that share their parts: 2^depth of them when they are written."""
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list …"""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

PLAIN: list[Any] = [
    *(None, True, False, 0, 1, 3, -1, 2**31, 2**64, 10**31, 10**400, -(10**400)),
    *(0.5, 1.5, -1.0, 1e300, math.nan, math.inf, -math.inf, 1j),
    *("", "a", "5", "a\0b", "\ud800", "x" * 10**6, b"", b"x", bytearray(b"x"), memoryview(b"x")),
    *([], [1], (), (1,), {}, {1}, {"a": 1}, {1: None}, {1.5: 1}, [None], [[1]], range(3)),
    *(np.int64(3), np.float32(0.5), np.bool_(True), np.str_("a"), np.array(3), np.array([1, 2])),
    *(np.zeros((2, 2)), np.zeros((2, 2, 3), np.uint8), np.array(["a"]), np.array([None])),
    *(object(), int, len, iter([1])),
]
# Those that cannot be printed, or only in hours, too.
ODD = [*PLAIN, 10**5000, [10**5000], Unprintable(), shared(40), nested(100_000), ENDLESS]
ANYTHING: st.SearchStrategy[Any] = (
    st.sampled_from(PLAIN)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers() | st.none() | st.text(max_size=2), max_size=3)
    | st.dictionaries(st.integers() | st.text(max_size=2), st.floats() | st.none(), max_size=3)
)
