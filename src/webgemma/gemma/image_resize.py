"""Resizing images on the device: byte for byte what Pillow computes."""

import struct
from functools import lru_cache

from webgemma.device import Device
from webgemma.errors import InputError
from webgemma.gemma.record.staged_plan import StagedPlan
from webgemma.graph import Tensor
from webgemma.images import WEIGHT_BITS, resize_taps, resizes_height_first

THREADS = 64


def check_pixels(device: Device, width: int, height: int) -> None:
    """Raise InputError for an image that is too large for a device."""
    limits = device.limits
    if 3 * width * height > min(limits.binding_nbytes, limits.buffer_nbytes):
        raise InputError(
            f"An image of {width} x {height} pixels is too large for {device.name}: "
            "make it smaller first."
        )


def resized(
    plan: StagedPlan, rgb: Tensor, size: tuple[int, int], target: tuple[int, int]
) -> Tensor:
    """Record an image, three bytes a pixel, in another size: [height * width] words."""
    axes = "yx" if resizes_height_first(*size, *target) else "xy"
    differs = {"x": size[0] != target[0], "y": size[1] != target[1]}
    pixels = rgb
    for axis in [each for each in axes if differs[each]] or ["x"]:  # one pass at least
        to = (target[0], size[1]) if axis == "x" else (size[0], target[1])
        pixels = _resize_axis(plan, pixels, axis, size, to, packed=pixels is rgb)
        size = to
    return pixels


def _resize_axis(
    plan: StagedPlan,
    pixels: Tensor,
    axis: str,
    size: tuple[int, int],
    target: tuple[int, int],
    packed: bool,
) -> Tensor:
    """Record rows or columns in another length; `packed` pixels have three bytes each."""
    along = "xy".index(axis)
    max_taps, taps, weights = _tables(size[along], target[along])
    result = plan.recorder.scratch(target[0] * target[1])
    plan.recorder.call(
        "resize",
        (-(-target[0] // THREADS), target[1]),
        pixels=pixels,
        taps=plan.upload(taps, "taps"),
        weights=plan.upload(weights, "taps"),
        result=result,
        width=target[0],
        height=target[1],
        from_width=size[0],
        max_taps=max_taps,
        THREADS=THREADS,
        BITS=WEIGHT_BITS,
        ALONG_X=axis == "x",
        PACKED=packed,
    )
    return result


@lru_cache(maxsize=8)
def _tables(source: int, target: int) -> tuple[int, bytes, bytes]:
    """Return the max taps of a pixel; where each one's begin and how many; their weights."""
    taps = resize_taps(source, target)
    max_taps = max(len(tap.weights) for tap in taps)
    ranges = b"".join(struct.pack("<2I", tap.first, len(tap.weights)) for tap in taps)
    lines = (struct.pack(f"<{len(tap.weights)}i", *tap.weights) for tap in taps)
    return max_taps, ranges, b"".join(line.ljust(4 * max_taps, b"\0") for line in lines)
