"""Attention over a Recorder: projections, the softmax over the cache, the output projection."""

from typing import TYPE_CHECKING, NamedTuple

from webgemma.gemma.config import Layer
from webgemma.gemma.record import loop_limits as loops
from webgemma.gemma.record.quantised import GROUP, pieces_of
from webgemma.graph import Tensor

if TYPE_CHECKING:
    from webgemma.gemma.record.ops import Steps
    from webgemma.gemma.text import TextRecorder

EVERYTHING = 1 << 30  # a window that no context reaches
THREADS, SOFTWARE_THREADS = 128, 32  # of a workgroup that looks at keys for one query
SHARES = {True: 16, False: 64}  # of the positions, on sliding layers and on full ones
MANY = {"THREADS": 256, "QUERIES": 32, "KEYS": 64}  # of one that looks for many queries


class Heads(NamedTuple):
    """How many look, how many are looked at, and their size."""

    queries: int
    keys: int
    size: int


def attend(
    steps: "Steps",
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    heads: Heads,
    ring: int,
    window: int,
    kv: str,
    sees: str = "sees_past",
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ) v for many rows: [rows, heads * size], in one dispatch or in a few."""
    queries, shape, rows = MANY["QUERIES"], {"HEAD_DIM": heads.size, **MANY}, q.shape[0]
    out = out or steps.recorder.scratch(rows, heads.queries * heads.size)
    group = heads.queries // heads.keys
    grid = (heads.keys, -(-rows * group // queries))
    params = [heads.queries, heads.keys, ring, window, rows]
    tensors = (steps.state, q, *cache, out)
    most = loops.attention_prefill_keys(*shape.values()) if steps.software else EVERYTHING
    together = steps.batch if sees == "sees_canvas" else queries  # that one workgroup sees for
    seen = min(ring, window + together)
    state = "state_soft" if sees == "sees_blocks" else "state"
    if seen <= most:
        pieces = (state, kv, sees, "attend_all")
        steps.call("attention_prefill", grid, params, *tensors, pieces=pieces, **shape)
        return out
    pieces = (state, kv, sees, "attend_some")
    left = steps.recorder.scratch(*grid, 2, queries)
    for begin in range(0, seen, most):
        some = [*params, begin, begin + most]
        steps.call("attention_prefill", grid, some, *tensors, left, pieces=pieces, **shape)
    return out


class Attention:
    """The attention of one layer, with a cache of its own or another layer's."""

    def __init__(self, text: "TextRecorder", layer: Layer) -> None:
        self.text = text
        self.layer = layer
        self.name = f"blk.{layer.index}."
        self.window = text.config.window if layer.sliding else EVERYTHING

    def answer(self, h: Tensor) -> Tensor:
        """What attention adds for the normed rows h: [batch, width]."""
        raw = self.project(h)
        out = self.attend_one(raw) if self.text.batch == 1 else self.attend_many(raw)
        return self.text.linear(out, self.text.model.matrices[self.name + "attn_output.weight"])

    def project(self, h: Tensor) -> Tensor:
        """Raw heads of each token: queries, then (with a cache of its own) keys and values."""
        text, layer = self.text, self.layer
        own = 0 if layer.shares_kv else (1 if layer.k_is_v else 2)
        width = (layer.heads + own * layer.kv_heads) * layer.head_dim
        raw = text.recorder.scratch(text.batch, width)
        first = 0
        for part in ("attn_qkv", "attn_k", "attn_v"):
            weight = text.model.matrices.get(f"{self.name}{part}.weight")
            if weight is not None and first < width:
                text.linear(h, weight, raw, first)
                first += weight.rows
        return raw

    def attend_one(self, raw: Tensor) -> Tensor:
        """One token: the positions are shared out among workgroups, then put together."""
        text, layer, ring = self.text, self.layer, self.ring
        threads, shares = THREADS, SHARES[layer.sliding]
        if text.software:
            threads = SOFTWARE_THREADS
            most = loops.attention_keys(layer.head_dim, threads)
            shares = max(shares, -(-min(ring, self.window) // most))
        own = int(not layer.shares_kv)
        shares += own  # the token itself
        parts = text.recorder.scratch(1, layer.heads * shares * layer.head_dim)
        sums = text.recorder.scratch(1, layer.heads * shares * 2)
        heads = [layer.heads, layer.kv_heads, raw.shape[1] // layer.head_dim]
        text.call(
            "attention",
            (layer.heads, shares),
            [*heads, ring, self.window, text.config.eps],
            *(text.inputs.state, raw, self.norms, self.turns, *self.cache, parts, sums),
            pieces=("sum", "state", "rope", text.kv),
            HEAD_DIM=layer.head_dim,
            OWN_CACHE=own,
            THREADS=threads,
        )
        out = text.recorder.scratch(1, layer.heads * layer.head_dim)
        if layer.head_dim % GROUP == 0:
            out = text.room(out.shape[1], self.name + "attn_output.weight")
        text.call(
            "attention_merge",
            (layer.heads, 1),
            [layer.heads],
            *(text.inputs.state, parts, sums, out),
            pieces=("state", *pieces_of("put", out)),
            HEAD_DIM=layer.head_dim,
            SHARES=shares,
        )
        return out

    def attend_many(self, raw: Tensor) -> Tensor:
        """Many tokens: a workgroup takes a tile of queries; keys and values serve all of them."""
        layer = self.layer
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        text, q = self.text, self.queries(raw)
        sees = text.sees(layer)
        return attend(text, q, self.cache, heads, self.ring, self.window, text.kv, sees)

    def queries(self, raw: Tensor) -> Tensor:
        """Queries normed and turned; keys and values go into the cache."""
        text, layer = self.text, self.layer
        q = text.recorder.scratch(text.batch, layer.heads * layer.head_dim)
        heads = [layer.heads, layer.kv_heads, raw.shape[1] // layer.head_dim]
        text.call(
            "heads",
            (layer.heads + 2 * layer.kv_heads * (not layer.shares_kv), text.batch),
            [*heads, self.ring, text.config.eps],
            *(text.inputs.state, raw, self.norms, self.turns, q, *self.cache),
            pieces=("sum", "state", "rope", text.kv),
            HEAD_DIM=layer.head_dim,
            THREADS=text.row_threads(64),
        )
        return q

    @property
    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.text.inputs.caches[self.layer.kv_donor]

    @property
    def ring(self) -> int:
        """Positions that the cache holds."""
        return self.text.inputs.ring[self.layer.kv_donor]

    @property
    def norms(self) -> Tensor:
        """q_norm and k_norm, one after the other."""
        return self.text.model.head_norms[self.layer.index]

    @property
    def turns(self) -> Tensor:
        """Turns per position of each pair of dimensions, as 64-bit fractions."""
        return self.text.model.turns[self.layer.sliding]
