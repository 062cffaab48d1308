"""What search needs of an embedding model: unit vectors of texts, and a mark of its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from webgemma.errors import InputError
from webgemma.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_SIZE = 256  # of EmbeddingGemma's 768 numbers: a third of the file, and nearly as good
MAX_SIZE = 8192  # of any model

Task = Literal["query", "document"]


class Embedder(Protocol):
    """An embedding model, which need not be loaded before it is used."""

    @property
    def name(self) -> str:
        """By which a user finds it again."""

    @property
    def fingerprint(self) -> str:
        """What no other model has: vectors of two models cannot be compared."""

    def embed(
        self, texts: Sequence[str], task: Task, size: int, progress: Progress
    ) -> "NDArray[np.float32]":
        """Return a unit vector of `size` numbers for each text: [texts, size]."""


def check_size(size: int) -> int:
    """Return the size of vectors; InputError if no embedding model has it."""
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"A size of {size} is not possible; 768, 512, 256 and 128 are usual.")
    return size


def embed_texts(
    embedder: Embedder,
    texts: Sequence[str],
    task: Task,
    size: int,
    progress: Progress = ignore_progress,
) -> "NDArray[np.float32]":
    """Return the vectors of texts, checked: [texts, size], finite, of length 1.

    A wrong one in an index would stay there and never be found."""
    if not texts:
        return np.empty((0, size), np.float32)
    vectors = np.asarray(embedder.embed(texts, task, size, progress), np.float32)
    if vectors.shape != (len(texts), size):
        raise InputError(
            f"{embedder.name} made vectors of shape {list(vectors.shape)} for {len(texts)} texts; "
            f"[{len(texts)}, {size}] was expected. Name another embedding model."
        )
    lengths = np.linalg.norm(vectors, axis=1)
    if not np.all(np.abs(lengths - 1) < 0.01):
        raise InputError(
            f"{embedder.name} made vectors that are not of length 1; name another embedding model."
        )
    return vectors
