"""How matrix units divide products and attention among workgroups; measured on an H200."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from webgemma.device import Device, Limits, MatrixShape
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.tiling import MANY_GROUPS, Constants
from webgemma.kernels import unit as unit_of

# Tokens and rows of a workgroup and of a subgroup, and the microseconds that a slice of k takes
# there on an H200. It has so many cores, each of which runs one such workgroup at a time; beginning
# and ending take as long as some slices.
MATRIX_TILES = (
    (128, 128, 64, 32, 1.35),
    (64, 128, 32, 32, 1.15),
    (32, 128, 32, 32, 1.1),
    (16, 64, 16, 32, 1.05),
)
CORES = 132
START_SLICES = 10
MAX_SPLITS, FEWEST_SLICES = 12, 4  # of k: splits, and the slices of each
# Adding splits up: microseconds of a dispatch, and bytes that are read or written in one.
SUM_MICROSECONDS, SUM_NBYTES = 3, 3 << 20
# Workgroups that keep a large GPU busy where sums over the rows of a matrix can be split, and rows
# that are worth a split.
BUSY_MATRIX_GROUPS, MATRIX_SPLIT_ROWS = 512, 1024
MAX_SLICES = 8  # of a head: what attention_matrix_units writes out


@dataclass(frozen=True, slots=True)
class MatrixUnits:
    """What a GPU multiplies at once, and the threads of a subgroup, which do it together."""

    shape: MatrixShape
    subgroup: int

    @classmethod
    def of(cls, device: Device) -> "MatrixUnits | None":
        """Return the largest matrices of a device; None if it has none that kernels can use.

        Kernels need to know which threads are a subgroup: all have the same size, in order."""
        smallest, size = device.subgroup_sizes
        known = smallest == size and f"shuffle{size}" in device.features
        if "subgroup-matrix" not in device.features or not known or not device.matrix_shapes:
            return None
        return cls(max(device.matrix_shapes, key=lambda shape: shape.m * shape.n * shape.k), size)

    @property
    def constants(self) -> Constants:
        """The overrides of a kernel that uses them."""
        m, n, k = self.shape
        return {"SUBGROUP": self.subgroup, "MATRIX_M": m, "MATRIX_N": n, "MATRIX_K": k}


@dataclass(frozen=True, slots=True)
class MatrixTiling:
    """How matrix units divide a product: rows and tokens of a workgroup, and of a subgroup."""

    units: MatrixUnits
    tokens: int
    rows: int
    sub_tokens: int
    sub_rows: int
    slice: int = 64  # at least the longest unit of a format
    splits: int = 1  # of k, whose sums are added up afterwards
    over_rows: bool = False  # sums are over the rows of a matrix; `rows` are columns of it then

    @classmethod
    def for_product(
        cls,
        units: MatrixUnits,
        shape: tuple[int, int],
        tokens: int,
        limits: Limits,
        most_splits: int = 1,
        *,
        core_threads: int = 0,
    ) -> "MatrixTiling | None":
        """Return the fastest tiles and splits for a matrix of this shape, by an estimate.

        A core runs one workgroup at a time, or several of so many threads together. None if no tile
        fits into a workgroup."""
        rows, width = shape
        y_nbytes = 4 * tokens * rows
        best, least = None, math.inf
        for *size, slice_microseconds in MATRIX_TILES:
            whole = cls.sized(units, *size)
            slices = whole.split_slices(width)
            most = min(most_splits, slices // FEWEST_SLICES, limits.binding_nbytes // y_nbytes)
            for splits in range(1, max(1, most) + 1 if whole.fits(limits) else 1):
                at_once = CORES * max(1, core_threads // whole.threads)
                waves = -(-whole.groups(rows, tokens) * splits // at_once)
                time = waves * (START_SLICES + -(-slices // splits)) * slice_microseconds
                if splits > 1:
                    time += SUM_MICROSECONDS + (splits + 1) * y_nbytes / SUM_NBYTES
                if time < least:
                    best, least = (whole, splits), time
        return replace(best[0], splits=best[1]) if best else None

    @classmethod
    def for_backward(
        cls, units: MatrixUnits, weights: Sequence[Weight], tokens: int, limits: Limits
    ) -> "MatrixTiling | None":
        """Return the largest tiles that fill a GPU if rows are split; None where none fits."""
        width, rows = weights[0].width, sum(weight.rows for weight in weights)
        unit = max(unit_of(weight.format.name) for weight in weights)
        found = None
        for *size, _ in MATRIX_TILES:
            tiling = replace(cls.sized(units, *size), over_rows=True)
            if tiling.rows % unit or not tiling.fits(limits):
                continue
            found = tiling
            groups = math.prod(tiling.grid(width, tokens)) * max(1, rows // MATRIX_SPLIT_ROWS)
            if groups >= MANY_GROUPS and tiling.tokens < 2 * tokens:
                break
        return found

    def row_splits(self, groups: int, rows: int) -> int:
        """Return into how many splits the rows of a matrix are divided, to keep a GPU busy."""
        return max(1, min(BUSY_MATRIX_GROUPS // groups, rows // MATRIX_SPLIT_ROWS, 64))

    def grid(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the workgroups of a product of this size, along rows and tokens."""
        return -(-rows // self.rows), -(-tokens // self.tokens)

    @classmethod
    def for_experts(cls, units: MatrixUnits, slots: int) -> "MatrixTiling":
        """Return the tiling of the experts' products, with 16, 32 or 64 slots in a tile."""
        return cls.sized(units, slots, 128, min(slots, 32), 32)

    @classmethod
    def sized(
        cls, units: MatrixUnits, tokens: int, rows: int, sub_tokens: int, sub_rows: int
    ) -> "MatrixTiling":
        """Return a tiling in which a subgroup has at most four matrices in each direction."""
        m, n, _ = units.shape
        return cls(units, tokens, rows, min(sub_tokens, 4 * m), min(sub_rows, 4 * n))

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.units.subgroup * (self.tokens // self.sub_tokens) * (self.rows // self.sub_rows)

    def fits(self, limits: Limits) -> bool:
        """Return whether a workgroup may have so many threads and so much memory."""
        m, n, _ = self.units.shape
        lines, length = self.rows, self.slice
        if self.over_rows:
            lines, length = length, lines
        halves = self.tokens * (self.slice + 8) + lines * (length + 8)
        nbytes = 2 * halves + 4 * (m * n * self.threads // self.units.subgroup + self.tokens)
        return nbytes <= limits.workgroup_nbytes and self.threads <= limits.workgroup_threads

    def groups(self, rows: int, tokens: int) -> int:
        """Return the workgroups of a product of this size."""
        return -(-rows // self.rows) * -(-tokens // self.tokens) * self.splits

    def split_slices(self, width: int) -> int:
        """Return the slices of k that a workgroup multiplies."""
        return -(-width // (self.slice * self.splits))

    @property
    def constants(self) -> Constants:
        """The overrides of tiled_product/matrix_units."""
        return {
            **self.units.constants,
            "THREADS": self.threads,
            "TILE_ROWS": self.rows,
            "TILE_TOKENS": self.tokens,
            "SUB_ROWS": self.sub_rows,
            "SUB_TOKENS": self.sub_tokens,
            "SLICE": self.slice,
            "BUFFERS": 1,
            "SPLIT_X": False,
            "SPLIT_W": False,
            "OVER_ROWS": self.over_rows,
        }


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How matrix units divide attention: queries of a workgroup, keys of a tile, and teams."""

    units: MatrixUnits
    queries: int
    keys: int
    team: int  # subgroups that have the same queries

    @classmethod
    def for_heads(cls, units: MatrixUnits, size: int, limits: Limits) -> "AttentionTiling | None":
        """Return the tiling for heads of this size; None where matrices do not divide it."""
        m, n, _ = units.shape
        for team in (4, 8):
            tiling = cls(units, 2 * m, 64, team)
            slices = size // (team * n)
            divides = slices * team * n == size and tiling.keys % (team * n) == 0
            if divides and slices <= MAX_SLICES and tiling.fits(limits):
                return tiling
        return None

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.units.subgroup * self.team * self.queries // self.units.shape.m

    def fits(self, limits: Limits) -> bool:
        """Return whether a workgroup may have so many threads and so much memory."""
        m, n, _ = self.units.shape
        line, subgroups = self.team * n + 8, self.threads // self.units.subgroup
        halves = (self.queries + self.keys) * line + self.queries * (self.keys + 8)
        floats = max(self.queries * (self.keys + 4), subgroups * m * n) + self.threads
        nbytes = 2 * halves + 4 * (floats + self.queries + 4)
        return nbytes <= limits.workgroup_nbytes and self.threads <= limits.workgroup_threads

    @property
    def constants(self) -> Constants:
        """The overrides of attention_matrix_units."""
        own = {"THREADS": self.threads, "QUERIES": self.queries, "KEYS": self.keys}
        return {**self.units.constants, **own}
