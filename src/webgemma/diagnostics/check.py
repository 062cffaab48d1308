"""Comparing the GPU with the reference, layer by layer."""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from webgemma.device import Device
from webgemma.engine.session import PLAN_ROWS
from webgemma.engine.slots import CHUNK
from webgemma.errors import InputError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.kv_cache import KvCache
from webgemma.gemma.lora_weights import NO_CHOICE, LoraScales, ScaledAdapter
from webgemma.gemma.record.operands import Operand
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.graph import BufferPool, Recorder, Tensor
from webgemma.reference.lora import AdaptedWeights, scaled_pairs
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Floats

# The largest relative error of a layer that rounding explains, by what is coarsest in it.
LIMITS = {"f32": 1e-4, "f16": 1e-2, "int16": 1e-2, "int8": 1e-1}
MAX_TOKENS = 128  # whose logits fit into the largest binding that every GPU has
THREADS = 64


@dataclass(frozen=True, slots=True)
class Mode:
    """How the GPU computes: see `Gemma.load`."""

    kv: str = "f16"
    precision: str = "exact"

    @property
    def limit(self) -> float:
        """The largest relative error that is accepted."""
        return LIMITS[self.kv if self.precision == "exact" else self.precision]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The relative errors of one stage of the model: largest difference over largest value.

    Where there are experts, it is the median token's."""

    stage: str
    prompt: float  # with the tokens as one batch, as a prompt is read
    decode: float  # with one token after the other, as a reply is written

    @property
    def error(self) -> float:
        """The larger of both."""
        return max(self.prompt, self.decode)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check."""

    tokens: int
    same_best: int  # after how many of them the likeliest next token is the same, both times
    limit: float
    comparisons: list[Comparison]

    @property
    def worst(self) -> Comparison:
        """The stage with the largest error."""
        return max(self.comparisons, key=lambda comparison: comparison.error)

    @property
    def first_wrong(self) -> Comparison | None:
        """The first stage whose error is above the limit."""
        return next((c for c in self.comparisons if c.error > self.limit), None)


def token_ids(config: Config, count: int) -> list[int]:
    """Return random ids, the same every time: they need no vocabulary."""
    limit = min(MAX_TOKENS, config.context)
    if not 1 <= count <= limit:
        raise InputError(f"A check with {count} tokens is not possible; use 1 to {limit}.")
    return random.Random(4).choices(range(config.vocab), k=count)


def reference_stages(
    gguf: Gguf,
    config: Config,
    mode: Mode,
    ids: Sequence[int],
    adapters: Sequence[ScaledAdapter] = (),
) -> list[Floats]:
    """Return the reference's embedding, each layer's output, the final norm and the logits."""
    stages: list[Floats] = []
    # Every matrix is needed once, so none is kept: those of a large model would not fit.
    weights = AdaptedWeights(gguf, scaled_pairs(adapters), budget_nbytes=0)
    reference = TextModel(config, weights)
    cache = _HalfCache(config) if mode.kv == "f16" else Cache(config)
    logits = reference.forward(ids, cache, trace=stages)
    return [*stages, logits]


async def gpu_stages(
    model: Model, mode: Mode, ids: Sequence[int], reference: list[Floats], at_once: int
) -> list[Floats]:
    """Return the same stages from the GPU, which reads `at_once` ids at a time.

    Every layer reads the reference's output of the one before, so that errors do not add up."""
    device, config = model.device, model.config
    rows = next(size for size in PLAN_ROWS if size >= at_once)
    cache = KvCache(device, config, len(ids), mode.kv, CHUNK)
    parts = []
    with BufferPool(device) as memory:
        batch, token_ids = (memory.tensor(n, label="check") for n in (4, rows))
        scales = LoraScales(model.lora, 1)
        scales.set(0, NO_CHOICE)
        inputs = Inputs(batch, token_ids, cache.layers, lora=scales.applied)
        recorder = Recorder(device)
        text = _TracedText(memory, model, recorder, inputs, rows, mode.kv, mode.precision)
        h = text.body(memory.tensor(rows, config.width, label="check"))
        stages = [*text.outputs, h, text.softcap(text.head(h))]
        plan = recorder.plan()
        for first in range(0, len(ids), at_once):
            chunk = slice(first, first + at_once)
            count = len(ids[chunk])
            device.write(batch.buffer, struct.pack("<4I", first, count, 0, 0))
            device.write(token_ids.buffer, struct.pack(f"<{count}I", *ids[chunk]))
            for tensor, stage in zip(text.replacements, reference, strict=False):
                device.write(tensor.buffer, stage[chunk].tobytes())
            if model.table:
                await model.table.upload(ids[chunk])
            device.run(plan)
            parts.append([await _floats(device, stage, count) for stage in stages])
        plan.close(device)
        scales.close()
    cache.close()
    return [np.concatenate(stage) for stage in zip(*parts, strict=True)]


