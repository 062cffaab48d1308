"""How matrix units divide products and attention: within the limits and rules of the kernels.

Both are read from the WGSL: its constants, `const_assert` and workgroup arrays are evaluated."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import product

import pytest

from webgemma.device import Limits, MatrixShape
from webgemma.device.null import NullDevice
from webgemma.gemma.matrices import Weight
from webgemma.gemma.patch_attention import PatchMatrixTiling
from webgemma.gemma.record.expert_matmul import MATRIX_SLOTS
from webgemma.gemma.record.matrix_tiling import (
    CORES,
    DECODING_TILES,
    MATRIX_TILES,
    MAX_SPLITS,
    AttentionTiling,
    MatrixTiling,
    MatrixUnits,
)
from webgemma.gemma.record.tiling import Constants
from webgemma.gguf.formats import FORMATS
from webgemma.kernels import unit

UNITS = {
    "NVIDIA": MatrixUnits(MatrixShape(16, 16, 16), 32),
    "Apple": MatrixUnits(MatrixShape(8, 8, 8), 32),
    "8x8x8 in 16": MatrixUnits(MatrixShape(8, 8, 8), 16),
    "lavapipe": MatrixUnits(MatrixShape(8, 8, 8), 8),
    "Intel": MatrixUnits(MatrixShape(8, 16, 16), 16),
}
LIMITS = [
    Limits(1 << 30, 1 << 30, nbytes << 10, threads, 65535)
    for nbytes, threads in product((16, 32, 48), (256, 1024))
]
EVERY_UNITS = pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
EVERY_LIMITS = pytest.mark.parametrize(
    "limits", LIMITS, ids=lambda x: f"{x.workgroup_nbytes >> 10} KiB-{x.workgroup_threads}"
)
HEADS = (64, 128, 256, 512)
SIZES = {"f16": 2, "f32": 4, "u32": 4, "atomic<u32>": 4}


class Wgsl:
    """The rules of some WGSL files, with values for their overrides."""

    def __init__(self, constants: Constants, *paths: str) -> None:
        texts = [(files("webgemma.kernels") / "wgsl" / path).read_text() for path in paths]
        self.text = re.sub(r"//.*", "", "".join(texts))
        self.values = dict(constants)
        for name, expression in re.findall(r"\bconst (\w+)(?:: \w+)? = ([^;]+);", self.text):
            self.values[name] = self.value(expression)

    def value(self, expression: str) -> int | float | bool:
        """Return the value of an expression of u32 or f32."""
        python = re.sub(r"(?<=\d)u\b", "", expression)
        python = python.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        return eval(
            python, {"max": max, "min": min, "select": select, "__builtins__": {}}, self.values
        )

    def broken_rules(self) -> list[str]:
        """Return the `const_assert` that do not hold."""
        rules = re.findall(r"const_assert ([^;]+);", self.text)
        assert rules
        return [rule for rule in rules if not self.value(rule)]

    def workgroup_nbytes(self) -> int:
        """Return the memory of the workgroup's arrays."""
        arrays = re.findall(r"var<workgroup> \w+: array<([\w<>]+), (.+)>;", self.text)
        assert len(arrays) == self.text.count("var<workgroup>")
        return sum(SIZES[kind] * self.value(count) for kind, count in arrays)


def select(false: int, true: int, condition: bool) -> int:
    """Return what WGSL's function of this name does."""
    return true if condition else false


def assert_allowed(wgsl: Wgsl, threads: int, limits: Limits) -> None:
    assert wgsl.broken_rules() == []
    assert wgsl.workgroup_nbytes() <= limits.workgroup_nbytes
    assert wgsl.values["THREADS"] == threads <= limits.workgroup_threads


def longest_and_shortest_unit() -> Iterator[int]:
    found = {unit(name) for name, fmt in FORMATS.items() if fmt.usable}
    return iter((min(found), max(found)))


# Which matrix units


def device(features: str, subgroups: tuple[int, int], *shapes: tuple[int, int, int]) -> NullDevice:
    made = NullDevice(frozenset(features.split()))
    made.subgroup_sizes = subgroups
    made.matrix_shapes = tuple(MatrixShape(*shape) for shape in shapes)
    return made


