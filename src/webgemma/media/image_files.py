"""Pictures from files, bytes, arrays and Pillow's images, decoded by Pillow in native Python."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

from PIL import Image, ImageOps, UnidentifiedImageError

from webgemma.errors import InputError
from webgemma.images import RgbImage, check_size, rgb_image, too_large

# A path, the bytes of a file, an image, or an array of bytes [height, width, 3] (any buffer).
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | Image.Image | memoryview | object"


def decode(source: Source) -> RgbImage:
    """The picture upright, in RGB, what is transparent on white; InputError with a sentence."""
    if isinstance(source, Image.Image):
        with _sentences("The picture"):
            return _flatten(source, "The picture")
    if isinstance(source, bytes | bytearray):
        return _read(io.BytesIO(source), "The picture")
    if not isinstance(source, str | os.PathLike):
        return _array(source)
    path = os.fspath(source)
    with _opening(path), open(path, "rb") as file:
        return _read(file, path)


@contextmanager
def _opening(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path!r} cannot be opened: {reason}.") from None


def decode_frames(
    source: str | os.PathLike[str] | bytes | bytearray, chosen: Callable[[int], Sequence[int]]
) -> list[tuple[float, RgbImage]]:
    """The chosen ones of the frames of an animated GIF, WebP or PNG, each with its seconds."""
    if isinstance(source, bytes | bytearray):
        return _frames(io.BytesIO(source), "The film", chosen)
    path = os.fspath(source)
    with _opening(path), open(path, "rb") as file:
        return _frames(file, path, chosen)


def _frames(
    file: IO[bytes], name: str, chosen: Callable[[int], Sequence[int]]
) -> list[tuple[float, RgbImage]]:
    frames, seconds = [], 0.0
    known = "an animated picture; give the frames of a film as a list of pictures"
    with _sentences(name, known), Image.open(file) as image:
        count = getattr(image, "n_frames", 1)
        wanted = set(chosen(count))
        for number in range(count):
            image.seek(number)
            if number in wanted:
                frames.append((seconds, _flatten(image, name)))
            seconds += float(image.info.get("duration", 0)) / 1000
    return frames


def _read(file: IO[bytes], name: str) -> RgbImage:
    with _sentences(name), Image.open(file) as image:
        return _flatten(image, name)


@contextmanager
def _sentences(name: str, known: str = "a picture") -> Iterator[None]:
    """Make InputErrors of what goes wrong: Pillow meets damage with almost any exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd but readable is read
            yield
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(too_large(name, "far more")) from None
    except UnidentifiedImageError:
        raise InputError(f"{name} holds nothing that Pillow knows as {known}.") from None
    except Exception as error:
        raise InputError(f"{name} is damaged or cut short: {error}.") from None


def _flatten(image: Image.Image, name: str) -> RgbImage:
    check_size(*image.size, name)
    image = _upright(image)
    if image.mode == "F":
        raise InputError(f"{name} holds floating-point pixels: turn it into 8 or 16 bits first.")
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB")
    return RgbImage(*image.size, image.tobytes())


def _upright(image: Image.Image) -> Image.Image:
    """Turned and mirrored as its EXIF says, where that can be read."""
    image.load()  # damage to the picture itself is not to be hidden below
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey in 16 bits, which Pillow may hold in 32, as grey in 8."""
    wide = image.convert("I")
    return wide.point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _array(source: object) -> RgbImage:
    try:
        pixels = memoryview(source)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            "A picture is a path, the bytes of a file, a PIL image or an array of bytes "
            f"[height, width, 3], not {type(source).__name__}."
        ) from None
    return rgb_image(pixels)
