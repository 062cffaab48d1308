"""How outer products are shared out among threads; measured on an H200."""

from dataclasses import dataclass, replace

FEW = 32  # rows or columns that a narrow tile serves better


@dataclass(frozen=True, slots=True)
class Outer:
    """How lib/outer.wgsl cuts a product: m and n of a workgroup, fours of a thread, step of k.

    A step may be on its way while another is added up. Two buffers spare a barrier a step;
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
    def large(cls) -> "Outer":
        """For many rows and columns; wider than the longest unit of a format."""
        return cls(128, 64, 128, 2, 2, 8, 2)

    @classmethod
    def narrow(cls) -> "Outer":
        """For few columns."""
        return cls(64, 64, 16, 1, 1, 16, 2)

    @property
    def turned(self) -> "Outer":
        """The same for rows as for columns."""
        m, n, each_m, each_n = self.n, self.m, self.each_n, self.each_m
        return replace(self, m=m, n=n, each_m=each_m, each_n=each_n)

    @classmethod
    def for_product(cls, m: int, n: int, software: bool) -> "Outer":
        """Narrow tiles for narrow results; in software, threads that need not wait."""
        if software:
            short = next((size for size in (8, 16) if min(m, n) <= size), 16)
            m, n = (512 // short, short) if n <= m else (short, 512 // short)
            return cls(8, m, n, 2, 2, ahead=False)
        if n <= FEW:
            return cls.narrow()
        return cls.narrow().turned if m <= FEW else cls.large()

    @classmethod
    def for_places(cls, places: int, software: bool) -> "Outer":
        """For the experts' products, with 8, 16 or 32 places in a tile."""
        each = 1 if places == 8 and not software else 2
        n = 64 if software else 128
        return cls(places // (4 * each) * n // 8, places, n, each, 2, ahead=not software)

    @property
    def constants(self) -> dict[str, int]:
        """As outer.wgsl names them."""
        return {
            "THREADS": self.threads,
            "TILE_M": self.m,
            "TILE_N": self.n,
            "EACH_M": self.each_m,
            "EACH_N": self.each_n,
            "SLICE": self.slice,
            "BUFFERS": self.buffers,
            "AHEAD": int(self.ahead),
            "SKIP": 0,
        }