def test_the_largest_matrices_are_used() -> None:
    gpu = device("subgroup-matrix shuffle32", (32, 32), (8, 8, 8), (16, 16, 16), (16, 8, 16))
    assert MatrixUnits.of(gpu) == UNITS["NVIDIA"]


@pytest.mark.parametrize(
    "gpu",
    [
        device("shuffle32", (32, 32), (16, 16, 16)),
        device("subgroup-matrix shuffle32", (32, 32)),
        device("subgroup-matrix shuffle32", (16, 32), (8, 16, 16)),
        device("subgroup-matrix shuffle16", (32, 32), (16, 16, 16)),
        device("subgroup-matrix", (32, 32), (16, 16, 16)),
        device("", (0, 0)),
    ],
    ids=["no feature", "no shape", "differing sizes", "another size", "unknown order", "nothing"],
)
def test_matrix_units_that_kernels_cannot_use(gpu: NullDevice) -> None:
    assert MatrixUnits.of(gpu) is None


# Products


@EVERY_UNITS
@EVERY_LIMITS
def test_products(units: MatrixUnits, limits: Limits) -> None:
    for rows, tokens in product((1, 33, 128, 2048, 16384, 262144), (3, 9, 17, 40, 100, 512, 2048)):
        tiling = MatrixTiling.for_product(units, (rows, 2048), tokens, limits)
        if tiling is None:
            continue
        for size in longest_and_shortest_unit():
            constants = {**tiling.constants, "UNIT": size}
            wgsl = Wgsl(constants, "lib/tiled_product/matrix_units.wgsl")
            assert_allowed(wgsl, tiling.threads, limits)
            assert wgsl.values["MATRIX_K"] == units.shape.k


@EVERY_UNITS
@EVERY_LIMITS
def test_products_over_rows(units: MatrixUnits, limits: Limits) -> None:
    sizes = product((256, 1536, 12288), (64, 2048, 262144), (3, 17, 100, 512, 2048))
    for (width, rows, tokens), name in product(sizes, ("Q4_K", "Q8_0", "F16")):
        weight = Weight(name, FORMATS[name], width, rows, ())
        tiling = MatrixTiling.for_backward(units, [weight], tokens, limits)
        if tiling is None:
            continue
        for split in (False, True):
            halves = {"SPLIT_X": split, "SPLIT_W": split}
            constants = {**tiling.constants, **halves, "UNIT": unit(name)}
            wgsl = Wgsl(constants, "lib/tiled_product/matrix_units.wgsl")
            assert_allowed(wgsl, tiling.threads, limits)
            assert wgsl.values["W_LINES"] == tiling.slice


def test_a_large_gpu_is_busy_with_sums_over_rows() -> None:
    """The head of a model: few columns and tokens, and very many rows, which are split."""
    head = Weight("head", FORMATS["Q6_K"], 1536, 262144, ())
    tiling = MatrixTiling.for_backward(UNITS["NVIDIA"], [head], 128, LIMITS[-1])
    assert tiling is not None
    assert (tiling.tokens, tiling.rows) == (128, 128)
    groups = math.prod(tiling.grid(1536, 128))
    assert 256 <= groups * tiling.row_splits(groups, head.rows) <= 1024


@EVERY_UNITS
@EVERY_LIMITS
def test_products_of_experts(units: MatrixUnits, limits: Limits) -> None:
    for slots in MATRIX_SLOTS:
        tiling = MatrixTiling.for_experts(units, slots)
        assert tiling.tokens == slots
        if not tiling.fits(limits):
            continue
        for size in longest_and_shortest_unit():
            constants = {**tiling.constants, "UNIT": size}
            paths = ("lib/tiled_product/matrix_units.wgsl", "ops/expert_matmul.wgsl")
            assert_allowed(Wgsl(constants, *paths), tiling.threads, limits)


@EVERY_UNITS
def test_a_product_is_divided_for_every_gpu(units: MatrixUnits) -> None:
    """WebGPU promises 16 KiB and 256 threads."""
    for tokens in (3, 40, 2048):
        assert MatrixTiling.for_product(units, (2048, 2048), tokens, LIMITS[0]) is not None


