"""What a training will take of a device's memory, counted by recording it without one."""

from __future__ import annotations

from typing import NamedTuple

from webgemma.device import Device
from webgemma.device.null import NullDevice
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import Adapter
from webgemma.lora.trainer import Options, Trainer


class Memory(NamedTuple):
    """Bytes on the device."""

    model_nbytes: int
    adapter_nbytes: int  # with its gradients and AdamW's moments
    work_nbytes: int  # of the batches with the longest sequences

    @property
    def nbytes(self) -> int:
        """All together."""
        return sum(self)


async def estimate(
    gguf: Gguf,
    config: Config,
    adapter: Adapter,
    options: Options,
    length: int,
    device: Device | None = None,
) -> Memory:
    """What batches of so long sequences take; `device` says how work would be cut there."""
    blank = NullDevice() if device is None else NullDevice(device.features, device.limits)
    blank.software = device is not None and device.software
    with Model.reserve(gguf, config, blank) as model:
        await model.derive(gguf)
        weights = blank.nbytes
        trainer = Trainer(model, adapter, options)
        pairs = blank.nbytes - weights
        trainer.reserve(options.sequences, length)
        work = blank.nbytes - weights - pairs
        trainer.close()
    return Memory(weights, pairs, work)
