"""The cuts of outer products: what every device can run."""

import pytest

from webgemma.gemma.record.outer import Outer

LEAST_NBYTES = 16384  # of workgroup memory, that WebGPU promises
SMALL_NBYTES = 512  # of it, for what ops keep there besides

CUTS = {Outer.large()} | {
    cut
    for software in (False, True)
    for cut in (
        *(Outer.for_product(m, n, software) for m in (1, 16, 500) for n in (1, 16, 500)),
        *(Outer.for_places(places, software) for places in (8, 16, 32)),
    )
}


@pytest.mark.parametrize("cut", sorted(CUTS, key=str), ids=str)
def test_a_cut_fits_a_workgroup(cut: Outer) -> None:
    lines = cut.m // 4 + 1 + cut.n // 4 + 1
    assert 16 * cut.buffers * cut.slice * lines <= LEAST_NBYTES - SMALL_NBYTES
    assert cut.threads == cut.m // (4 * cut.each_m) * (cut.n // (4 * cut.each_n))
    assert cut.threads <= 256
    assert cut.buffers == 1 or cut.ahead  # what is not on its way needs one


def test_a_turned_cut_has_columns_for_rows() -> None:
    cut = Outer.narrow()
    assert (cut.turned.m, cut.turned.n) == (cut.n, cut.m)
    assert cut.turned.turned == cut
