"""Sampled tokens, and the random numbers of a seed, which are the same on every device."""

from typing import NamedTuple

MASK = 0xFFFFFFFF


class SampledToken(NamedTuple):
    """What an engine returns for each step: a token, and the likeliest ones if requested.

    Log-probabilities are the model's own: over all its tokens but the suppressed ones, before
    penalties, bias, temperature and any cut. A token of no probability is not among the likeliest.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # ids and log-probabilities, the likeliest first


def draw(seed: int, step: int) -> float:
    """Return the number in [0, 1) for a step of a seed."""
    return (bits(seed, step) >> 8) / (1 << 24)


def bits(seed: int, *counters: int) -> int:
    """Return 32 random bits for some counters of a seed, by integer mixing."""
    x = _mix((seed & MASK) ^ _mix((seed >> 32 & MASK) + 0x9E3779B9 & MASK))
    for counter in counters:
        x = _mix(x ^ _mix(counter & MASK))
    return x


def _mix(x: int) -> int:
    """Return a bijection of 32-bit integers in which every input bit reaches every output bit."""
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return x ^ x >> 16
