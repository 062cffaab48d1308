"""Time training on real shapes with random weights: tokens per second, and the time per kernel."""

import argparse
import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.blank import BlankGguf, a4b, e2b, q4_k_m

from webgemma.device import Plan, open_device
from webgemma.gemma.record.precision import TRAINING_PRECISIONS
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import TensorInfo
from webgemma.lora.adapter import new_adapter
from webgemma.lora.data import Example
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.sync import run_sync

STEPS = 3  # timed, after one that compiles the kernels
CONFIGS = {"e2b": e2b, "a4b": a4b}


class RandomGguf(BlankGguf):
    """Weights whose bytes are random, but whose floats are all small."""

    name = "random.gguf"
    bytes_ = bytes(byte & 0x2F for byte in random.Random(1).randbytes(1 << 20))

    async def read(self, tensor: TensorInfo, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return random bytes; ones for a vector."""
        nbytes = tensor.nbytes - offset if nbytes is None else nbytes
        if len(tensor.shape) == 1:
            return struct.pack("<f", 1.0) * (nbytes // 4)
        return (self.bytes_ * (nbytes // len(self.bytes_) + 1))[:nbytes]

    read_raw = read


def main() -> None:
    """Time some steps, then every kernel by itself."""
    options = arguments()
    sequences, length = options.sequences, options.length
    config = CONFIGS[options.model]()
    device = open_device()
    gguf = RandomGguf(config, q4_k_m)
    model = run_sync(Model.load(gguf, config, device))  # type: ignore[arg-type]
    training = TrainingOptions(
        batch_size=sequences, recompute=not options.keep, precision=options.precision
    )
    trainer = Trainer(model, new_adapter(config, rank=options.rank), training)
    ids = (2, *random.Random(2).choices(range(3, config.vocab), k=length - 1))
    batch = [Example(ids, (True,) * length, line) for line in range(sequences)]
    for step in range(1 + STEPS):
        start = time.perf_counter()
        result = run_sync(trainer.step([batch], 1e-4))
        seconds = time.perf_counter() - start
        speed = f"{sequences * length / seconds:.0f} tokens/s" if step else "compiling"
        print(f"{seconds:.3f} s, {speed}, loss {result.loss:.3f}", flush=True)
    print(f"memory {device.nbytes / 1e9:.2f} GB on {device.name}")
    (recorded,) = trainer._recorded.values()
    print_kernel_times(trainer, recorded.plans[True])


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=CONFIGS, default="e2b")
    for name, default in (("sequences", 4), ("length", 512), ("rank", 16)):
        parser.add_argument(name, nargs="?", type=int, default=default)
    parser.add_argument(
        "keep", nargs="?", choices=["keep"], help="keep all activations: no checkpointing"
    )
    parser.add_argument("--precision", choices=TRAINING_PRECISIONS, default="auto")
    return parser.parse_args()


def print_kernel_times(trainer: Trainer, plans: list[Plan]) -> None:
    """Print the time of each kernel: all its dispatches one after the other."""
    dispatches = [dispatch for plan in plans for dispatch in plan.dispatches]
    device, total, kernels = trainer.device, 0.0, Counter(d.name for d in dispatches)
    times = []
    for kernel in kernels:
        plan = Plan([dispatch for dispatch in dispatches if dispatch.name == kernel])
        for _ in range(2):
            start = time.perf_counter()
            device.run(plan)
            run_sync(device.read(trainer._gradient_norm.buffer, 0, 4).bytes())
            seconds = time.perf_counter() - start
        times.append((seconds, kernel))
        total += seconds
    for seconds, kernel in sorted(times, reverse=True):
        print(f"{kernel:50s} {kernels[kernel]:5d}  {1e3 * seconds:8.1f} ms  {seconds / total:5.1%}")


if __name__ == "__main__":
    main()
