"""Turn float32 weights into the bytes of a tensor, for the formats whose rule is short."""

from collections.abc import Callable

import numpy as np

from webgemma.reference.weights import Floats

BLOCK = 32  # weights with one scale


def f32(w: Floats) -> np.ndarray:
    """As they are."""
    return w.astype("<f4")


def f16(w: Floats) -> np.ndarray:
    """The nearest float16."""
    return w.astype("<f2")


def bf16(w: Floats) -> np.ndarray:
    """The nearest bfloat16, ties to even."""
    words = w.astype("<f4").view("<u4")
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")


def q8_0(w: Floats) -> np.ndarray:
    """d = largest / 127, then q = round(w / d)."""
    d: Floats = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    return _joined(d, _away(w * _inverse(d)).astype(np.int8).view(np.uint8))


def q4_0(w: Floats) -> np.ndarray:
    """d = (what is largest in size) / −8, then q = ⌊w / d + 8.5⌋ up to 15."""
    d: Floats = _peak(w) / np.float32(-8)
    q = np.minimum(15, np.trunc(w * _inverse(d) + 8.5)).astype(np.uint8)
    return _joined(d, _nibbles(q))


def q5_0(w: Floats) -> np.ndarray:
    """d = (what is largest in size) / −16, then q = ⌊w / d + 16.5⌋ up to 31."""
    d: Floats = _peak(w) / np.float32(-16)
    q = np.minimum(31, np.trunc(w * _inverse(d) + 16.5)).astype(np.uint8)
    high = np.packbits(q >> 4, axis=1, bitorder="little")
    return _joined(d, high, _nibbles(q & 15))


QUANTISERS: dict[str, Callable[[Floats], np.ndarray]] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q5_0": q5_0,
}


def quantise(weights: Floats, format: str) -> bytes:
    """The bytes of whole rows; their width is a multiple of the format's block."""
    plain = format in ("F32", "F16", "BF16")
    blocks = weights if plain else weights.reshape(-1, BLOCK)
    return QUANTISERS[format](blocks.astype(np.float32, copy=False)).tobytes()


def _peak(w: Floats) -> Floats:
    at = np.abs(w).argmax(axis=1)[:, None]
    return np.take_along_axis(w, at, axis=1)


def _inverse(d: Floats) -> Floats:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _away(x: Floats) -> Floats:
    """Rounded, halves away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + np.float32(0.5))


def _nibbles(q: np.ndarray) -> np.ndarray:
    return q[:, : BLOCK // 2] | (q[:, BLOCK // 2 :] << 4)


def _joined(d: Floats, *parts: np.ndarray) -> np.ndarray:
    return np.concatenate([d.astype("<f2").view(np.uint8), *parts], axis=1)
