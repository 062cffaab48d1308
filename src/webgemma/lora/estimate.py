"""What a training takes of a device's memory, counted by recording it on a null device."""

from __future__ import annotations

from typing import NamedTuple

from webgemma.device import Device
from webgemma.device.null import NullDevice
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import Adapter
from webgemma.lora.trainer import Trainer, TrainingOptions


class TrainingMemory(NamedTuple):
    """Bytes on the device."""

    model_nbytes: int
    adapter_nbytes: int  # with its gradients and AdamW's moments
    scratch_nbytes: int  # of the batches with the longest sequences

    @property
    def nbytes(self) -> int:
        """All together."""
        return sum(self)


async def estimate(
    gguf: Gguf,
    config: Config,
    adapter: Adapter,
    options: TrainingOptions,
    length: int,
    device: Device | None = None,
) -> TrainingMemory:
    """Return what batches of sequences of this length take; `device` has features and limits."""
    null = NullDevice() if device is None else NullDevice(device.features, device.limits)
    if device is not None:
        null.software = device.software
        null.matrix_shapes, null.subgroup_sizes = device.matrix_shapes, device.subgroup_sizes
    with Model.allocate_all(gguf, config, null) as model:
        await model.derive(gguf)
        weights = null.nbytes
        trainer = Trainer(model, adapter, options)
        pairs = null.nbytes - weights
        trainer.allocate(options.batch_size, length)
        scratch = null.nbytes - weights - pairs
        trainer.close()
    return TrainingMemory(weights, pairs, scratch)
