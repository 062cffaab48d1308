"""Pictures and sounds in a browser: browser.js decodes them."""

import math
import os
import sys
from array import array
from typing import Any

from webgemma.errors import InputError
from webgemma.gemma.encoder_config import SAMPLE_RATE
from webgemma.images import MAX_PIXELS, RgbImage, check_size, rgb_image
from webgemma.media.audio_files import (
    MAX_SECONDS,
    check_level,
    check_seconds,
    too_long,
    wrong_rate,
)

PICTURE_KINDS = "JPEG, PNG, GIF, WebP, AVIF and BMP"
SOUND_KINDS = "WAV, FLAC, OGG, MP3 and what else this browser plays"


async def decode_image(source: Any, where: str = "The picture") -> RgbImage:
    """The picture upright, in RGB, what is transparent on white; InputError with a sentence.

    It is a path, the bytes of a file, an array of bytes [height, width, 3] (any buffer), or
    JavaScript's: a Blob or File, an ArrayBuffer or Uint8Array of a file, an ImageBitmap, ImageData
    or canvas. `where` is what sentences call it."""
    name, data = _file(source, where)
    if isinstance(data, memoryview):
        if data.ndim != 1 or data.format != "B":
            return rgb_image(data)
        data = bytes(data)
    media = _media()
    try:
        found = await media.picture(data, MAX_PIXELS)
    except Exception as error:  # JavaScript's, whatever it is
        if getattr(error, "name", "") == "TypeError":
            raise InputError(
                f"{name} must be the bytes of a file, a Blob, an ImageBitmap, ImageData or an "
                f"array of bytes [height, width, 3], not {_kind(source)}."
            ) from None
        raise InputError(
            f"{name} is damaged, cut short or nothing that this browser knows as a picture; "
            f"{PICTURE_KINDS} can be read."
        ) from None
    width, height = int(found.width), int(found.height)
    check_size(width, height, name)
    return RgbImage(width, height, found.rgb.to_bytes())


async def decode_audio(source: Any, where: str = "The sound") -> "array[float]":
    """The sound as float32 samples at 16 kHz, its channels averaged; InputError with a sentence.

    It is a path, the bytes of a file, float samples at 16 kHz (a list or any buffer), or
    JavaScript's: a Blob or File, an ArrayBuffer or Uint8Array of a file, a Float32Array of
    samples. Workers decode WAV only. `where` is what sentences call it."""
    name, data = _file(source, where)
    if isinstance(data, list | tuple) or (isinstance(data, memoryview) and data.format != "B"):
        return _checked_samples(data, name)
    file = bytes(data) if isinstance(data, memoryview) else data
    media = _media()
    try:
        found = await media.sound(file, MAX_SECONDS)
    except Exception as error:  # JavaScript's, whatever it is
        raise _sound_error(error, name, source) from None
    samples = array("f")
    samples.frombytes(found.samples.to_bytes())
    _check_samples(samples, float(found.loudest), name)
    return samples


def _file(source: Any, name: str) -> tuple[str, Any]:
    """What to call it, and its data: memory of Python's as a view, anything else as it is."""
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


def _checked_samples(data: Any, name: str) -> "array[float]":
    """Samples of Python's, when they are what a model can hear."""
    try:
        floats = isinstance(data, list | tuple) or (data.ndim == 1 and data.format in ("f", "d"))
        samples = array("f", data if floats else [None])
    except (TypeError, OverflowError):
        raise InputError(
            f"{name} must be the bytes of a file or one row of float samples at "
            f"{SAMPLE_RATE} Hz (integers divided by their full scale, channels averaged)."
        ) from None
    total = sum(map(abs, samples))  # finite if and only if all are
    loudest = max(map(abs, samples), default=0.0) if math.isfinite(total) else total
    _check_samples(samples, loudest, name)
    return samples


def _check_samples(samples: "array[float]", loudest: float, name: str) -> None:
    if not samples:
        raise InputError(f"{name} holds no samples.")
    check_seconds(len(samples) / SAMPLE_RATE, name)
    check_level(loudest, name)


def _sound_error(error: Exception, name: str, source: Any) -> InputError:
    match getattr(error, "name", ""):
        case "empty":
            return InputError(f"{name} is empty.")
        case "long":
            return InputError(too_long(name))
        case "rate":
            return InputError(wrong_rate(int(getattr(error, "rate", 0)), name))
        case "no decoder":
            return InputError(
                f"{name} is no WAV of whole numbers or floats, and a worker can decode nothing "
                "else: let the page decode it, and give its samples at 16 kHz (Float32Array)."
            )
        case "TypeError":
            return InputError(
                f"{name} must be the bytes of a file, a Blob or float samples at "
                f"{SAMPLE_RATE} Hz, not {_kind(source)}."
            )
    return InputError(
        f"{name} cannot be decoded: it is damaged, cut short or no sound; "
        f"{SOUND_KINDS} can be read."
    )


def _kind(source: Any) -> str:
    """What a thing of Python or JavaScript calls its kind."""
    constructor = getattr(source, "constructor", None)
    return str(getattr(constructor, "name", None) or type(source).__name__)


def _media() -> Any:
    """The functions of browser.js."""
    if sys.platform != "emscripten":
        raise InputError("Only a browser decodes what JavaScript has.")
    from webgemma.javascript import script

    return script("webgemma.media", "browser.js", "webgemmaMedia")
