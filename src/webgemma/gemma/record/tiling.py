"""How products are shared out among threads; measured on an H200 and on lavapipe."""

from dataclasses import dataclass

from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import loop_limits as loops
from webgemma.gemma.record.quantised import GROUP
from webgemma.kernels import unit as unit_of

FEW_TOKENS = 2  # that many are better multiplied one by one
MANY_ROWS = 2048
LARGE_PRODUCT = 1 << 20  # values, enough for large tiles to fill a GPU
FEW_GROUPS = 64  # workgroups that leave most of a large GPU idle
MANY_GROUPS = 128  # that fill it
MANY_THREADS = 3 << 14  # in flight, to hide the latency of memory


@dataclass(frozen=True, slots=True)
class Team:
    """How matvec shares out rows: of a workgroup's threads, `lanes` share `each` rows."""

    threads: int
    lanes: int
    each: int

    @classmethod
    def for_weight(cls, weight: Weight, features: frozenset[str], software: bool) -> "Team":
        """Enough threads to fill a GPU, or as few as a software adapter has cores for."""
        rows, unit = weight.rows, unit_of(weight.format.name)
        units = weight.width // unit
        if software:  # adding up is slow there, and a value of x serves as many rows as may be
            each, lanes = 4, 1
            while loops.matvec(units, unit // 4, lanes, each) > loops.MOST:
                lanes *= 2
            return cls(8, lanes, each)  # among eight, lavapipe waits for nobody
        each = 2 if rows >= MANY_ROWS else 1
        lanes = 1 if units < 4 else 4
        if "shuffle32" in features:  # adding up is cheap
            while lanes < min(32, units):
                lanes *= 2
            return cls(256 if rows * lanes >= each << 14 else 64, lanes, each)
        while lanes < 64 and 2 * lanes <= units and rows * lanes < each * MANY_THREADS:
            lanes *= 2
        return cls(64, lanes, each)

    @classmethod
    def for_pairs(cls, weight: Weight) -> "Team":
        """Of gate_up, where `each` is a pair: a workgroup makes a whole group of integers."""
        lanes = 1 if weight.width // unit_of(weight.format.name) < 4 else 8
        return cls(GROUP * lanes, lanes, 1)

    @property
    def constants(self) -> dict[str, int]:
        """As matvec.wgsl names them."""
        return {"THREADS": self.threads, "LANES": self.lanes, "EACH": self.each}

    @property
    def rows(self) -> int:
        """Of a workgroup."""
        return self.threads // self.lanes * self.each


@dataclass(frozen=True, slots=True)
class Tile:
    """How matmul cuts a product: rows and tokens of a workgroup, of a thread, and the step of k."""

    threads: int
    rows: int
    tokens: int
    rows_each: int
    tokens_each: int
    slice: int
    buffers: int = 1

    @classmethod
    def of_fours(cls, rows: int, tokens: int, workgroup_nbytes: int) -> "Tile | None":
        """For tile_four, where such tiles fill a GPU."""
        step = 16 if workgroup_nbytes >= 17 << 10 else 8
        tile = cls(128, 64, 64, 4, 8, step, 2)
        return tile if tile.groups(rows, tokens) >= MANY_GROUPS else None

    @classmethod
    def for_product(cls, rows: int, tokens: int, integers: bool) -> "Tile | None":
        """None: so few tokens that each is better multiplied by itself."""
        step = 64 if integers else 32  # either fills the 16 KiB of a workgroup at most
        if tokens <= FEW_TOKENS:
            return None
        if tokens <= 16:
            tile = cls(64, 32, 16, 4, 4, step)
        elif tokens <= 32 or (integers and rows * tokens < LARGE_PRODUCT):
            tile = cls(128, 64, 32, 4, 4, step)
        else:
            tile = cls(128, 64, 64, 4, 8, step)
        if not integers and tile.groups(rows, tokens) < FEW_GROUPS:
            return cls(128, 16, 16, 4, 4, 128)  # eight threads share k
        return tile

    @classmethod
    def for_places(cls, tokens: int, integers: bool, software: bool) -> "Tile":
        """For the experts' products, with 8, 16 or 32 places in a tile."""
        if software and not integers:
            threads = max(8, tokens // 2)
            return cls(threads, 64, tokens, 8 * tokens // threads, 8, 32)
        each = 8 if tokens == 32 else 4
        return cls(max(64, 16 * tokens // each), 64, tokens, 4, each, 64 if integers else 32)

    def groups(self, rows: int, tokens: int) -> int:
        """Workgroups for a product of this size."""
        return -(-rows // self.rows) * -(-tokens // self.tokens)

    @property
    def constants(self) -> dict[str, int]:
        """As matmul.wgsl names them."""
        return {
            "THREADS": self.threads,
            "TILE_ROWS": self.rows,
            "TILE_TOKENS": self.tokens,
            "ROWS_EACH": self.rows_each,
            "TOKENS_EACH": self.tokens_each,
            "SLICE": self.slice,
            "BUFFERS": self.buffers,
        }


@dataclass(frozen=True, slots=True)
class Cut:
    """How matmul_lanes cuts a product: threads of a subgroup, rows of a thread, tokens."""

    threads: int
    rows_each: int
    tokens: int

    @classmethod
    def for_tokens(cls, tokens: int, features: frozenset[str], software: bool) -> "Cut | None":
        """None: the device is no CPU, or its threads do not shuffle."""
        sizes = [size for size in (4, 8, 16) if f"shuffle{size}" in features]
        if not software or not sizes:
            return None
        return cls(sizes[-1], 2, 1) if tokens <= FEW_TOKENS else cls(sizes[-1], 4, 8)

    @property
    def constants(self) -> dict[str, int]:
        """As matmul_lanes.wgsl names them."""
        return {"THREADS": self.threads, "EACH": self.rows_each, "TOKENS": self.tokens}
