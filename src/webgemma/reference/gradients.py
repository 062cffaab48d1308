"""The derivative of each operation of the text model: from dL/dy, written dy, to dL/dx."""

import math

import numpy as np

from webgemma.reference.text import rope, softmax
from webgemma.reference.weights import Floats


def rms_back(x: Floats, weight: Floats | None, eps: float, dy: Floats) -> Floats:
    """y = w x r with r = 1 / √(mean(x²) + eps): dx = r (g − x r² mean(g x)), g = w dy."""
    g = dy if weight is None else dy * weight
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return r * (g - x * (r * r * np.mean(g * x, axis=-1, keepdims=True)))


def gelu_slope(x: Floats) -> Floats:
    """½ (1 + t) + ½ x (1 − t²) u′ for t = tanh(u), u = √(2/π) (x + 0.044715 x³)."""
    root, cubic = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
    t = np.tanh(root * (x + cubic * x * x * x))
    inner = root * (1 + 3 * cubic * x * x)
    return np.float32(0.5) * (1 + t + x * (1 - t * t) * inner)


def rope_back(dy: Floats, angles: np.ndarray) -> Floats:
    """A rotation's derivative turns back."""
    return rope(dy, -angles)


def softmax_back(p: Floats, dp: Floats) -> Floats:
    """p = softmax(s): ds = p (dp − Σ p dp)."""
    return p * (dp - (p * dp).sum(axis=-1, keepdims=True))


def attend_back(
    q: Floats, k: Floats, v: Floats, window: int, dout: Floats
) -> tuple[Floats, Floats, Floats]:
    """From dL/d(softmax(q kᵀ) v) to dq [T, heads, d], dk and dv [T, kv_heads, d].

    The probabilities p are computed again: dv = pᵀ dout, ds = softmax_back(p, dout vᵀ),
    dq = ds k, dk = dsᵀ q, where a key-value head sums over the query heads that share it."""
    count, heads, size = q.shape
    shape = (count, k.shape[1], heads // k.shape[1], size)
    queries, douts = (x.reshape(shape).transpose(1, 2, 0, 3) for x in (q, dout))
    keys, values = (x.transpose(1, 0, 2)[:, None] for x in (k, v))  # [kv_heads, 1, T, d]
    at = np.arange(count)
    seen = (at <= at[:, None]) & (at > at[:, None] - window)
    scores = np.where(seen, queries @ keys.swapaxes(-1, -2), np.float32(-np.inf))
    p = softmax(scores)  # [kv_heads, group, T, T]
    ds = softmax_back(p, douts @ values.swapaxes(-1, -2))
    dq = (ds @ keys).transpose(2, 0, 1, 3).reshape(q.shape)
    dk = (ds.swapaxes(-1, -2) @ queries).sum(axis=1).transpose(1, 0, 2)
    dv = (p.swapaxes(-1, -2) @ douts).sum(axis=1).transpose(1, 0, 2)
    return dq, dk, dv


def cross_entropy(z: Floats, targets: np.ndarray, cap: float) -> tuple[Floats, Floats]:
    """−ln softmax(cap · tanh(z / cap))[target] of each row of z [n, vocab], and its dz."""
    bend = np.tanh(z / np.float32(cap))
    logits = np.float32(cap) * bend
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    rows = np.arange(len(z))
    dlogits = np.exp(logs)
    dlogits[rows, targets] -= 1
    return -logs[rows, targets], dlogits * (1 - bend * bend)
