"""Drafter of Gemma 4 (multi-token prediction): guesses the tokens that follow, with a few layers.

It has neither keys and values nor input embeddings of its own: it reads those of its target, and
the state of the target's last token. All drafts of a round have the position n of the newest token,
which the target has not read yet."""

from typing import NamedTuple

import numpy as np

from webgemma.gemma.config import CENTROIDS, POST_PROJECTION, PRE_PROJECTION, Config, Layer
from webgemma.gemma.drafter_config import read_ordering
from webgemma.reference.text import Cache, TextModel, attend, rms
from webgemma.reference.weights import Floats, Weights
from webgemma.sync import run_sync


class Draft(NamedTuple):
    """A draft: its token, the logits [vocab] that it is the best of, the next state [width]."""

    token: int
    logits: Floats
    state: Floats


class DraftModel(TextModel):
    """Drafter: a configuration and its weights; the state of a conversation is its target's."""

    def __init__(self, config: Config, weights: Weights, target: TextModel) -> None:
        super().__init__(config, weights)
        assert config.drafter is not None
        self.drafter = config.drafter
        self.target = target
        self.clusters = None  # token ids [centroids, tokens of a cluster]
        if self.drafter.centroids:
            ordering = run_sync(read_ordering(weights.gguf, config))
            self.clusters = np.array(ordering).reshape(self.drafter.centroids, -1)

    def drafts(self, token: int, state: Floats, cache: Cache, count: int) -> list[Draft]:
        """Return drafts of the tokens after `token`, which stands at position `cache.length`.

        `state` [target's width] is what the target's head has read of the token before it."""
        drafts: list[Draft] = []
        for _ in range(count):
            drafts.append(self.draft(token, state, cache))
            token, _, state = drafts[-1]
        return drafts

    def draft(self, token: int, state: Floats, cache: Cache) -> Draft:
        """Return the draft of the token after `token`.

        x = W_pre [√d · E[token], state], with the target's embedding E; then the layers
        y = rms(x); logits = E_draft y; next state = W_post y"""
        u = np.concatenate([self.target.embed([token])[0], state])[None]
        x = self.weights.linear(u, PRE_PROJECTION)
        ends = np.array([cache.length])
        for layer in self.config.layers:
            x = self.layer_output(layer, x, None, cache, ends)
        y = rms(x, self.weights["output_norm.weight"], self.config.eps)
        logits = self.logits(y)
        return Draft(int(logits.argmax()), logits, self.weights.linear(y, POST_PROJECTION)[0])

    def attention(self, layer: Layer, h: Floats, cache: Cache, ends: np.ndarray) -> Floats:
        """Return W_o softmax(q kᵀ) v over the target's cache: [1, width].

        The query stands at position n behind it; sliding layers attend to n - window < s < n."""
        n = cache.length
        donor = self.drafter.donors[layer.kv_donor - len(self.config.layers)]
        k, v = cache.read(self.target.config.layers[donor], n)
        window = self.config.window if layer.sliding else n + 1
        out = attend(self.queries(layer, h, n), k, v, n, window, ends)
        return self.weights.linear(out.reshape(1, -1), f"blk.{layer.index}.attn_output.weight")

    def logits(self, y: Floats) -> Floats:
        """Return E y for y [1, width]: [vocab].

        With centroids, only the tokens of the clusters with the highest W_c y are candidates; all
        others get one less than the least of these."""
        if self.clusters is None:
            return self.weights.linear(y, "token_embd.weight")[0]
        scores = self.weights.linear(y, CENTROIDS)[0]
        nearest = np.argsort(-scores, kind="stable")[: self.drafter.nearest]
        candidates = self.clusters[nearest].reshape(-1)
        found = (self.weights.rows("token_embd.weight", candidates.tolist()) @ y[0]).astype(
            np.float32
        )
        logits = np.full(self.config.vocab, found.min() - 1, np.float32)
        logits[candidates] = found
        return logits
