"""Attention over whole sequences, forward and backward, between the projections of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from webgemma.gemma.attention import NO_WINDOW, Heads, attend
from webgemma.gemma.config import Layer
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.record.matmul_backward import (
    KEYS_ALONG_K,
    KEYS_ALONG_N,
    QUERIES_ALONG_K,
    Mask,
    Matrix,
    Stack,
)
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.graph import Argument, Tensor
from webgemma.lora.backward.ops import TrainingOps

SCORES_NBYTES = 64 << 20  # of the probabilities that the backward pass computes at once

KeysValues = tuple[Tensor, Tensor]


class Attended(NamedTuple):
    """The queries, keys and values of a layer: [tokens, heads * head_dim] each."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Chunk(NamedTuple):
    """Sequences, and tokens of each, whose probabilities are computed at once."""

    first_sequence: int
    sequences: int
    first: int
    end: int


class TrainingAttention:
    """The attention of one layer."""

    def __init__(self, ops: TrainingOps, layer: Layer) -> None:
        self.ops = ops
        self.layer = layer
        self.window = ops.config.window if layer.sliding else NO_WINDOW
        own = 0 if layer.shares_kv else (1 if layer.k_is_v else 2)
        self.raw_heads = layer.heads + own * layer.kv_heads

    def forward(self, raw: Tensor, shared: KeysValues | None) -> tuple[Attended, Tensor]:
        """Record softmax(q kᵀ) v from raw heads, or with the `shared` keys and values."""
        ops, layer = self.ops, self.layer
        q = self._rope(raw, 0, layer.heads, 0)
        if shared is None:
            k = self._rope(raw, layer.heads, layer.kv_heads, layer.head_dim)
            v = self._rope(raw, self.raw_heads - layer.kv_heads, layer.kv_heads, None)
            shared = k, v
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        cache = LayerCache(*shared, ops.length)
        out = attend(ops, q, cache, heads, self.window, "f32", sequences=ops.sequences)
        return Attended(q, *shared), out

    def rope_backward(self, raw: Tensor, dq: Tensor, shared: KeysValues) -> Tensor:
        """Record dL/draw from dL/dq and, of a layer with keys of its own, from dL/dk and dL/dv."""
        layer = self.layer
        draw = self.ops.scratch(*raw.shape)
        self._rope_backward(raw, 0, layer.heads, 0, dq, draw)
        if not layer.shares_kv:
            dk, dv = shared
            self._rope_backward(raw, layer.heads, layer.kv_heads, layer.head_dim, dk, draw)
            last = self.raw_heads - layer.kv_heads
            self._rope_backward(raw, last, layer.kv_heads, None, dv, draw, add=layer.k_is_v)
        return draw

    def _rope(self, raw: Tensor, first: int, heads: int, norm: int | None) -> Tensor:
        """Record heads normed and rotated; `norm` is where their weights begin, None for values."""
        out = self.ops.scratch(self.ops.rows, heads * self.layer.head_dim)
        arguments = self._rope_arguments(raw, first, heads, norm)
        self.ops.recorder.call("rope_heads", (heads, self.ops.rows), out=out, **arguments)
        return out

    def _rope_backward(
        self,
        raw: Tensor,
        first: int,
        heads: int,
        norm: int | None,
        dy: Tensor,
        draw: Tensor,
        *,
        add: bool = False,
    ) -> None:
        arguments = self._rope_arguments(raw, first, heads, norm)
        arguments |= {"dy": dy, "draw": draw, "add": int(add)}
        self.ops.recorder.call("rope_heads_backward", (heads, self.ops.rows), **arguments)

    def _rope_arguments(
        self, raw: Tensor, first: int, heads: int, norm: int | None
    ) -> dict[str, Argument]:
        model, layer = self.ops.model, self.layer
        return {
            "raw": raw,
            "norms": model.head_norms[layer.index],
            "rotations": model.rotations[layer.sliding],
            "heads": heads,
            "raw_heads": self.raw_heads,
            "first_head": first,
            "norm_vec4": (norm or 0) // 4,
            "length": self.ops.length,
            "eps": self.ops.eps,
            "HEAD_DIM": layer.head_dim,
            "ROTATED": norm is not None,
            "NORMED": norm is not None or self.ops.config.value_norm,
            "THREADS": self.ops.row_threads(64),
        }

    # The softmax

    def softmax_backward(
        self, attended: Attended, dout: Tensor, gradients: KeysValues, *, add: bool
    ) -> Tensor:
        """Record dL/dq; dL/dk and dL/dv are written to `gradients`, or added to them."""
        dq = self.ops.scratch(*attended.q.shape)
        for chunk in self._chunks():
            whole = chunk.end == self.ops.length  # comes first, and writes every key
            self._chunk_backward(chunk, attended, dout, dq, gradients, add=add or not whole)
        return dq

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield all sequences at once if their probabilities are few; else some, or some tokens.

        The last tokens of a sequence come first, because they attend to every key."""
        length, sequences = self.ops.length, self.ops.sequences
        row_nbytes = 4 * length * self.layer.heads
        available = min(SCORES_NBYTES, self.ops.recorder.device.limits.binding_nbytes)
        at_once = available // (row_nbytes * length)
        if at_once:
            for first in range(0, sequences, at_once):
                yield _Chunk(first, min(at_once, sequences - first), 0, length)
            return
        tokens = max(1, available // row_nbytes)
        for sequence in range(sequences):
            for end in range(length, 0, -tokens):
                yield _Chunk(sequence, 1, max(0, end - tokens), end)

    def _chunk_backward(
        self,
        chunk: _Chunk,
        attended: Attended,
        dout: Tensor,
        dq: Tensor,
        gradients: KeysValues,
        *,
        add: bool,
    ) -> None:
        """Record, for s = q kᵀ and p = softmax(s): dv = pᵀ dout, dp = dout vᵀ,
        ds = p (dp - sum p dp), dq = ds k, dk = dsᵀ q."""
        ops, layer, product = self.ops, self.layer, self.ops.products.products.product
        group, size, keys = layer.heads // layer.kv_heads, layer.head_dim, chunk.end
        rows = (chunk.end - chunk.first) * group
        stack = Stack(chunk.sequences, layer.kv_heads)
        s, dp = (ops.scratch(*stack, rows, keys) for _ in range(2))
        strides = (stack.inner * rows * keys, rows * keys)
        p, ds = (Matrix(x, keys, 0, 1, 0, *strides) for x in (s, dp))
        q, douts, dqs = (self._queries(x, chunk) for x in (attended.q, dout, dq))
        k, v, dk, dv = (self._keys(x, chunk) for x in (attended.k, attended.v, *gradients))
        along_k, along_n, queries = (
            Mask(kind, group, chunk.first, self.window)
            for kind in (KEYS_ALONG_K, KEYS_ALONG_N, QUERIES_ALONG_K)
        )
        shape = (rows, keys, size)
        product(q, k, p, shape, b_transposed=True, stack=stack, mask=along_n)
        product(douts, v, ds, shape, b_transposed=True, stack=stack, mask=along_n)
        ops.recorder.call(
            "softmax_backward",
            (rows, stack.outer * stack.inner),
            s=s,
            dp=dp,
            keys=keys,
            group=group,
            rows=rows,
            first_token=chunk.first,
            window=self.window,
            THREADS=ops.row_threads(ROW_THREADS),
        )
        product(ds, k, dqs, (rows, size, keys), stack=stack, mask=along_k)
        shape = (keys, size, rows)
        product(ds, q, dk, shape, a_transposed=True, add=add, stack=stack, mask=queries)
        product(p, douts, dv, shape, a_transposed=True, add=add, stack=stack, mask=queries)

    def _queries(self, x: Tensor, chunk: _Chunk) -> Matrix:
        """Return the queries of a key-value head as rows: those of a token, then the next one's."""
        layer, length = self.layer, self.ops.length
        group, token = layer.heads // layer.kv_heads, layer.heads * layer.head_dim
        first = (chunk.first_sequence * length + chunk.first) * token
        return Matrix(
            x, token, first, group, layer.head_dim, length * token, group * layer.head_dim
        )

    def _keys(self, x: Tensor, chunk: _Chunk) -> Matrix:
        layer, length = self.layer, self.ops.length
        token = layer.kv_heads * layer.head_dim
        first = chunk.first_sequence * length * token
        return Matrix(x, token, first, 1, 0, length * token, layer.head_dim)
