"""Image decoding with Pillow: files, bytes, arrays and Pillow images to RGB pixels."""

import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from webgemma.errors import InputError
from webgemma.images import MAX_PIXELS, RgbImage, check_size, rgb_image, too_large_message
from webgemma.values import shown

# Of images that people have. Pillow knows more, and starts other programs for some (EPS).
FORMATS = (
    "AVIF",
    "BMP",
    "GIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PNG",
    "PPM",
    "TGA",
    "TIFF",
    "WEBP",
)

# A few bytes can declare many large frames, so what is decoded depends on the size of the file.
PIXELS_PER_BYTE = 4000  # far more than a real animation has
MAX_VIDEO_PIXELS = 3 * MAX_PIXELS  # of the chosen frames together: 32 of 4K
WALKED = 8  # times as many pixels may be in all frames, which build on each other

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
    with _opened(source) as file:
        return _read(file, str(file.name))


def decode_frames(
    source: str | os.PathLike[str] | bytes | bytearray, choose: Callable[[int], Sequence[int]]
) -> list[tuple[float, RgbImage]]:
    """Return frames of an animated GIF, WebP or PNG, each with its time in seconds.

    `choose` returns the indices of the frames to decode for the number of frames."""
    if isinstance(source, bytes | bytearray):
        return _frames(io.BytesIO(source), "The video", choose)
    with _opened(source) as file:
        return _frames(file, str(file.name), choose)


def _frames(
    file: IO[bytes], name: str, choose: Callable[[int], Sequence[int]]
) -> list[tuple[float, RgbImage]]:
    frames: list[tuple[float, RgbImage]] = []
    seconds, kept = 0.0, 0
    limit = min(MAX_VIDEO_PIXELS, max(MAX_PIXELS, PIXELS_PER_BYTE * file.seek(0, os.SEEK_END)))
    file.seek(0)
    expected = "an animated image that Pillow can decode; pass the frames of a video as a list"
    with _input_errors(name, expected), _open(file) as image:
        count = getattr(image, "n_frames", 1)
        chosen = set(choose(count))
        pixels = image.width * image.height
        check_size(*image.size, name)
        if pixels * len(chosen) > limit or pixels * count > WALKED * limit:
            raise InputError(_too_many_message(name, image, count))
        for number in range(max(chosen, default=-1) + 1):
            image.seek(number)
            if number in chosen:
                kept += image.width * image.height  # pages of a file may differ in size
                if kept > limit:
                    raise InputError(_too_many_message(name, image, count))
                frames.append((seconds, _to_rgb(image, name)))
            seconds += float(image.info.get("duration", 0)) / 1000
    return frames


def _open(file: IO[bytes]) -> Image.Image:
    Image.init()  # some builds of Pillow lack a format
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


def _too_many_message(name: str, image: Image.Image, count: int) -> str:
    return (
        f"{name} has {count} frames of {image.width} x {image.height} pixels, too many to decode: "
        "make it smaller, or pass some of its frames as a list."
    )


def _read(file: IO[bytes], name: str) -> RgbImage:
    with _input_errors(name), _open(file) as image:
        return _to_rgb(image, name)


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file; InputError if that is not possible, or if it is no file: a pipe would block."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{shown(os.fspath(path))} cannot be opened: it is not a file.")
        return open(path, "rb")
    except (OSError, ValueError, TypeError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{shown(path)} cannot be opened: {reason}.") from None


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
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return image  # not a copy of it
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
    except (TypeError, ValueError, BufferError):  # of those, some are closed
        raise InputError(
            "An image must be a path, the bytes of a file, a PIL image or an array of bytes "
            f"[height, width, 3], not {type(source).__name__}."
        ) from None
    return rgb_image(pixels)
