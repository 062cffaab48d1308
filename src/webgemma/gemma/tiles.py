"""How products are cut into pieces; the shapes were measured on an H200 and on lavapipe."""

import re
from dataclasses import dataclass

from webgemma.device import Device

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
    def for_batch(cls, tokens: int) -> "Tile | None":
        """None: so few tokens that each is better multiplied by itself."""
        if tokens <= FEW_TOKENS:
            return None
        if tokens <= 16:
            return cls(64, 32, 16, 4, 4, 32)
        return cls(128, 64, 32, 4, 4, 32) if tokens <= 32 else cls(128, 64, 64, 4, 8, 32)

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


@dataclass(frozen=True, slots=True)
class Cut:
    """How matmul_lanes cuts a product: threads of a subgroup, rows of a thread, tokens."""

    threads: int
    rows_each: int
    tokens: int

    @classmethod
    def for_batch(cls, device: Device, tokens: int) -> "Cut | None":
        """None: the device is no CPU, or nobody knows how many threads a subgroup of it has."""
        bits = re.search(r"llvmpipe .*\b(\d+) bits", device.name)  # of a CPU's vectors
        if bits is None or not device.software or "subgroups" not in device.features:
            return None
        threads = int(bits[1]) // 32
        return cls(threads, 2, 1) if tokens <= FEW_TOKENS else cls(threads, 4, 8)

    @property
    def constants(self) -> dict[str, int]:
        """As matmul_lanes.wgsl names them."""
        return {"THREADS": self.threads, "EACH": self.rows_each, "TOKENS": self.tokens}
