"""Kernels are linked once, and only those that are the same are the same."""

import pytest

from webgemma.kernels import link

SUBGROUPS = frozenset({"subgroups", "enable-subgroups"})


def test_the_same_kernel_is_linked_once() -> None:
    first, second = (
        link("norm", frozenset(), constants={"THREADS": 64}, pieces=("sum", "state", "put_float"))
        for _ in range(2)
    )
    assert first is second


@pytest.mark.parametrize(
    "change",
    [
        {"features": SUBGROUPS},
        {"constants": {"THREADS": 32}},
        {"constants": {"THREADS": 64.0}},  # equal to 64, but not of its type
        {"pieces": ("sum",)},
        {"op": "layer_norm"},
    ],
)
def test_others_are_others(change: dict[str, object]) -> None:
    same = {"op": "norm", "features": frozenset(), "constants": {"THREADS": 64}}
    same["pieces"] = ("sum", "state")
    assert link(**same).wgsl != link(**same | change).wgsl  # type: ignore[arg-type]
