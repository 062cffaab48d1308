"""A whole training by a schedule: its steps, its checkpoints, and how it continues from one."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from webgemma.errors import GgufError, InputError
from webgemma.gguf.safetensors import Safetensors
from webgemma.lora.checkpoint import (
    Checkpoint,
    Facts,
    read_checkpoint,
    training_facts,
    write_checkpoint,
)
from webgemma.lora.data import Example, batches
from webgemma.lora.schedule import Schedule
from webgemma.lora.trainer import StepResult, Trainer


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where a training writes checkpoints, each in place of the one before, and how often.

    One that cannot be written does not end the training: the one before stays, and the next is
    tried in its turn. `report` is called with the step and the error, or None if it was written;
    without it, an error is a warning."""

    path: str | os.PathLike[str]
    steps: int | None = None  # after so many steps,
    minutes: float | None = 5.0  # and when so much time has passed
    notes: Facts | None = None  # JSON that is stored with each
    report: Callable[[int, GgufError | None], None] | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise InputError(f"There is a checkpoint after at least 1 step, not {self.steps}.")
        if self.minutes is not None and not (0 < self.minutes < math.inf):
            raise InputError(f"Checkpoints are some minutes apart, not {self.minutes}.")

    def due(self, steps: int, seconds: float) -> bool:
        """Return whether it is time for one, so long after the one before."""
        by_steps = self.steps is not None and steps >= self.steps
        return by_steps or (self.minutes is not None and seconds >= 60 * self.minutes)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a training is after a step."""

    step: int  # the first is 1
    steps: int
    learning_rate: float
    result: StepResult
    held_out_loss: float | None = None  # where it was measured
    best: bool = False  # the lowest so far

    @property
    def perplexity(self) -> float | None:
        """e to the held-out loss."""
        return None if self.held_out_loss is None else math.exp(min(self.held_out_loss, 700.0))


class Training:
    """Trains on examples by a schedule; between two steps it can be saved, to continue later.

    A training that is continued computes what it would have computed without the interruption: to
    the bit, on a device that repeats a training to the bit (some add in an order that varies)."""

    def __init__(
        self,
        trainer: Trainer,
        examples: Sequence[Example],
        held_out: Sequence[Example] = (),
        schedule: Schedule | None = None,
    ) -> None:
        self.trainer = trainer
        self.examples, self.held_out = examples, held_out
        self.schedule = schedule or Schedule()
        self.losses: list[float] = []
        self.held_out_losses: list[float] = []

    async def run(
        self, checkpoints: Checkpoints | None = None
    ) -> AsyncGenerator[TrainingProgress, None]:
        """Yield step after step from where the trainer is; the caller may stop between steps.

        A checkpoint is written after the caller has seen the step. InputError if the loss
        diverges."""
        trainer, batch_size = self.trainer, self.trainer.options.batch_size
        steps = self.schedule.steps(self.examples, batch_size)
        learning_rates, divergence = self.schedule.learning_rates(len(steps)), Divergence()
        for past in self.losses:
            divergence.add(past)
        held_out_batches = batches(self.held_out, batch_size, 0)
        every = max(1, len(steps) // self.schedule.epochs)
        saved, saved_at = trainer.steps, time.monotonic()
        for index in range(trainer.steps, len(steps)):
            learning_rate = learning_rates.at(index)
            result = await trainer.step(steps[index], learning_rate)
            divergence.check(result)
            self.losses.append(result.loss)
            loss, best = None, False
            if held_out_batches and ((index + 1) % every == 0 or index + 1 == len(steps)):
                loss = await trainer.evaluate(held_out_batches)
                best = loss < min(self.held_out_losses, default=math.inf)
                self.held_out_losses.append(loss)
            yield TrainingProgress(index + 1, len(steps), learning_rate, result, loss, best)
            since = (index + 1 - saved, time.monotonic() - saved_at)
            if checkpoints is not None and index + 1 < len(steps) and checkpoints.due(*since):
                await self._try_save(checkpoints)
                saved, saved_at = index + 1, time.monotonic()

    async def save(self, path: str | os.PathLike[str], notes: Facts | None = None) -> None:
        """Write a checkpoint in place of the one before; GgufError, and that one stays, if not."""
        write_checkpoint(
            path,
            self.trainer.steps,
            await self.trainer.state(),
            self.losses,
            self.held_out_losses,
            self.facts,
            notes,
        )

    def restore(self, checkpoint: Checkpoint | str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; InputError if it is of another model, data or settings."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = read_checkpoint(checkpoint)
        checkpoint.check(self.facts)
        total = len(self.schedule.steps(self.examples, self.trainer.options.batch_size))
        if checkpoint.step > total:
            raise GgufError(f"{checkpoint.path} has {checkpoint.step} steps of {total}.")
        with Safetensors.open(checkpoint.path) as file:
            self.trainer.restore(file, checkpoint.step)
        self.losses = list(checkpoint.losses)
        self.held_out_losses = list(checkpoint.held_out_losses)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What has to be the same when it is continued."""
        trainer = self.trainer
        given = (trainer.parameters.adapter, trainer.options, self.schedule)
        facts = training_facts(*given, self.examples, self.held_out)
        return facts | {"model": trainer.model.fingerprint}

    async def _try_save(self, checkpoints: Checkpoints) -> None:
        problem: GgufError | None = None
        try:
            await self.save(checkpoints.path, checkpoints.notes)
        except GgufError as error:
            problem = error
        if checkpoints.report is not None:
            checkpoints.report(self.trainer.steps, problem)
        elif problem is not None:
            warnings.warn(f"No checkpoint of step {self.trainer.steps}: {problem}", stacklevel=2)


async def train(
    trainer: Trainer,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    schedule: Schedule | None = None,
    checkpoints: Checkpoints | None = None,
) -> AsyncGenerator[TrainingProgress, None]:
    """Yield the steps of a `Training` that is not continued later, or only by its checkpoints."""
    async for progress in Training(trainer, examples, held_out, schedule).run(checkpoints):
        yield progress


class Divergence:
    """Recognises a training that diverges."""

    def __init__(self) -> None:
        self.best = math.inf
        self._recent: list[float] = []

    def add(self, loss: float) -> float:
        """Add a step's loss; return the mean of the last ten, or 0 while there are fewer."""
        self._recent = [*self._recent, loss][-10:]
        mean = sum(self._recent) / len(self._recent)
        if len(self._recent) < 10:
            return 0.0
        if mean <= 2 * self.best + 3:
            self.best = min(self.best, mean)
        return mean

    def check(self, result: StepResult) -> None:
        """Raise InputError if the loss is not finite, or stays far above the best so far."""
        if not math.isfinite(result.loss + result.gradient_norm):
            raise InputError("The loss is not finite any more: use a smaller learning rate.")
        mean = self.add(result.loss)
        if mean > 2 * self.best + 3:
            raise InputError(
                f"The loss rose from {self.best:.2f} to {mean:.2f}: use a smaller learning rate."
            )
