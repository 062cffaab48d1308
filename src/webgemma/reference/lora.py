"""Low-rank adapters in the reference: W x + scale · B (A x), for any matrix of the text model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from webgemma.gguf.reader import Gguf
from webgemma.reference.weights import Floats, Weights

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class Pair(NamedTuple):
    """What is added to one matrix [out, in]: scale · B A. Of experts each has its own A and B."""

    a: Floats  # [rank, in] or [experts, rank, in]; of the embedding [vocab, rank]: a row a token
    b: Floats  # [out, rank] or [experts, out, rank]
    scale: float

    @classmethod
    def of_bytes(cls, name: str, stored: Any, scale: float) -> "Pair":
        """What an adapter has for a tensor (see lora/adapter.py), times a scale."""
        experts = (stored.experts,) if name.endswith("_exps.weight") else ()
        shape = (stored.rank, stored.inputs)
        a = np.frombuffer(stored.a, "<f4").reshape(
            *experts, *shape[:: -1 if name == EMBEDDING else 1]
        )
        b = np.frombuffer(stored.b, "<f4").reshape(*experts, stored.outputs, stored.rank)
        return cls(a, b, scale * stored.scale)

    def of(self, part: int) -> tuple[Floats, Floats]:
        """A [rank, in] and B [out, rank] of one expert, or of the only matrix there is."""
        return (self.a[part], self.b[part]) if self.a.ndim == 3 else (self.a, self.b)


class AdaptedWeights(Weights):
    """The weights of a file with any number of adapters on top, each by its tensors' names.

    A head that is the embedding's table keeps its own adapter, under the head's name."""

    def __init__(
        self,
        gguf: Gguf,
        adapters: Sequence[Mapping[str, Pair]],
        budget_nbytes: int | None = None,
    ) -> None:
        super().__init__(gguf, budget_nbytes)
        self.adapters = adapters

    def rows(self, name: str, ids: Sequence[int]) -> Floats:
        """Rows of a table: E[id] + scale · B A[id]."""
        out = super().rows(name, ids)
        for pair in self.pairs(name):
            out = out + np.float32(pair.scale) * (pair.a[list(ids)] @ pair.b.T)
        return out

    def linear(self, x: Floats, name: str, part: int = 0, parts: int = 1) -> Floats:
        """x [T, in] -> [T, out]: W x + scale · B (A x)."""
        out = super().linear(x, name, part, parts)
        for pair in self.pairs(HEAD if name == EMBEDDING else name):
            a, b = pair.of(part)
            inner: Floats = np.float32(pair.scale) * (x @ a.T)  # [T, rank]
            out = out + inner @ b.T
        return out

    def transposed(self, dy: Floats, name: str, part: int, parts: int) -> Floats:
        """dy [T, out] W of the frozen matrix alone: [T, in]."""
        tensor = self.tensors[name]
        count = tensor.rows // parts
        return dy @ self[name].reshape(tensor.rows, -1)[part * count : (part + 1) * count]

    def pairs(self, name: str) -> list[Pair]:
        """What the adapters have for a tensor."""
        return [adapter[name] for adapter in self.adapters if name in adapter]
