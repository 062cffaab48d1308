"""A picture on the device: its pixels made larger or smaller there, four bytes each."""

import struct
from functools import lru_cache

from webgemma.device import Device
from webgemma.errors import InputError
from webgemma.gemma.record.staged_plan import Bench
from webgemma.graph import Tensor
from webgemma.images import WEIGHT_BITS, resize_taps, starts_with_y
from webgemma.kernels import link

THREADS = 64


def check_pixels(device: Device, width: int, height: int) -> None:
    """InputError for a picture that is too large for a device."""
    limits = device.limits
    if 3 * width * height > min(limits.binding_nbytes, limits.buffer_nbytes):
        raise InputError(
            f"A picture of {width} x {height} pixels is too large for {device.name}: "
            "make it smaller first."
        )


def resized(bench: Bench, rgb: Tensor, size: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """The pixels of a picture, three bytes each, in another size: [height * width] words."""
    axes = "yx" if starts_with_y(*size, *target) else "xy"
    wanted = {"x": size[0] != target[0], "y": size[1] != target[1]}
    pixels = rgb
    for axis in [each for each in axes if wanted[each]] or ["x"]:  # one pass at least
        to = (target[0], size[1]) if axis == "x" else (size[0], target[1])
        pixels = _pass(bench, pixels, axis, size, to, packed=pixels is rgb)
        size = to
    return pixels


def _pass(
    bench: Bench,
    pixels: Tensor,
    axis: str,
    size: tuple[int, int],
    target: tuple[int, int],
    packed: bool,
) -> Tensor:
    """Rows or columns in another length; `packed` pixels have three bytes each."""
    along = "xy".index(axis)
    most, *tables = _tables(size[along], target[along])
    result = bench.recorder.scratch(target[0] * target[1])
    constants = {
        "THREADS": THREADS,
        "BITS": WEIGHT_BITS,
        "ALONG_X": int(axis == "x"),
        "PACKED": int(packed),
    }
    kernel = link("resize", bench.device.features, constants=constants)
    grid = (-(-target[0] // THREADS), target[1])
    taps, weights = (bench.put(table, "taps") for table in tables)
    bench.recorder.call(kernel, grid, [*target, size[0], most], pixels, taps, weights, result)
    return result


@lru_cache(maxsize=8)
def _tables(source: int, target: int) -> tuple[int, bytes, bytes]:
    """The most taps of a pixel; where each one's begin and how many they are; and their weights."""
    taps = resize_taps(source, target)
    most = max(len(tap.weights) for tap in taps)
    places = b"".join(struct.pack("<2I", tap.first, len(tap.weights)) for tap in taps)
    lines = (struct.pack(f"<{len(tap.weights)}i", *tap.weights) for tap in taps)
    return most, places, b"".join(line.ljust(4 * most, b"\0") for line in lines)
