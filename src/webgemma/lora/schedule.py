"""How the learning rate goes from step to step."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal, get_args

from webgemma.errors import InputError

Shape = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A straight warm-up to the peak, then down to `floor` of it along the shape."""

    peak: float
    steps: int
    warmup: int = 0
    shape: Shape = "cosine"
    floor: float = 0.0  # of the peak, at the last step

    def __post_init__(self) -> None:
        if not 0 < self.peak < 1:
            raise InputError(f"A learning rate must be above 0 and below 1, not {self.peak}.")
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            raise InputError(f"{self.warmup} steps of warm-up do not fit into {self.steps} steps.")
        if self.shape not in get_args(Shape):
            names = ", ".join(get_args(Shape))
            raise InputError(f"There is no schedule {self.shape!r}; take one of {names}.")
        if not 0 <= self.floor <= 1:
            raise InputError(f"A schedule's floor must be from 0 to 1, not {self.floor}.")

    def rate(self, step: int) -> float:
        """The learning rate of a step; the first is 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        last = max(1, self.steps - 1 - self.warmup)
        done = min(1.0, (step - self.warmup) / last)
        match self.shape:
            case "cosine":
                left = (1 + cos(pi * done)) / 2
            case "linear":
                left = 1 - done
            case "constant":
                left = 1.0
        return self.peak * (self.floor + (1 - self.floor) * left)
