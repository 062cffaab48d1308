"""How products are divided among workgroups and threads; measured on an H200 and on lavapipe."""

from dataclasses import dataclass, replace

from webgemma.device import Limits
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import loop_limits
from webgemma.gemma.record.operands import MOST_THREADS as MOST_ROW_THREADS
from webgemma.gemma.record.operands import THREADS as ROW_THREADS
from webgemma.gemma.record.quantised import GROUP
from webgemma.kernels import unit as unit_of

FEW_TOKENS = 2  # that many are faster multiplied one by one
# Tokens of different conversations: that one workgroup of matvec multiplies at once (more need more
# registers than they save reads, unless a matrix has very many rows, or they are very many), and
# that are multiplied so rather than by matrix units.
MATVEC_TOKENS, MANY_MATVEC_TOKENS, MOST_MATVEC_TOKENS = 2, 4, 8
MANY_ROWS, MORE_ROWS, VERY_MANY_ROWS = 2048, 4096, 1 << 14
TEAMS = 4  # of the lanes of a row, where very many rows are multiplied by several tokens
LARGE_PRODUCT = 1 << 20  # values, enough for large tiles to fill a GPU
FEW_GROUPS = 64  # workgroups that leave most of a large GPU idle
MANY_GROUPS = 128  # that fill it
MANY_THREADS = 3 << 14  # in flight, to hide the latency of memory
# Workgroups that keep a large GPU busy where sums over the rows of a matrix can be split, and rows
# that are worth a split.
BUSY_GROUPS, SPLIT_ROWS = 256, 512
NARROW = 32  # rows or columns below which narrow outer tiles are faster

Constants = dict[str, int | float | bool]


