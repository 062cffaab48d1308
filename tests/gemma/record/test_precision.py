"""Which precision a device computes with: what it is asked for, or the nearest that it can."""

import pytest

from webgemma.device import MatrixShape
from webgemma.device.null import NullDevice
from webgemma.errors import InputError
from webgemma.gemma.record.precision import PRECISIONS, check_precision, choose_precision


def device(units: bool, software: bool) -> NullDevice:
    made = NullDevice(frozenset({"subgroup-matrix", "shuffle32"} if units else ()))
    made.subgroup_sizes, made.software = (32, 32), software
    made.matrix_shapes = (MatrixShape(16, 16, 16),) if units else ()
    return made


@pytest.mark.parametrize(
    ("asked", "units", "software", "chosen"),
    [
        ("auto", True, False, "f16"),
        ("auto", False, False, "int16"),
        ("auto", True, True, "exact"),
        ("auto", False, True, "exact"),
        ("f16", True, False, "f16"),
        ("f16", True, True, "f16"),
        ("f16", False, False, "int16"),
        ("f16", False, True, "int16"),
        *((name, True, False, name) for name in ("exact", "int16", "int8")),
        *((name, False, True, name) for name in ("exact", "int16", "int8")),
    ],
)
def test_choice(asked: str, units: bool, software: bool, chosen: str) -> None:
    assert choose_precision(asked, device(units, software)) == chosen


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_that_there_are(name: str) -> None:
    check_precision(name)


@pytest.mark.parametrize("name", ["float16", "F16", "", None, 16, ["f16"]])
def test_precisions_that_there_are_not(name: object) -> None:
    with pytest.raises(InputError, match="use auto, exact, int16, int8 or f16"):
        check_precision(name)  # type: ignore[arg-type]
