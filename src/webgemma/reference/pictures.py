"""From a decoded picture to the patches that a tower takes, in numpy."""

import numpy as np
from numpy.typing import NDArray

from webgemma.gemma.encoder_config import VisionConfig
from webgemma.images import (
    BUDGET,
    WEIGHT_BITS,
    RgbImage,
    check_sides,
    resize_taps,
    starts_with_y,
    target_size,
)
from webgemma.reference.weights import Floats

Rgb = NDArray[np.uint8]  # [height, width, 3]


def pixel_values(
    picture: RgbImage, vision: VisionConfig, budget: int = BUDGET, *, resized: bool = True
) -> Floats:
    """A picture as VisionModel takes it: [rows, columns, patch · patch · 3], from 0 to 1."""
    width, height, _ = picture
    rgb = rgb_of(picture)
    side = vision.patch * vision.pool
    if resized:
        rgb = resize(rgb, *target_size(width, height, budget, side))
    else:
        check_sides(width, height, vision.positions // vision.pool, side)
    return patches(rgb, vision.patch)


def rgb_of(picture: RgbImage) -> Rgb:
    """Its pixels as an array."""
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


def resize(rgb: Rgb, width: int, height: int) -> Rgb:
    """Bicubic with antialias: one axis, then the other."""
    if starts_with_y(rgb.shape[1], rgb.shape[0], width, height):
        return resize_rows(resize_columns(rgb, height), width)
    return resize_columns(resize_rows(rgb, width), height)


def resize_columns(rgb: Rgb, height: int) -> Rgb:
    """Along y, as rows are along x."""
    return resize_rows(rgb.swapaxes(0, 1), height).swapaxes(0, 1)


def resize_rows(rgb: Rgb, width: int) -> Rgb:
    """Each row [source, 3] as one of [width, 3]: the nearest whole number to a weighted sum."""
    if rgb.shape[1] == width:
        return rgb
    out = np.empty((len(rgb), width, 3), np.uint8)
    half = 1 << (WEIGHT_BITS - 1)
    for at, (first, weights) in enumerate(resize_taps(rgb.shape[1], width)):
        source = rgb[:, first : first + len(weights)].astype(np.int32)
        sums = np.einsum("ysc,s->yc", source, np.array(weights, np.int32))
        out[:, at] = np.clip((sums + half) >> WEIGHT_BITS, 0, 255)
    return out


def patches(rgb: Rgb, patch: int) -> Floats:
    """Squares of patch × patch pixels in their places: [rows, columns, patch · patch · 3]."""
    rows, columns = rgb.shape[0] // patch, rgb.shape[1] // patch
    squares = rgb.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    return squares.reshape(rows, columns, -1).astype(np.float32) / np.float32(255)
