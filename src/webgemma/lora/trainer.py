"""Steps of training on a device: the gradients of some texts, then AdamW on the adapter."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod

from webgemma.device import Plan
from webgemma.errors import InputError
from webgemma.gemma.adapters import EMBEDDING, matrix_members
from webgemma.gemma.learning import Learner, Lesson
from webgemma.gemma.optimiser import PACE_NBYTES, AdamW, Trained
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.lora.adapter import Adapter, Pair
from webgemma.lora.data import Example, bucket


class Trainer:
    """An adapter that learns on a model, which has it on; `close` leaves it there as it is."""

    def __init__(self, model: Model, adapter: Adapter, optimiser: AdamW | None = None) -> None:
        self.model = model
        self.device = model.device
        self.optimiser = optimiser or AdamW()
        self.adapter = adapter.fitted(model.config)
        self.steps = 0
        self.scale = _one_scale(self.adapter)
        if model.config.experts is not None:
            raise InputError("Models with experts cannot be trained on the GPU yet.")
        if EMBEDDING in self.adapter.pairs or "per_layer_model_proj.weight" in self.adapter.pairs:
            raise InputError("Embeddings cannot be trained on the GPU yet: leave them out.")
        model.set_adapters([(self.adapter.pairs, 1.0)])
        self._rooms: dict[int, _Room] = {}
        with ExitStack() as owned:
            self._owned = owned
            self._gradients = {
                name: (self._keep(*low.a.shape), self._keep(*low.b.shape))
                for name, low in model.low.items()
            }
            self._pace = self._keep(PACE_NBYTES // 4)
            self._optimise = self._record_optimiser()
            self._owned = owned.pop_all()

    async def step(self, examples: Sequence[Example], rate: float) -> float:
        """Learn from some texts together; the mean loss over their supervised tokens, before."""
        self.steps += 1
        loss = await self.gradients(examples)
        pace = (*self.optimiser.pace(self.steps, rate), 0.0)
        self.device.write(self._pace.buffer, struct.pack("<4f", *pace))
        self.device.run(self._optimise)
        return loss

    async def gradients(self, examples: Sequence[Example]) -> float:
        """Add up the gradients of the mean loss, which it gives."""
        targets = sum(example.targets for example in examples)
        if not targets:
            raise InputError("No token is supervised: there is nothing to learn.")
        loss = 0.0
        for example in examples:
            room = self._room(bucket(len(example.ids)))
            room.write(example, 1 / targets)
            reading = self.device.run(room.plan, (room.losses.buffer, 0, room.losses.nbytes))
            assert reading is not None
            losses = struct.unpack(f"<{room.batch}f", await reading.bytes())
            learnt = zip(example.supervised[1:], losses, strict=False)
            loss += sum(value for is_target, value in learnt if is_target) / targets
        return loss

    async def result(self) -> Adapter:
        """The adapter as it is now."""
        pairs: dict[str, Pair] = {}
        for matrix, members in matrix_members(self.model):
            low = self.model.low.get(matrix)
            if low is None:
                continue
            a, b = [
                await self.device.read(x.buffer, 0, x.nbytes).bytes() for x in (low.a, low.b)
            ]  # fmt: skip
            for segment, (member, row) in enumerate(zip(members, low.firsts, strict=True)):
                old = self.adapter.pairs.get(member.name)
                if old is not None:
                    first = 4 * segment * low.ranks * old.inputs
                    own_a = a[first : first + 4 * old.rank * old.inputs]
                    rows = b[4 * row * low.ranks : 4 * (row + member.rows) * low.ranks]
                    own_b = _columns(rows, low.ranks, old.rank)
                    sizes = (old.rank, old.inputs, old.outputs, old.scale)
                    pairs[member.name] = Pair(own_a, own_b, *sizes)
        return Adapter(self.adapter.name, pairs, self.adapter.base)

    def close(self) -> None:
        """Give the memory of training back."""
        self._owned.close()
        self._rooms.clear()

    def _room(self, batch: int) -> _Room:
        if batch not in self._rooms:
            self._rooms[batch] = _Room(self, batch)
        return self._rooms[batch]

    def _record_optimiser(self) -> Plan:
        recorder = Recorder(self.device)
        trained = []
        for name, low in self.model.low.items():
            for weights, gradient in zip((low.a, low.b), self._gradients[name], strict=True):
                moments = self._keep(gradient.nbytes // 4, 2)
                trained.append(Trained(weights, gradient, moments))
        squares = self._keep(len(trained))
        self.optimiser.record(recorder, self._pace, trained, squares)
        return self._planned(recorder)

    def _planned(self, recorder: Recorder) -> Plan:
        plan = recorder.plan()
        self._owned.callback(plan.close, self.device)
        return plan

    def _keep(self, *shape: int) -> Tensor:
        """Memory that lives as long as the training, zero at first."""
        nbytes = 4 * prod(shape)
        buffer = self.device.buffer(nbytes, "training")
        self._owned.callback(self.device.free, buffer)
        self.device.write(buffer, bytes(nbytes))
        return Tensor(shape, nbytes, buffer)


class _Room:
    """Memory and plan for texts of at most `batch` tokens."""

    def __init__(self, trainer: Trainer, batch: int) -> None:
        keep, model = trainer._keep, trainer.model
        self.batch, self.device = batch, trainer.device
        self.losses = keep(batch)
        self.state, self.ids, self.targets, self.weights = keep(4), *(keep(batch) for _ in "123")
        self.spans = keep(batch, 2)
        widths = {x.index: x.kv_heads * x.head_dim for x in model.config.layers if not x.shares_kv}
        caches, self.owed = (
            {index: (keep(batch, width), keep(batch, width)) for index, width in widths.items()}
            for _ in range(2)
        )
        inputs = Inputs(self.state, self.ids, caches, dict.fromkeys(caches, batch))
        tensors = (self.spans, self.targets, self.weights, self.losses, self.owed)
        lesson = Lesson(*tensors, trainer._gradients, trainer.scale)
        recorder = Recorder(self.device)
        Learner(model, recorder, inputs, batch, lesson).record()
        self.plan = trainer._planned(recorder)

    def write(self, example: Example, weight: float) -> None:
        """A text to learn, each of its targets with this weight."""
        count, rest = len(example.ids), self.batch - len(example.ids)
        write = self.device.write
        write(self.state.buffer, struct.pack("<4I", 0, count, 0, 0))
        write(self.ids.buffer, struct.pack(f"<{count}I", *example.ids) + bytes(4 * rest))
        following = struct.pack(f"<{count - 1}I", *example.ids[1:])
        write(self.targets.buffer, following + bytes(4 * (rest + 1)))
        weights = [weight * learnt for learnt in example.supervised[1:]]
        write(self.weights.buffer, struct.pack(f"<{count - 1}f", *weights) + bytes(4 * (rest + 1)))
        write(self.spans.buffer, struct.pack("<2I", 0, count) * count + bytes(8 * rest))
        for pair in self.owed.values():
            for tensor in pair:
                write(tensor.buffer, bytes(tensor.nbytes))


def _one_scale(adapter: Adapter) -> float:
    scales = {pair.scale for pair in adapter.pairs.values()}
    if len(scales) != 1:
        raise InputError(f"To be trained, all of {adapter.name} must have one scale: alpha / rank.")
    return scales.pop()


def _columns(data: bytes, width: int, kept: int) -> bytes:
    """The first columns of a matrix of float32."""
    if width == kept:
        return data
    words, out = array("I", data), array("I", bytes(len(data) // width * kept))
    for column in range(kept):
        out[column::kept] = words[column::width]
    return out.tobytes()


def fresh_pairs(
    shapes: Mapping[str, tuple[int, int]], rank: int, alpha: float, seed: int
) -> dict[str, Pair]:
    """Pairs that change nothing yet: A random, within ±1 / √inputs; B zero."""
    source = random.Random(seed)
    pairs = {}
    for name, (inputs, outputs) in shapes.items():
        bound = inputs**-0.5
        a = array("f", (source.uniform(-bound, bound) for _ in range(rank * inputs))).tobytes()
        pairs[name] = Pair(a, bytes(4 * outputs * rank), rank, inputs, outputs, alpha / rank)
    return pairs
