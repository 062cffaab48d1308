"""A new adapter to train: A random, B zero, so that it begins by changing nothing.

Of the embedding it is A that is zero: its rows are the tokens', and few of them occur."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterable
from math import sqrt

from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.tensors import text_tensors
from webgemma.lora.adapter import (
    EMBEDDING,
    GLOBAL_MODULES,
    HEAD,
    LAYER_MODULES,
    MAX_RANK,
    Adapter,
    Pair,
    split_layer,
)
from webgemma.lora.floats import floats_bytes

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
PER_LAYER = ("inp_gate", "proj")
ALL_LINEAR = (*ATTENTION, *FEED_FORWARD, *PER_LAYER)
PARTS = (*LAYER_MODULES, *(name.removesuffix(".weight") for name in GLOBAL_MODULES))
GROUPS = {"all": ALL_LINEAR, "attention": ATTENTION, "feed-forward": FEED_FORWARD}


def new_adapter(
    config: Config,
    parts: Iterable[str] = ALL_LINEAR,
    *,
    rank: int = 16,
    alpha: float | None = None,
    layers: Collection[int] | None = None,
    seed: int = 0,
    name: str = "adapter",
) -> Adapter:
    """An adapter for the parts (`attn_q`, …; those that a model has) of all or some layers.

    `alpha` is twice the rank if not given."""
    if not 1 <= rank <= MAX_RANK:  # before so much memory is filled
        raise InputError(f"An adapter of rank {rank} is none; take 1 to {MAX_RANK}.")
    wanted = set(parts)
    if unknown := sorted(wanted - set(PARTS)):
        raise InputError(f"There is no part {unknown[0]!r} to adapt; take of {', '.join(PARTS)}.")
    if layers is not None and not set(layers) <= set(range(len(config.layers))):
        raise InputError(f"This model has the layers 0 to {len(config.layers) - 1} to adapt.")
    scale = 2.0 if alpha is None else alpha / rank
    pairs = {}
    for tensor, shape in _shapes(config, wanted):
        layer = split_layer(tensor)
        if layer is None or layers is None or layer[0] in layers:
            drawn = f"{seed}:{tensor}"
            if tensor == EMBEDDING:
                b = _even(rank * config.width, 1.0, drawn)
                a = bytes(4 * config.vocab * rank)
                pairs[tensor] = Pair(a, b, rank, config.vocab, config.width, scale)
            else:
                pairs[tensor] = _pair(*shape, rank, scale, drawn)
    fitted = Adapter(name, pairs, config.name).fitted(config)
    if not fitted.pairs:
        raise InputError("None of these parts is in these layers of the model.")
    return fitted


def _shapes(config: Config, wanted: set[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    """The matrices to adapt, [inputs, outputs] of each; a tied head is no tensor of its own."""
    for tensor, shape, _ in text_tensors(config):
        layer = split_layer(tensor)
        part = layer[1] if layer else tensor.removesuffix(".weight")
        if part in wanted and len(shape) == 2 and tensor != HEAD:
            yield tensor, (shape[0], shape[1])
    if HEAD.removesuffix(".weight") in wanted:
        yield HEAD, (config.width, config.vocab)


def _pair(inputs: int, outputs: int, rank: int, scale: float, seed: str) -> Pair:
    """A as PEFT begins it: even between ± 1 / √inputs."""
    a = _even(rank * inputs, 1 / sqrt(inputs), seed)
    return Pair(a, bytes(4 * outputs * rank), rank, inputs, outputs, scale)


def _even(count: int, bound: float, seed: str) -> bytes:
    draw = random.Random(seed).random
    return floats_bytes(array("f", [bound * (2 * draw() - 1) for _ in range(count)]))
