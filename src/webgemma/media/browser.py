"""Image and audio decoding in a browser, through browser.js."""

import math
import os
from array import array
from typing import Any

from webgemma.errors import InputError
from webgemma.gemma.encoder_config import SAMPLE_RATE
from webgemma.images import MAX_PIXELS, RgbImage, check_size, rgb_image
from webgemma.media.audio_files import (
    MAX_SECONDS,
    check_peak,
    check_seconds,
    too_long_message,
    wrong_rate_message,
)
from webgemma.sync import IN_BROWSER

IMAGE_FORMATS = "JPEG, PNG, GIF, WebP, AVIF and BMP"
AUDIO_FORMATS = "WAV, FLAC, OGG, MP3 and any other format that this browser plays"


async def decode_image(source: Any, where: str = "The image") -> RgbImage:
    """Return an image upright, in RGB, transparent parts on white.

    The source is a path, the bytes of a file, an array of bytes [height, width, 3] (any buffer), or
    an object of JavaScript: a Blob or File, an ArrayBuffer or Uint8Array of a file, an ImageBitmap,
    ImageData or canvas. InputError, which calls it `where`, for anything that cannot be decoded."""
    name, data = _open(source, where)
    if isinstance(data, memoryview):
        if data.ndim != 1 or data.format != "B":
            return rgb_image(data)
        data = bytes(data)
    media = _media()
    try:
        decoded = await media.decodeImage(data, MAX_PIXELS)
    except Exception as error:  # any error of JavaScript
        if getattr(error, "name", "") == "TypeError":
            raise InputError(
                f"{name} must be the bytes of a file, a Blob, an ImageBitmap, ImageData or an "
                f"array of bytes [height, width, 3], not {_kind(source)}."
            ) from None
        raise InputError(
            f"{name} is damaged, cut short or not an image that this browser can decode; "
            f"{IMAGE_FORMATS} are supported."
        ) from None
    width, height = int(decoded.width), int(decoded.height)
    check_size(width, height, name)
    return RgbImage(width, height, decoded.rgb.to_bytes())


async def decode_audio(source: Any, where: str = "The audio") -> "array[float]":
    """Return audio as float32 samples at 16 kHz, channels averaged.

    The source is a path, the bytes of a file, float samples at 16 kHz (a list or any buffer), or an
    object of JavaScript: a Blob or File, an ArrayBuffer or Uint8Array of a file, a Float32Array of
    samples. Workers decode WAV only. InputError, which calls it `where`, for anything that cannot
    be decoded."""
    name, data = _open(source, where)
    if isinstance(data, list | tuple) or (isinstance(data, memoryview) and data.format != "B"):
        return _float_samples(data, name)
    file = bytes(data) if isinstance(data, memoryview) else data
    media = _media()
    try:
        decoded = await media.decodeAudio(file, MAX_SECONDS)
    except Exception as error:  # any error of JavaScript
        raise _audio_error(error, name, source) from None
    samples = array("f")
    samples.frombytes(decoded.samples.to_bytes())
    _check_samples(samples, float(decoded.loudest), name)
    return samples


def _open(source: Any, name: str) -> tuple[str, Any]:
    """Return the source's name for messages and its data.

    Files and buffers of Python become a memoryview; other objects stay as they are."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        try:
            with open(path, "rb") as file:
                return path, memoryview(file.read())
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path!r} cannot be opened: {reason}.") from None
    try:
        return name, memoryview(source)
    except TypeError:
        return name, source


def _float_samples(data: Any, name: str) -> "array[float]":
    """Return a list or buffer of Python as float32; InputError unless it holds valid samples."""
    try:
        floats = isinstance(data, list | tuple) or (data.ndim == 1 and data.format in ("f", "d"))
        samples = array("f", data if floats else [None])
    except (TypeError, OverflowError):
        raise InputError(
            f"{name} must be the bytes of a file or one row of float samples at "
            f"{SAMPLE_RATE} Hz (integers divided by their full scale, channels averaged)."
        ) from None
    total = sum(map(abs, samples))  # finite if and only if all samples are
    peak = max(map(abs, samples), default=0.0) if math.isfinite(total) else total
    _check_samples(samples, peak, name)
    return samples


def _check_samples(samples: "array[float]", peak: float, name: str) -> None:
    if not samples:
        raise InputError(f"{name} holds no samples.")
    check_seconds(len(samples) / SAMPLE_RATE, name)
    check_peak(peak, name)


def _audio_error(error: Exception, name: str, source: Any) -> InputError:
    """Return the InputError for an error of browser.js, by its name."""
    match getattr(error, "name", ""):
        case "empty":
            return InputError(f"{name} is empty.")
        case "long":
            return InputError(too_long_message(name))
        case "rate":
            return InputError(wrong_rate_message(int(getattr(error, "rate", 0)), name))
        case "no decoder":
            return InputError(
                f"{name} is not a WAV of integers or floats, and a worker can decode nothing "
                "else: let the page decode it, and pass its samples at 16 kHz (Float32Array)."
            )
        case "TypeError":
            return InputError(
                f"{name} must be the bytes of a file, a Blob or float samples at "
                f"{SAMPLE_RATE} Hz, not {_kind(source)}."
            )
    return InputError(
        f"{name} cannot be decoded: it is damaged, cut short or not audio; "
        f"{AUDIO_FORMATS} are supported."
    )


def _kind(source: Any) -> str:
    """Return the type name of an object of Python or JavaScript."""
    constructor = getattr(source, "constructor", None)
    return str(getattr(constructor, "name", None) or type(source).__name__)


def _media() -> Any:
    """Return the functions of browser.js."""
    if not IN_BROWSER:
        raise InputError("Objects of JavaScript can be decoded in a browser only.")
    from webgemma.javascript import script

    return script("webgemma.media", "browser.js", "webgemmaMedia")
