"""Every program that the engine links compiles in Chromium, whose compiler refuses what naga takes:
barriers and shuffles that not all threads reach, and subgroups that were not asked for."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from browser.programs import FEATURES, programs
from browser.serving import serving

from webgemma.device import Kernel

AT_ONCE = 200  # programs that cross to the page together

BAD = Kernel(
    "bad",
    """
    @group(0) @binding(0) var<storage, read_write> seen: array<u32>;
    @compute @workgroup_size(64) fn main(@builtin(local_invocation_index) thread: u32) {
        if (thread < 3u) { workgroupBarrier(); }
        seen[thread] = 1u;
    }
    """,
    ("write",),
)


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    with serving({}) as origin:
        page = chromium.new_page()
        page.goto(f"{origin}/compile.html")
        page.wait_for_function("document.title == 'ready'")
        yield page
        page.close()


@pytest.fixture(scope="module")
def clean() -> set[str]:
    """Programs that have compiled: many are the same for several kinds of devices."""
    return set()


def complaints(page: Any, kernels: list[Kernel], pipelines: bool = False) -> list[str]:
    """What Chromium says against programs, and against pipelines of them."""
    found = []
    for at in range(0, len(kernels), AT_ONCE):
        share = [asdict(kernel) for kernel in kernels[at : at + AT_ONCE]]
        found += page.evaluate("(given) => compile(...given)", [share, pipelines])
    return found


@pytest.mark.parametrize("name", FEATURES)
def test_every_program_compiles(page: Any, clean: set[str], name: str) -> None:
    kernels = programs(FEATURES[name])
    assert len(kernels) > 500
    new = {kernel.wgsl: kernel for kernel in kernels if kernel.wgsl not in clean}
    assert complaints(page, list(new.values())) == []
    clean.update(new)


def test_one_pipeline_of_each_operation(page: Any) -> None:
    """Each with its explicit layout, on a device with no more than WebGPU's default limits."""
    found = {}
    for kernel in sorted(programs(FEATURES["shuffle4"]), key=lambda kernel: len(kernel.wgsl)):
        found.setdefault((kernel.name.partition("/")[0], kernel.bindings), kernel)
    assert len(found) >= 32
    assert complaints(page, list(found.values()), pipelines=True) == []


def test_what_is_wrong_is_found(page: Any) -> None:
    good = replace(BAD, wgsl=BAD.wgsl.replace("if (thread < 3u)", ""))
    shuffled = replace(good, wgsl=good.wgsl.replace("1u;", "subgroupAdd(1u);"))
    unbound = replace(good, bindings=("read",))
    assert complaints(page, [good], pipelines=True) == []
    assert "uniform control flow" in complaints(page, [BAD])[0]
    assert "subgroups" in complaints(page, [shuffled])[0]
    assert complaints(page, [unbound], pipelines=True)
