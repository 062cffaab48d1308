"""Checkpoints: float16 weights as one list of numbers, split into files that are easy to copy."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from settings import Shape

FILE_NBYTES = 12 << 20
INDEX = "weights.json"


def save(model: object, folder: Path) -> None:
    """Write `weights.json` and `weights.N.bin`."""
    arrays = {name: p.detach().float().cpu().numpy() for name, p in model.named_tensors()}
    index = {"shape": asdict(model.shape), "tensors": {n: list(a.shape) for n, a in arrays.items()}}
    data = b"".join(array.astype("<f2").tobytes() for array in arrays.values())
    for number, start in enumerate(range(0, len(data), FILE_NBYTES)):
        (folder / f"weights.{number}.bin").write_bytes(data[start : start + FILE_NBYTES])
    (folder / INDEX).write_text(json.dumps(index))


def load(folder: Path, kind: type = Shape) -> tuple[Any, dict[str, np.ndarray]]:
    """Read a checkpoint; return the shape of the model and its tensors as float32."""
    index = json.loads((folder / INDEX).read_text())
    sizes = {name: int(np.prod(shape)) for name, shape in index["tensors"].items()}
    count = -(-2 * sum(sizes.values()) // FILE_NBYTES)
    data = b"".join((folder / f"weights.{number}.bin").read_bytes() for number in range(count))
    values = np.frombuffer(data, "<f2").astype(np.float32)
    ends = np.cumsum(list(sizes.values()))
    arrays = np.split(values, ends[:-1])
    shapes = index["tensors"].items()
    return kind(**index["shape"]), {
        name: array.reshape(shape) for (name, shape), array in zip(shapes, arrays, strict=True)
    }
