"""EmbeddingGemma and EmbeddingGemma 2: the ids of a text in, one vector out.

A text is read as Gemma 3 reads it (EmbeddingGemma 2: as Gemma 4), but its tokens attend both ways.
Their mean state goes through the dense layers; the vector has the length 1.
"""

from collections.abc import Sequence

import numpy as np

from webgemma.errors import GgufError
from webgemma.gemma.config import Config, Embedding, Layer
from webgemma.reference.blas import few_threads
from webgemma.reference.text import Cache, Soft, TextModel, attend, rms
from webgemma.reference.weights import Floats, Weights

SHORTEST = 1e-12  # length of a vector that is divided by its length


class EmbeddingModel(TextModel):
    """Text model whose tokens attend both ways, with what makes one vector of their states."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        assert config.embedding is not None
        self.embedding: Embedding = config.embedding

    def vector(
        self, ids: Sequence[int], size: int | None = None, soft: Sequence[Soft] = ()
    ) -> Floats:
        """Return the vector of a text, of length 1: [size]; a smaller one is its beginning.

        Soft tokens of images and audio are read in place of some ids."""
        return normalised(self.raw_vector(ids, soft)[:size])

    @few_threads
    @np.errstate(over="ignore", invalid="ignore")  # values that are not finite raise below
    def raw_vector(self, ids: Sequence[int], soft: Sequence[Soft] = ()) -> Floats:
        """Return the vector of a text before it is normalised: [size].

        GgufError when it is not finite."""
        raw = self.dense(self.states(ids, soft).mean(axis=0))
        if not np.isfinite(raw).all():
            raise GgufError(
                f"{self.weights.gguf.name} computes NaN or infinity: its weights are "
                "damaged; check the file with `webgemma verify`."
            )
        return raw

    def states(self, ids: Sequence[int], soft: Sequence[Soft] = ()) -> Floats:
        """Return the states of a text's tokens after the final RMSNorm: [T, width]."""
        return self.forward(ids, soft=soft, head=False)

    def dense(self, pooled: Floats) -> Floats:
        """Return W₂ W₁ x, or in EmbeddingGemma 2 W x; x itself if the file has no such layer."""
        x = pooled[None]
        for name in self.embedding.dense:
            x = self.weights.linear(x, name)
        vector: Floats = x[0]
        return vector

    def per_layer_embeddings(self, x: Floats, ids: Sequence[int]) -> Floats | None:
        """Return rms(W x / √d), a vector per layer: [T, layers, ple]; tokens have none of theirs.

        None for models without per-layer embeddings."""
        if not self.config.ple:
            return None
        context = self.weights.linear(x, "per_layer_model_proj.weight")
        shape = (len(ids), len(self.config.layers), self.config.ple)
        scaled = context.reshape(shape) / np.float32(np.sqrt(self.config.width))
        return rms(scaled, self.weights["per_layer_proj_norm.weight"], self.config.eps)

    def attention(self, layer: Layer, h: Floats, cache: Cache, ends: np.ndarray) -> Floats:
        """Return W_o softmax(q kᵀ) v over all tokens, on sliding layers those near: [T, width].

        Near are those less than `window` positions away, before and after."""
        del cache  # a text is read at once
        count = len(h)
        window = self.config.window if layer.sliding else count
        ends = np.minimum(np.arange(count) + window, count)
        k, v = self.keys_and_values(layer, h, 0)
        out = attend(self.queries(layer, h, 0), k, v, 0, window, ends)
        return self.weights.linear(out.reshape(count, -1), f"blk.{layer.index}.attn_output.weight")


def normalised(vectors: Floats) -> Floats:
    """Return vectors divided by their lengths; one of zeros remains as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, np.float32(SHORTEST))
