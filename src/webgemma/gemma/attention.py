"""Attention of the text model: projections, softmax over the KV cache, output projection."""

from typing import NamedTuple

from webgemma.gemma.config import Layer
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import loop_limits
from webgemma.gemma.record.operands import MergedSplits, Operand, can_make
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.quantised import GROUP, HalfTensor, providers
from webgemma.gemma.record.split_sums import splits_of
from webgemma.gemma.weights import Model
from webgemma.graph import Argument, Tensor

NO_WINDOW = 1 << 30  # a window that no context reaches
DECODE_THREADS, SOFTWARE_DECODE_THREADS = 128, 32  # of a workgroup of attention_decode
# Of attention_merge: threads of a workgroup, and those of a team that share its splits.
MERGE_THREADS, MERGE_COLUMNS = 256, 32
# Splits of the positions, on sliding layers and on full ones: fewer of those of many heads.
DECODE_SPLITS = {True: 16, False: 64}
MOST_DECODE_GROUPS = 1024
# The same where many conversations decode on matrix units: workgroups that fill a GPU, and fewest.
BUSY_DECODE_GROUPS = {True: 1024, False: 2048}
FEWEST_DECODE_SPLITS = {True: 2, False: 4}
PREFILL = {"THREADS": 256, "QUERIES": 32, "KEYS": 64}


class Heads(NamedTuple):
    """How many query and key-value heads there are, and their size."""

    queries: int
    keys: int
    size: int


