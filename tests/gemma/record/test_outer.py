"""The tilings of outer products: what every device can run."""

import pytest

from webgemma.gemma.record.tiling import OuterTiling

WORKGROUP_NBYTES = 16384  # of workgroup memory, that WebGPU promises
OTHER_NBYTES = 512  # of it, for what ops keep there besides

TILINGS = {OuterTiling.large()} | {
    tiling
    for software in (False, True)
    for tiling in (
        *(OuterTiling.for_product(m, n, software) for m in (1, 16, 500) for n in (1, 16, 500)),
        *(OuterTiling.for_experts(slots, software) for slots in (8, 16, 32)),
    )
}


@pytest.mark.parametrize("tiling", sorted(TILINGS, key=str), ids=str)
def test_a_tiling_fits_a_workgroup(tiling: OuterTiling) -> None:
    lines = tiling.m // 4 + 1 + tiling.n // 4 + 1
    assert 16 * tiling.buffers * tiling.slice * lines <= WORKGROUP_NBYTES - OTHER_NBYTES
    assert tiling.threads == tiling.m // (4 * tiling.each_m) * (tiling.n // (4 * tiling.each_n))
    assert tiling.threads <= 256
    assert tiling.buffers == 1 or tiling.ahead  # a slice that is not loaded ahead needs one


def test_a_transposed_tiling_exchanges_rows_and_columns() -> None:
    tiling = OuterTiling.narrow()
    assert (tiling.transposed.m, tiling.transposed.n) == (tiling.n, tiling.m)
    assert tiling.transposed.transposed == tiling
