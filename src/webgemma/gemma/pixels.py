"""A picture on the device: its pixels, four bytes each, made larger or smaller there."""

import struct

from webgemma.errors import InputError
from webgemma.gemma.workbench import Bench
from webgemma.graph import Tensor
from webgemma.kernels import link
from webgemma.pictures import WEIGHT_BITS, Picture, Taps, resize_taps, starts_with_y

THREADS = 64


def pixels_of(bench: Bench, picture: Picture, width: int, height: int) -> Tensor:
    """The pixels of a picture in another size: [height * width] words."""
    limits = bench.device.limits
    if 4 * picture.width * picture.height > min(limits.binding_nbytes, limits.buffer_nbytes):
        raise InputError(
            f"A picture of {picture.width} x {picture.height} pixels is too large for "
            f"{bench.device.name}: make it smaller first."
        )
    pixels = bench.put(words(picture.rgb), "pixels")
    size = (picture.width, picture.height)
    axes = "yx" if starts_with_y(*size, width, height) else "xy"
    for axis in axes:
        target = (width, size[1]) if axis == "x" else (size[0], height)
        if target != size:
            pixels = _resized(bench, pixels, size, target)
            size = target
    return pixels


def words(rgb: bytes) -> bytes:
    """Three bytes for each pixel as four."""
    padded = bytearray(len(rgb) // 3 * 4)
    for colour in range(3):
        padded[colour::4] = rgb[colour::3]
    return bytes(padded)


def _resized(
    bench: Bench, pixels: Tensor, size: tuple[int, int], target: tuple[int, int]
) -> Tensor:
    """One pass, along the axis in which the sizes differ."""
    along_x = size[0] != target[0]
    taps = resize_taps(*((size[0], target[0]) if along_x else (size[1], target[1])))
    most = max(len(tap.weights) for tap in taps)
    result = bench.room(target[0] * target[1], label="pixels")
    constants = {"THREADS": THREADS, "BITS": WEIGHT_BITS, "ALONG_X": int(along_x)}
    kernel = link("resize", bench.device.features, constants=constants)
    grid = (-(-target[0] // THREADS), target[1])
    params = [*target, size[0], most]
    tensors = (pixels, *_tables(bench, taps, most), result)
    bench.recorder.call(kernel, grid, params, *tensors)
    return result


def _tables(bench: Bench, taps: list[Taps], most: int) -> tuple[Tensor, Tensor]:
    """Where each pixel's taps begin and how many they are, and their weights in lines of `most`."""
    places = b"".join(struct.pack("<2I", tap.first, len(tap.weights)) for tap in taps)
    lines = (struct.pack(f"<{len(tap.weights)}i", *tap.weights) for tap in taps)
    weights = b"".join(line.ljust(4 * most, b"\0") for line in lines)
    return bench.put(places, "taps"), bench.put(weights, "weights")
