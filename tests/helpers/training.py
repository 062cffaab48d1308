"""Trainers of tiny models, the gradients that they compute, and those of the reference."""

import numpy as np

from helpers.gpu import device, get
from helpers.tiny import Tiny, tiny_gguf
from helpers.tiny_adapter import LAYER, tiny_adapter, tiny_pairs
from webgemma.device import Device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.adapter import EMBEDDING, HEAD
from webgemma.lora.data import Example
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.reference.backward import Backward
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

NAMES = (*LAYER, "ffn_gate_inp", EMBEDDING, HEAD)
IDS = (2, *np.random.default_rng(4).integers(24, 310, 39).tolist())
EXAMPLES = [
    Example(IDS, tuple(t >= 6 for t in range(40)), 1),  # longer than the window of 8
    Example(IDS[4:10], tuple(t in (1, 2, 5) for t in range(6)), 2),
]


def open_tiny(tiny: Tiny) -> Gguf:
    """Open a tiny model."""
    return run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))


def trainer_of(
    tiny: Tiny,
    names: tuple[str, ...] = NAMES,
    on: Device | None = None,
    table: str = "device",
    **options: object,
) -> Trainer:
    """Return a trainer of pairs for the named matrices of a tiny model."""
    gguf = open_tiny(tiny)
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), on or device(), table=table))
    adapter = tiny_adapter(tiny_pairs(gguf, names))
    return Trainer(model, adapter, TrainingOptions(**({"batch_size": 2} | options)))


def gradients_of(trainer: Trainer, batches: list[list[Example]]) -> dict[str, list[np.ndarray]]:
    """Return the gradients of a step, which AdamW would read."""
    targets = sum(example.targets for batch in batches for example in batch)
    for number, batch in enumerate(batches):
        trainer._write_step(targets, number, 0.0)
        run_sync(trainer._run(batch, backward=True))
    pairs = trainer.parameters.pairs.items()
    gradients = {name: [get(t.a_gradient), get(t.b_gradient)] for name, t in pairs}
    close(trainer)
    return gradients


def close(trainer: Trainer) -> None:
    """Free the memory of a trainer and its model."""
    trainer.close()
    trainer.model.close()


def reference_of(tiny: Tiny, names: tuple[str, ...] = NAMES) -> Backward:
    """Return the reference of such a trainer."""
    gguf = open_tiny(tiny)
    model = TextModel(Config.from_gguf(gguf), Weights(gguf))
    return Backward(model, tiny_pairs(gguf, names))


def assert_close(actual: dict, expected: dict, bound: float) -> None:
    """Compare gradients, relative to the largest of each tensor."""
    for name, halves in actual.items():
        for half, (one, other) in enumerate(zip(halves, expected[name], strict=True)):
            error = np.abs(one - np.ravel(other)).max() / np.abs(other).max()
            assert error <= bound, f"{name} {'AB'[half]}: {error}"
