"""AdamW on a device: each weight's moments beside it, gradients shortened together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link

THREADS = 256
PACE_NBYTES = 16  # of what `pace` gives


class Trained(NamedTuple):
    """Weights that learn: [count] each, the moments [count, 2]."""

    weights: Tensor
    gradients: Tensor
    moments: Tensor


@dataclass(frozen=True, slots=True)
class AdamW:
    """The constants of adamw.wgsl."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    longest: float = 1.0  # that all gradients together may be

    def pace(self, step: int, rate: float) -> tuple[float, float, float]:
        """What a step is told, the first being 1: its rate, 1 − β₁ᵗ and 1 − β₂ᵗ."""
        return rate, 1 - self.beta1**step, 1 - self.beta2**step

    def record(
        self, recorder: Recorder, pace: Tensor, trained: Sequence[Trained], squares: Tensor
    ) -> None:
        """One step of all weights; `squares` has room for a number of each of them."""
        features = recorder.device.features
        constants = {"THREADS": THREADS}
        length = link("squares", features, constants=constants, pieces=("sum",))
        step = link("adamw", features, constants=constants, pieces=("sum",))
        for slot, each in enumerate(trained):
            params = [each.weights.nbytes // 4, slot]
            recorder.call(length, (1,), params, each.gradients, squares)
        numbers = [float(x) for x in (self.beta1, self.beta2, self.eps, self.decay, self.longest)]
        for each in trained:
            count = each.weights.nbytes // 4
            groups = -(-count // THREADS)
            grid = (min(groups, 32768), -(-groups // 32768))
            tensors = (pace, squares, each.gradients, each.weights, each.moments)
            recorder.call(step, grid, [count, len(trained), *numbers], *tensors)
