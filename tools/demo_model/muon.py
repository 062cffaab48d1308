"""Muon: momentum whose every matrix is made nearly orthogonal before it is added."""

from collections import defaultdict

import torch
from torch import Tensor, nn

# Odd polynomial whose repetition sends all singular values into the neighbourhood of one.
A, B, C = 3.4445, -4.7750, 2.0315
ROUNDS = 5


class Muon:
    """For hidden matrices; those of one shape are treated together."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float, decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.values())
        self.memory = [torch.stack([torch.zeros_like(p) for p in group]) for group in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; `rate` is the size of a step for a square matrix."""
        for group, memory in zip(self.groups, self.memory, strict=True):
            gradient = torch.stack([p.grad for p in group])
            memory.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(memory, self.momentum))
            rows, columns = group[0].shape[-2:]
            size = rate * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change.to(parameter.dtype), alpha=size)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly [number, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.clone()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.mT if tall else x
