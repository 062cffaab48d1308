"""How a canvas of noise becomes text: the schedule, what each step leaves, the random numbers."""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from webgemma.errors import InputError
from webgemma.sampler import Chosen, bits

MOST_STEPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """The schedule of a block, DiffusionGemma's own unless told otherwise.

    Each step divides the canvas's logits by a temperature that falls from `t_max` to almost
    `t_min`, draws a token for each position, and keeps those of the least entropy: as many as
    have at most `entropy_bound` nats before them. The others become noise again. A block ends
    after `steps`, or when the likeliest tokens have stayed the same for `stability_threshold`
    steps and the mean entropy is below `confidence_threshold`."""

    steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    def __post_init__(self) -> None:
        for item in fields(self):
            low, high = _RANGES[item.name]
            _check(item.name, getattr(self, item.name), item.type is int, low, high)

    def temperature(self, step: int) -> float:
        """That of a step, counted from 1."""
        left = (self.steps - step + 1) / self.steps
        return self.t_min + (self.t_max - self.t_min) * left


_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, MOST_STEPS),
    "entropy_bound": (0, 1e9),
    "t_min": (1e-3, 100),
    "t_max": (1e-3, 100),
    "stability_threshold": (0, MOST_STEPS),
    "confidence_threshold": (0, 1e9),
}


class Canvas(NamedTuple):
    """What a denoising step leaves."""

    block: int  # counted from 0
    step: int  # counted from 1
    ids: tuple[int, ...]  # what the next step looks at: drawn tokens and noise
    accepted: tuple[bool, ...]  # which of them are drawn tokens
    best: tuple[int, ...]  # the likeliest tokens: the block's text, once it is done
    logprobs: tuple[float, ...]  # of those, before temperature
    entropy: float  # the mean over all positions, in nats
    done: bool  # whether this was the block's last step


async def tokens_of(
    canvases: AsyncIterator[Canvas], watch: bool = False
) -> AsyncIterator[Chosen | Canvas]:
    """The tokens of each block when it is done; with `watch`, every canvas before them."""
    async for canvas in canvases:
        if watch:
            yield canvas
        if canvas.done:
            for token, logprob in zip(canvas.best, canvas.logprobs, strict=True):
                yield Chosen(token, logprob)


def whole_canvases(prompt: int, canvas: int, context: int) -> int:
    """How many tokens of whole canvases the context holds after a prompt: one canvas at least."""
    if prompt + canvas > context:
        raise InputError(
            f"The prompt has {prompt} tokens, which leaves no room for a canvas of {canvas} in a "
            f"context of {context}; shorten it or load the model with a larger context."
        )
    return (context - prompt) // canvas * canvas


def position_bits(seed: int, block: int, step: int, position: int, *, sampling: bool) -> int:
    """32 random bits of a position: those that noise comes from, or those a draw begins with."""
    return bits(seed, block, step, 2 * position + sampling)


def _check(name: str, value: Any, whole: bool, low: float, high: float) -> None:
    allowed = int if whole else int | float
    good = isinstance(value, allowed) and not isinstance(value, bool)
    if not (good and math.isfinite(value) and low <= value <= high):
        wanted = "a whole number" if whole else "a number"
        raise InputError(f"{name} is {value!r}; it must be {wanted} between {low:g} and {high:g}.")
