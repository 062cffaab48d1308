"""Linking kernels: constants and a few .wgsl files joined, chosen by what the device has."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files

from webgemma.device import Kernel
from webgemma.device.neighbours import ENABLE

_BINDING = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var<(storage, read_write|storage, read|storage|uniform)>"
)
_KINDS = {
    "storage, read_write": "write",
    "storage, read": "read",
    "storage": "read",
    "uniform": "uniform",
}


def link(
    op: str,
    features: frozenset[str],
    *,
    format: str = "",
    constants: Mapping[str, int | float] | None = None,
    pieces: tuple[str, ...] = (),
) -> Kernel:
    """The program of one operation, for one weight format where it reads weights.

    `pieces` names files of lib/, each joined once; of "sum", "lanes" and "eight" the one that the
    device's features decide, and "integer" brings the format's weights as integers.
    """
    constants = constants or {}
    chosen = tuple(_provider(piece, features, constants) for piece in pieces)
    lines = tuple(_constant(name, value) for name, value in constants.items())
    return _joined(op, format, lines, chosen, "enable-subgroups" in features)


@lru_cache(maxsize=1024)
def _joined(
    op: str, format: str, lines: tuple[str, ...], chosen: tuple[str, ...], enable: bool
) -> Kernel:
    parts = [*lines, *(_source(f"lib/{piece}") for piece in dict.fromkeys(chosen))]
    parts += [_source(f"formats/{format.lower()}")] if format else []
    parts += [_source(f"formats/integer/{format.lower()}")] if "integer" in chosen else []
    parts.append(_source(f"ops/{op}"))
    wgsl = "\n".join(parts)
    if enable and "subgroup" in wgsl:
        wgsl = ENABLE + wgsl
    name = "/".join([op, *([format] if format else [])])
    return Kernel(name, wgsl, _bindings(wgsl))


@cache
def unit(format: str) -> int:
    """How many weights one call of a format's decode gives."""
    found = re.search(r"const UNIT: u32 = (\d+)u;", _source(f"formats/{format.lower()}"))
    assert found is not None
    return int(found[1])


def _provider(piece: str, features: frozenset[str], constants: Mapping[str, int | float]) -> str:
    """The file that does a piece's work best on a device with these features."""
    if piece == "sum":
        if "shuffle32" in features:
            return "sum_shuffle"
        return "sum_subgroups" if "subgroups" in features else "sum_plain"
    needed = {"lanes": f"shuffle{constants.get('LANES')}", "eight": "shuffle8"}.get(piece)
    return f"{piece}_shuffle" if needed in features else piece


def _constant(name: str, value: int | float) -> str:
    return (
        f"const {name}: u32 = {value}u;"
        if isinstance(value, int)
        else f"const {name}: f32 = {value!r}f;"
    )


@cache
def _source(name: str) -> str:
    return files(__package__).joinpath("wgsl", f"{name}.wgsl").read_text("utf-8")


def _bindings(wgsl: str) -> tuple[str, ...]:
    found = {int(number): _KINDS[kind] for number, kind in _BINDING.findall(wgsl)}
    return tuple(found[number] for number in range(len(found)))
