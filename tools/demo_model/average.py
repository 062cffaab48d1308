"""Step 4 of the second training: average the weights of checkpoints and of files."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import load, save
from settings import DEMO
from shipped import tensors


class Averaged:
    """Weights as `checkpoint.save` reads them from a model."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.shape, self.arrays = DEMO, arrays

    def named_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield every weight with its name."""
        import torch

        return ((name, torch.from_numpy(values)) for name, values in self.arrays.items())


def main() -> None:
    """Write the weighted mean of two or more sets of weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("parts", nargs="+", help="FOLDER=SHARE, or FILE.gguf=SHARE")
    options = parser.parse_args()
    total: dict[str, np.ndarray] = {}
    for part in options.parts:
        source, _, share = part.rpartition("=")
        path = Path(source)
        arrays = tensors(path) if path.is_file() else load(path)[1]
        for name, values in arrays.items():
            total[name] = total.get(name, 0.0) + float(share) * values
    options.out.mkdir(parents=True, exist_ok=True)
    save(Averaged(total), options.out)


if __name__ == "__main__":
    main()
