"""Training an adapter on the GPU, step by step; `training` has whole trainings by a schedule."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.errors import GgufError, InputError
from webgemma.gemma.record.precision import check_training_precision, choose_training_precision
from webgemma.gemma.weights import BATCH_ROWS, Model
from webgemma.gguf.safetensors import NewSafetensor, Safetensors
from webgemma.graph import BufferPool, Recorder, Tensor
from webgemma.kernels import host_struct
from webgemma.lora.adapter import Adapter
from webgemma.lora.backward.layers import TrainingBatch, TrainingPass
from webgemma.lora.data import Example, bucket
from webgemma.lora.optimiser import AdamW, Parameters, Slab

NO_TARGET = 0xFFFFFFFF
MAX_DISPATCHES = 128  # submitted at once: systems reset a GPU that is busy for seconds
TRAINING_STEP = host_struct("lib/training_step/struct", "TrainingStep")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train; the learning rate comes with every step."""

    batch_size: int = 4  # sequences
    dropout: float = 0.0
    seed: int = 0
    optimiser: AdamW = field(default_factory=AdamW)
    recompute: bool = True  # each layer in the backward pass: less memory, more work
    # Of products with the model's matrices: auto, exact or f16, see choose_training_precision.
    precision: str = "auto"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"A batch must have at least one sequence, not {self.batch_size}.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"The dropout must be from 0 to below 1, not {self.dropout}.")
        check_training_precision(self.precision)


class StepResult(NamedTuple):
    """What a step computed."""

    loss: float  # mean over its supervised tokens
    gradient_norm: float  # of all gradients together, before clipping
    targets: int  # supervised tokens
    tokens: int


@dataclass(slots=True)
class _Recorded:
    """The inputs of batches of one shape, and the plans recorded for them."""

    batch: TrainingBatch
    plans: dict[bool, list[Plan]] = field(default_factory=dict)  # with and without a backward pass


