"""How matrix units divide products and attention among workgroups; measured on an H200."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from webgemma.device import Device, Limits, MatrixShape
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.tiling import MANY_GROUPS, Constants
from webgemma.kernels import unit as unit_of


class MatrixTile(NamedTuple):
    """Tokens and rows of a workgroup and of a subgroup, shares of k, and what an H200 makes of it.

    Where k is shared, subgroups have the same tokens and rows, and a part of each slice of k."""

    tokens: int
    rows: int
    sub_tokens: int
    sub_rows: int
    shares: int
    at_once: int  # workgroups that a core runs beside each other
    start: float  # microseconds for beginning and ending
    slice: float  # microseconds for each slice


# For many tokens, and for those that decode together.
MATRIX_TILES = (
    MatrixTile(128, 128, 64, 32, 1, 1, 13.5, 1.35),
    MatrixTile(64, 128, 32, 32, 1, 1, 11.5, 1.15),
    MatrixTile(32, 128, 32, 32, 1, 1, 11, 1.1),
    MatrixTile(16, 64, 16, 32, 1, 1, 10.5, 1.05),
)
DECODING_TILES = (
    MatrixTile(64, 64, 32, 32, 2, 1, 3, 1.4),
    MatrixTile(64, 128, 32, 32, 1, 1, 7, 1.25),
    MatrixTile(32, 64, 16, 32, 2, 1, 3.7, 1.2),
    MatrixTile(32, 64, 32, 32, 1, 3, 8.6, 1.15),
    MatrixTile(16, 64, 16, 32, 2, 1, 2.2, 1.3),
    MatrixTile(16, 32, 16, 32, 2, 3, 5, 1.15),
)
MOST_DECODING_TOKENS = 64
SHARE_LENGTH = 64  # of k; at least the longest unit of a format
CORES = 132  # of an H200
MAX_SPLITS, FEWEST_SLICES = 16, 4  # of k: splits, and the slices of each where k is not shared
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
    shares: int = 1  # of a slice of k: subgroups that have the same rows and tokens
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
    ) -> "MatrixTiling | None":
        """Return the fastest tiles and splits for a matrix of this shape, by an estimate.

        None if no tile fits into a workgroup."""
        rows, width = shape
        y_nbytes = 4 * tokens * rows
        best, least = None, math.inf
        tiles = DECODING_TILES if tokens <= MOST_DECODING_TOKENS else MATRIX_TILES
        smallest = min(tile.tokens for tile in tiles)
        for tile in tiles:
            if tile.tokens >= max(2 * tokens, smallest + 1):  # half of it would be empty
                continue
            whole = cls.sized(units, tile)
            slices = whole.split_slices(width)
            fewest = FEWEST_SLICES // tile.shares
            most = min(most_splits, slices // fewest, limits.binding_nbytes // y_nbytes)
            for splits in range(1, max(1, most) + 1 if whole.fits(limits) else 1):
                waves = -(-whole.groups(rows, tokens) * splits // (CORES * tile.at_once))
                time = waves * (tile.start + -(-slices // splits) * tile.slice)
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
        for tile in MATRIX_TILES:
            tiling = replace(cls.sized(units, tile), over_rows=True)
            if tiling.rows % unit or not tiling.fits(limits):
                continue
            found = tiling
            groups = math.prod(tiling.grid(width, tokens)) * max(1, rows // MATRIX_SPLIT_ROWS)
            if groups >= MANY_GROUPS and tiling.tokens < 2 * tokens:
                break
        return found

    @property
    def slice(self) -> int:
        """Values of k that go through workgroup memory at once."""
        return SHARE_LENGTH * self.shares

    def row_splits(self, groups: int, rows: int) -> int:
        """Return into how many splits the rows of a matrix are divided, to keep a GPU busy."""
        return max(1, min(BUSY_MATRIX_GROUPS // groups, rows // MATRIX_SPLIT_ROWS, 64))

    def grid(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the workgroups of a product of this size, along rows and tokens."""
        return -(-rows // self.rows), -(-tokens // self.tokens)

    @classmethod
    def for_experts(cls, units: MatrixUnits, slots: int) -> "MatrixTiling":
        """Return the tiling of the experts' products, with 16, 32 or 64 slots in a tile."""
        return cls._within(units, cls(units, slots, 128, min(slots, 32), 32))

    @classmethod
    def sized(cls, units: MatrixUnits, tile: MatrixTile) -> "MatrixTiling":
        """Return the tiling of a tile."""
        return cls._within(units, cls(units, *tile[:5]))

    @staticmethod
    def _within(units: MatrixUnits, tiling: "MatrixTiling") -> "MatrixTiling":
        """Return a tiling in which a subgroup has at most four matrices in each direction."""
        m, n, _ = units.shape
        sub_tokens, sub_rows = min(tiling.sub_tokens, 4 * m), min(tiling.sub_rows, 4 * n)
        return replace(tiling, sub_tokens=sub_tokens, sub_rows=sub_rows)

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        subgroups = (self.tokens // self.sub_tokens) * (self.rows // self.sub_rows)
        return self.units.subgroup * subgroups * self.shares

    def fits(self, limits: Limits) -> bool:
        """Return whether a workgroup may have so many threads and so much memory."""
        m, n, _ = self.units.shape
        lines, length = (self.slice, self.rows) if self.over_rows else (self.rows, self.slice)
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
            "SHARES": self.shares,
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
