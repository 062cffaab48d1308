"""Pictures before a tower sees them: how large they become, and how they are made so.

The rules alone, in plain Python: `reference/pictures.py` applies them with numpy.
"""

import math
from typing import NamedTuple

from webgemma.errors import InputError

BUDGETS = (70, 140, 280, 560, 1120)  # soft tokens that a picture may become
BUDGET = 280
VIDEO_FRAME_BUDGET = 70  # of a frame of a film
MAX_FRAMES = 32  # of a film that a model sees
WEIGHT_BITS = 22  # after the point of a weight in resizing
SIDE = 48  # pixels of a soft token's side: 3 patches of 16
MAX_PIXELS = 100_000_000  # a small file can claim to be larger than memory


class RgbImage(NamedTuple):
    """A decoded picture: `rgb` holds three bytes for each pixel, row by row."""

    width: int
    height: int
    rgb: bytes


def rgb_image(pixels: memoryview) -> RgbImage:
    """A picture that is in memory already: bytes [height, width, 3]."""
    shape = pixels.shape or ()
    if pixels.format != "B" or len(shape) != 3 or shape[2] != 3:
        raise InputError(
            f"An array of shape {shape} and format {pixels.format!r} is no picture: "
            "it must be uint8 [height, width, 3]."
        )
    height, width, _ = shape
    check_size(width, height, "The picture")
    return RgbImage(width, height, pixels.tobytes())


def check_size(width: int, height: int, name: str) -> None:
    """Refuse a picture with no pixels, or with too many."""
    if not width * height:
        raise InputError(f"{name} has {width} x {height} pixels: there is nothing to see.")
    if width * height > MAX_PIXELS:
        raise InputError(too_large(name, f"{width} x {height}"))


def too_large(name: str, pixels: str) -> str:
    """The sentence for a picture of too many pixels."""
    most = MAX_PIXELS // 1_000_000
    return f"{name} has {pixels} pixels; at most {most} million can be taken. Make it smaller."


class Taps(NamedTuple):
    """What makes one pixel of a resized line: Σ weights[i] · line[first + i] / 2^WEIGHT_BITS."""

    first: int
    weights: tuple[int, ...]


def check_budget(budget: int) -> None:
    """InputError for one that no model was made for."""
    if budget not in BUDGETS:
        known = ", ".join(map(str, BUDGETS))
        raise InputError(f"A picture can become at most one of {known} soft tokens, not {budget}.")


def target_size(width: int, height: int, budget: int = BUDGET, side: int = SIDE) -> tuple[int, int]:
    """(width, height) that fills the budget: near the picture's shape, multiples of `side`.

    Small pictures grow as large ones shrink. A strip too thin for one row of soft tokens gets
    one, as long as the budget allows."""
    check_budget(budget)
    if width < 1 or height < 1:
        raise InputError(f"A picture of {width} x {height} pixels holds nothing to see.")
    factor = math.sqrt(budget * side * side / (width * height))
    columns = math.floor(factor * width / side)
    rows = math.floor(factor * height / side)
    if not rows:
        columns, rows = min(width // height, budget), 1
    elif not columns:
        columns, rows = 1, min(height // width, budget)
    return columns * side, rows * side


def chosen_frames(count: int) -> list[int]:
    """Which frames of a film a model sees: all of a short one, else evenly spaced ones."""
    if count <= MAX_FRAMES:
        return list(range(count))
    return [at * count // MAX_FRAMES for at in range(MAX_FRAMES)]


def clock(seconds: float) -> str:
    """The time of a frame, as a model reads it: minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02}:{rest:02}"


def soft_tokens(width: int, height: int, side: int = SIDE) -> int:
    """How many soft tokens a picture of a target size becomes."""
    return (width // side) * (height // side)


def check_sides(width: int, height: int, positions: int, side: int = SIDE) -> None:
    """A picture that is not to be resized has sides a tower can take, or there is a sentence.

    `positions` is the longest side that the tower knows, in soft tokens."""
    if width < side or height < side or width % side or height % side:
        raise InputError(
            f"A picture of {width} x {height} pixels must be resized: "
            f"its sides are no multiples of {side}."
        )
    if max(width, height) > positions * side:
        raise InputError(
            f"A picture of {width} x {height} pixels must be resized: "
            f"a side can have at most {positions * side}."
        )
    if soft_tokens(width, height, side) > BUDGETS[-1]:
        raise InputError(
            f"A picture of {width} x {height} pixels must be resized: "
            f"it would become more than {BUDGETS[-1]} soft tokens."
        )


def starts_with_y(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether columns are resized before rows, which changes what is rounded: Pillow 13's rule."""
    lost = height - new_height
    return lost > 0 and lost > 2 * (width - new_width)


def resize_taps(source: int, target: int) -> list[Taps]:
    """The taps of every pixel of a line of `target` pixels, made of one of `source`.

    A picture is resized in two passes, one along each axis. A pass adds up whole numbers, divides
    by 2^WEIGHT_BITS, rounds to the nearest and keeps what lies between 0 and 255, so that every
    machine makes the same pixels, and those of Pillow. The sums stay below 2^31.

    Shrinking widens the cubic, so that every source pixel counts (antialias); beyond the edges
    there is nothing, and the weights that remain are scaled to add up to one."""
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
    """Keys' cubic convolution with a = -½: 1 at 0, 0 at 1, at 2 and beyond."""
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    if x < 2:
        return ((-0.5 * x + 2.5) * x - 4) * x + 2
    return 0.0