def attend(
    ops: Ops,
    q: Tensor,
    cache: LayerCache,
    heads: Heads,
    window: int,
    kv: str,
    mask: str = "causal",
    out: Tensor | None = None,
    sequences: int = 1,
) -> Tensor:
    """Record softmax(q kᵀ) v for many rows: [rows, heads * size], in one or a few dispatches.

    Matrix units may leave it in float16, for a product on them. The rows and the cache may be those
    of several sequences, one after the other."""
    rows, group = q.shape[0] // sequences, heads.queries // heads.keys
    on_units = kv == "f16" and sequences == 1
    tiling = ops.matmul.attention_tiling(heads.size) if on_units else None
    out, rounded = out or ops.scratch(*q.shape), isinstance(out, HalfTensor)
    assert tiling or not rounded
    shared: dict[str, Argument] = {"mask": mask, "HEAD_DIM": heads.size}
    shared |= {"q": q, "k_cache": cache.k, "v_cache": cache.v, "out": out, "batch": ops.batch}
    shared |= {"heads": heads.queries, "kv_heads": heads.keys, "tokens": rows}
    shared |= {"ring": cache.ring, "window": window}
    if tiling is not None:
        tiles = -(-rows * group // tiling.queries)
        shared |= {**tiling.constants, "pair": "f16" if rounded else "f32", "ROUNDED": rounded}
        ops.recorder.call("attention_matrix_units", (heads.keys, tiles), **shared)
        return out
    queries = PREFILL["QUERIES"]
    grid = (heads.keys, -(-rows * group // queries), sequences)
    shared |= {"kv": kv, **PREFILL}
    at_once = NO_WINDOW
    if ops.software:
        at_once = loop_limits.attention_prefill_keys(heads.size, *PREFILL.values())
    together = ops.rows if mask == "canvas" else queries  # that one workgroup covers keys for
    sides = 2 if mask == "texts" else 1  # of a token, to which its window reaches
    keys = min(cache.ring, sides * window + together)
    if keys <= at_once:
        ops.recorder.call("attention_prefill", grid, key_range="all", **shared)
        return out
    shared |= {"key_range": "part", "suspended": ops.scratch(*grid, 2, queries)}
    for begin in range(0, keys, at_once):
        shared |= {"begin": begin, "end": begin + at_once}
        ops.recorder.call("attention_prefill", grid, **shared)
    return out


class Attention:
    """The attention of one layer, over a cache of its own or another layer's."""

    def __init__(
        self,
        ops: Ops,
        model: Model,
        layer: Layer,
        cache: LayerCache,
        kv: str,
        place: str = "chunk",
        *,
        drafts: bool = False,
    ) -> None:
        self.ops = ops
        self.model = model
        self.layer = layer
        self.cache = cache
        self.kv = kv
        self.place = place  # "rows": rows are of several conversations
        self.drafts = drafts  # whether some of those are of the same one
        self.name = f"blk.{layer.index}."
        self.window = model.config.window if layer.sliding else NO_WINDOW

    def record(self, h: Operand, mask: str) -> Tensor:
        """Record what attention adds for the normed rows h: [rows, width]."""
        raw = self.project(h)
        out: Operand
        one_each = self.ops.rows == 1 or self.place == "rows"
        out = self.decode(raw) if one_each else self.prefill(raw, mask)
        return self.ops.matmul.in_splits(out, self.model.matrices[self.name + "attn_output.weight"])

    def project(self, h: Operand) -> Tensor:
        """Record the raw heads of each token: queries, then (with an own cache) keys and values."""
        layer = self.layer
        own = 0 if layer.shares_kv else (1 if layer.k_is_v else 2)
        width = (layer.heads + own * layer.kv_heads) * layer.head_dim
        parts, first = list[Weight](), 0
        for part in ("attn_qkv", "attn_k", "attn_v"):
            weight = self.model.matrices.get(f"{self.name}{part}.weight")
            if weight is not None and first < width:
                parts.append(weight)
                first += weight.rows
        return self.ops.matmul.in_splits(h, *parts)

    def decode(self, raw: Tensor) -> Operand:
        """Record attention of single tokens: positions are split among workgroups, then merged.

        The output product may be left to merge them."""
        ops, layer = self.ops, self.layer
        threads, splits = DECODE_THREADS, self.decode_splits()
        if ops.software:
            threads = SOFTWARE_DECODE_THREADS
            at_once = loop_limits.attention_decode_keys(layer.head_dim, threads)
            splits = max(splits, -(-min(self.cache.ring, self.window) // at_once))
        own = int(not layer.shares_kv)
        splits += own  # the token itself
        if own and self.drafts:
            self.store_keys_and_values(raw, threads)
        parts = ops.scratch(ops.rows, layer.heads * splits * layer.head_dim)
        sums = ops.scratch(ops.rows, layer.heads * splits * 2)
        ops.recorder.call(
            "attention_decode",
            (layer.heads, splits, ops.rows),
            **self._raw_heads(raw),
            parts=parts,
            sums=sums,
            window=self.window,
            OWN_CACHE=own,
            STORED=self.drafts,
            UNREAD=self.model.config.drafter is not None,
            THREADS=threads,
        )
        width, reader = layer.heads * layer.head_dim, self.name + "attn_output.weight"
        out = ops.scratch(ops.rows, width)
        if self.kv == "f16" and layer.head_dim % GROUP == 0:  # whose means are float16, too
            out = ops.row_input_for(width, reader)
        elif layer.head_dim % GROUP == 0:
            out = ops.input_for(width, reader)
        reread_nbytes = parts.nbytes + sums.nbytes
        alone = ops.rows == 1 or ops.matmul.apart
        makes = alone and can_make(ops.device, out, reread_nbytes)
        if makes and reader not in ops.matmul.lora:
            return MergedSplits(out, reread_nbytes, parts, sums, layer.head_dim, splits)
        # Where the product of one token merges them, those of several are added in the same order.
        in_order = alone and can_make(ops.device, out.rows(0, 1), reread_nbytes // ops.rows)
        ops.recorder.call(
            "attention_merge",
            (layer.heads, -(-layer.head_dim // (4 * MERGE_COLUMNS)), ops.rows),
            **(out.unscaled if isinstance(out, HalfTensor) else providers("store", out)),
            batch=ops.batch,
            parts=parts,
            sums=sums,
            h=out,
            heads=layer.heads,
            HEAD_DIM=layer.head_dim,
            SPLITS=splits,
            COLUMNS=MERGE_COLUMNS,
            THREADS=MERGE_COLUMNS if ops.software or in_order else MERGE_THREADS,
        )
        return out

    def store_keys_and_values(self, raw: Tensor, threads: int) -> None:
        """Record the cache's keys and values of rows that attend to each other."""
        ops, arguments = self.ops, self._raw_heads(raw)
        grid = (2 * self.layer.kv_heads, ops.rows)
        ops.recorder.call("kv_heads", grid, **arguments, THREADS=threads)

    def decode_splits(self) -> int:
        """Return among how many workgroups the positions of a head are divided.

        The order in which they are added up depends on it: only rows that matrix units multiply,
        which are not computed as they would be alone, may have other splits."""
        ops, heads, sliding = self.ops, self.layer.heads, self.layer.sliding
        splits = max(DECODE_SPLITS[True], MOST_DECODE_GROUPS // heads)
        if ops.matmul.apart_on_units:
            busy = BUSY_DECODE_GROUPS[sliding] // (heads * ops.rows)
            splits = max(FEWEST_DECODE_SPLITS[sliding], busy)
        return min(DECODE_SPLITS[sliding], splits)

    def prefill(self, raw: Tensor, mask: str) -> Tensor:
        """Record attention of many tokens: a workgroup computes a tile of queries."""
        layer = self.layer
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        q = self.queries(raw)
        out = None
        if self.kv == "f16" and self.ops.matmul.attention_tiling(layer.head_dim):
            out = self.ops.row_input_for(q.shape[1], self.name + "attn_output.weight")
        return attend(self.ops, q, self.cache, heads, self.window, self.kv, mask, out)

    def queries(self, raw: Tensor) -> Tensor:
        """Record queries normed and rotated; keys and values go into the cache."""
        ops, layer = self.ops, self.layer
        q = ops.scratch(ops.rows, layer.heads * layer.head_dim)
        ops.recorder.call(
            "qkv_heads",
            (layer.heads + 2 * layer.kv_heads * (not layer.shares_kv), ops.rows),
            **self._raw_heads(raw),
            q=q,
            THREADS=ops.row_threads(64),
        )
        return q

    def _raw_heads(self, raw: Tensor) -> dict[str, Argument]:
        """Return the arguments of a kernel that makes queries, keys and values of raw heads."""
        layer = self.layer
        return {
            "batch": self.ops.batch,
            "place": self.place,
            "raw": raw,
            "RAW_SPLITS": splits_of(raw),
            "norms": self.model.head_norms[layer.index],
            "rotations": self.model.rotations[layer.sliding],
            "k_cache": self.cache.k,
            "v_cache": self.cache.v,
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "raw_heads": raw.shape[1] // layer.head_dim,
            "ring": self.cache.ring,
            "eps": self.ops.eps,
            "kv": self.kv,
            "HEAD_DIM": layer.head_dim,
            "VALUE_NORM": self.model.config.value_norm,
        }
