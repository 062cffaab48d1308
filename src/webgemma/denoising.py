"""Denoising of a canvas: the schedule, what each step leaves, the random numbers."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from webgemma.errors import InputError
from webgemma.sampler import SampledToken, bits
from webgemma.settings import SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """The schedule of a canvas; the defaults are DiffusionGemma's.

    Each step divides the canvas's logits by a temperature that falls from `t_max` to almost
    `t_min`, draws a token for each position, and accepts those of the least entropy: as many as
    have at most `entropy_bound` nats before them. The others become noise again. A canvas is done
    after `steps`, or when the likeliest tokens have stayed the same for `stability_threshold`
    steps and the mean entropy is below `confidence_threshold`."""

    steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    def __post_init__(self) -> None:
        for name in ("steps", "entropy_bound", "t_min", "t_max"):
            SETTINGS[name].check(getattr(self, name))

    def temperature(self, step: int) -> float:
        """Return the temperature of a step, counted from 1."""
        remaining = (self.steps - step + 1) / self.steps
        return self.t_min + (self.t_max - self.t_min) * remaining


class Canvas(NamedTuple):
    """What a denoising step leaves."""

    number: int  # of the canvas, from 0
    step: int  # counted from 1
    ids: tuple[int, ...]  # what the next step reads: drawn tokens and noise
    accepted: tuple[bool, ...]  # which of them are drawn tokens
    best: tuple[int, ...]  # the likeliest tokens: the canvas's text, once it is done
    logprobs: tuple[float, ...]  # of those, before temperature
    entropy: float  # the mean over all positions, in nats
    done: bool  # whether this was the canvas's last step


async def tokens_of(
    canvases: AsyncGenerator[Canvas, None], watch: bool = False
) -> AsyncGenerator[SampledToken | Canvas, None]:
    """Yield the tokens of each canvas when it is done; with `watch`, every step before them."""
    async with aclosing(canvases):
        async for canvas in canvases:
            if watch:
                yield canvas
            if canvas.done:
                for token, logprob in zip(canvas.best, canvas.logprobs, strict=True):
                    yield SampledToken(token, logprob)


def canvas_capacity(prompt: int, canvas: int, context: int) -> int:
    """Return how many tokens of whole canvases the context holds after a prompt.

    InputError if there is no space for one canvas."""
    if prompt + canvas > context:
        raise InputError(
            f"The prompt has {prompt} tokens, which leaves no space for a canvas of {canvas} in a "
            f"context of {context}; shorten it or load the model with a larger context."
        )
    return (context - prompt) // canvas * canvas


def position_bits(seed: int, canvas: int, step: int, position: int, *, sampling: bool) -> int:
    """Return 32 random bits of a position: for its noise, or for the key of its draw."""
    return bits(seed, canvas, step, 2 * position + sampling)
