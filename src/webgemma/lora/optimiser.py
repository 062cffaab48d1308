"""AdamW over a Recorder: all gradients clipped together, then every number of an adapter moves."""

from __future__ import annotations

from dataclasses import dataclass

from webgemma.device import Plan
from webgemma.errors import InputError
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.lora.parameters import Parameters

THREADS, EACH = 256, 64  # of a workgroup that adds up squares, and how many each thread takes


@dataclass(frozen=True, slots=True)
class AdamW:
    """Its constants; the learning rate comes with every step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    longest: float = 1.0  # of all gradients together

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps > 0):
            raise InputError("AdamW's betas must be from 0 to below 1, its eps above 0.")
        if not (self.decay >= 0 and self.longest > 0):
            raise InputError("The weight decay must not be negative, the clipping length above 0.")

    def left(self, step: int) -> tuple[float, float]:
        """What the moments still lack after so many steps: 1 − βᵗ of each."""
        return 1 - self.beta1**step, 1 - self.beta2**step

    def plan(self, parameters: Parameters, pace: Tensor, length: Tensor) -> Plan:
        """One step of all parameters; `length` becomes that of all gradients before clipping."""
        recorder, features = Recorder(parameters.device), parameters.device.features
        counts = [slab.nbytes // 4 for slab in parameters.slabs]
        groups = [-(-count // (THREADS * EACH)) for count in counts]
        sums = recorder.scratch(sum(groups))
        shape = {"THREADS": THREADS, "EACH": EACH}
        squares = link("squares", features, constants=shape, pieces=("sum",))
        for i, slab in enumerate(parameters.slabs):
            params = [counts[i], sum(groups[:i])]
            recorder.call(squares, (groups[i],), params, slab.tensors()[1], sums)
        total = link("length", features, constants={"THREADS": THREADS}, pieces=("sum",))
        recorder.call(total, (1,), [sum(groups)], sums, length)
        move = link("adamw", features, constants={"THREADS": THREADS}, pieces=("pace", "finite"))
        numbers = [self.beta1, self.beta2, self.eps, self.decay, self.longest]
        for slab, count in zip(parameters.slabs, counts, strict=True):
            wanted = -(-count // THREADS)
            grid = (min(wanted, 32768), -(-wanted // 32768))
            recorder.call(move, grid, [count, *map(float, numbers)], pace, length, *slab.tensors())
        return recorder.plan()
