"""Quantisation of float32 weights to the ggml formats that webgemma writes."""

from collections.abc import Callable

import numpy as np

from webgemma.reference.weights import Floats

BLOCK = 32  # weights that share one scale


def f32(w: Floats) -> np.ndarray:
    """Return w."""
    return w.astype("<f4")


def f16(w: Floats) -> np.ndarray:
    """Return the nearest float16."""
    return w.astype("<f2")


def bf16(w: Floats) -> np.ndarray:
    """Return the nearest bfloat16, ties to even."""
    words = w.astype("<f4").view("<u4")
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")


def q8_0(w: Floats) -> np.ndarray:
    """Return d = max|w| / 127 and q = round(w / d)."""
    d: Floats = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    return _block_bytes(d, _round(w * _inverse(d)).astype(np.int8).view(np.uint8))


def q4_0(w: Floats) -> np.ndarray:
    """Return d = peak / −8 and q = min(15, ⌊w / d + 8.5⌋), peak being the w of largest |w|."""
    d: Floats = _peak(w) / np.float32(-8)
    q = np.minimum(15, np.trunc(w * _inverse(d) + 8.5)).astype(np.uint8)
    return _block_bytes(d, _nibbles(q))


def q5_0(w: Floats) -> np.ndarray:
    """Return d = peak / −16 and q = min(31, ⌊w / d + 16.5⌋), peak being the w of largest |w|."""
    d: Floats = _peak(w) / np.float32(-16)
    q = np.minimum(31, np.trunc(w * _inverse(d) + 16.5)).astype(np.uint8)
    high = np.packbits(q >> 4, axis=1, bitorder="little")
    return _block_bytes(d, high, _nibbles(q & 15))


QUANTISERS: dict[str, Callable[[Floats], np.ndarray]] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q5_0": q5_0,
}


def quantise(weights: Floats, format: str) -> bytes:
    """Return the bytes of rows whose width is a multiple of the format's block."""
    unscaled = format in ("F32", "F16", "BF16")
    blocks = weights if unscaled else weights.reshape(-1, BLOCK)
    return QUANTISERS[format](blocks.astype(np.float32, copy=False)).tobytes()


def _peak(w: Floats) -> Floats:
    """Return the weight of largest magnitude of each block, with its sign: (n, 1)."""
    at = np.abs(w).argmax(axis=1)[:, None]
    return np.take_along_axis(w, at, axis=1)


def _inverse(d: Floats) -> Floats:
    """Return 1 / d, and 0 where d is 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _round(x: Floats) -> Floats:
    """Return the nearest integers, halves rounded away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + np.float32(0.5))


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Return q of 4 bits packed in pairs: byte j holds q[j] and q[j + 16]."""
    return q[:, : BLOCK // 2] | (q[:, BLOCK // 2 :] << 4)


def _block_bytes(d: Floats, *parts: np.ndarray) -> np.ndarray:
    """Return the bytes of each block: d as a float16, then the parts."""
    return np.concatenate([d.astype("<f2").view(np.uint8), *parts], axis=1)
