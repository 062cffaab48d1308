"""Training rows on the device, drawn by the shares of a mix in an order fixed by a seed."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Rows:
    """Ids and kinds of all sources, each read repeatedly in shuffled orders."""

    def __init__(self, folder: Path, sources: list[str], device: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.tokens = {name: load(folder, name, "tokens", device) for name in sources}
        self.kinds = {name: load(folder, name, "kinds", device) for name in sources}
        self.order: dict[str, list[int]] = {name: [] for name in sources}

    def describe(self) -> dict[str, dict[str, int]]:
        """Return the rows and tokens of each source."""
        return {
            name: {
                "rows": len(kinds),
                "tokens": int((kinds > 0).sum()),
                "model": int((kinds == 2).sum()),
            }
            for name, kinds in self.kinds.items()
        }

    def batch(self, mix: dict[str, float], count: int) -> tuple[Tensor, Tensor]:
        """Return ids and kinds [count, row] of the next batch."""
        names = [name for name in mix if len(self.tokens[name])]
        shares = np.array([mix[name] for name in names])
        counts = self.random.multinomial(count, shares / shares.sum())
        tokens, kinds = [], []
        for name, number in zip(names, counts, strict=True):
            picked = torch.tensor(
                self.draw(name, int(number)), dtype=torch.long, device=self.tokens[name].device
            )
            tokens.append(self.tokens[name][picked])
            kinds.append(self.kinds[name][picked])
        return torch.cat(tokens).long(), torch.cat(kinds)

    def draw(self, name: str, number: int) -> list[int]:
        """Return the next rows of a source."""
        taken: list[int] = []
        while len(taken) < number:
            if not self.order[name]:
                self.order[name] = self.random.permutation(len(self.tokens[name])).tolist()
            missing = number - len(taken)
            taken += self.order[name][-missing:]
            del self.order[name][-missing:]
        return taken


def load(folder: Path, name: str, kind: str, device: str) -> Tensor:
    """Return the "tokens" or "kinds" of all shards of a source, in order."""
    paths = sorted(
        folder.glob(f"{name}.*.{kind}.npy"), key=lambda path: int(path.name.split(".")[1])
    )
    if not paths:
        raise SystemExit(
            f"There are no rows of {name} in {folder}: run data.py and teacher.py first."
        )
    return torch.from_numpy(np.concatenate([np.load(path) for path in paths])).to(device)
