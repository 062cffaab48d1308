"""The GPU against the reference, layer by layer: does this machine compute what it should?"""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from webgemma.device import Device
from webgemma.engine.session import BATCHES, CHUNK
from webgemma.errors import InputError
from webgemma.gemma import kv_cache as cache
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Floats, Weights

# The largest relative error of a layer that rounding explains, by what is coarsest in it.
LIMITS = {"f32": 1e-4, "f16": 1e-2, "int16": 1e-2, "int8": 1e-1}
MOST_TOKENS = 128  # whose logits fit into what every GPU shows a kernel
THREADS = 64


@dataclass(frozen=True, slots=True)
class Way:
    """How the GPU computes: see `Gemma.load`."""

    kv: str = "f16"
    precision: str = "exact"

    @property
    def limit(self) -> float:
        """The largest relative error that is none."""
        return LIMITS[self.kv if self.precision == "exact" else self.precision]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One stage of the model: its largest difference over its largest value, computed both ways.

    Where there are experts, that of the median token."""

    stage: str
    at_once: float  # the tokens as one batch, as a prompt is read
    one_by_one: float  # as an answer is written

    @property
    def error(self) -> float:
        """The worse of both."""
        return max(self.at_once, self.one_by_one)


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    tokens: int
    same_best: int  # of these, after how many the likeliest next token is the same, both ways
    limit: float
    comparisons: list[Comparison]

    @property
    def worst(self) -> Comparison:
        """Where the difference is largest."""
        return max(self.comparisons, key=lambda comparison: comparison.error)

    @property
    def first_wrong(self) -> Comparison | None:
        """Where it goes wrong first."""
        return next((c for c in self.comparisons if c.error > self.limit), None)


def token_ids(config: Config, count: int) -> list[int]:
    """Ids drawn at random, the same every time: they need no vocabulary."""
    most = min(MOST_TOKENS, config.context)
    if not 1 <= count <= most:
        raise InputError(f"A check with {count} tokens is not possible; take 1 to {most}.")
    return random.Random(4).choices(range(config.vocab), k=count)


def reference_stages(gguf: Gguf, config: Config, way: Way, ids: Sequence[int]) -> list[Floats]:
    """The truth: the embedding, each layer's output, the final norm's, the logits."""
    stages: list[Floats] = []
    # Every matrix is needed once, so none is kept: a big model's would not fit.
    reference = TextModel(config, Weights(gguf, budget_nbytes=0))
    held = _HalfCache(config) if way.kv == "f16" else Cache(config)
    logits = reference.forward(ids, held, trace=stages)
    return [*stages, logits]


async def gpu_stages(
    model: Model, way: Way, ids: Sequence[int], truth: list[Floats], at_a_time: int
) -> list[Floats]:
    """The same from the GPU, which reads so many ids at a time.

    Every layer is given the truth to compute with, so that it answers for its own mistakes only."""
    device, config = model.device, model.config
    batch = next(size for size in BATCHES if size >= at_a_time)
    held = cache.Cache(device, config, len(ids), way.kv, CHUNK)
    inputs = Inputs(_keep(device, 4), _keep(device, batch), held.tensors, held.rings)
    recorder = Recorder(device)
    text = _TracedText(model, recorder, inputs, batch, "kv_" + way.kv, way.precision)
    h = text.body(_keep(device, batch, config.width))
    stages = [*text.kept, h, text.softcap(text.head(h))]
    plan = recorder.plan()
    parts = []
    for first in range(0, len(ids), at_a_time):
        chunk = slice(first, first + at_a_time)
        count = len(ids[chunk])
        device.write(inputs.state.buffer, struct.pack("<4I", first, count, 0, 0))
        device.write(inputs.ids.buffer, struct.pack(f"<{count}I", *ids[chunk]))
        for tensor, stage in zip(text.given, truth, strict=False):
            device.write(tensor.buffer, stage[chunk].tobytes())
        if model.table:
            await model.table.bring(ids[chunk])
        device.run(plan)
        parts.append([await _floats(device, stage, count) for stage in stages])
    return [np.concatenate(stage) for stage in zip(*parts, strict=True)]


def compare(
    config: Config, way: Way, truth: list[Floats], at_once: list[Floats], one_by_one: list[Floats]
) -> Report:
    """Each stage of both ways against the truth."""
    layers = [f"layer {layer.index}" for layer in config.layers]
    names = ["embedding", *layers, "final norm", "logits"]
    # Where two experts are about equally good, rounding may decide which one a single token asks.
    among = np.median if config.experts else np.max
    comparisons = [
        Comparison(name, *(float(among(relative_errors(x, wanted))) for x in (a, b)))
        for name, wanted, a, b in zip(names, truth, at_once, one_by_one, strict=True)
    ]
    best = truth[-1].argmax(-1)
    possible = np.isfinite(truth[-1])  # suppressed tokens are never chosen
    same = [np.where(possible, x[-1], -np.inf).argmax(-1) == best for x in (at_once, one_by_one)]
    return Report(len(best), int((same[0] & same[1]).sum()), way.limit, comparisons)


def relative_errors(made: Floats, wanted: Floats) -> Floats:
    """max |made - wanted| / max |wanted| of each token; infinite where something is no number."""
    possible = np.isfinite(wanted)
    difference = np.abs(np.where(possible, made - np.where(possible, wanted, 0), 0)).max(-1)
    errors = difference / np.abs(wanted[possible]).max()
    return np.where(np.isfinite(errors), errors, np.inf).astype(np.float32)


def _keep(device: Device, *shape: int) -> Tensor:
    nbytes = 4 * int(np.prod(shape))
    return Tensor(shape, nbytes, device.buffer(nbytes, "check"))


async def _floats(device: Device, stage: Tensor, count: int) -> Floats:
    """The first `count` rows of what a stage gave."""
    width = stage.shape[1]
    data = await device.read(stage.buffer, stage.offset, 4 * count * width).bytes()
    return np.frombuffer(data, np.float32).reshape(count, width)


class _HalfCache(Cache):
    """Keeps keys and values in float16, as the GPU does, so that only mistakes differ."""

    def append(self, layer: Layer, k: Floats, v: Floats) -> None:
        super().append(layer, *(x.astype(np.float16).astype(np.float32) for x in (k, v)))


class _TracedText(TextRecorder):
    """Keeps what the embedding and every layer give, and gives the next layer something else."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: list[Tensor] = []  # what each layer computes with
        self.kept: list[Tensor] = []

    def block(
        self, layer: Layer, x: Tensor, h: Tensor, ple: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        self.given.append(_keep(self.model.device, *x.shape))
        self._keep_copy(x)
        self._copy(self.given[-1], x)
        h = self.norm(x, f"blk.{layer.index}.attn_norm.weight", self._input_of(layer.index))
        h = super().block(layer, x, h, ple, out)
        if layer.index + 1 == len(self.config.layers):
            self._keep_copy(x)
        return h

    def _keep_copy(self, x: Tensor) -> None:
        self.kept.append(_keep(self.model.device, *x.shape))
        self._copy(x, self.kept[-1])

    def _copy(self, source: Tensor, to: Tensor) -> None:
        fours = source.nbytes // 16
        kernel = link("copy", self.features, constants={"THREADS": THREADS, "EACH": 1})
        self.recorder.call(kernel, (-(-fours // THREADS),), [fours], source, to)
