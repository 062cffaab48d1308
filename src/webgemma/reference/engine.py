"""The reference as an engine: one conversation's cache, reused where the next prompt agrees."""

from collections.abc import AsyncIterator, Sequence
from itertools import takewhile

from webgemma.errors import InputError
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
        self.closed = False
        self.model = TextModel(config, Weights(gguf))
        self.cache = Cache(config)
        self.held: list[int] = []  # the ids whose keys and values the cache holds

    async def logits(self, ids: Sequence[int]) -> Floats:
        """The logits after each of the ids: [T, vocab]."""
        self._check_open()
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
        self._check_open()
        pairs = zip(self.held, tokens, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        agreed = min(agreed, len(tokens) - 1)  # the last one is computed, for its logits
        self.cache.truncate(agreed)
        self.held = tokens[:agreed]
        logits = self.model.forward(tokens[agreed:], self.cache, last_only=True)[0]
        self.held = list(tokens)
        return logits

    def close(self) -> None:
        """Let the file go."""
        self.closed = True
        self.gguf.close()

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self.gguf.name} is closed: load the model again.")
