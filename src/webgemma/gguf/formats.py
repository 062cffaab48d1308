"""Table of the ggml tensor types: number, weights per block and bytes per block of each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format of weights: `block` weights are packed into `nbytes` bytes."""

    name: str
    id: int
    block: int
    nbytes: int
    usable: bool = False  # the engine and the reference support it; else only its size is known
    planes: tuple[tuple[int, int], ...] = ()
    """Parts of a block, as (offset, nbytes), that the GPU stores apart: each part of all blocks is
    contiguous, so that wide loads are aligned. Empty if blocks are stored unchanged."""

    def row_nbytes(self, width: int) -> int:
        """Return the bytes of one row of `width` weights, a multiple of the block."""
        return width // self.block * self.nbytes

    def __str__(self) -> str:
        return self.name


_USABLE = (
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 18),
    ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),
    ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34),
    ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),
    ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210),
    ("IQ4_NL", 20, 32, 18),
    ("IQ4_XS", 23, 256, 136),
    ("BF16", 30, 1, 2),
    ("MXFP4", 39, 32, 17),
)

_SIZE_ONLY = (
    ("Q8_1", 9, 32, 36),
    ("Q8_K", 15, 256, 292),
    ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98),
    ("IQ1_S", 19, 256, 50),
    ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82),
    ("I8", 24, 1, 1),
    ("I16", 25, 1, 2),
    ("I32", 26, 1, 4),
    ("I64", 27, 1, 8),
    ("F64", 28, 1, 8),
    ("IQ1_M", 29, 256, 56),
    ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),
    ("NVFP4", 40, 64, 36),
    ("Q1_0", 41, 128, 18),
)

_PLANES: dict[str, tuple[tuple[int, int], ...]] = {
    "Q4_0": ((2, 16), (0, 2)),
    "Q4_1": ((4, 16), (0, 4)),
    "Q5_0": ((6, 16), (2, 4), (0, 2)),
    "Q5_1": ((8, 16), (0, 8)),
    "Q8_0": ((2, 32), (0, 2)),
    "Q2_K": ((0, 80), (80, 4)),
    "Q3_K": ((0, 96), (96, 12), (108, 2)),
    "Q6_K": ((0, 208), (208, 2)),
    "IQ4_NL": ((2, 16), (0, 2)),
    "IQ4_XS": ((8, 128), (0, 8)),
    "MXFP4": ((1, 16), (0, 1)),
}

FORMATS: dict[str, Format] = {
    row[0]: Format(*row, usable=True, planes=_PLANES.get(row[0], ())) for row in _USABLE
} | {row[0]: Format(*row) for row in _SIZE_ONLY}
FORMAT_BY_ID: dict[int, Format] = {fmt.id: fmt for fmt in FORMATS.values()}
