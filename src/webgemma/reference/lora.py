"""LoRA adapters in the reference: W x + scale · B (A x) for any matrix of the text model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from webgemma.gguf.reader import Gguf
from webgemma.reference.weights import Floats, Weights

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class Pair(NamedTuple):
    """Low-rank update scale · B A of one matrix [out, in]; each expert has its own A and B."""

    a: Floats  # [rank, in] or [experts, rank, in]; for the embedding [vocab, rank], a row per token
    b: Floats  # [out, rank] or [experts, out, rank]
    scale: float

    @classmethod
    def from_stored(cls, name: str, stored: Any, scale: float) -> "Pair":
        """Return the pair that an adapter stores for a tensor (lora/adapter.py), times a scale."""
        experts = (stored.experts,) if name.endswith("_exps.weight") else ()
        shape = (stored.rank, stored.inputs)
        a = np.frombuffer(stored.a, "<f4").reshape(
            *experts, *shape[:: -1 if name == EMBEDDING else 1]
        )
        b = np.frombuffer(stored.b, "<f4").reshape(*experts, stored.outputs, stored.rank)
        return cls(a, b, scale * stored.scale)

    def of_expert(self, expert: int) -> tuple[Floats, Floats]:
        """Return A [rank, in] and B [out, rank] of one expert, or of a single matrix."""
        return (self.a[expert], self.b[expert]) if self.a.ndim == 3 else (self.a, self.b)


def scaled_pairs(adapters: Sequence[tuple[Mapping[str, Any], float]]) -> list[dict[str, Pair]]:
    """Return the pairs of adapters that are each applied with a scale."""
    return [
        {name: Pair.from_stored(name, pair, scale) for name, pair in pairs.items()}
        for pairs, scale in adapters
    ]


class AdaptedWeights(Weights):
    """Weights of a file plus any number of adapters, each a mapping from tensor name to pair.

    A tied head, which is the embedding table, has its adapter under the name of the head."""

    def __init__(
        self,
        gguf: Gguf,
        adapters: Sequence[Mapping[str, Pair]],
        budget_nbytes: int | None = None,
    ) -> None:
        super().__init__(gguf, budget_nbytes)
        self.adapters = adapters

    def rows(self, name: str, ids: Sequence[int]) -> Floats:
        """Return rows of a table, E[id] + scale · B A[id]: [len(ids), width]."""
        out = super().rows(name, ids)
        for pair in self.pairs(name):
            out = out + np.float32(pair.scale) * (pair.a[list(ids)] @ pair.b.T)
        return out

    def linear(self, x: Floats, name: str, expert: int = 0, expert_count: int = 1) -> Floats:
        """Return W x + scale · B (A x) for x [T, in]: [T, out]."""
        out = super().linear(x, name, expert, expert_count)
        for pair in self.pairs(HEAD if name == EMBEDDING else name):
            a, b = pair.of_expert(expert)
            inner: Floats = np.float32(pair.scale) * (x @ a.T)  # [T, rank]
            out = out + inner @ b.T
        return out

    def linear_transposed(self, dy: Floats, name: str, expert: int, expert_count: int) -> Floats:
        """Return dy W for dy [T, out] and the frozen W [out, in], without adapters: [T, in]."""
        tensor = self.tensors[name]
        count = tensor.rows // expert_count
        return dy @ self[name].reshape(tensor.rows, -1)[expert * count : (expert + 1) * count]

    def pairs(self, name: str) -> list[Pair]:
        """Return the pairs of all adapters that change a tensor."""
        return [adapter[name] for adapter in self.adapters if name in adapter]
