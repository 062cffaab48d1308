"""Trainer: batches of examples in, losses out, an adapter that learns on the GPU."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.errors import GgufError, InputError
from webgemma.gemma.weights import BATCH_ROWS, Model
from webgemma.gguf.safetensors import NewStored, Safetensors, write_safetensors
from webgemma.graph import Recorder, Tensor
from webgemma.lora.adapter import Adapter
from webgemma.lora.backward.layers import Batch, Passes
from webgemma.lora.data import Example, bucket
from webgemma.lora.optimiser import AdamW
from webgemma.lora.parameters import Parameters

NO_TARGET = 0xFFFFFFFF
PACE = struct.Struct("<fIfff")  # see pace.wgsl
SUBMITTED = 128  # dispatches at a time: systems end what keeps a slow GPU busy for seconds


@dataclass(frozen=True, slots=True)
class Options:
    """How to train; the learning rate comes with every step."""

    sequences: int = 4  # that go through the model together
    dropout: float = 0.0
    seed: int = 0
    optimiser: AdamW = field(default_factory=AdamW)
    checkpoint: bool = True  # compute every layer again on the way back: less memory, more work

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise InputError(f"A batch must have at least one sequence, not {self.sequences}.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"The dropout must be from 0 to below 1, not {self.dropout}.")


class Step(NamedTuple):
    """What a step found."""

    loss: float  # mean over its supervised tokens
    length: float  # of all gradients together, before clipping
    targets: int  # supervised tokens
    tokens: int


@dataclass(slots=True)
class _Room:
    """The inputs of batches of one shape, and the plans recorded for them."""

    batch: Batch
    plans: dict[bool, list[Plan]] = field(default_factory=dict)  # with and without the way back


class Trainer:
    """Trains an adapter on a model that stays as it is."""

    def __init__(self, model: Model, adapter: Adapter, options: Options | None = None) -> None:
        self.model = model
        self.device: Device = model.device
        self.options = options or Options()
        adapter = adapter.fitted(model.config)
        _check_trainable(adapter)
        if model.config.diffusion:
            raise InputError("DiffusionGemma cannot be trained yet.")
        if model.low:
            raise InputError("The model has adapters on: take them off before training.")
        self.steps = 0
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._pool: list[Buffer] = []  # scratch of all plans
        self._own: list[Buffer] = []
        self.parameters = Parameters(self.device, adapter)
        self._pace, self._length = self._tensor(PACE.size // 4), self._tensor(1)
        self._update = self.options.optimiser.plan(self.parameters, self._pace, self._length)

    async def step(self, batches: Sequence[Sequence[Example]], rate: float) -> Step:
        """One step of AdamW by the gradients of some batches together; the adapter moves.

        InputError if nothing is supervised. A loss that is not finite moves nothing."""
        targets = _targets(batches)
        readings = []
        for number, batch in enumerate(batches):
            self._write_pace(targets, number, rate)
            readings.append(await self._run(batch, back=True))
        self.steps += 1
        self._write_pace(targets, 0, rate)
        length = self.device.run(self._update, (self._length.buffer, 0, 4))
        assert length is not None
        losses = [sum(_floats(await reading.bytes())) for reading in readings]
        (size,) = struct.unpack("<f", await length.bytes())
        return Step(sum(losses) / targets, size, targets, self._tokens(batches))

    async def evaluate(self, batches: Sequence[Sequence[Example]]) -> float:
        """The mean loss over all supervised tokens, without dropout; nothing moves."""
        targets, total = _targets(batches), 0.0
        self._write_pace(targets, 0, 0.0)
        for batch in batches:
            total += sum(_floats(await (await self._run(batch, back=False)).bytes()))
        return total / targets

    async def adapter(self) -> Adapter:
        """What has been learnt."""
        return await self.parameters.read()

    def reserve(self, sequences: int, length: int) -> None:
        """Record the plans for batches of this shape now; DeviceError if they do not fit."""
        self._plans(self._room(sequences, length), back=True)

    def close(self) -> None:
        """Give the memory back; the model keeps its own."""
        for room in self._rooms.values():
            for plan in chain(*room.plans.values()):
                plan.close(self.device)
        self._update.close(self.device)
        self._rooms.clear()
        self.parameters.close()
        for buffer in (*self._pool, *self._own):
            self.device.free(buffer)
        self._pool.clear()
        self._own.clear()

    # Running

    async def _run(self, batch: Sequence[Example], *, back: bool) -> Reading:
        """Submit a batch; its losses come back."""
        room = self._room(*self._shape(batch))
        plans, data = self._plans(room, back=back), room.batch
        await self.device.compiled()
        ids, targets = _laid_out(batch, data.sequences, data.length)
        self.device.write(data.ids.buffer, struct.pack(f"<{len(ids)}I", *ids))
        self.device.write(data.targets.buffer, struct.pack(f"<{len(targets)}I", *targets))
        if self.model.table is not None:
            await self.model.table.bring(ids)
        for plan in plans[:-1]:
            self.device.run(plan)
        reading = self.device.run(plans[-1], (data.losses.buffer, 0, data.losses.nbytes))
        assert reading is not None
        return reading

    def _shape(self, batch: Sequence[Example]) -> tuple[int, int]:
        if not batch or len(batch) > self.options.sequences:
            raise InputError(
                f"A batch has 1 to {self.options.sequences} examples here, not {len(batch)}."
            )
        for example in batch:
            bad = [token for token in example.ids if not 0 <= token < self.model.config.vocab]
            if bad:
                raise InputError(f"The id {bad[0]} is none of this model's.")
        return self.options.sequences, bucket(max(len(example.ids) for example in batch))

    def _tokens(self, batches: Sequence[Sequence[Example]]) -> int:
        return sum(len(example.ids) for batch in batches for example in batch)

    def _write_pace(self, targets: int, number: int, rate: float) -> None:
        """What the next plan finds of this step."""
        seed = (self.options.seed * 0x9E3779B9 + self.steps * 4099 + number) & 0xFFFFFFFF
        left = self.options.optimiser.left(max(1, self.steps))
        self.device.write(self._pace.buffer, PACE.pack(1 / targets, seed, rate, *left))

    # Recording

    def _room(self, sequences: int, length: int) -> _Room:
        if (sequences, length) not in self._rooms:
            tokens, experts = sequences * length, self.model.config.experts
            if tokens * (experts.used if experts else 1) > self.device.limits.grid:
                raise InputError(
                    f"{sequences} times {length} tokens are too many for a batch: take fewer or "
                    "shorter sequences."
                )
            if self.model.table is not None and tokens > BATCH_ROWS:
                raise InputError(
                    f"With the table of per-layer embeddings on the host, a batch has at most "
                    f"{BATCH_ROWS} tokens, not {sequences} times {length}: take fewer or shorter "
                    "sequences, or load the model with the table on the device."
                )
            state, ids, targets, losses = (
                self._tensor(count) for count in (2, tokens, tokens, tokens)
            )
            self.device.write(state.buffer, struct.pack("<II", 0, tokens))
            batch = Batch(sequences, length, state, ids, targets, losses, self._pace)
            self._rooms[sequences, length] = _Room(batch)
        return self._rooms[sequences, length]

    def _plans(self, room: _Room, *, back: bool) -> list[Plan]:
        if back not in room.plans:
            recorder = Recorder(self.device, self._pool)
            options, dropout = self.options, self.options.dropout if back else 0.0
            passes = Passes(
                self.model, recorder, room.batch, self.parameters, dropout, options.checkpoint
            )
            passes.loss(back=back)
            room.plans[back] = _parts(recorder.plan())
        return room.plans[back]

    def _tensor(self, words: int) -> Tensor:
        buffer = self.device.buffer(4 * words, "training")
        self._own.append(buffer)
        return Tensor((words,), 4 * words, buffer)

    # Going on later

    async def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write AdamW's moments and the number of steps: with the adapter, enough to go on."""
        tensors = []
        for i, slab in enumerate(self.parameters.slabs):
            for kind, buffer in (("means", slab.means), ("squares", slab.squares)):
                data = await self.device.read(buffer).bytes()
                tensors += [
                    NewStored(f"{name}.{half}.{kind}", "F32", t.shape, _part(data, t))
                    for name, trained in self.parameters.pairs.items()
                    for half, t in (("lora_a", trained.a), ("lora_b", trained.b))
                    if t.buffer is self.parameters.slabs[i].values
                ]
        write_safetensors(path, tensors, {"steps": str(self.steps)})

    def restore_state(self, path: str | os.PathLike[str]) -> None:
        """Go on with the moments of `save_state`; GgufError if they are another adapter's."""
        slabs = {slab.values: slab for slab in self.parameters.slabs}
        with Safetensors.open(path) as file:
            steps = file.metadata.get("steps", "")
            if not (steps.isdecimal() and len(steps) < 10):
                raise GgufError(f"{file.name} is no state of a training.")
            for name, trained in self.parameters.pairs.items():
                for half, t in (("lora_a", trained.a), ("lora_b", trained.b)):
                    slab = slabs[t.buffer]
                    for kind, buffer in (("means", slab.means), ("squares", slab.squares)):
                        key = f"{name}.{half}.{kind}"
                        if key not in file.names or file.shape(key) != t.shape:
                            raise GgufError(f"{file.name} belongs to another adapter: see {key}.")
                        self.device.write(buffer, file.read(key), t.offset)
        self.steps = int(steps)


