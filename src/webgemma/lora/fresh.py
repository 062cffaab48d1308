"""A new adapter to train: A random, B zero, so that it begins by changing nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterable
from math import sqrt

from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.tensors import text_tensors
from webgemma.lora.adapter import HEAD, LAYER_MODULES, Adapter, Pair, split_layer
from webgemma.lora.floats import floats_bytes

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
PER_LAYER = ("inp_gate", "proj")
ALL_LINEAR = (*ATTENTION, *FEED_FORWARD, *PER_LAYER)
PARTS = (*LAYER_MODULES, "output")
GROUPS = {"all": ALL_LINEAR, "attention": ATTENTION, "feed-forward": FEED_FORWARD}


def fresh_adapter(
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
    wanted = set(parts)
    if unknown := sorted(wanted - set(PARTS)):
        raise InputError(f"There is no part {unknown[0]!r} to adapt; take of {', '.join(PARTS)}.")
    if layers is not None and not set(layers) <= set(range(len(config.layers))):
        raise InputError(f"This model has the layers 0 to {len(config.layers) - 1} to adapt.")
    scale = (2.0 if alpha is None else alpha / rank) if rank else 0.0
    pairs = {}
    for tensor, shape in _shapes(config, wanted):
        layer = split_layer(tensor)
        if layer is None or layers is None or layer[0] in layers:
            pairs[tensor] = _pair(*shape, rank, scale, f"{seed}:{tensor}")
    fitted = Adapter(name, pairs, config.name).fitted(config)
    if not fitted.pairs:
        raise InputError("None of these parts is in these layers of the model.")
    return fitted


def _shapes(config: Config, wanted: set[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    """The matrices to adapt, [inputs, outputs] of each."""
    for tensor, shape, _ in text_tensors(config):
        layer = split_layer(tensor)
        if layer is not None and layer[1] in wanted and len(shape) == 2:
            yield tensor, (shape[0], shape[1])
    if "output" in wanted:
        yield HEAD, (config.width, config.vocab)


def _pair(inputs: int, outputs: int, rank: int, scale: float, seed: str) -> Pair:
    """A as PEFT begins it: even between ± 1 / √inputs."""
    draw, bound = random.Random(seed).random, 1 / sqrt(inputs)
    a = floats_bytes(array("f", [bound * (2 * draw() - 1) for _ in range(rank * inputs)]))
    return Pair(a, bytes(4 * outputs * rank), rank, inputs, outputs, scale)
