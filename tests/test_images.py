"""Sizes and resizing of images, against transformers and Pillow."""

import numpy as np
import pytest
from conftest import FIXTURES
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from webgemma import InputError
from webgemma.gemma.encoder_config import VisionConfig
from webgemma.images import BUDGETS, WEIGHT_BITS, RgbImage, resize_taps, soft_tokens, target_size
from webgemma.reference.images import patches, pixel_values, resize

VISION = VisionConfig(
    width=64,
    layers=1,
    heads=1,
    ffn=64,
    patch=16,
    pool=3,
    positions=300,
    output=64,
    clipped=False,
    standardised=False,
)


def test_sizes_agree_with_transformers() -> None:
    for width, height, budget, *expected in np.load(FIXTURES / "mm" / "sizes.npy").tolist():
        assert target_size(width, height, budget) == tuple(expected), (width, height, budget)


@given(st.integers(1, 30000), st.integers(1, 30000), st.sampled_from(BUDGETS))
def test_every_size_fits_the_budget(width: int, height: int, budget: int) -> None:
    new = target_size(width, height, budget)
    assert min(new) >= 48
    assert [side % 48 for side in new] == [0, 0]
    assert 1 <= soft_tokens(*new) <= budget
    assert max(new) // 16 <= 10240


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1, 1), (768, 768)), ((1, 5000), (48, 13440)), ((20000, 3), (13440, 48))],
    ids=str,
)
def test_extreme_sizes_are_resized(size: tuple[int, int], expected: tuple[int, int]) -> None:
    width, height = size
    assert target_size(width, height) == expected
    grey = RgbImage(width, height, bytes([99]) * (3 * width * height))
    pixels = pixel_values(grey, VISION)
    assert pixels.shape == (expected[1] // 16, expected[0] // 16, 768)
    assert (pixels == np.float32(99) / 255).all()


@pytest.mark.parametrize("args", [(0, 5), (5, -1), (5, 5, 100), (5, 5, 0)], ids=str)
def test_invalid_sizes_and_budgets_raise_an_error(args: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="image"):
        target_size(*args)


def noise(rng: np.random.Generator, width: int, height: int, hard: bool) -> np.ndarray:
    """Return an image of noise; a hard one has values 0 and 255, so that the cubic overshoots."""
    rgb = rng.integers(0, 256, (height, width, 3), np.uint8)
    return (rgb > 127).astype(np.uint8) * np.uint8(255) if hard else rgb


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("budget", [70, None])
def test_resizing_equals_that_of_pillow(seed: int, budget: int | None) -> None:
    """Both to the target size of a budget and to arbitrary sizes."""
    rng = np.random.default_rng(seed)
    width, height, *size = rng.integers(1, 500, 4).tolist()
    size = target_size(width, height, budget) if budget else tuple(size)
    rgb = noise(rng, width, height, hard=seed % 2 == 1)
    expected = Image.fromarray(rgb).resize(size, Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(resize(rgb, *size), np.asarray(expected))


@given(st.integers(1, 3000), st.integers(1, 300))
def test_taps_are_inside_the_line_and_sum_to_one(source: int, target: int) -> None:
    for first, weights in resize_taps(source, target):
        assert 0 <= first < first + len(weights) <= source
        assert sum(weights) == pytest.approx(1 << WEIGHT_BITS, abs=len(weights))
        assert 255 * sum(map(abs, weights)) + (1 << WEIGHT_BITS) < 1 << 31  # fits into 32 bits


@pytest.mark.parametrize("size", [1, 7, 48])
def test_resizing_to_the_same_size_changes_nothing(size: int) -> None:
    for at, (first, weights) in enumerate(resize_taps(size, size)):
        assert [first + i for i, weight in enumerate(weights) if weight] == [at]


def test_patches_keep_rows_columns_and_colours_in_order() -> None:
    """The value of a pixel encodes its position: row · 100 + column · 10 + colour, below 256."""
    y, x, colour = np.mgrid[:2, :4, :3]
    rgb = (100 * y + 10 * x + colour).astype(np.uint8)
    cut = np.rint(patches(rgb, 2) * 255).astype(int)
    assert cut.shape == (1, 2, 12)
    assert cut[0, 1].tolist() == [20, 21, 22, 30, 31, 32, 120, 121, 122, 130, 131, 132]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((47, 48), "multiples of 48"),
        ((48, 100), "multiples of 48"),
        ((48, 4848), "at most 4800"),
        ((1632, 1632), "more than 1120"),
    ],
)
def test_images_that_must_be_resized_raise_an_error(size: tuple[int, int], message: str) -> None:
    image = RgbImage(*size, bytes(3 * size[0] * size[1]))
    with pytest.raises(InputError, match=message):
        pixel_values(image, VISION, resized=False)
