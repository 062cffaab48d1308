"""How products are shared out: who multiplies without barriers, and who in which teams."""

import pytest

from webgemma.gemma.tiles import Cut

EIGHT = frozenset({"subgroups", "shuffle4", "shuffle8"})  # lavapipe on a CPU with 256-bit vectors


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
