"""Recorded generation of DiffusionGemma by transformers, with its random draws."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from conftest import SHARED

from webgemma.convert import convert
from webgemma.denoising import Denoising
from webgemma.gguf.reader import Gguf

FOLDER = SHARED / "diffusion"
DENOISING = Denoising(steps=8, entropy_bound=2.0)
BLOCKS = 2


@cache
def converted() -> Path:
    """Return the path of the model, converted to GGUF."""
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = Path(folder) / "diffusion.gguf"
    convert(FOLDER, path)
    return path


def opened() -> Gguf:
    """Open the converted model."""
    return Gguf.open(converted())


def array(name: str) -> np.ndarray:
    """Return a recorded array."""
    return np.load(FOLDER / f"{name}.npy")


def prompt() -> list[int]:
    """Return the ids of the recorded prompt."""
    return [int(word) for word in (FOLDER / "ids.txt").read_text().split()]


class Trace:
    """Recorded draws, and `logits` [block, step, canvas, vocab] before temperature.

    A network of random weights amplifies differences about a hundredfold with each step, so a
    replay checks its own logits of each step and continues with the recorded ones."""

    def __init__(self) -> None:
        trace = np.load(FOLDER / "generate_trace.npz")
        steps = DENOISING.steps
        self.noises = trace["randint"].reshape(BLOCKS, steps + 1, -1)
        self.samples = trace["multinomial"].reshape(BLOCKS, steps, -1)
        self.logits = trace["logits"].reshape(BLOCKS, steps, *trace["logits"].shape[1:])
        self.ids: list[int] = trace["sequences"].tolist()  # prompt and reply

    def noise(self, block: int, step: int) -> np.ndarray:
        """Return the recorded random tokens."""
        return self.noises[block, step]

    def sample(self, block: int, step: int, z: np.ndarray) -> np.ndarray:
        """Return the recorded samples."""
        del z
        return self.samples[block, step - 1]
