"""Image preprocessing rules in plain Python: target sizes, resize weights, frames of a video.

`reference/images.py` applies them with numpy, `gemma/image_resize.py` on the GPU.
"""

import math
from typing import NamedTuple

from webgemma.errors import InputError
from webgemma.values import shown, whole_number

BUDGETS = (70, 140, 280, 560, 1120)  # the numbers of soft tokens that an image may be limited to
BUDGET = 280
VIDEO_FRAME_BUDGET = 70
MAX_FRAMES = 32  # of a video
WEIGHT_BITS = 22  # fraction bits of a resize weight
SIDE = 48  # pixels per side of a soft token: 3 patches of 16
MAX_PIXELS = 100_000_000  # a small file can declare more pixels than fit into memory


class RgbImage(NamedTuple):
    """Decoded image: `rgb` holds three bytes for each pixel, row by row."""

    width: int
    height: int
    rgb: bytes


def rgb_image(pixels: memoryview) -> RgbImage:
    """Return the image in an array of bytes [height, width, 3]; InputError for any other array."""
    shape = pixels.shape or ()
    if pixels.format != "B" or len(shape) != 3 or shape[2] != 3:
        raise InputError(
            f"An array of shape {shape} and format {pixels.format!r} is not an image: "
            "it must be uint8 [height, width, 3]."
        )
    height, width, _ = shape
    check_size(width, height, "The image")
    return RgbImage(width, height, pixels.tobytes())


def check_size(width: int, height: int, name: str) -> None:
    """Raise InputError for an image without pixels, or with more than MAX_PIXELS."""
    if not width * height:
        raise InputError(f"{name} has {width} x {height} pixels: it is empty.")
    if width * height > MAX_PIXELS:
        raise InputError(too_large_message(name, f"{width} x {height}"))


def too_large_message(name: str, pixels: str) -> str:
    """Return the error message for an image with more than MAX_PIXELS."""
    millions = MAX_PIXELS // 1_000_000
    return f"{name} has {pixels} pixels; at most {millions} million are supported. Make it smaller."


def check_budget(budget: int) -> None:
    """Raise InputError for a budget that the models were not trained with."""
    if whole_number(budget) not in BUDGETS:
        known = ", ".join(map(str, BUDGETS))
        raise InputError(
            f"The budget of an image must be one of {known} soft tokens, not {shown(budget)}."
        )


def target_size(width: int, height: int, budget: int = BUDGET, side: int = SIDE) -> tuple[int, int]:
    """Return the (width, height) that an image is resized to: multiples of `side`.

    The largest size of about the same aspect ratio whose soft tokens fit the budget; small images
    are enlarged. A strip too thin for one row of soft tokens gets one, as long as the budget
    allows."""
    check_budget(budget)
    if width < 1 or height < 1:
        raise InputError(f"An image of {width} x {height} pixels is empty.")
    factor = math.sqrt(budget * side * side / (width * height))
    columns = math.floor(factor * width / side)
    rows = math.floor(factor * height / side)
    if not rows:
        columns, rows = min(width // height, budget), 1
    elif not columns:
        columns, rows = 1, min(height // width, budget)
    return columns * side, rows * side


def soft_tokens(width: int, height: int, side: int = SIDE) -> int:
    """Return the number of soft tokens of an image of a target size."""
    return (width // side) * (height // side)


def check_sides(width: int, height: int, positions: int, side: int = SIDE) -> None:
    """Raise InputError unless an image fits the encoder without resizing.

    `positions` is the longest side of the encoder's position table, in soft tokens."""
    if width < side or height < side or width % side or height % side:
        raise InputError(
            f"An image of {width} x {height} pixels must be resized: "
            f"its sides are not multiples of {side}."
        )
    if max(width, height) > positions * side:
        raise InputError(
            f"An image of {width} x {height} pixels must be resized: "
            f"a side can have at most {positions * side}."
        )
    if soft_tokens(width, height, side) > BUDGETS[-1]:
        raise InputError(
            f"An image of {width} x {height} pixels must be resized: "
            f"it would need more than {BUDGETS[-1]} soft tokens."
        )


# Video


def chosen_frames(count: int) -> list[int]:
    """Return the indices of the frames to encode: all up to MAX_FRAMES, else evenly spaced ones."""
    if count <= MAX_FRAMES:
        return list(range(count))
    return [at * count // MAX_FRAMES for at in range(MAX_FRAMES)]


def timestamp(seconds: float) -> str:
    """Return the time of a frame as the prompt states it: minutes and seconds, mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02}:{rest:02}"


# Resizing


class Taps(NamedTuple):
    """Weights of one resized pixel: Σ weights[i] · line[first + i] / 2^WEIGHT_BITS."""

    first: int
    weights: tuple[int, ...]


def resizes_height_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Return whether the height is resized before the width, as in Pillow 13.

    The order matters because each pass rounds."""
    removed = height - new_height
    return removed > 0 and removed > 2 * (width - new_width)


def resize_taps(source: int, target: int) -> list[Taps]:
    """Return the taps of every pixel of a line of `target` pixels, made from `source` pixels.

    An image is resized in two passes, one along each axis. A pass sums integers, divides by
    2^WEIGHT_BITS, rounds to the nearest and clamps to 0 … 255, so that every machine computes the
    same pixels, and those of Pillow. The sums stay below 2^31.

    Shrinking widens the cubic so that every source pixel contributes (antialiasing). Pixels beyond
    the edges are left out, and the remaining weights are scaled to a sum of one."""
    scale = source / target
    stretch = max(scale, 1.0)
    taps = []
    for pixel in range(target):
        centre = (pixel + 0.5) * scale
        first = max(0, int(centre - 2 * stretch + 0.5))
        last = min(source, int(centre + 2 * stretch + 0.5))
        weights = [cubic((at - centre + 0.5) / stretch) for at in range(first, last)]
        unit = (1 << WEIGHT_BITS) / sum(weights)
        taps.append(Taps(first, tuple(round(weight * unit) for weight in weights)))
    return taps


def cubic(x: float) -> float:
    """Return Keys' cubic convolution kernel with a = -½: 1 at 0, and 0 at 1, 2 and beyond."""
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    if x < 2:
        return ((-0.5 * x + 2.5) * x - 4) * x + 2
    return 0.0
