"""Muon: an optimiser whose momentum matrices are made nearly orthogonal before each update."""

from collections import defaultdict

import torch
from torch import Tensor, nn

# Coefficients of an odd polynomial; repeated, it moves all singular values close to one.
A, B, C = 3.4445, -4.7750, 2.0315
ROUNDS = 5


class Muon:
    """Optimiser of hidden matrices; those of one shape are updated together."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float, decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.values())
        self.momenta = [torch.stack([torch.zeros_like(p) for p in group]) for group in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update all matrices; `rate` is the size of a step for a square matrix."""
        for group, average in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group])
            average.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(average, self.momentum))
            rows, columns = group[0].shape[-2:]
            size = rate * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change.to(parameter.dtype), alpha=size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximately the nearest orthogonal matrices [number, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.clone()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.mT if tall else x
