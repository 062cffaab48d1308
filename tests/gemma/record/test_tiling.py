"""How products are shared out: without barriers on a CPU, in tiles that fit and fill a GPU."""

import pytest

from webgemma.gemma.record.tiling import FEW_GROUPS, Cut, Tile

EIGHT = frozenset({"subgroups", "shuffle4", "shuffle8"})  # lavapipe on a CPU with 256-bit vectors
WORKGROUP_NBYTES = 16 << 10  # of WebGPU


@pytest.mark.parametrize("threads", [4, 8, 16])
def test_a_thread_for_each_float_of_a_vector(threads: int) -> None:
    features = frozenset(f"shuffle{size}" for size in (4, 8, 16) if size <= threads)
    found = Cut.for_tokens(1, features, software=True)
    assert found is not None
    assert found.threads == threads


@pytest.mark.parametrize(("tokens", "at_once"), [(1, 1), (2, 1), (3, 8), (512, 8)])
def test_many_tokens_are_read_together(tokens: int, at_once: int) -> None:
    found = Cut.for_tokens(tokens, EIGHT, software=True)
    assert found is not None
    assert found.tokens == at_once


def test_others_do_without() -> None:
    assert Cut.for_tokens(1, frozenset({"subgroups"}), software=True) is None
    assert Cut.for_tokens(1, EIGHT, software=False) is None


def nbytes(tile: Tile, integers: bool) -> int:
    """Of tile_integer's or tile_float's workgroup memory."""
    if integers:
        return 16 * (tile.slice // 32) * (3 * tile.rows + 5 * tile.tokens)
    return 4 * tile.slice * (tile.rows + tile.tokens)


@pytest.mark.parametrize("room", [16 << 10, 32 << 10])
@pytest.mark.parametrize(("rows", "tokens"), [(768, 2394), (4304, 2394), (1024, 750)])
def test_fours_of_towers_fill_a_gpu(rows: int, tokens: int, room: int) -> None:
    tile = Tile.of_fours(rows, tokens, room)
    assert tile is not None
    lines = (tile.rows // 4 + 1) + (tile.tokens // 4 + 1)
    assert 16 * tile.buffers * tile.slice * lines <= room
    assert tile.groups(rows, tokens) >= 2 * FEW_GROUPS
    assert Tile.of_fours(rows, 20, room) is None


@pytest.mark.parametrize("software", [True, False])
@pytest.mark.parametrize("integers", [True, False])
def test_tiles_fit_into_workgroup_memory(integers: bool, software: bool) -> None:
    for rows in (1, 128, 1536, 16384):
        for tokens in (8, 32, 128, 512):
            tile = Tile.for_product(rows, tokens, integers)
            assert tile is not None
            assert nbytes(tile, integers) <= WORKGROUP_NBYTES
    for tokens in (8, 16, 32):
        tile = Tile.for_places(tokens, integers, software)
        assert tile.tokens == tokens
        assert nbytes(tile, integers) + 4 * tokens <= WORKGROUP_NBYTES


def test_the_scores_of_many_experts_are_shared_out() -> None:
    """128 experts, 512 tokens: with the tiles of large products that would be 16 workgroups."""
    tile = Tile.for_product(128, 512, integers=False)
    assert tile is not None
    assert tile.groups(128, 512) >= 2 * FEW_GROUPS
    large = Tile.for_product(2816, 512, integers=False)
    assert large is not None
    assert (large.rows, large.tokens) == (64, 64)
