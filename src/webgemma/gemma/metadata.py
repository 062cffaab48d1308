"""Typed, range-checked access to metadata: a wrong value ends in a sentence, not a wrong model."""

import math
from collections.abc import Sequence

from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf

LARGEST_COUNT = 1 << 24  # no width, length or number of anything in a Gemma 4 comes near it


class Metadata:
    """The keys of one file under one prefix ("gemma4.", "clip.vision.")."""

    def __init__(self, gguf: Gguf, prefix: str) -> None:
        self.gguf = gguf
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the file says anything under this key."""
        return self.prefix + key in self.gguf.metadata

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        return self._count(key, self._value(key, default), least)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite, positive number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value, "a finite number above zero")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def flags(self, key: str, length: int) -> list[bool]:
        """One true or false for each layer."""
        values = self._array(key, length)
        for value in values:
            if not isinstance(value, bool):
                raise self._wrong(key, value, "true or false for each layer")
        return [value is True for value in values]

    def counts(self, key: str, length: int) -> list[int]:
        """One whole number for each layer; a single number stands for all of them."""
        value = self._value(key, None)
        if isinstance(value, int):
            return [self._count(key, value, 1)] * length
        return [self._count(key, item, 1) for item in self._array(key, length)]

    def _value(self, key: str, default: object) -> object:
        value = self.gguf.metadata.get(self.prefix + key, default)
        if value is None:
            raise GgufError(
                f"{self.gguf.name}: the metadata has no {self.prefix}{key}, which a Gemma 4 model "
                "needs; the file is incomplete or its converter does not know Gemma 4."
            )
        return value

    def _count(self, key: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        if not least <= value <= LARGEST_COUNT:
            raise self._wrong(key, value, f"between {least} and {LARGEST_COUNT}")
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

    def _wrong(self, key: str, value: object, wanted: str) -> GgufError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return GgufError(f"{self.gguf.name}: {self.prefix}{key} is {shown}; it must be {wanted}.")
