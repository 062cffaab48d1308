"""A generation of DiffusionGemma that transformers made and recorded, draw by draw."""

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
    """The model as a GGUF."""
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = Path(folder) / "diffusion.gguf"
    convert(FOLDER, path)
    return path


def opened() -> Gguf:
    return Gguf.open(converted())


def array(name: str) -> np.ndarray:
    """One of the recorded arrays."""
    return np.load(FOLDER / f"{name}.npy")


def prompt() -> list[int]:
    return [int(word) for word in (FOLDER / "ids.txt").read_text().split()]


class Trace:
    """The draws as they were; `logits` [block, step, canvas, vocab] before temperature.

    A network of random weights multiplies what differs by about a hundred with each step, so a
    replay takes each step's logits from the record, once its own were found to be the same."""

    def __init__(self) -> None:
        trace = np.load(FOLDER / "generate_trace.npz")
        steps = DENOISING.steps
        self.noises = trace["randint"].reshape(BLOCKS, steps + 1, -1)
        self.samples = trace["multinomial"].reshape(BLOCKS, steps, -1)
        self.logits = trace["logits"].reshape(BLOCKS, steps, *trace["logits"].shape[1:])
        self.ids: list[int] = trace["sequences"].tolist()  # prompt and reply

    def noise(self, block: int, step: int) -> np.ndarray:
        return self.noises[block, step]

    def sample(self, block: int, step: int, z: np.ndarray) -> np.ndarray:
        del z
        return self.samples[block, step - 1]
