"""AdamW optimiser and gradient clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from webgemma.reference.weights import Floats


def clip_gradients(gradients: Sequence[Floats], max_norm: float) -> float:
    """Scale all gradients, in place, by min(1, max_norm / ‖g‖); return ‖g‖ before.

    ‖g‖ = √(Σ g²) is the norm over all gradients together."""
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients))
    if norm > max_norm:
        for gradient in gradients:
            gradient *= np.float32(max_norm / norm)
    return norm


@dataclass
class AdamW:
    """Adam with decoupled weight decay. Step t changes each weight w by its gradient g:

    m ← β₁ m + (1 − β₁) g,  m̂ = m / (1 − β₁ᵗ)
    v ← β₂ v + (1 − β₂) g²,  v̂ = v / (1 − β₂ᵗ)
    w ← w − rate (m̂ / (√v̂ + eps) + decay · w)"""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    step: int = 0  # t, the number of updates made
    moments: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)  # m and v by index

    def update(self, weights: Sequence[Floats], gradients: Sequence[Floats], rate: float) -> None:
        """Change all weights, in place, by one step at a learning rate."""
        self.step += 1
        for index, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            if index not in self.moments:
                self.moments[index] = np.zeros_like(w), np.zeros_like(w)
            m, v = self.moments[index]
            m += (1 - self.beta1) * (g - m)
            v += (1 - self.beta2) * (g * g - v)
            m_hat = m / (1 - self.beta1**self.step)
            v_hat = v / (1 - self.beta2**self.step)
            w -= rate * (m_hat / (np.sqrt(v_hat) + self.eps) + self.decay * w)
