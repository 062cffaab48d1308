"""Tokens per second of training on true shapes with made-up weights, and where the time goes.

usage: train_speed.py [e2b|a4b] [SEQUENCES] [LENGTH] [RANK] [keep]   (keep: no checkpointing)
"""

import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from blank import BlankGguf, a4b, e2b, q4_k_m

from webgemma.device import Plan, open_device
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import TensorInfo
from webgemma.lora.data import Example
from webgemma.lora.fresh import new_adapter
from webgemma.lora.trainer import Options, Trainer
from webgemma.sync import run_sync

REPEATS = 3


class Noise(BlankGguf):
    """Weights whose bytes are random, but no float among them large."""

    name = "noise.gguf"
    bytes_ = bytes(byte & 0x2F for byte in random.Random(1).randbytes(1 << 20))

    async def read(self, tensor: TensorInfo, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Noise; vectors are ones."""
        nbytes = tensor.nbytes - offset if nbytes is None else nbytes
        if len(tensor.shape) == 1:
            return struct.pack("<f", 1.0) * (nbytes // 4)
        return (self.bytes_ * (nbytes // len(self.bytes_) + 1))[:nbytes]

    read_raw = read


def main() -> None:
    """Time whole steps, then every kind of kernel by itself."""
    name = sys.argv[1] if len(sys.argv) > 1 else "e2b"
    sequences, length, rank = (int(x) for x in [*sys.argv[2:5], "4", "512", "16"][:3])
    config = {"e2b": e2b, "a4b": a4b}[name]()
    device = open_device()
    gguf = Noise(config, q4_k_m)
    model = Model.reserve(gguf, config, device)  # type: ignore[arg-type]
    run_sync(model._derive(gguf, gguf.tensors))  # type: ignore[arg-type]
    run_sync(model.fill(gguf))  # type: ignore[arg-type]
    options = Options(sequences=sequences, checkpoint="keep" not in sys.argv)
    trainer = Trainer(model, new_adapter(config, rank=rank), options)
    ids = (2, *random.Random(2).choices(range(3, config.vocab), k=length - 1))
    batch = [Example(ids, (True,) * length, line) for line in range(sequences)]
    for repeat in range(1 + REPEATS):
        start = time.perf_counter()
        found = run_sync(trainer.step([batch], 1e-4))
        seconds = time.perf_counter() - start
        speed = sequences * length / seconds
        said = "compiling" if repeat == 0 else f"{speed:.0f} tokens/s"
        print(f"{seconds:.3f} s, {said}, loss {found.loss:.3f}", flush=True)
    print(f"memory {device.nbytes / 1e9:.2f} GB on {device.name}")
    spend(trainer, trainer._rooms[sequences, length].plans[True])


def spend(trainer: Trainer, plans: list[Plan]) -> None:
    """The time of every kind of kernel: all its dispatches one after the other."""
    dispatches = [dispatch for plan in plans for dispatch in plan.dispatches]
    device, total, kinds = trainer.device, 0.0, Counter(d.name for d in dispatches)
    found = []
    for kind in kinds:
        some = Plan([dispatch for dispatch in dispatches if dispatch.name == kind])
        for _ in range(2):
            start = time.perf_counter()
            device.run(some)
            run_sync(device.read(trainer._length.buffer, 0, 4).bytes())
            seconds = time.perf_counter() - start
        found.append((seconds, kind))
        total += seconds
    for seconds, kind in sorted(found, reverse=True):
        print(f"{kind:24s} {kinds[kind]:5d}  {1e3 * seconds:8.1f} ms  {seconds / total:5.1%}")


if __name__ == "__main__":
    main()
