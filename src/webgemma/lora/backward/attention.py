"""Attention in training over a Recorder: whole sequences, forward and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from webgemma.gemma.attention import EVERYTHING, Heads, attend
from webgemma.gemma.config import Layer
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.graph import Tensor
from webgemma.lora.backward.matmul import Matrix, Times, product

if TYPE_CHECKING:
    from webgemma.lora.backward.layers import Passes

SCORES_NBYTES = 64 << 20  # of the probabilities that the way back has at a time


class Seen(NamedTuple):
    """What a layer looks with and at: [tokens, heads * head_dim] each."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Some(NamedTuple):
    """Sequences, and the tokens of each, whose probabilities are made at a time."""

    first_sequence: int
    sequences: int
    first: int
    end: int


class Looking:
    """The attention of one layer between its projections."""

    def __init__(self, passes: Passes, layer: Layer) -> None:
        self.passes = passes
        self.layer = layer
        self.window = passes.config.window if layer.sliding else EVERYTHING
        own = 0 if layer.shares_kv else (1 if layer.k_is_v else 2)
        self.raw_heads = layer.heads + own * layer.kv_heads

    def forward(self, raw: Tensor, seen: tuple[Tensor, Tensor] | None) -> tuple[Seen, Tensor]:
        """Keys and values of `raw` (or those already `seen`), and what is gathered of them."""
        layer, scratch = self.layer, self.passes.recorder.scratch
        q = self._turned(raw, 0, layer.heads, 0)
        if seen is None:
            k = self._turned(raw, layer.heads, layer.kv_heads, layer.head_dim)
            v = self._turned(raw, self.raw_heads - layer.kv_heads, layer.kv_heads, None)
            seen = k, v
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        out = scratch(self.passes.batch, layer.heads * layer.head_dim)
        length, rows = self.passes.length, self.passes.recorder.rows
        for first in range(0, self.passes.batch, length):
            part, cache = rows(q, first, length), tuple(rows(x, first, length) for x in seen)
            to = rows(out, first, length)
            pair = (cache[0], cache[1])
            attend(self.passes, part, pair, heads, length, self.window, "kv_f32", out=to)
        return Seen(q, *seen), out

    def _turned(self, raw: Tensor, first: int, heads: int, norm: int | None) -> Tensor:
        """Heads normed and (unless `norm`, where the weights begin, is None) turned."""
        out = self.passes.recorder.scratch(self.passes.batch, heads * self.layer.head_dim)
        tensors = (raw, *self._vectors, out)
        self._call("turn_heads", heads, self._numbers(first, heads, norm), tensors, norm)
        return out

    def turn_back(self, raw: Tensor, dq: Tensor, owed: tuple[Tensor, Tensor]) -> Tensor:
        """dL/draw from dL/dq and, where keys are the layer's own, from all that is owed to them."""
        layer = self.layer
        draw = self.passes.recorder.scratch(*raw.shape)
        self._turned_back(raw, 0, layer.heads, 0, dq, draw)
        if not layer.shares_kv:
            dk, dv = owed
            self._turned_back(raw, layer.heads, layer.kv_heads, layer.head_dim, dk, draw)
            last = self.raw_heads - layer.kv_heads
            self._turned_back(raw, last, layer.kv_heads, None, dv, draw, add=layer.k_is_v)
        return draw

    def _turned_back(
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
        tensors = (raw, *self._vectors, dy, draw)
        params = [*self._numbers(first, heads, norm), int(add)]
        self._call("turn_heads_back", heads, params, tensors, norm)

    @property
    def _vectors(self) -> tuple[Tensor, Tensor]:
        model, layer = self.passes.model, self.layer
        return model.head_norms[layer.index], model.turns[layer.sliding]

    def _numbers(self, first: int, heads: int, norm: int | None) -> list[int | float]:
        passes = self.passes
        return [heads, self.raw_heads, first, (norm or 0) // 4, passes.length, passes.eps]

    def _call(
        self,
        op: str,
        heads: int,
        params: list[int | float],
        tensors: tuple[Tensor, ...],
        norm: int | None,
    ) -> None:
        passes, shape = self.passes, {"HEAD_DIM": self.layer.head_dim}
        shape |= {"TURNED": int(norm is not None), "THREADS": passes.row_threads(64)}
        pieces = ("sum", "rope")
        passes.call(op, (heads, passes.batch), params, *tensors, pieces=pieces, **shape)

    # The softmax

    def softmax_back(
        self, seen: Seen, dout: Tensor, owed: tuple[Tensor, Tensor], *, add: bool
    ) -> Tensor:
        """dL/dq; dL/dk and dL/dv are written to `owed`, or added to what it holds."""
        dq = self.passes.recorder.scratch(*seen.q.shape)
        for some in self._parts():
            whole = some.end == self.passes.length  # comes first, and reaches every key
            self._part_back(some, seen, dout, dq, owed, add=add or not whole)
        return dq

    def _parts(self) -> Iterator[_Some]:
        """All sequences at once if their probabilities are few; else parts, the last tokens first,
        who see every key."""
        length, sequences = self.passes.length, self.passes.batch // self.passes.length
        row_nbytes = 4 * length * self.layer.heads
        most = min(SCORES_NBYTES, self.passes.model.device.limits.binding_nbytes)
        at_once = most // (row_nbytes * length)
        if at_once:
            for first in range(0, sequences, at_once):
                yield _Some(first, min(at_once, sequences - first), 0, length)
            return
        tokens = max(1, most // row_nbytes)
        for sequence in range(sequences):
            for end in range(length, 0, -tokens):
                yield _Some(sequence, 1, max(0, end - tokens), end)

    def _part_back(
        self,
        some: _Some,
        seen: Seen,
        dout: Tensor,
        dq: Tensor,
        owed: tuple[Tensor, Tensor],
        *,
        add: bool,
    ) -> None:
        """p = softmax(q kᵀ): dv = pᵀ dout, ds = softmax_back(dout vᵀ), dq = ds k, dk = dsᵀ q."""
        passes, layer = self.passes, self.layer
        group, size, keys = layer.heads // layer.kv_heads, layer.head_dim, some.end
        rows = (some.end - some.first) * group
        times = Times(some.sequences, layer.kv_heads)
        s, dp = (passes.recorder.scratch(*times, rows, keys) for _ in range(2))
        steps = (times.inner * rows * keys, rows * keys)
        scores, slopes = (Matrix(x, keys, 0, 1, 0, *steps) for x in (s, dp))
        queries, steep, to_queries = (self._queries(x, some) for x in (seen.q, dout, dq))
        k, v, dk, dv = (self._keys(x, some) for x in (seen.k, seen.v, *owed))
        shape = (rows, keys, size)
        product(passes, queries, k, scores, shape, b_turned=True, times=times)
        product(passes, steep, v, slopes, shape, b_turned=True, times=times)
        passes.call(
            "softmax_back",
            (rows, times.outer * times.inner),
            [keys, group, rows, some.first, self.window],
            *(s, dp),
            pieces=("sum", "largest"),
            THREADS=passes.row_threads(ROW_THREADS),
        )
        product(passes, slopes, k, to_queries, (rows, size, keys), times=times)
        shape = (keys, size, rows)
        product(passes, slopes, queries, dk, shape, a_turned=True, add=add, times=times)
        product(passes, scores, steep, dv, shape, a_turned=True, add=add, times=times)

    def _queries(self, x: Tensor, some: _Some) -> Matrix:
        """The queries of a key-value head are rows: those of one token, then the next one's."""
        layer, length = self.layer, self.passes.length
        group, token = layer.heads // layer.kv_heads, layer.heads * layer.head_dim
        first = (some.first_sequence * length + some.first) * token
        return Matrix(
            x, token, first, group, layer.head_dim, length * token, group * layer.head_dim
        )

    def _keys(self, x: Tensor, some: _Some) -> Matrix:
        layer, length = self.layer, self.passes.length
        token = layer.kv_heads * layer.head_dim
        first = some.first_sequence * length * token
        return Matrix(x, token, first, 1, 0, length * token, layer.head_dim)
