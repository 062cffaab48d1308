"""The reference as an engine: one conversation's cache, reused where the next prompt agrees."""

from collections.abc import AsyncIterator, Sequence
from itertools import takewhile

import numpy as np

from webgemma.errors import GgufError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.reference.sampling import sample
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Floats, Weights
from webgemma.sampler import Chosen, Sampling


class ReferenceEngine:
    """The text model on the CPU. Its coroutines never suspend."""

    name = "CPU (numpy)"

    def __init__(self, gguf: Gguf, config: Config) -> None:
        self.gguf = gguf
        self.model = TextModel(config, Weights(gguf))
        self.cache = Cache(config)
        self.held: list[int] = []  # the ids whose keys and values the cache holds

    async def logits(self, ids: Sequence[int]) -> Floats:
        """The logits after each of the ids: [T, vocab]."""
        return self.model.forward(ids)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncIterator[Chosen]:
        """Token after token with its log-probability, without end: the caller stops it."""
        tokens = list(ids)
        while True:
            chosen = sample(self._read(tokens), sampling, tokens, seed)
            yield chosen
            tokens.append(chosen.token)

    def _read(self, tokens: list[int]) -> Floats:
        """Logits [vocab] after the last token; only what the cache does not hold is computed."""
        pairs = zip(self.held, tokens, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        agreed = min(agreed, len(tokens) - 1)  # the last one is computed, for its logits
        self.cache.truncate(agreed)
        self.held = tokens[:agreed]
        logits = self.model.forward(tokens[agreed:], self.cache, last_only=True)[0]
        if np.isnan(logits).any():
            raise GgufError(
                f"{self.gguf.name}: the model computes no numbers (NaN); "
                "its weights are damaged: check the file with `webgemma verify`."
            )
        self.held = list(tokens)
        return logits

    def close(self) -> None:
        """Let the weights go."""
        self.gguf.close()
