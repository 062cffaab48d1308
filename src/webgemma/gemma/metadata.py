"""Typed, range-checked access to GGUF metadata; GgufError for a missing or wrong value."""

import math
from collections.abc import Sequence

from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf

MAX_COUNT = 1 << 24  # far above every width, length and count of a Gemma
SMALLEST, LARGEST = 1.2e-38, 3.4e38  # that every device computes with: float32, not subnormal


class Metadata:
    """Metadata of a file under one key prefix ("gemma4.", "clip.vision.")."""

    def __init__(self, gguf: Gguf, prefix: str) -> None:
        self.gguf = gguf
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Return whether the file has this key."""
        return self.prefix + key in self.gguf.metadata

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer from `minimum` to MAX_COUNT."""
        return self._count(key, self._value(key, default), minimum)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        low: float = SMALLEST,
        high: float = LARGEST,
    ) -> float:
        """Return a positive number from `low` to `high`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value, "a finite number above zero")
        if not low <= value <= high:
            raise self._wrong(key, value, f"between {low:g} and {high:g}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def flags(self, key: str, length: int) -> list[bool]:
        """Return one boolean for each of `length` layers."""
        values = self._array(key, length)
        for value in values:
            if not isinstance(value, bool):
                raise self._wrong(key, value, "true or false for each layer")
        return [value is True for value in values]

    def counts(self, key: str, length: int) -> list[int]:
        """Return one integer for each of `length` layers; a single one applies to all."""
        value = self._value(key, None)
        if isinstance(value, int):
            return [self._count(key, value, 1)] * length
        return [self._count(key, item, 1) for item in self._array(key, length)]

    def _value(self, key: str, default: object) -> object:
        value = self.gguf.metadata.get(self.prefix + key, default)
        if value is None:
            raise GgufError(
                f"{self.gguf.name}: the metadata has no {self.prefix}{key}, which a Gemma model "
                "needs; the file is incomplete or its converter does not support this model."
            )
        return value

    def _count(self, key: str, value: object, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        if not minimum <= value <= MAX_COUNT:
            raise self._wrong(key, value, f"between {minimum} and {MAX_COUNT}")
        return value

    def _array(self, key: str, length: int) -> Sequence[object]:
        values = self._value(key, None)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise self._wrong(key, values, f"an array of {length} entries")
        if len(values) != length:
            raise GgufError(
                f"{self.gguf.name}: {self.prefix}{key} has {len(values)} entries "
                f"for {length} layers; the file contradicts itself."
            )
        return values

    def _wrong(self, key: str, value: object, expected: str) -> GgufError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return GgufError(f"{self.gguf.name}: {self.prefix}{key} is {shown}; it must be {expected}.")
