"""How products are divided: without barriers on a CPU, in tiles that fit and fill a GPU."""

import pytest

from webgemma.gemma.record.tiling import FEW_GROUPS, MatmulTiling, SoftwareTiling

EIGHT = frozenset({"subgroups", "shuffle4", "shuffle8"})  # lavapipe on a CPU with 256-bit vectors
WORKGROUP_NBYTES = 16 << 10  # of WebGPU


@pytest.mark.parametrize("threads", [4, 8, 16])
def test_a_thread_for_each_float_of_a_vector(threads: int) -> None:
    features = frozenset(f"shuffle{size}" for size in (4, 8, 16) if size <= threads)
    tiling = SoftwareTiling.for_tokens(1, features, software=True)
    assert tiling is not None
    assert tiling.threads == threads


@pytest.mark.parametrize(("tokens", "at_once"), [(1, 1), (2, 1), (3, 8), (512, 8)])
def test_many_tokens_are_multiplied_together(tokens: int, at_once: int) -> None:
    tiling = SoftwareTiling.for_tokens(tokens, EIGHT, software=True)
    assert tiling is not None
    assert tiling.tokens == at_once


def test_no_software_tiling_without_shuffles_or_on_hardware() -> None:
    assert SoftwareTiling.for_tokens(1, frozenset({"subgroups"}), software=True) is None
    assert SoftwareTiling.for_tokens(1, EIGHT, software=False) is None


def nbytes(tiling: MatmulTiling, integers: bool) -> int:
    """Return the workgroup memory of tile/integer or tile/float."""
    if integers:
        return 16 * (tiling.slice // 32) * (3 * tiling.rows + 5 * tiling.tokens)
    return 4 * tiling.slice * (tiling.rows + tiling.tokens)


@pytest.mark.parametrize("workgroup_nbytes", [16 << 10, 32 << 10])
@pytest.mark.parametrize(("rows", "tokens"), [(768, 2394), (4304, 2394), (1024, 750)])
def test_vec4_tiles_of_encoders_fill_a_gpu(rows: int, tokens: int, workgroup_nbytes: int) -> None:
    tiling = MatmulTiling.for_vec4(rows, tokens, workgroup_nbytes)
    assert tiling is not None
    lines = (tiling.rows // 4 + 1) + (tiling.tokens // 4 + 1)
    assert 16 * tiling.buffers * tiling.slice * lines <= workgroup_nbytes
    assert tiling.groups(rows, tokens) >= 2 * FEW_GROUPS
    assert MatmulTiling.for_vec4(rows, 20, workgroup_nbytes) is None


@pytest.mark.parametrize("software", [True, False])
@pytest.mark.parametrize("integers", [True, False])
def test_tiles_fit_into_workgroup_memory(integers: bool, software: bool) -> None:
    for rows in (1, 128, 1536, 16384):
        for tokens in (8, 32, 128, 512):
            tiling = MatmulTiling.for_product(rows, tokens, integers)
            assert nbytes(tiling, integers) <= WORKGROUP_NBYTES
    for slots in (8, 16, 32):
        tiling = MatmulTiling.for_experts(slots, integers, software)
        assert tiling.tokens == slots
        assert nbytes(tiling, integers) + 4 * slots <= WORKGROUP_NBYTES


def test_the_scores_of_many_experts_are_divided_among_many_workgroups() -> None:
    """128 experts, 512 tokens: with the tiles of large products that would be 16 workgroups."""
    tiling = MatmulTiling.for_product(128, 512, integers=False)
    assert tiling.groups(128, 512) >= 2 * FEW_GROUPS
    large = MatmulTiling.for_product(2816, 512, integers=False)
    assert (large.rows, large.tokens) == (64, 64)
