"""Who multiplies without barriers: adapters that are CPUs, if the size of a subgroup is known."""

import pytest

from webgemma.device.null import NullDevice
from webgemma.gemma.tiles import Cut

LAVAPIPE = "llvmpipe (LLVM 15.0.6, 256 bits) (Vulkan)"


def cut(name: str, tokens: int, *, software: bool = True, subgroups: bool = True) -> Cut | None:
    device = NullDevice(frozenset({"subgroups"}) if subgroups else frozenset())
    device.name, device.software = name, software
    return Cut.for_batch(device, tokens)


@pytest.mark.parametrize(("bits", "threads"), [(128, 4), (256, 8), (512, 16)])
def test_a_thread_for_each_float_of_a_vector(bits: int, threads: int) -> None:
    found = cut(LAVAPIPE.replace("256", str(bits)), 1)
    assert found is not None
    assert found.threads == threads


@pytest.mark.parametrize(("tokens", "at_once"), [(1, 1), (2, 1), (3, 8), (512, 8)])
def test_many_tokens_are_read_together(tokens: int, at_once: int) -> None:
    found = cut(LAVAPIPE, tokens)
    assert found is not None
    assert found.tokens == at_once


def test_others_do_without() -> None:
    assert cut("SwiftShader Device (Subzero) (Vulkan)", 1) is None
    assert cut("NVIDIA H200 (Vulkan)", 1, software=False) is None
    assert cut(LAVAPIPE, 1, subgroups=False) is None
