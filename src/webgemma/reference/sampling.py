"""Choosing a token from logits, in numpy, in the order that `Sampling` states."""

from collections.abc import Sequence

import numpy as np

from webgemma.reference.text import softmax
from webgemma.reference.weights import Floats
from webgemma.sampler import Chosen, Sampling, draw


def sample(logits: Floats, sampling: Sampling, tokens: Sequence[int], seed: int) -> Chosen:
    """The next token after `tokens`, and log-probabilities before any setting."""
    changed = penalise(logits, sampling, tokens)
    best = int(np.argmax(changed))
    token = best if sampling.greedy else choose(changed, sampling, draw(seed, len(tokens)))
    shifted = logits - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    return Chosen(token, float(logprobs[token]), likeliest(logprobs, sampling.top_logprobs))


def likeliest(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """At most `count` possible tokens, the likeliest first, the lowest id where equal."""
    order = np.argsort(-logprobs, kind="stable")[:count] if count else ()
    return tuple((int(i), float(logprobs[i])) for i in order if logprobs[i] > -np.inf)


def penalise(logits: Floats, sampling: Sampling, tokens: Sequence[int]) -> Floats:
    """Logits after repetition and presence penalties on the recent tokens, and after the bias."""
    changed = logits.astype(np.float32, copy=True)
    count = sampling.look_back(len(tokens))
    recent = np.unique(np.asarray(tokens[len(tokens) - count :], np.int64))
    seen = changed[recent]
    penalty = np.float32(sampling.repetition_penalty)
    changed[recent] = np.where(seen > 0, seen / penalty, seen * penalty)
    changed[recent] -= np.float32(sampling.presence_penalty)
    for token, bias in sampling.logit_bias.items():
        changed[token] += np.float32(bias)
    return changed


def choose(logits: Floats, sampling: Sampling, u: float) -> int:
    """The token at the share `u` of the remaining probability, the likeliest first."""
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    p = softmax(logits[order])
    before = np.cumsum(p, dtype=np.float64) - p
    inside = (before < sampling.top_p) | (sampling.top_p == 1)  # rounding must not cut the tail
    kept = inside & (p >= sampling.min_p * p[0])
    kept[0] = True  # the best always stays
    order = order[kept]
    share = np.cumsum(softmax(logits[order] / np.float32(sampling.temperature)), dtype=np.float64)
    return int(order[np.searchsorted(share, u * share[-1], side="right").clip(0, len(order) - 1)])