class Trainer:
    """Trains an adapter on a model that stays unchanged."""

    def __init__(
        self, model: Model, adapter: Adapter, options: TrainingOptions | None = None
    ) -> None:
        self.model = model
        self.device: Device = model.device
        self.options = options or TrainingOptions()
        model.config.check_writes(model.name)
        if model.config.diffusion:
            raise InputError("DiffusionGemma cannot be trained yet.")
        adapter = adapter.fitted(model.config)
        _check_trainable(adapter)
        if model.lora.weights or model.lora.embedding:
            raise InputError("The model has adapters applied: remove them before training.")
        self.steps = 0
        self._recorded: dict[tuple[int, int], _Recorded] = {}  # by sequences and length
        self._scratch, self._memory = BufferPool(self.device), BufferPool(self.device)
        self.parameters = Parameters(self.device, adapter)
        self._training_step = self._tensor(TRAINING_STEP.nbytes // 4)
        self._gradient_norm = self._tensor(1)
        self._update = self.options.optimiser.plan(
            self.parameters, self._training_step, self._gradient_norm
        )

    async def step(self, batches: Sequence[Sequence[Example]], learning_rate: float) -> StepResult:
        """Update the adapter by one step of AdamW, with the gradients of some batches together.

        InputError if nothing is supervised. A loss that is not finite changes nothing."""
        targets = _count_targets(batches)
        readings = []
        for number, batch in enumerate(batches):
            self._write_step(targets, number, learning_rate)
            readings.append(await self._run(batch, backward=True))
        self.steps += 1
        self._write_step(targets, 0, learning_rate)
        norm = self.device.run(self._update, (self._gradient_norm.buffer, 0, 4))
        assert norm is not None
        losses = [sum(_floats(await reading.bytes())) for reading in readings]
        (gradient_norm,) = _floats(await norm.bytes())
        tokens = sum(len(example.ids) for batch in batches for example in batch)
        return StepResult(sum(losses) / targets, gradient_norm, targets, tokens)

    async def evaluate(self, batches: Sequence[Sequence[Example]]) -> float:
        """Return the mean loss over all supervised tokens, without dropout; nothing changes."""
        targets, total = _count_targets(batches), 0.0
        self._write_step(targets, 0, 0.0)
        for batch in batches:
            total += sum(_floats(await (await self._run(batch, backward=False)).bytes()))
        return total / targets

    async def adapter(self) -> Adapter:
        """Return the adapter as it is now."""
        return await self.parameters.read()

    def allocate(self, sequences: int, length: int) -> None:
        """Record the plans for batches of this shape now; DeviceError if they do not fit."""
        self._plans(self._for_shape(sequences, length), backward=True)

    def close(self) -> None:
        """Free the memory; the model keeps its own."""
        for recorded in self._recorded.values():
            for plan in chain(*recorded.plans.values()):
                plan.close(self.device)
        self._update.close(self.device)
        self._recorded.clear()
        self.parameters.close()
        self._scratch.close()
        self._memory.close()

    # Running

    async def _run(self, batch: Sequence[Example], *, backward: bool) -> Reading:
        """Submit a batch; return the reading of its losses."""
        recorded = self._for_shape(*self._shape(batch))
        plans, data = self._plans(recorded, backward=backward), recorded.batch
        await self.device.compiled()
        ids, targets = _padded(batch, data.sequences, data.length)
        self.device.write(data.ids.buffer, struct.pack(f"<{len(ids)}I", *ids))
        self.device.write(data.targets.buffer, struct.pack(f"<{len(targets)}I", *targets))
        if self.model.table is not None:
            await self.model.table.upload(ids)
        for plan in plans[:-1]:
            self.device.run(plan)
        reading = self.device.run(plans[-1], (data.losses.buffer, 0, data.losses.nbytes))
        assert reading is not None
        return reading

    def _shape(self, batch: Sequence[Example]) -> tuple[int, int]:
        if not batch or len(batch) > self.options.batch_size:
            raise InputError(
                f"A batch has 1 to {self.options.batch_size} examples here, not {len(batch)}."
            )
        vocab = self.model.config.vocab
        for example in batch:
            bad = [token for token in example.ids if not 0 <= token < vocab]
            if bad:
                raise InputError(
                    f"The id {bad[0]} is not a token: this model has 0 to {vocab - 1}."
                )
        return self.options.batch_size, bucket(max(len(example.ids) for example in batch))

    def _write_step(self, targets: int, number: int, learning_rate: float) -> None:
        """Write what the next plan reads of this step."""
        seed = (self.options.seed * 0x9E3779B9 + self.steps * 4099 + number) & 0xFFFFFFFF
        packed = TRAINING_STEP.pack(
            loss_weight=1 / targets,
            seed=seed,
            rate=learning_rate,
            **self.options.optimiser.corrections(max(1, self.steps)),
        )
        self.device.write(self._training_step.buffer, packed)

    # Recording

    def _for_shape(self, sequences: int, length: int) -> _Recorded:
        if (sequences, length) not in self._recorded:
            tokens, experts = sequences * length, self.model.config.experts
            if tokens * (experts.used if experts else 1) > self.device.limits.grid:
                raise InputError(
                    f"{sequences} times {length} tokens are too many for a batch: use fewer or "
                    "shorter sequences."
                )
            if self.model.table is not None and tokens > BATCH_ROWS:
                raise InputError(
                    "With the table of per-layer embeddings on the host, a batch has at most "
                    f"{BATCH_ROWS} tokens, not {sequences} times {length}: use fewer or shorter "
                    "sequences, or load the model with the table on the device."
                )
            batch, ids, targets, losses = map(self._tensor, (2, tokens, tokens, tokens))
            self.device.write(batch.buffer, struct.pack("<II", 0, tokens))
            self._recorded[sequences, length] = _Recorded(
                TrainingBatch(sequences, length, batch, ids, targets, losses, self._training_step)
            )
        return self._recorded[sequences, length]

    def _plans(self, recorded: _Recorded, *, backward: bool) -> list[Plan]:
        if backward not in recorded.plans:
            recorder = Recorder(self.device, self._scratch)
            TrainingPass(
                self.model,
                recorder,
                recorded.batch,
                self.parameters,
                self.options.dropout if backward else 0.0,
                self.options.recompute,
                choose_training_precision(self.options.precision, self.device),
            ).record(backward=backward)
            recorded.plans[backward] = _split(recorder.plan())
        return recorded.plans[backward]

    def _tensor(self, words: int) -> Tensor:
        return self._memory.tensor(words, label="training")

    # Continuing later

    async def state(self) -> list[NewSafetensor]:
        """Return the adapter's numbers and AdamW's moments: with `steps`, all it continues from."""
        tensors = []
        for slab in self.parameters.slabs:
            for kind, buffer in _buffers(slab):
                data = memoryview(await self.device.read(buffer).bytes())
                tensors += [
                    NewSafetensor(
                        f"{name}.{half}.{kind}",
                        "F32",
                        t.shape,
                        data[t.offset : t.offset + t.nbytes],
                    )
                    for name, trained in self.parameters.pairs.items()
                    for half, t in trained.halves()
                    if trained.slab is slab
                ]
        return tensors

    def restore(self, file: Safetensors, steps: int) -> None:
        """Continue from the `state` in a file; GgufError, and no change, if it is of another."""
        writes = []
        for name, trained in self.parameters.pairs.items():
            for half, t in trained.halves():
                for kind, buffer in _buffers(trained.slab):
                    key = f"{name}.{half}.{kind}"
                    if key not in file.tensors or (file.dtype(key), file.shape(key)) != (
                        "F32",
                        t.shape,
                    ):
                        raise GgufError(f"{file.name} belongs to another adapter: see {key}.")
                    writes.append((buffer, key, t.offset))
        for buffer, key, offset in writes:
            self.device.write(buffer, file.read(key), offset)
        self.steps = steps


def _buffers(slab: Slab) -> tuple[tuple[str, Buffer], ...]:
    return ("values", slab.values), ("means", slab.means), ("squares", slab.squares)


def _split(plan: Plan) -> list[Plan]:
    """Split a plan's dispatches; the last one owns its buffers, and is closed after the others."""
    starts = range(0, len(plan.dispatches), MAX_DISPATCHES)
    plans = [Plan(plan.dispatches[at : at + MAX_DISPATCHES]) for at in starts]
    plans[-1].buffers = plan.buffers
    return plans


def _check_trainable(adapter: Adapter) -> None:
    for name, pair in adapter.pairs.items():
        if pair.experts > 1:
            raise InputError(f"{name} cannot be trained here; make the adapter without it.")
    if not adapter.pairs:
        raise InputError("The adapter changes nothing in this model: there is nothing to train.")


def _count_targets(batches: Sequence[Sequence[Example]]) -> int:
    count = sum(example.targets for batch in batches for example in batch)
    if not count:
        raise InputError("No token is supervised: there is nothing to train on.")
    return count


def _padded(batch: Sequence[Example], sequences: int, length: int) -> tuple[list[int], list[int]]:
    """Return the padded ids and targets of all sequences; token t predicts the next one."""
    ids, targets = [0] * (sequences * length), [NO_TARGET] * (sequences * length)
    for index, example in enumerate(batch):
        first = index * length
        ids[first : first + len(example.ids)] = example.ids
        for t, supervised in enumerate(example.supervised[1:], 1):
            if supervised:
                targets[first + t - 1] = example.ids[t]
    return ids, targets


def _floats(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)
