"""Image decoding with Pillow: files, bytes, arrays and Pillow images to RGB pixels."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

from PIL import Image, ImageOps, UnidentifiedImageError

from webgemma.errors import InputError
from webgemma.images import RgbImage, check_size, rgb_image, too_large_message

# A path, the bytes of a file, an image, or an array of bytes [height, width, 3] (any buffer).
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | Image.Image | memoryview | object"


def decode(source: Source) -> RgbImage:
    """Return an image upright, in RGB, transparent parts on white.

    InputError when it cannot be opened or decoded."""
    if isinstance(source, Image.Image):
        with _input_errors("The image"):
            return _to_rgb(source, "The image")
    if isinstance(source, bytes | bytearray):
        return _read(io.BytesIO(source), "The image")
    if not isinstance(source, str | os.PathLike):
        return _array(source)
    path = os.fspath(source)
    with _opening(path), open(path, "rb") as file:
        return _read(file, path)


def decode_frames(
    source: str | os.PathLike[str] | bytes | bytearray, choose: Callable[[int], Sequence[int]]
) -> list[tuple[float, RgbImage]]:
    """Return frames of an animated GIF, WebP or PNG, each with its time in seconds.

    `choose` returns the indices of the frames to decode for the number of frames."""
    if isinstance(source, bytes | bytearray):
        return _frames(io.BytesIO(source), "The video", choose)
    path = os.fspath(source)
    with _opening(path), open(path, "rb") as file:
        return _frames(file, path, choose)


def _frames(
    file: IO[bytes], name: str, choose: Callable[[int], Sequence[int]]
) -> list[tuple[float, RgbImage]]:
    frames, seconds = [], 0.0
    expected = "an animated image that Pillow can decode; pass the frames of a video as a list"
    with _input_errors(name, expected), Image.open(file) as image:
        count = getattr(image, "n_frames", 1)
        chosen = set(choose(count))
        for number in range(count):
            image.seek(number)
            if number in chosen:
                frames.append((seconds, _to_rgb(image, name)))
            seconds += float(image.info.get("duration", 0)) / 1000
    return frames


def _read(file: IO[bytes], name: str) -> RgbImage:
    with _input_errors(name), Image.open(file) as image:
        return _to_rgb(image, name)


@contextmanager
def _opening(path: str) -> Iterator[None]:
    """Raise InputError for a file that cannot be opened."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path!r} cannot be opened: {reason}.") from None


@contextmanager
def _input_errors(name: str, expected: str = "an image that Pillow can decode") -> Iterator[None]:
    """Raise InputError for every failure: Pillow raises almost any exception for damaged files."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unusual but readable files are accepted
            yield
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(too_large_message(name, "far more")) from None
    except UnidentifiedImageError:
        raise InputError(f"{name} is not {expected}.") from None
    except Exception as error:
        raise InputError(f"{name} is damaged or cut short: {error}.") from None


def _to_rgb(image: Image.Image, name: str) -> RgbImage:
    """Return a Pillow image upright, with 8 bits per channel, transparent parts on white."""
    check_size(*image.size, name)
    image = _upright(image)
    if image.mode == "F":
        raise InputError(f"{name} has floating-point pixels: convert it to 8 or 16 bits first.")
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB")
    return RgbImage(*image.size, image.tobytes())


def _upright(image: Image.Image) -> Image.Image:
    """Return the image rotated and mirrored as its EXIF orientation says, if that is readable."""
    image.load()  # outside of the try, so that damaged pixels raise
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey, which Pillow may store in 32 bits, as 8-bit grey."""
    wide = image.convert("I")
    return wide.point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _array(source: object) -> RgbImage:
    try:
        pixels = memoryview(source)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            "An image must be a path, the bytes of a file, a PIL image or an array of bytes "
            f"[height, width, 3], not {type(source).__name__}."
        ) from None
    return rgb_image(pixels)
