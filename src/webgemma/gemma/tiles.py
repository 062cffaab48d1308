"""How products of many tokens are cut into tiles; the shapes were measured on an H200."""

from dataclasses import dataclass

FEW_TOKENS = 2  # that many are better multiplied one by one


@dataclass(frozen=True, slots=True)
class Tile:
    """How matmul cuts a product: rows and tokens of a workgroup, of a thread, and the step of k."""

    threads: int
    rows: int
    tokens: int
    rows_each: int
    tokens_each: int
    slice: int

    @classmethod
    def for_batch(cls, tokens: int, integers: bool) -> "Tile | None":
        """None: so few tokens that each is better multiplied by itself."""
        step = 64 if integers else 32  # either fills the 16 KiB of a workgroup at most
        if tokens <= FEW_TOKENS:
            return None
        if tokens <= 16:
            return cls(64, 32, 16, 4, 4, step)
        return cls(128, 64, 32, 4, 4, step) if tokens <= 32 else cls(128, 64, 64, 4, 8, step)

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
        }
