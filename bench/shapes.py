"""Models of the real shapes, with random weights that are made in memory while they are loaded.

A file of 31B has 19 GB: writing and reading it takes minutes, of which a timing needs nothing."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from webgemma.gemma.config import Config
from webgemma.gguf.formats import Format
from webgemma.gguf.reader import Gguf, TensorInfo

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from helpers.blank import BlankGguf, a4b, b31, e2b

SHAPES = {"e2b": e2b, "26b": a4b, "31b": b31}
# Where a block has scales, and the value of a weight of 1 in them.
SCALES = {
    "Q4_K": ((0, 1 / 256), (2, 1 / 64)),
    "Q5_0": ((0, 1 / 8),),
    "Q6_K": ((208, 1 / 2048),),
    "Q8_0": ((0, 1 / 64),),
}
BLOCKS = 1 << 17  # that differ
VECTORS = {"_q_norm": 0.3, "_k_norm": 0.3, "output_scale": 0.5}  # what they hold; others hold 1


class RandomGguf(BlankGguf):
    """A model in a format, or those of llama.cpp's Q4_K_M; no byte is stored before it is read."""

    def __init__(self, config: Config, format: str | None = None) -> None:
        super().__init__(config, lambda name: format or _format_of(name, config))
        self.name = config.name
        self._blocks: dict[tuple[str, int], np.ndarray] = {}

    async def read(self, tensor: TensorInfo, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return weights whose products have the size of what they multiply."""
        end = tensor.nbytes if nbytes is None else offset + nbytes
        if len(tensor.shape) == 1:
            value = next((v for name, v in VECTORS.items() if name in tensor.name), 1.0)
            return np.full(tensor.shape, value, "<f4").tobytes()[offset:end]
        data = self._random(tensor.format, tensor.shape[0])
        first = offset % data.size
        return np.resize(data, first + end - offset)[first:].tobytes()

    read_raw = read

    def _random(self, format: Format, width: int) -> np.ndarray:
        """Return the bytes of some blocks, for rows of this width."""
        key = format.name, width
        if key not in self._blocks:
            rng, size = np.random.default_rng(1), 0.7 / math.sqrt(width)
            if format.name in SCALES:
                blocks = rng.integers(0, 256, (BLOCKS, format.nbytes), dtype=np.uint8)
                for at, one in SCALES[format.name]:
                    scale = np.float16(size * one).tobytes()
                    blocks[:, at : at + 2] = np.frombuffer(scale, np.uint8)
            else:
                values = rng.standard_normal(BLOCKS) * (1 if format.name == "F32" else size)
                blocks = values.astype("<f4" if format.name == "F32" else "<f2").view(np.uint8)
            self._blocks[key] = blocks.reshape(-1)
        return self._blocks[key]


def _format_of(name: str, config: Config) -> str:
    """Return the format in which llama.cpp's Q4_K_M stores a matrix."""
    if name.endswith("_gate_inp.weight"):
        return "F32"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "Q6_K"
    if name == "per_layer_model_proj.weight":
        return "F16"
    if not name.startswith("blk."):
        return "Q4_K"
    at, count = int(name.split(".")[1]), len(config.layers)
    better = at < count // 8 or at >= 7 * count // 8 or (at - count // 8) % 3 == 2
    if "_down_exps" in name or (name.endswith("ffn_down.weight") and config.layers[at].ffn % 256):
        return "Q8_0" if better else "Q5_0"
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        return "Q6_K" if better else "Q4_K"
    return "Q4_K"


@contextmanager
def opened(model: str) -> Iterator[tuple[Gguf, Config]]:
    """Open a .gguf file, or make the weights of a shape: e2b, 26b or 31b."""
    if model in SHAPES:
        config = SHAPES[model]()
        made: Gguf = RandomGguf(config)  # the part of it that loading reads
        yield made, config
        return
    with Gguf.open(Path(model)) as gguf:
        yield gguf, Config.from_gguf(gguf)
