"""Token sampling from logits in numpy, in the order that `webgemma.settings` defines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from webgemma.reference.text import softmax
from webgemma.reference.weights import Floats
from webgemma.sampler import SampledToken, draw
from webgemma.settings import Settings, is_greedy, penalised_tokens


def sample(
    logits: Floats,
    settings: Settings,
    tokens: Sequence[int],
    seed: int,
    mask: bytes | None = None,
) -> SampledToken:
    """Return the token after `tokens` with log-probabilities, sampled from logits [vocab].

    A mask has a bit for each token that may follow. The log-probabilities are those of the model:
    before penalties, bias, mask and temperature."""
    changed = penalise(logits, settings, tokens)
    if mask is not None:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        changed[allowed[: len(changed)] == 0] = -np.inf
    best = int(np.argmax(changed))
    token = best if is_greedy(settings) else choose(changed, settings, draw(seed, len(tokens)))
    shifted = logits - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = likeliest(logprobs, settings["top_logprobs"])
    return SampledToken(token, float(logprobs[token]), top)


def likeliest(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """Return (token, log-probability) of the `count` likeliest tokens, the likeliest first.

    The lowest id comes first among equals; tokens of probability 0 are left out."""
    order = np.argsort(-logprobs, kind="stable")[:count] if count else ()
    return tuple((int(i), float(logprobs[i])) for i in order if logprobs[i] > -np.inf)


def penalise(logits: Floats, settings: Settings, tokens: Sequence[int]) -> Floats:
    """Return logits with the penalties on recent tokens, and the bias added."""
    changed = logits.astype(np.float32, copy=True)
    count = penalised_tokens(settings, len(tokens))
    recent = np.asarray(tokens[len(tokens) - count :], np.int64)
    recent, times = np.unique(recent, return_counts=True)
    penalised = changed[recent]
    penalty = np.float32(settings["repetition_penalty"])
    changed[recent] = np.where(penalised > 0, penalised / penalty, penalised * penalty)
    changed[recent] -= np.float32(settings["presence_penalty"])
    changed[recent] -= times.astype(np.float32) * np.float32(settings["frequency_penalty"])
    for token, bias in settings["logit_bias"].items():
        changed[token] += np.float32(bias)
    return changed


def choose(logits: Floats, settings: Settings, u: float) -> int:
    """Return the token at quantile u of what top_k, typical_p, top_p and min_p leave.

    The tokens are ordered from the likeliest; temperature applies after all filters."""
    top_p, min_p = settings["top_p"], settings["min_p"]
    order = np.argsort(-logits, kind="stable")[: settings["top_k"] or None]
    if settings["typical_p"] < 1:
        order = order[is_typical(logits[order], settings["typical_p"])]
    p = softmax(logits[order])
    before = np.cumsum(p, dtype=np.float64) - p
    inside = (before < top_p) | (top_p == 1)  # rounding must not cut the tail
    kept = inside & (p >= min_p * p[0])
    kept[0] = True  # the likeliest token always stays
    order = order[kept]
    shares = softmax(logits[order] / np.float32(settings["temperature"]))
    total = np.cumsum(shares, dtype=np.float64)
    return int(order[np.searchsorted(total, u * total[-1], side="right").clip(0, len(order) - 1)])


def is_typical(logits: Floats, typical_p: float) -> NDArray[np.bool_]:
    """Return which tokens have a typical surprisal -ln p (Meister et al. 2022).

    They are the ones closest to the expected surprisal, the entropy, that together hold at least
    `typical_p` of the probability; all that are equally close stay."""
    p = softmax(logits).astype(np.float64)
    surprisal = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    distance = np.abs(surprisal - (p * surprisal).sum())
    closest = np.argsort(distance, kind="stable")
    last = np.searchsorted(np.cumsum(p[closest]), typical_p).clip(0, len(p) - 1)
    return distance <= distance[closest[last]]
