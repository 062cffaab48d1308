"""A whole training: epochs of batches, a learning rate that follows a schedule, judgements."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count

from webgemma.errors import InputError
from webgemma.lora.data import Example, batches
from webgemma.lora.schedule import Schedule, Shape
from webgemma.lora.trainer import Guard, Step, Trainer


@dataclass(frozen=True, slots=True)
class Course:
    """How long, how fast and in which order an adapter learns from its examples."""

    rate: float = 2e-4
    epochs: int = 3
    accumulate: int = 1  # batches that make one step
    warmup: float = 0.03  # of all steps
    shape: Shape = "cosine"
    seed: int = 0
    total: int | None = None  # steps, in place of epochs

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.accumulate < 1:
            raise InputError("A training has at least one epoch, and a step one batch.")
        if not 0 <= self.warmup <= 1:
            raise InputError(f"The warm-up must be a share of the steps, not {self.warmup}.")
        if self.total is not None and self.total < 1:
            raise InputError(f"A training of {self.total} steps is none.")
        self.schedule(1)  # checks the rate and the shape

    def steps(self, examples: Sequence[Example], size: int) -> list[list[list[Example]]]:
        """The batches of every step, epoch after epoch."""
        made: list[list[list[Example]]] = []
        for epoch in count():
            if epoch >= self.epochs if self.total is None else len(made) >= self.total:
                break
            held = batches(examples, size, self.seed + epoch)
            many = self.accumulate
            made += [held[at : at + many] for at in range(0, len(held), many)]
        return made[: self.total]

    def schedule(self, steps: int) -> Schedule:
        """The learning rate of each of so many steps."""
        return Schedule(self.rate, steps, round(self.warmup * steps), self.shape)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training is after a step."""

    step: int  # the first is 1
    steps: int
    rate: float
    found: Step
    judged: float | None = None  # loss over the examples to judge by, where it was measured
    best: bool = False  # the lowest so far

    @property
    def perplexity(self) -> float | None:
        """Of the examples to judge by: e to their loss."""
        return None if self.judged is None else math.exp(min(self.judged, 700.0))


@dataclass(slots=True)
class Training:
    """Runs a course; whoever iterates may stop between steps, and later go on."""

    trainer: Trainer
    examples: Sequence[Example]
    judges: Sequence[Example] = ()
    course: Course = field(default_factory=Course)

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Step after step from where the trainer is; InputError when the loss goes astray."""
        size = self.trainer.options.sequences
        steps = self.course.steps(self.examples, size)
        schedule, guard, best = self.course.schedule(len(steps)), Guard(), math.inf
        judges = batches(self.judges, size, 0)
        every = max(1, len(steps) // self.course.epochs)
        for index in range(self.trainer.steps, len(steps)):
            rate = schedule.rate(index)
            found = await self.trainer.step(steps[index], rate)
            guard.watch(found)
            judged = None
            if judges and ((index + 1) % every == 0 or index + 1 == len(steps)):
                judged = await self.trainer.evaluate(judges)
            lowest = judged is not None and judged < best
            best = judged if lowest and judged is not None else best
            yield Progress(index + 1, len(steps), rate, found, judged, lowest)
