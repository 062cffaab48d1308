"""How the next token is chosen: the settings a user may give, their order, and the random draw."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from webgemma.errors import InputError

MASK = 0xFFFFFFFF
TOP_LOGPROBS = 20  # the most tokens that are reported beside the chosen one


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings, applied in this order (llama.cpp's, which Ollama runs):

    penalties and bias on the logits, the top_k best, of those the fewest that hold top_p of the
    probability, of those all with at least min_p of the best one's, then temperature and the draw.
    Temperature 0 takes the best token after penalties and bias.
    """

    temperature: float = 1.0
    top_k: int = 64  # 0: all
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive logits of recent tokens, multiplies negative
    presence_penalty: float = 0.0  # subtracted once from the logit of each recent token
    recent: int = 64  # how many tokens back the penalties look, prompt included; 0: none, -1: all
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: another one each time
    top_logprobs: int = 0  # how many of the likeliest tokens to report; changes no choice

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _RANGES:
                _check(item.name, value, *_RANGES[item.name])
        if self.seed is not None:
            _check("seed", self.seed, int, 0, 2**64 - 1)
        for token, bias in self.logit_bias.items():
            _check("logit_bias token", token, int, 0, 2**31)
            _check(f"logit_bias of {token}", bias, float, -1e9, 1e9)

    @property
    def greedy(self) -> bool:
        """Whether no random draw takes part."""
        return self.temperature == 0 or self.top_k == 1

    def look_back(self, length: int) -> int:
        """How many of `length` tokens the penalties see."""
        return length if self.recent < 0 else min(self.recent, length)


_RANGES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100),
    "top_k": (int, 0, 2**31),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -1e3, 1e3),
    "recent": (int, -1, 2**31),
    "top_logprobs": (int, 0, TOP_LOGPROBS),
}


class Chosen(NamedTuple):
    """What an engine gives for each step: a token, and the likeliest ones if asked for.

    Log-probabilities are the model's own: of all its tokens but the suppressed ones, before
    penalties, bias, temperature and any cut. A token of no probability is not among the likeliest.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # ids and log-probabilities, the likeliest first


def _check(name: str, value: Any, kind: type, low: float, high: float) -> None:
    wanted = "a whole number" if kind is int else "a number"
    allowed = int if kind is int else int | float
    good = isinstance(value, allowed) and not isinstance(value, bool)
    if not (good and math.isfinite(value) and low <= value <= high):
        raise InputError(f"{name} is {value!r}; it must be {wanted} between {low:g} and {high:g}.")


def draw(seed: int, step: int) -> float:
    """A number in [0, 1) for a step of a seed."""
    return (bits(seed, step) >> 8) / (1 << 24)


def bits(seed: int, *counters: int) -> int:
    """32 random bits for some counters of a seed: integer mixing, the same on any device."""
    x = _mix((seed & MASK) ^ _mix((seed >> 32 & MASK) + 0x9E3779B9 & MASK))
    for counter in counters:
        x = _mix(x ^ _mix(counter & MASK))
    return x


def _mix(x: int) -> int:
    """A bijection of 32-bit integers in which every input bit reaches every output bit."""
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return x ^ x >> 16
