"""Structs that the host writes for kernels: packed by name, as WGSL lays them out."""

import struct

import pytest

from webgemma.errors import KernelError
from webgemma.kernels import host_struct
from webgemma.kernels.host_struct import HostStruct

STEP = {
    "inverse_temperature": 0.5,
    "entropy_bound": 1.5,
    "confidence_threshold": 0.25,
    "stability_threshold": 3,
    "seed": (4, 5),
    "canvas": 6,
    "step": 7,
    "steps": 8,
}


def schedule() -> HostStruct:
    return host_struct("lib/denoising/schedule", "Denoising")


def test_a_struct_is_packed_by_name_and_padded() -> None:
    expected = struct.pack("<3f6I12x", 0.5, 1.5, 0.25, 3, 4, 5, 6, 7, 8)
    assert schedule().pack(**STEP) == expected
    assert schedule().pack(**dict(reversed(STEP.items()))) == expected
    assert schedule().nbytes == len(expected) == 48


def test_a_vec2_is_aligned() -> None:
    layout = HostStruct("Example", [("a", "u32"), ("b", "vec2<u32>"), ("c", "f32")])
    assert layout.pack(a=1, b=(2, 3), c=0.5) == struct.pack("<I4x2If12x", 1, 2, 3, 0.5)
    assert layout.nbytes == 32


@pytest.mark.parametrize("name", STEP)
def test_a_missing_field(name: str) -> None:
    with pytest.raises(KernelError, match=rf"Denoising\b.*\b{name}\b"):
        schedule().pack(**{key: value for key, value in STEP.items() if key != name})


WRONG_FIELDS = {
    "unknown": ("temperature", 1.0),
    "int for f32": ("entropy_bound", 1),
    "float for u32": ("step", 7.0),
    "bool for u32": ("step", True),
    "tuple for u32": ("step", (7, 0)),
    "int for vec2": ("seed", 4),
    "list for vec2": ("seed", [4, 5]),
    "vec2 of one": ("seed", (4,)),
    "vec2 of three": ("seed", (4, 5, 6)),
    "vec2 of floats": ("seed", (4.0, 5.0)),
    "negative": ("step", -1),
    "33 bits": ("step", 1 << 32),
    "negative in a vec2": ("seed", (-1, 0)),
    "f32 that overflows": ("entropy_bound", 1e39),
}


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS.values(), ids=WRONG_FIELDS)
def test_a_wrong_field(name: str, value: object) -> None:
    with pytest.raises(KernelError, match=rf"Denoising\b.*\b{name}\b"):
        schedule().pack(**{**STEP, name: value})


def test_an_unknown_struct() -> None:
    with pytest.raises(KernelError, match=r"schedule\.wgsl declares no struct Canvas"):
        host_struct("lib/denoising/schedule", "Canvas")