def compare(
    config: Config,
    mode: Mode,
    reference: list[Floats],
    prompt: list[Floats],
    decode: list[Floats],
) -> Report:
    """Compare each stage, computed as a prompt and as a reply, with the reference."""
    layers = [f"layer {layer.index}" for layer in config.layers]
    names = ["embedding", *layers, "final norm", "logits"]
    # Where two experts have about the same score, rounding may decide which one a token uses.
    over_tokens = np.median if config.experts else np.max
    comparisons = [
        Comparison(name, *(float(over_tokens(relative_errors(x, expected))) for x in (a, b)))
        for name, expected, a, b in zip(names, reference, prompt, decode, strict=True)
    ]
    best = reference[-1].argmax(-1)
    possible = np.isfinite(reference[-1])  # suppressed tokens are never sampled
    same = [np.where(possible, x[-1], -np.inf).argmax(-1) == best for x in (prompt, decode)]
    return Report(len(best), int((same[0] & same[1]).sum()), mode.limit, comparisons)


def relative_errors(computed: Floats, expected: Floats) -> Floats:
    """Return max |computed - expected| / max |expected| of each token; infinite for a NaN."""
    possible = np.isfinite(expected)
    difference = np.abs(np.where(possible, computed - np.where(possible, expected, 0), 0)).max(-1)
    errors = difference / np.abs(expected[possible]).max()
    return np.where(np.isfinite(errors), errors, np.inf).astype(np.float32)


async def _floats(device: Device, stage: Tensor, count: int) -> Floats:
    """Read the first `count` rows of a stage."""
    width = stage.shape[1]
    data = await device.read(stage.buffer, stage.offset, 4 * count * width).bytes()
    return np.frombuffer(data, np.float32).reshape(count, width)


class _HalfCache(Cache):
    """A cache that rounds keys and values to float16, as the GPU's does."""

    def append(self, layer: Layer, k: Floats, v: Floats) -> None:
        super().append(layer, *(x.astype(np.float16).astype(np.float32) for x in (k, v)))


class _TracedText(TextRecorder):
    """Copies the outputs of the embedding and of every layer, and replaces each layer's input."""

    joins_layers = False

    def __init__(self, memory: BufferPool, *args: Any) -> None:
        super().__init__(*args)
        self.memory = memory
        self.replacements: list[Tensor] = []  # of each layer's input
        self.outputs: list[Tensor] = []

    def layer(
        self, layer: Layer, x: Tensor, h: Operand, ple: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, Operand]:
        self.replacements.append(self.memory.tensor(*x.shape, label="check"))
        self._copy_output(x)
        self._copy(self.replacements[-1], x)
        norm = self.model.vector(f"blk.{layer.index}.attn_norm.weight")
        h = self.norm(x, norm, self.layer_input(layer.index))
        x, h = super().layer(layer, x, h, ple, out)
        if layer.index + 1 == len(self.config.layers):
            self._copy_output(x)
        return x, h

    def _copy_output(self, x: Tensor) -> None:
        self.outputs.append(self.memory.tensor(*x.shape, label="check"))
        self._copy(x, self.outputs[-1])

    def _copy(self, source: Tensor, to: Tensor) -> None:
        vec4s = source.nbytes // 16
        grid = (-(-vec4s // THREADS),)
        self.recorder.call("copy", grid, source=source, to=to, vec4s=vec4s, THREADS=THREADS, EACH=1)
