"""The schedule of a training: its steps, their batches, and the learning rate of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import cos, pi
from typing import Literal, get_args

from webgemma.errors import InputError
from webgemma.lora.data import Example, batches

Shape = Literal["cosine", "linear", "constant"]
MAX_STEPS = 1 << 22  # their batches are listed before the first one


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A linear warm-up to the peak, then a decay to `floor` of it along the shape."""

    peak: float
    steps: int
    warmup: int = 0  # steps
    shape: Shape = "cosine"
    floor: float = 0.0  # of the peak, at the last step

    def __post_init__(self) -> None:
        if not 0 < self.peak < 1:
            raise InputError(f"A learning rate must be above 0 and below 1, not {self.peak}.")
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            raise InputError(f"{self.warmup} steps of warm-up do not fit into {self.steps} steps.")
        if self.shape not in get_args(Shape):
            names = ", ".join(get_args(Shape))
            raise InputError(f"There is no schedule {self.shape!r}; choose one of {names}.")
        if not 0 <= self.floor <= 1:
            raise InputError(f"A schedule's floor must be from 0 to 1, not {self.floor}.")

    def at(self, step: int) -> float:
        """Return the learning rate of a step; the first is 0."""
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


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a training is, in which order it reads examples, and its learning rate."""

    learning_rate: float = 2e-4
    epochs: int = 3
    accumulate: int = 1  # batches whose gradients make one step
    warmup: float = 0.03  # share of all steps
    shape: Shape = "cosine"
    seed: int = 0
    max_steps: int | None = None  # instead of epochs

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.accumulate < 1:
            raise InputError("A training has at least one epoch, and a step at least one batch.")
        if not 0 <= self.warmup <= 1:
            raise InputError(f"The warm-up must be a share of the steps, not {self.warmup}.")
        if self.max_steps is not None and self.max_steps < 1:
            raise InputError(f"A training has at least one step, not {self.max_steps}.")
        self.learning_rates(1)  # checks the rate and the shape

    def steps(self, examples: Sequence[Example], batch_size: int) -> list[list[list[Example]]]:
        """Return the batches of every step, epoch after epoch; InputError if they are too many."""
        if not examples:
            raise InputError("There are no examples to train on.")
        steps: list[list[list[Example]]] = []
        for epoch in count():
            if epoch >= self.epochs if self.max_steps is None else len(steps) >= self.max_steps:
                break
            epoch_batches = batches(examples, batch_size, self.seed + epoch)
            starts = range(0, len(epoch_batches), self.accumulate)
            steps += [epoch_batches[at : at + self.accumulate] for at in starts]
            total = self.max_steps or self.epochs * len(starts)
            if total > MAX_STEPS:
                raise InputError(f"{total} steps are too many for a training: {MAX_STEPS} at most.")
        return steps[: self.max_steps]

    def learning_rates(self, steps: int) -> LearningRate:
        """Return the learning rate of each of so many steps."""
        warmup = round(self.warmup * steps)
        return LearningRate(self.learning_rate, steps, warmup, self.shape)
