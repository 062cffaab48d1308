"""Audio decoding with libsndfile: files, bytes or samples to 16 kHz mono float32."""

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
    Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Sequence[float]

MAX_SECONDS = 3 * 60 * 60  # at 25 soft tokens a second, more than the longest context holds
RATES = range(1000, 768_001)  # sample rates of files, in hertz
MAX_PEAK = 100.0  # full scale is 1: samples far beyond it were meant as integers
BLOCK = 1 << 16  # samples decoded at a time, as a header may declare any number

ZEROS = 64  # zero crossings of the resampling kernel's sinc on each side
CUTOFF = 0.955  # where the kernel's response is one half, of the lower Nyquist frequency


def read_audio(source: "Source | NDArray[Any]") -> "Samples":
    """Return audio as samples at 16 kHz: of a path, the bytes of a file, or samples at that rate.

    Files may be WAV, FLAC, OGG, MP3 or any other format of libsndfile, of any sample rate and
    number of channels. InputError for anything else, and for samples that are not finite."""
    if isinstance(source, bytes | bytearray | memoryview):
        return decode(bytes(source))
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        try:
            if not path.is_file():
                raise InputError(f"There is no audio file at {path}.")
            return decode(path.read_bytes(), str(path))
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            raise InputError(f"{path} cannot be read: {error}.") from None
    samples = float_samples(source, "The audio")
    check_seconds(len(samples) / SAMPLE_RATE, "The audio")
    return samples


def decode(data: bytes, name: str = "The audio") -> "Samples":
    """Return the samples of a file at 16 kHz, channels averaged; messages call it `name`."""
    import numpy as np

    if not data:
        raise InputError(f"{name} is empty.")
    soundfile = _soundfile()
    blocks, seconds = [], 0.0
    try:
        with soundfile.SoundFile(_MemoryFile(data)) as file:
            rate = file.samplerate
            if rate not in RATES:
                raise InputError(wrong_rate_message(rate, name))
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                seconds += len(block) / rate
                check_seconds(seconds, name)
                with np.errstate(all="ignore"):  # `float_samples` raises for samples not finite
                    blocks.append(block.mean(axis=1))
    except (soundfile.SoundFileError, ValueError) as error:
        reason = str(getattr(error, "error_string", error)).strip(" .")
        raise InputError(
            f"{name} cannot be decoded ({reason}): it is damaged, cut short or not audio; "
            "WAV, FLAC, OGG and MP3 are supported."
        ) from None
    samples = float_samples(np.concatenate(blocks) if blocks else np.empty(0, np.float32), name)
    return resample(samples, rate)


class _MemoryFile(io.BytesIO):
    """File in memory that ignores a seek to before its start, as decoders of damaged files do."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()  # the decoder notices that the position is not the requested one


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: there is no libsndfile for this machine
        raise InputError(
            f"Audio files are read with the soundfile package, which does not load ({error}): "
            "install it, or pass samples."
        ) from None
    return soundfile


# Checks


def float_samples(source: object, name: str) -> "Samples":
    """Return samples as float32 [n]; InputError unless they are finite floats of full scale 1."""
    import numpy as np

    try:
        samples = np.asarray(source)
    except ValueError:  # rows of different lengths
        samples = np.empty((0, 0), object)
    if samples.ndim != 1 or (samples.dtype.kind != "f" and len(samples)):
        raise InputError(
            f"{name} must be a path, the bytes of a file, or one row of float samples at "
            f"{SAMPLE_RATE} Hz (integers divided by their full scale, channels averaged), "
            f"not {_kind(source, samples)}."
        )
    if not len(samples):
        raise InputError(f"{name} holds no samples.")
    check_peak(float(np.abs(samples).max()), name)
    return np.ascontiguousarray(samples, np.float32)


def check_peak(peak: float, name: str) -> None:
    """Raise InputError when the largest magnitude is not finite, or of another scale than 1."""
    if not math.isfinite(peak):
        raise InputError(f"{name} holds samples that are NaN or infinite.")
    if peak > MAX_PEAK:
        raise InputError(
            f"{name} reaches {peak:g}, but samples lie between -1 and 1: divide them by "
            "their full scale (16-bit integers by 32768)."
        )


def check_seconds(seconds: float, name: str) -> None:
    """Raise InputError for audio longer than MAX_SECONDS."""
    if seconds > MAX_SECONDS:
        raise InputError(too_long_message(name))


def too_long_message(name: str) -> str:
    """Return the error message for audio longer than MAX_SECONDS."""
    return (
        f"{name} is longer than {MAX_SECONDS // 3600} hours, which no model takes at once: "
        "cut it into pieces."
    )


def wrong_rate_message(rate: int, name: str) -> str:
    """Return the error message for a sample rate outside of RATES."""
    return f"{name} has {rate} samples a second; {RATES[0]} to {RATES[-1]} are supported."


def _kind(source: object, samples: "NDArray[Any]") -> str:
    if samples.dtype == object or samples.ndim == 0:
        return f"a value of type {type(source).__name__}"
    return f"samples of type {samples.dtype} and shape {samples.shape}"


# Resampling


def resample(samples: "Samples", rate: int) -> "Samples":
    """Return y[m] = Σ x[n] · s · kernel(s · (m · rate / 16000 − n)), the samples at 16 kHz.

    s = min(1, 16000 / rate) widens the kernel where the rate falls. Outputs at the same fraction
    between two inputs share their weights, so each such phase is one matrix product."""
    import numpy as np

    if rate == SAMPLE_RATE:
        return samples
    common = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common  # output m is at input m · down / up
    scale = min(1.0, up / down)
    reach = math.ceil(ZEROS / scale)  # inputs on each side
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, reach)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        first, fraction = divmod(phase * down, up)
        distances = fraction / up - np.arange(-reach, reach + 1, dtype=np.float64)
        weights = scale * kernel(scale * distances)
        out[phase::up] = windows[first::down] @ weights.astype(np.float32)
    return out


def kernel(t: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return sin(π c t) / (π t), c = CUTOFF, under a Blackman-Harris window that ends at ±ZEROS."""
    import numpy as np

    angle = np.pi * np.clip(t / ZEROS, -1, 1)
    terms = (0.35875, 0.48829, 0.14128, 0.01168)
    window = sum(term * np.cos(order * angle) for order, term in enumerate(terms))
    return CUTOFF * np.sinc(CUTOFF * t) * window * (np.abs(t) < ZEROS)
