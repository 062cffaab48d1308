"""The shapes of tiles: they fit into the memory of a workgroup, and small products fill a GPU."""

import pytest

from webgemma.gemma.tiles import FEW_GROUPS, Tile

WORKGROUP_NBYTES = 16 << 10  # of WebGPU


def nbytes(tile: Tile, integers: bool) -> int:
    """Of tile_integer's or tile_float's workgroup memory."""
    if integers:
        return 16 * (tile.slice // 32) * (3 * tile.rows + 5 * tile.tokens)
    return 4 * tile.slice * (tile.rows + tile.tokens)


@pytest.mark.parametrize("software", [True, False])
@pytest.mark.parametrize("integers", [True, False])
def test_tiles_fit_into_workgroup_memory(integers: bool, software: bool) -> None:
    for rows in (1, 128, 1536, 16384):
        for tokens in (8, 32, 128, 512):
            tile = Tile.for_product(rows, tokens, integers, software)
            assert tile is not None
            assert nbytes(tile, integers) <= WORKGROUP_NBYTES
    for tokens in (8, 16, 32):
        tile = Tile.for_places(tokens, integers, software)
        assert tile.tokens == tokens
        assert nbytes(tile, integers) + 4 * tokens <= WORKGROUP_NBYTES


def test_the_scores_of_many_experts_are_shared_out() -> None:
    """128 experts, 512 tokens: with the tiles of large products that would be 16 workgroups."""
    tile = Tile.for_product(128, 512, False, False)
    assert tile is not None
    assert tile.groups(128, 512) >= 2 * FEW_GROUPS
    large = Tile.for_product(2816, 512, False, False)
    assert large is not None
    assert (large.rows, large.tokens) == (64, 64)
