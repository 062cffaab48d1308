"""AdamW and the clipping of gradients, from their definitions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from webgemma.reference.weights import Floats


def clip(gradients: Sequence[Floats], longest: float) -> float:
    """Shortens all gradients together, in place, to the longest length; what it was before."""
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients))
    if norm > longest:
        for gradient in gradients:
            gradient *= np.float32(longest / norm)
    return norm


@dataclass
class AdamW:
    """m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g²,
    w ← w − rate (m̂ / (√v̂ + eps) + decay · w), where m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    step: int = 0
    moments: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)

    def update(self, weights: Sequence[Floats], gradients: Sequence[Floats], rate: float) -> None:
        """One step of all weights, in place."""
        self.step += 1
        for index, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            if index not in self.moments:
                self.moments[index] = np.zeros_like(w), np.zeros_like(w)
            m, v = self.moments[index]
            m += (1 - self.beta1) * (g - m)
            v += (1 - self.beta2) * (g * g - v)
            bent = m / (1 - self.beta1**self.step)
            size = np.sqrt(v / (1 - self.beta2**self.step)) + self.eps
            w -= rate * (bent / size + self.decay * w)