def test_products_with_few_rows_split_k() -> None:
    """So that all cores of a large GPU have about as much to do."""

    def chosen(rows: int, width: int, limits: Limits = LIMITS[-1]) -> tuple[int, int]:
        shape = (rows, width)
        tiling = MatrixTiling.for_product(UNITS["NVIDIA"], shape, 512, limits, MAX_SPLITS)
        assert tiling is not None
        assert tiling.split_slices(width) * tiling.splits * tiling.slice >= width
        return tiling.splits, tiling.groups(rows, 512)

    for rows, width in ((5376, 21504), (5376, 8192), (1536, 12288), (2816, 4096)):
        splits, groups = chosen(rows, width)
        assert splits > 1
        assert groups % CORES == 0 or groups % CORES > CORES // 2
    assert chosen(43008, 5376)[0] == 1
    assert chosen(1536, 128)[0] == 1
    little = replace(LIMITS[-1], binding_nbytes=4 * 512 * 5376 * 2)
    assert chosen(5376, 21504, little)[0] <= 2


def test_large_products_have_large_tiles() -> None:
    chosen = [
        MatrixTiling.for_product(UNITS["NVIDIA"], (rows, 2048), tokens, LIMITS[-1])
        for rows, tokens in ((16384, 2048), (2048, 512), (2048, 60), (128, 16))
    ]
    assert [(t.tokens, t.rows) for t in chosen if t] == sorted(
        [(t.tokens, t.rows) for t in chosen if t], reverse=True
    )
    assert chosen[0] is not None
    assert (chosen[0].tokens, chosen[0].rows) == MATRIX_TILES[0][:2]
    assert chosen[-1] is not None
    assert chosen[-1].tokens == DECODING_TILES[-1].tokens


# Attention


@EVERY_UNITS
@pytest.mark.parametrize("size", [16, 24, 32, *HEADS, 1024])
def test_attention(units: MatrixUnits, size: int) -> None:
    for limits in LIMITS:
        tiling = AttentionTiling.for_heads(units, size, limits)
        if tiling is not None:
            constants = {**tiling.constants, "HEAD_DIM": size}
            wgsl = Wgsl(constants, "ops/attention_matrix_units.wgsl")
            assert_allowed(wgsl, tiling.threads, limits)


@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("name", ["NVIDIA", "Intel", "lavapipe"])
def test_heads_of_gemma_are_attended_to(name: str, size: int) -> None:
    """With 32 KiB, which GPUs with matrix units have."""
    limits = Limits(1 << 30, 1 << 30, 32 << 10, 1024, 65535)
    assert AttentionTiling.for_heads(UNITS[name], size, limits) is not None


@EVERY_UNITS
@pytest.mark.parametrize("size", [16, 24, 72, 2048])
def test_heads_that_matrices_do_not_divide(units: MatrixUnits, size: int) -> None:
    assert AttentionTiling.for_heads(units, size, LIMITS[-1]) is None


# Attention among patches


@EVERY_UNITS
@pytest.mark.parametrize("size", [16, 24, 32, 64, 72, 128, 1024])
def test_attention_among_patches(units: MatrixUnits, size: int) -> None:
    for limits in LIMITS:
        tiling = PatchMatrixTiling.within(units, size, limits)
        if tiling is not None:
            wgsl = Wgsl(tiling.constants, "ops/vision_attention_matrix_units.wgsl")
            assert_allowed(wgsl, tiling.threads, limits)
            assert wgsl.workgroup_nbytes() % 16 == 0


@EVERY_UNITS
@pytest.mark.parametrize("size", [64, 72])
def test_patches_of_gemma_attend_to_each_other(units: MatrixUnits, size: int) -> None:
    """With the 16 KiB and 256 threads that WebGPU promises."""
    assert PatchMatrixTiling.within(units, size, LIMITS[0]) is not None
    assert PatchMatrixTiling.within(None, size, LIMITS[0]) is None


def test_heads_of_72_are_lengthened_to_whole_matrices() -> None:
    sizes = {}
    for name in ("NVIDIA", "Apple"):
        tiling = PatchMatrixTiling.within(UNITS[name], 72, LIMITS[-1])
        assert tiling is not None
        sizes[name] = tiling.dimensions
    assert sizes == {"NVIDIA": 80, "Apple": 72}


def test_subgroups_smaller_than_a_matrix_do_not_attend() -> None:
    units = MatrixUnits(MatrixShape(16, 16, 16), 8)
    assert PatchMatrixTiling.within(units, 64, LIMITS[-1]) is None
