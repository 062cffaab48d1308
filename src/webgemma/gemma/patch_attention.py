"""Attention among the patches of an image: on matrix units, in float32, or on a software GPU."""

from dataclasses import dataclass
from typing import NamedTuple

from webgemma.device import Limits
from webgemma.gemma.attention import NO_WINDOW, Heads, attend
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.record.matmul import UNBOUNDED, Clamp
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gemma.record.tiling import Constants
from webgemma.graph import Tensor

MATRIX_TILES = ((64, 32), (32, 16))  # queries of a workgroup and keys of a tile, on matrix units
MAX_SUMS = 9  # matrices along a head: what vision_attention_matrix_units writes out


@dataclass(frozen=True, slots=True)
class PatchTiling:
    """How vision_attention.wgsl is divided: the size of a head, the queries of a workgroup."""

    head_dim: int
    queries: int

    @classmethod
    def within(cls, head_dim: int, limits: Limits) -> "PatchTiling | None":
        """Return the most queries that a workgroup has memory and threads for."""
        for queries in (64, 48, 32, 24, 16):
            tiling = cls(head_dim, queries)
            fits = tiling.nbytes <= limits.workgroup_nbytes
            if fits and tiling.threads <= limits.workgroup_threads:
                return tiling
        return None

    @property
    def threads(self) -> int:
        """Threads of a workgroup: each has four queries and eight keys."""
        return self.queries // 4 * self.head_dim // 8

    @property
    def slice_vec4s(self) -> int:
        """vec4s of dimensions fetched at once, one by each thread for four queries or keys."""
        vec4s = self.head_dim // 4
        fitting = self.threads // (self.queries // 4 + vec4s)
        return next(n for n in range(fitting, 0, -1) if vec4s % n == 0)

    @property
    def nbytes(self) -> int:
        """Bytes of workgroup memory."""
        query_line, key_line = self.queries // 4 + 1, self.head_dim // 4 + 1
        slices = 8 * self.slice_vec4s * (query_line + key_line)
        return 16 * (max(slices, self.head_dim * query_line) + self.threads)

    @property
    def constants(self) -> Constants:
        """The overrides of vision_attention.wgsl."""
        return {
            "HEAD_DIM": self.head_dim,
            "QUERIES": self.queries,
            "SLICE_VEC4S": self.slice_vec4s,
            "THREADS": self.threads,
        }


@dataclass(frozen=True, slots=True)
class PatchMatrixTiling:
    """How matrix units divide it: the size of a head, queries of a workgroup, keys of a tile."""

    units: MatrixUnits
    head_dim: int
    queries: int
    keys: int

    @classmethod
    def within(
        cls, units: MatrixUnits | None, head_dim: int, limits: Limits
    ) -> "PatchMatrixTiling | None":
        """Return the largest tiles that fit into a workgroup; None where there are none."""
        if units is None or units.subgroup % units.shape.m:  # threads of a subgroup share queries
            return None
        tilings = [cls(units, head_dim, *size) for size in MATRIX_TILES]
        return next((tiling for tiling in tilings if tiling.fits(limits)), None)

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.queries // self.units.shape.m * self.units.subgroup

    @property
    def dimensions(self) -> int:
        """Dimensions of a head, with those of zeros that make whole matrices of it."""
        whole = max(self.units.shape.n, self.units.shape.k)
        return -(-self.head_dim // whole) * whole

    def fits(self, limits: Limits) -> bool:
        """Return whether the kernel allows for such heads, and a workgroup for this tiling."""
        m, n, k = self.units.shape
        divides = not (self.queries % m or self.keys % n or self.keys % k)
        halves = 2 * self.keys * (self.dimensions + 8) + self.queries * (self.keys + 8)
        floats = self.queries * (self.keys + 4) + self.queries + 4
        fits = 2 * halves + 4 * floats <= limits.workgroup_nbytes
        fits = fits and self.threads <= limits.workgroup_threads
        return divides and fits and self.dimensions // n <= MAX_SUMS

    @property
    def constants(self) -> Constants:
        """The overrides of vision_attention_matrix_units.wgsl."""
        own = {"THREADS": self.threads, "QUERIES": self.queries, "KEYS": self.keys}
        return {
            **self.units.constants,
            **own,
            "HEAD_DIM": self.head_dim,
            "DIMENSIONS": self.dimensions,
        }


class PatchHeads(NamedTuple):
    """Queries, keys and values: [patches, heads * size], in float32 or float16."""

    q: Tensor
    k: Tensor
    v: Tensor


class PatchAttention:
    """Records softmax(q kᵀ) v, every patch attending to every other."""

    def __init__(self, ops: Ops, heads: int, size: int, *, halves: bool) -> None:
        """Use matrix units if there are some and if float16 holds what is attended to."""
        self.ops = ops
        self.heads = heads
        self.size = size
        units, limits = ops.matmul.units if halves else None, ops.device.limits
        self.on_units = PatchMatrixTiling.within(units, size, limits)

    def scratch(self) -> PatchHeads:
        """Return scratch tensors for what `record` reads."""
        shape = (self.ops.rows, self.heads * self.size)
        if self.on_units is None:
            return PatchHeads(*(self.ops.scratch(*shape) for _ in range(3)))
        return PatchHeads(*(Tensor(shape, 2 * shape[0] * shape[1]) for _ in range(3)))

    @property
    def pair(self) -> str:
        """The provider with which a kernel writes that."""
        return "f32" if self.on_units is None else "f16"

    def record(self, inputs: PatchHeads, rounded: Clamp | None) -> Tensor:
        """Record it: [patches, heads * size].

        With bounds for a product on matrix units, it may be rounded for that, and then is clamped
        to them."""
        if self.on_units is not None:
            return self._on_units(self.on_units, inputs, rounded)
        q, k, v = inputs
        ops, tiling = self.ops, None
        if not ops.software:
            tiling = PatchTiling.within(self.size, ops.device.limits)
        if tiling is None:
            kind, cache = Heads(self.heads, self.heads, self.size), LayerCache(k, v, ops.rows)
            return attend(ops, q, cache, kind, NO_WINDOW, "f32", "all")
        out = ops.scratch(*q.shape)
        ops.recorder.call(
            "vision_attention",
            (self.heads, -(-ops.rows // tiling.queries)),
            batch=ops.batch,
            q=q,
            k=k,
            v=v,
            out=out,
            heads=self.heads,
            **tiling.constants,
        )
        return out

    def _on_units(
        self, tiling: PatchMatrixTiling, inputs: PatchHeads, rounded: Clamp | None
    ) -> Tensor:
        ops, shape = self.ops, inputs.q.shape
        out = ops.scratch(*shape) if rounded is None else HalfTensor.scratch(*shape)
        ops.recorder.call(
            "vision_attention_matrix_units",
            (self.heads, -(-ops.rows // tiling.queries)),
            batch=ops.batch,
            **inputs._asdict(),
            out=out,
            heads=self.heads,
            patches=ops.rows,
            **(rounded or UNBOUNDED)._asdict(),
            pair="f32" if rounded is None else "f16",
            ROUNDED=rounded is not None,
            **tiling.constants,
        )
        return out
