"""Sounds from files, bytes or samples: as 16 kHz mono float32, the way a model hears them."""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from webgemma.errors import InputError
from webgemma.gemma.encoder_config import SAMPLE_RATE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples: TypeAlias = NDArray[np.float32]
    Sound: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Sequence[float]

MAX_SECONDS = 3 * 60 * 60  # at 25 soft tokens a second more than the longest context holds
RATES = range(1000, 768_001)  # of files, in hertz
LOUDEST = 100.0  # full scale is 1: what is so far beyond was meant as integers
BLOCK = 1 << 16  # samples decoded at a time: a header may promise any number

ZEROS = 64  # zero crossings of the resampler's sinc on each side
CUTOFF = 0.955  # where it halves, of the lower of the two Nyquist frequencies


def read_audio(sound: "Sound | NDArray[Any]") -> "Samples":
    """A sound as samples at 16 kHz: a path, the bytes of a file, or float samples at that rate.

    Files may be WAV, FLAC, OGG, MP3 or whatever else libsndfile reads, of any rate and number of
    channels."""
    if isinstance(sound, bytes | bytearray | memoryview):
        return decode(bytes(sound))
    if isinstance(sound, str | os.PathLike):
        path = Path(sound)
        try:
            if not path.is_file():
                raise InputError(f"There is no sound file at {path}.")
            return decode(path.read_bytes(), str(path))
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            raise InputError(f"{path} cannot be read: {error}.") from None
    samples = checked(sound, "The sound")
    check_seconds(len(samples) / SAMPLE_RATE, "The sound")
    return samples


def decode(data: bytes, name: str = "The sound") -> "Samples":
    """The samples of a file, its channels averaged, at 16 kHz."""
    import numpy as np

    if not data:
        raise InputError(f"{name} is empty.")
    soundfile = _soundfile()
    blocks, seconds = [], 0.0
    try:
        with soundfile.SoundFile(_Memory(data)) as file:
            rate = file.samplerate
            if rate not in RATES:
                raise InputError(wrong_rate(rate, name))
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                seconds += len(block) / rate
                check_seconds(seconds, name)
                with np.errstate(all="ignore"):  # `checked` notices what came of it
                    blocks.append(block.mean(axis=1))
    except (soundfile.SoundFileError, ValueError) as error:
        reason = str(getattr(error, "error_string", error)).strip(" .")
        raise InputError(
            f"{name} cannot be decoded ({reason}): it is damaged, cut short or no sound; "
            "WAV, FLAC, OGG and MP3 can be read."
        ) from None
    samples = checked(np.concatenate(blocks) if blocks else np.empty(0, np.float32), name)
    return resample(samples, rate)


class _Memory(io.BytesIO):
    """A file whose decoder may seek to before its start, as damaged ones make it do."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()  # the decoder sees that it is not where it wanted to be


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: there is no libsndfile for this machine
        raise InputError(
            f"Sound files are read with the soundfile package, which does not load ({error}): "
            "install it, or hand in samples."
        ) from None
    return soundfile


def checked(sound: object, name: str) -> "Samples":
    """Samples as float32, when they are what a model can hear."""
    import numpy as np

    try:
        samples = np.asarray(sound)
    except ValueError:  # rows of different lengths
        samples = np.empty((0, 0), object)
    if samples.ndim != 1 or (samples.dtype.kind != "f" and len(samples)):
        raise InputError(
            f"{name} must be a path, the bytes of a file, or one row of float samples at "
            f"{SAMPLE_RATE} Hz (integers divided by their full scale, channels averaged), "
            f"not {_kind(sound, samples)}."
        )
    if not len(samples):
        raise InputError(f"{name} holds no samples.")
    check_level(float(np.abs(samples).max()), name)
    return np.ascontiguousarray(samples, np.float32)


def check_level(loudest: float, name: str) -> None:
    """Refuse samples that are no numbers, or numbers of another scale."""
    if not math.isfinite(loudest):
        raise InputError(f"{name} holds samples that are NaN or infinite.")
    if loudest > LOUDEST:
        raise InputError(
            f"{name} reaches {loudest:g}, but samples lie between -1 and 1: divide them by "
            "their full scale (16-bit integers by 32768)."
        )


def _kind(sound: object, samples: "NDArray[Any]") -> str:
    if samples.dtype == object or samples.ndim == 0:
        return f"a value of type {type(sound).__name__}"
    return f"samples of type {samples.dtype} and shape {samples.shape}"


def check_seconds(seconds: float, name: str) -> None:
    """Refuse a sound that no context holds."""
    if seconds > MAX_SECONDS:
        raise InputError(too_long(name))


def too_long(name: str) -> str:
    """The sentence for that."""
    return (
        f"{name} is longer than {MAX_SECONDS // 3600} hours, which no model takes at once: "
        "cut it into pieces."
    )


def wrong_rate(rate: int, name: str) -> str:
    """The sentence for a rate beyond RATES."""
    return f"{name} has {rate} samples a second; {RATES[0]} to {RATES[-1]} can be used."


def resample(samples: "Samples", rate: int) -> "Samples":
    """The same sound at 16 kHz: y[m] = Σ x[n] · s · kernel(s · (m · rate / 16000 − n)).

    s = min(1, 16000 / rate): where samples are dropped, the kernel is as much wider. Outputs at
    the same place between two inputs share their weights, so each such phase is one product."""
    import numpy as np

    if rate == SAMPLE_RATE:
        return samples
    common = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common  # output m is at m · down / up
    scale = min(1.0, up / down)
    reach = math.ceil(ZEROS / scale)  # inputs on each side
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, reach)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        whole, part = divmod(phase * down, up)
        distances = part / up - np.arange(-reach, reach + 1, dtype=np.float64)
        weights = scale * kernel(scale * distances)
        out[phase::up] = windows[whole::down] @ weights.astype(np.float32)
    return out


def kernel(t: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """sin(π c t) / (π t) under a Blackman-Harris window that ends at ±ZEROS."""
    import numpy as np

    angle = np.pi * np.clip(t / ZEROS, -1, 1)
    terms = (0.35875, 0.48829, 0.14128, 0.01168)
    window = sum(term * np.cos(order * angle) for order, term in enumerate(terms))
    return CUTOFF * np.sinc(CUTOFF * t) * window * (np.abs(t) < ZEROS)