class Guard:
    """Notices when a training has gone astray."""

    def __init__(self) -> None:
        self.best = math.inf
        self._recent: list[float] = []

    def watch(self, step: Step) -> None:
        """InputError when the loss is no number, or stays far above the best there was."""
        if not math.isfinite(step.loss + step.length):
            raise InputError("The loss is no longer a number: take a smaller learning rate.")
        self._recent = [*self._recent, step.loss][-10:]
        mean = sum(self._recent) / len(self._recent)
        if len(self._recent) == 10:
            if mean > 2 * self.best + 3:
                raise InputError(
                    f"The loss went up from {self.best:.2f} to {mean:.2f}: take a smaller "
                    "learning rate."
                )
            self.best = min(self.best, mean)


def _parts(plan: Plan) -> list[Plan]:
    """The plan in pieces; its buffers are the last one's, which is closed after the others."""
    starts = range(0, len(plan.dispatches), SUBMITTED)
    parts = [Plan(plan.dispatches[at : at + SUBMITTED]) for at in starts]
    parts[-1].buffers = plan.buffers
    return parts


def _check_trainable(adapter: Adapter) -> None:
    for name, pair in adapter.pairs.items():
        if pair.experts > 1:
            raise InputError(f"{name} cannot be trained here; make the adapter without it.")
    if not adapter.pairs:
        raise InputError("The adapter changes nothing of this model: there is nothing to train.")


def _targets(batches: Sequence[Sequence[Example]]) -> int:
    count = sum(example.targets for batch in batches for example in batch)
    if not count:
        raise InputError("No token is supervised: there is nothing to learn.")
    return count


def _laid_out(batch: Sequence[Example], sequences: int, length: int) -> tuple[list[int], list[int]]:
    """Ids and targets of all sequences, filled up; token t foresees the next one."""
    ids, targets = [0] * (sequences * length), [NO_TARGET] * (sequences * length)
    for index, example in enumerate(batch):
        first = index * length
        ids[first : first + len(example.ids)] = example.ids
        for t, supervised in enumerate(example.supervised[1:], 1):
            if supervised:
                targets[first + t - 1] = example.ids[t]
    return ids, targets


def _part(data: bytes, tensor: Tensor) -> bytes:
    return data[tensor.offset : tensor.offset + tensor.nbytes]


def _floats(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)
