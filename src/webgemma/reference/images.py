"""Image preprocessing in numpy: resizing and patches, by the rules of `webgemma.images`."""

import numpy as np
from numpy.typing import NDArray

from webgemma.gemma.encoder_config import VisionConfig
from webgemma.images import (
    BUDGET,
    WEIGHT_BITS,
    RgbImage,
    check_sides,
    resize_taps,
    resizes_height_first,
    target_size,
)
from webgemma.reference.weights import Floats

Rgb = NDArray[np.uint8]  # [height, width, 3]


def pixel_values(
    image: RgbImage, vision: VisionConfig, budget: int = BUDGET, *, resized: bool = True
) -> Floats:
    """Return an image as VisionEncoder takes it: [rows, columns, patch · patch · 3], from 0 to 1.

    It is resized to fill the budget of soft tokens; with resized=False it keeps its size, and
    InputError is raised unless that fits the encoder."""
    width, height, _ = image
    rgb = rgb_array(image)
    side = vision.patch * vision.pool
    if resized:
        rgb = resize(rgb, *target_size(width, height, budget, side))
    else:
        check_sides(width, height, vision.positions // vision.pool, side)
    return patches(rgb, vision.patch)


def rgb_array(image: RgbImage) -> Rgb:
    """Return the pixels of an image as an array: [height, width, 3]."""
    return np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)


def resize(rgb: Rgb, width: int, height: int) -> Rgb:
    """Return the image resized bicubically with antialiasing: one axis, then the other."""
    if resizes_height_first(rgb.shape[1], rgb.shape[0], width, height):
        return resize_rows(resize_columns(rgb, height), width)
    return resize_columns(resize_rows(rgb, width), height)


def resize_columns(rgb: Rgb, height: int) -> Rgb:
    """Return each column [source, 3] resized to [height, 3]."""
    return resize_rows(rgb.swapaxes(0, 1), height).swapaxes(0, 1)


def resize_rows(rgb: Rgb, width: int) -> Rgb:
    """Return each row [source, 3] resized to [width, 3]: weighted sums, rounded and clamped."""
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
    """Return the grid of patch × patch squares: [rows, columns, patch · patch · 3], from 0 to 1."""
    rows, columns = rgb.shape[0] // patch, rgb.shape[1] // patch
    squares = rgb.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    return squares.reshape(rows, columns, -1).astype(np.float32) / np.float32(255)
