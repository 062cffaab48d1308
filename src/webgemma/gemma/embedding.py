"""Embedding models, recorded: the tokens of several texts in, a vector of each text out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from struct import pack

from webgemma.gemma.config import Layer
from webgemma.gemma.kv_cache import ELEMENT_NBYTES, LayerCache
from webgemma.gemma.lora_weights import AppliedLora
from webgemma.gemma.record.matmul import THREADS
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor

BATCH_WORDS, TEXT_WORDS = 4, 2  # of lib/batch/texts


class EmbeddingRecorder(TextRecorder):
    """Records the forward pass of texts, at most `rows` tokens, side by side.

    Nothing is kept of them: keys and values are scratch. A token's position counts from the first
    text's beginning, which changes no score: RoPE depends on distances alone."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        inputs: Inputs,
        rows: int,
        precision: str,
        marks: Tensor | None = None,
    ) -> None:
        self._marks = marks  # see lib/batch/soft_tokens; needed where `inputs` have some
        kv = "f16" if precision == "f16" else "f32"  # what matrix units read
        caches = {}
        for layer in model.config.layers:
            words = rows * layer.kv_heads * layer.head_dim * ELEMENT_NBYTES[kv] // 4
            k, v = recorder.scratch(words), recorder.scratch(words)
            caches[layer.index] = LayerCache(k, v, rows)
        super().__init__(model, recorder, replace(inputs, caches=caches), rows, kv, precision)

    @property
    def soft_batch(self) -> Tensor:
        """The batch that says which rows are soft tokens; the other one says whose rows are."""
        assert self._marks is not None
        return self._marks

    def mask(self, layer: Layer) -> str:
        """Return the provider of attention's mask."""
        del layer
        return "texts"


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a batch: which rows are theirs, and how many there are."""

    batch: Tensor  # see lib/batch/tokens: it counts texts
    bounds: Tensor  # [texts, 2]: the first row of each, and the one after its last


def record_vectors(
    model: Model,
    recorder: Recorder,
    texts: Texts,
    h: Tensor,
    vectors: Tensor,
    precision: str,
    lora: AppliedLora | None,
) -> None:
    """Record the vectors [texts, size] of the states h [rows, width], not normalised."""
    config, count = model.config, vectors.shape[0]
    assert config.embedding is not None
    dense = [model.matrices[name] for name in config.embedding.dense]
    ops = Ops(model, recorder, texts.batch, count, config.eps, precision, lora)
    x = ops.scratch(count, config.width) if dense else vectors
    recorder.call(
        "mean_rows",
        (-(-config.width // (4 * THREADS)), count),
        batch=texts.batch,
        texts=texts.bounds,
        h=h,
        mean=x,
        width=config.width,
        THREADS=THREADS,
    )
    for weight in dense:
        x = ops.linear(x, weight, vectors if weight is dense[-1] else None)


def packed_texts(lengths: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    """Return the batch of tokens, that of texts and the bounds, for texts of these lengths."""
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    tokens = pack("<4I", 0, sum(lengths), 0, 0)
    tokens += b"".join(pack("<2I", *at) * (at[1] - at[0]) for at in bounds)
    return tokens, pack("<4I", 0, len(lengths), 0, 0), b"".join(pack("<2I", *at) for at in bounds)