@dataclass(frozen=True, slots=True)
class MatvecTiling:
    """How matvec divides rows: of a workgroup's threads, `lanes` share `each` rows.

    The lanes decide in which order a sum is added up: they do not depend on how many tokens there
    are, so that each of several conversations computes what it would alone. They may be in several
    teams of threads: neighbours have more rows then, for which what they read of x serves."""

    threads: int
    lanes: int
    each: int
    tokens: int = 1  # at a time
    teams: int = 1

    @classmethod
    def for_weight(cls, weight: Weight, features: frozenset[str], software: bool) -> "MatvecTiling":
        """Return enough threads to fill a GPU, or as few as a software GPU has cores for."""
        rows, unit = weight.rows, unit_of(weight.format.name)
        units = weight.width // unit
        if software:  # sums are slow there, and a value of x should serve many rows
            each, lanes = 4, 1
            while loop_limits.matvec(units, unit // 4, lanes, each) > loop_limits.MAX_ITERATIONS:
                lanes *= 2
            return cls(8, lanes, each)  # eight threads need no barrier on lavapipe
        each = 2 if rows >= MANY_ROWS else 1
        lanes = 1 if units < 4 else 4
        if "shuffle32" in features:  # sums are cheap
            while lanes < min(32, units):
                lanes *= 2
            return cls(256 if rows * lanes >= each << 14 else 64, lanes, each)
        while lanes < 64 and 2 * lanes <= units and rows * lanes < each * MANY_THREADS:
            lanes *= 2
        return cls(64, lanes, each)

    @classmethod
    def for_made_row(
        cls, weight: Weight, features: frozenset[str], limits: Limits, most_groups: int
    ) -> "MatvecTiling":
        """Return the tiling of workgroups that make what they read: few and large ones."""
        tiling = replace(cls.for_weight(weight, features, software=False), threads=ROW_THREADS)
        # Twice the threads or rows are faster than one row after the other.
        if weight.rows > most_groups * tiling.rows:
            tiling = replace(tiling, threads=min(MOST_ROW_THREADS, limits.workgroup_threads))
        return replace(tiling, each=2) if weight.rows > most_groups * tiling.rows else tiling

    @classmethod
    def for_gate_up(
        cls, weight: Weight, features: frozenset[str], limits: Limits, most_groups: int
    ) -> "MatvecTiling":
        """Return the tiling of gate_up, where a workgroup computes whole groups of integers."""
        groups = weight.rows // (2 * GROUP)
        lanes = 1 if weight.width // unit_of(weight.format.name) < 4 else 8
        threads = GROUP * lanes
        if lanes == 8 and 2 * threads <= limits.workgroup_threads:
            if groups < MANY_GROUPS and "shuffle16" in features:
                lanes, threads = 16, 2 * threads
            elif groups > most_groups:
                threads *= 2
        return cls(threads, lanes, 1)

    @property
    def constants(self) -> Constants:
        """The overrides of matvec."""
        own = {"THREADS": self.threads, "LANES": self.lanes // self.teams, "EACH": self.each}
        several = {"TEAMS": self.teams, "TOKENS": self.tokens}
        return {**own, **{name: count for name, count in several.items() if count > 1}}

    @property
    def products(self) -> str:
        """The provider of the slot `row_products`."""
        return "tokens" if self.tokens > 1 else "two_units"

    def of_made_tokens(self, tokens: int) -> "MatvecTiling":
        """Return the tiling for so many tokens, which workgroups make."""
        return replace(self, tokens=tokens)

    def of_gated_tokens(self, tokens: int, rows: int) -> "MatvecTiling":
        """Return the tiling of gate_up for so many tokens of x, and rows of its matrix."""
        many = tokens >= MOST_MATVEC_TOKENS or rows >= VERY_MANY_ROWS
        most = MANY_MATVEC_TOKENS if many else MATVEC_TOKENS
        return replace(self, tokens=tokens_at_once(tokens, most))

    def of_one_token(self, subgroup: int) -> "MatvecTiling":
        """Return the tiling for a single token: workgroups of one subgroup, if that has 32 threads.

        An H200 keeps more of them busy, and reads more at once."""
        return replace(self, threads=32) if subgroup == 32 and self.lanes <= 32 else self

    def of_tokens(
        self, tokens: int, rows: int, features: frozenset[str], *, floats: bool
    ) -> "MatvecTiling":
        """Return the tiling for so many tokens of x, and rows of a matrix.

        What is read of x serves more rows then, in smaller workgroups; the lanes stay."""
        at_once, each, threads = tokens_at_once(tokens, MATVEC_TOKENS), self.each, self.threads
        if tokens >= 2 and rows >= VERY_MANY_ROWS and (floats or self.lanes == 32):
            at_once, threads = tokens_at_once(tokens, MANY_MATVEC_TOKENS), 128
            # Only shuffles add the same lanes up in the same order, whatever teams they are in.
            if not floats and "shuffle32" in features:
                return replace(self, tokens=at_once, threads=threads, teams=TEAMS)
        elif tokens > (2 if floats else 1) and rows >= MORE_ROWS:
            each, threads = 2 if floats else 4, 64
        elif tokens >= 2 and rows >= MANY_ROWS:
            many = MANY_MATVEC_TOKENS if tokens >= MOST_MATVEC_TOKENS else MATVEC_TOKENS
            at_once, threads = tokens_at_once(tokens, many), 64
        elif tokens > 2:
            each, threads = min(1 << (tokens // 2).bit_length() - 1, 2 if floats else 4), 64
        return replace(self, tokens=at_once, each=each, threads=max(threads, self.lanes))

    @property
    def rows(self) -> int:
        """Rows of a workgroup."""
        return self.threads // self.lanes * self.each


def tokens_at_once(tokens: int, most: int) -> int:
    """Return how many tokens a workgroup multiplies at once, so that each has as many.

    At most so many, unless only one or all of them can be."""
    fitting = max(count for count in range(1, most + 1) if tokens % count == 0)
    return tokens if fitting == 1 else fitting


@dataclass(frozen=True, slots=True)
class MatmulTiling:
    """How matmul divides a product: rows and tokens of a workgroup, of a thread; a slice of k."""

    threads: int
    rows: int
    tokens: int
    rows_each: int
    tokens_each: int
    slice: int
    buffers: int = 1

    @classmethod
    def for_vec4(cls, rows: int, tokens: int, workgroup_nbytes: int) -> "MatmulTiling | None":
        """Return the tiling of tile/vec4, if such tiles fill a GPU."""
        slice = 16 if workgroup_nbytes >= 17 << 10 else 8
        tiling = cls(128, 64, 64, 4, 8, slice, 2)
        return tiling if tiling.groups(rows, tokens) >= MANY_GROUPS else None

    @classmethod
    def for_product(cls, rows: int, tokens: int, integers: bool) -> "MatmulTiling":
        """Return the tiling of a product."""
        slice = 64 if integers else 32  # either fills the 16 KiB of a workgroup at most
        if tokens <= 16:
            tiling = cls(64, 32, 16, 4, 4, slice)
        elif tokens <= 32 or (integers and rows * tokens < LARGE_PRODUCT):
            tiling = cls(128, 64, 32, 4, 4, slice)
        else:
            tiling = cls(128, 64, 64, 4, 8, slice)
        if not integers and tiling.groups(rows, tokens) < FEW_GROUPS:
            return cls(128, 16, 16, 4, 4, 128)  # eight threads share k
        return tiling

    @classmethod
    def for_experts(cls, slots: int, integers: bool, software: bool) -> "MatmulTiling":
        """Return the tiling of the experts' products, with 8, 16 or 32 slots in a tile."""
        if software and not integers:
            threads = max(8, slots // 2)
            return cls(threads, 64, slots, 8 * slots // threads, 8, 32)
        each = 8 if slots == 32 else 4
        return cls(max(64, 16 * slots // each), 64, slots, 4, each, 64 if integers else 32)

    def groups(self, rows: int, tokens: int) -> int:
        """Return the workgroups of a product of this size."""
        return -(-rows // self.rows) * -(-tokens // self.tokens)

    def split_slices(self, width: int) -> int:
        """Return the slices of k that a workgroup multiplies: all."""
        return -(-width // self.slice)

    @property
    def constants(self) -> Constants:
        """The overrides of tiled_product."""
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
class SoftwareTiling:
    """How matmul_software divides a product: threads of a subgroup, rows of a thread, tokens."""

    threads: int
    rows_each: int
    tokens: int

    @classmethod
    def for_tokens(
        cls, tokens: int, features: frozenset[str], software: bool
    ) -> "SoftwareTiling | None":
        """Return the tiling; None if the GPU is not software, or its threads cannot shuffle."""
        sizes = [size for size in (4, 8, 16) if f"shuffle{size}" in features]
        if not software or not sizes:
            return None
        return cls(sizes[-1], 2, 1) if tokens <= FEW_TOKENS else cls(sizes[-1], 4, 8)

    @property
    def constants(self) -> Constants:
        """The overrides of matmul_software."""
        return {"THREADS": self.threads, "EACH": self.rows_each, "TOKENS": self.tokens}


@dataclass(frozen=True, slots=True)
class OuterTiling:
    """How outer_product divides a product: m and n of a workgroup, vec4s of a thread, a slice of k.

    A slice may be on its way while another is added up. Two buffers save a barrier a slice;
    together they have to fit into 16 KiB."""

    threads: int
    m: int
    n: int
    each_m: int
    each_n: int
    slice: int = 16
    buffers: int = 1
    ahead: bool = True

    @classmethod
    def large(cls) -> "OuterTiling":
        """Return the tiling for many rows and columns; wider than the longest unit of a format."""
        return cls(128, 64, 128, 2, 2, 8, 2)

    @classmethod
    def narrow(cls) -> "OuterTiling":
        """Return the tiling for few columns."""
        return cls(64, 64, 16, 1, 1, 16, 2)

    @property
    def transposed(self) -> "OuterTiling":
        """The same tiling with rows and columns exchanged."""
        m, n, each_m, each_n = self.n, self.m, self.each_n, self.each_m
        return replace(self, m=m, n=n, each_m=each_m, each_n=each_n)

    @classmethod
    def for_product(cls, m: int, n: int, software: bool) -> "OuterTiling":
        """Return narrow tiles for narrow results; in software, threads that need no barrier."""
        if software:
            short = next((size for size in (8, 16) if min(m, n) <= size), 16)
            m, n = (512 // short, short) if n <= m else (short, 512 // short)
            return cls(8, m, n, 2, 2, ahead=False)
        if n <= NARROW:
            return cls.narrow()
        return cls.narrow().transposed if m <= NARROW else cls.large()

    @classmethod
    def for_experts(cls, slots: int, software: bool) -> "OuterTiling":
        """Return the tiling of the experts' products, with 8, 16 or 32 slots in a tile."""
        each = 1 if slots == 8 and not software else 2
        n = 64 if software else 128
        return cls(slots // (4 * each) * n // 8, slots, n, each, 2, ahead=not software)

    def grid(self, n: int, m: int) -> tuple[int, int]:
        """Return the workgroups of a product of this size."""
        return -(-n // self.n), -(-m // self.m)

    def row_splits(self, groups: int, rows: int) -> int:
        """Return into how many splits the rows of a matrix are divided, to keep a GPU busy."""
        return max(1, min(BUSY_GROUPS // groups, rows // SPLIT_ROWS, 16))

    @property
    def constants(self) -> Constants:
        """The overrides of outer_product."""
        return {
            "THREADS": self.threads,
            "TILE_M": self.m,
            "TILE_N": self.n,
            "EACH_M": self.each_m,
            "EACH_N": self.each_n,
            "SLICE": self.slice,
            "BUFFERS": self.buffers,
            "AHEAD": self.ahead,
            "SKIP": False,
        }
