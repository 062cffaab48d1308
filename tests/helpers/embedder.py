"""An embedder without a model: texts with the same words have similar vectors."""

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from webgemma.progress import Progress
from webgemma.search.embedding import Task


class WordEmbedder:
    """Hashes each word of a text to a direction; notes what it was given."""

    def __init__(self, name: str = "words", fingerprint: str = "1") -> None:
        self.name, self.fingerprint = name, fingerprint
        self.texts: list[str] = []  # documents
        self.calls = 0

    def embed(
        self, texts: Sequence[str], task: Task, size: int, progress: Progress
    ) -> NDArray[np.float32]:
        self.calls += 1
        if task == "document":
            self.texts += texts
        vectors = np.zeros((len(texts), size), np.float32)
        for at, text in enumerate(texts):
            for word in {*re.findall(r"\w+", text.lower())} or {"-"}:
                rng = np.random.default_rng(zlib.crc32(word.encode()))
                vectors[at] += rng.standard_normal(size, np.float32)
            vectors[at] /= np.linalg.norm(vectors[at])
            progress(at + 1, len(texts))
        return vectors
