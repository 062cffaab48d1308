"""Audio decoding with libsndfile: files, bytes or samples to 16 kHz mono float32."""

import io
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from webgemma.errors import InputError
from webgemma.gemma.encoder_config import SAMPLE_RATE
from webgemma.values import shortened

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples: TypeAlias = NDArray[np.float32]
    Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Sequence[float]

MAX_SECONDS = 3 * 60 * 60  # at 25 soft tokens a second, more than the longest context holds
RATES = range(1000, 768_001)  # sample rates of files, in hertz
MAX_PEAK = 100.0  # full scale is 1: samples far beyond it were meant as integers
BLOCK = 1 << 16  # samples decoded at a time, as a header may declare any number
CHUNK = 1 << 22  # samples resampled at a time
UNKNOWN = 1 << 62  # samples that a file has if its header does not say how many

ZEROS = 64  # zero crossings of the resampling kernel's sinc on each side
CUTOFF = 0.955  # where the kernel's response is one half, of the lower Nyquist frequency


def read_audio(source: "Source | NDArray[Any]") -> "Samples":
    """Return audio as samples at 16 kHz: of a path, the bytes of a file, or samples at that rate.

    Files may be WAV, FLAC, OGG, MP3 or any other format of libsndfile, of any sample rate and
    number of channels. InputError for anything else, and for samples that are not finite."""
    if isinstance(source, bytes | bytearray | memoryview):
        return decode(io.BytesIO(bytes(source)))
    if isinstance(source, str | os.PathLike):
        try:
            path = Path(source)
            if not path.is_file():  # opening a pipe would block
                raise InputError(f"There is no audio file at {shortened(path)}.")
            with path.open("rb") as file:
                return decode(file, str(path))
        except (OSError, TypeError, ValueError) as error:  # ValueError: a null character
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{shortened(source)} cannot be read: {reason}.") from None
    return float_samples(source, "The audio")


def decode(file: BinaryIO, name: str = "The audio") -> "Samples":
    """Return the samples of a file at 16 kHz, channels averaged; messages call it `name`."""
    import numpy as np

    if not file.seek(0, os.SEEK_END):
        raise InputError(f"{name} is empty.")
    file.seek(0)
    soundfile = _soundfile()

    class Sound(soundfile.SoundFile):  # type: ignore[name-defined,misc]
        def seekable(self) -> bool:
            """Refuse: soundfile would seek after each block, where an MP3 then loses samples."""
            return False

    try:
        with Sound(_SoundData(file)) as sound:
            rate, declared = sound.samplerate, sound.frames
            if rate not in RATES:
                raise InputError(wrong_rate_message(rate, name))
            if declared < UNKNOWN:
                check_seconds(declared / rate, name)
            chunks = list(resampled(_mono_blocks(sound, name), rate))
    except (soundfile.SoundFileError, ValueError) as error:
        reason = str(getattr(error, "error_string", error)).strip(" .")
        raise InputError(
            f"{name} cannot be decoded ({reason}): it is damaged, cut short or not audio; "
            "WAV, FLAC, OGG and MP3 are supported."
        ) from None
    samples = np.concatenate(chunks) if chunks else np.empty(0, np.float32)
    if not len(samples):
        raise InputError(f"{name} holds no samples.")
    return samples


def _mono_blocks(sound: Any, name: str) -> "Iterator[Samples]":
    """Yield the samples of an open file, channels averaged; InputError for what is no audio."""
    import numpy as np

    frames, count = max(1, BLOCK // sound.channels), 0
    while len(block := sound.read(frames, dtype="float32", always_2d=True)):
        count += len(block)
        check_seconds(count / sound.samplerate, name)
        with np.errstate(all="ignore"):  # `check_peak` raises for samples that are not finite
            samples = block.mean(axis=1)
            check_peak(float(np.abs(samples).max()), name)
        yield samples


class _SoundData:
    """A file as decoders read it, without a name, by which they would choose its format."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.read, self.readinto, self.tell = file.read, file.readinto, file.tell  # type: ignore[attr-defined]

    def seek(self, offset: int, whence: int = 0) -> int:
        """Ignore a seek to before the start, as decoders of damaged files do.

        They notice that the position is not the requested one."""
        try:
            return self._file.seek(offset, whence)
        except (OSError, ValueError):
            return self._file.tell()


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

    samples: NDArray[Any] = np.empty((0, 0), object)
    if _is_row(source):
        with suppress(TypeError, ValueError, OverflowError):
            samples = np.asarray(source)
    if samples.ndim != 1 or (samples.dtype.kind != "f" and len(samples)):
        raise InputError(
            f"{name} must be a path, the bytes of a file, or one row of float samples at "
            f"{SAMPLE_RATE} Hz (integers divided by their full scale, channels averaged), "
            f"not {_kind(source, samples)}."
        )
    if not len(samples):
        raise InputError(f"{name} holds no samples.")
    check_seconds(len(samples) / SAMPLE_RATE, name)
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


def _is_row(source: object) -> bool:
    """Return whether this is an array, or a list of numbers: numpy would open what is nested."""
    if not isinstance(source, list | tuple):
        return hasattr(source, "__array__") or isinstance(source, array)
    return all(
        type(x) is float or isinstance(x, Real | str) or getattr(x, "shape", None) == ()
        for x in source
    )


def _kind(source: object, samples: "NDArray[Any]") -> str:
    if samples.dtype == object or samples.ndim == 0:
        return f"a value of type {type(source).__name__}"
    return f"samples of type {samples.dtype} and shape {samples.shape}"


# Resampling


def resampled(blocks: "Iterable[Samples]", rate: int) -> "Iterator[Samples]":
    """Yield y[m] = Σ x[n] · s · kernel(s · (m · rate / 16000 − n)), the samples at 16 kHz.

    s = min(1, 16000 / rate) widens the kernel where the rate falls. Blocks are read and chunks
    yielded one by one: hours of audio are never held at once."""
    import numpy as np

    if rate == SAMPLE_RATE:
        yield from blocks
        return
    common = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common  # output m is at input m · down / up
    reach = math.ceil(ZEROS * max(1.0, down / up))  # inputs on each side
    step = max(1, CHUNK // down) * down  # inputs of a chunk
    held = [np.zeros(reach, np.float32)]  # from `reach` before the chunk on
    length = reach
    for block in blocks:
        held.append(block)
        length += len(block)
        while length >= step + 2 * reach:
            joined = np.concatenate(held)
            yield _convolved(joined[: step + 2 * reach], up, down, reach, step // down * up)
            held, length = [joined[step:]], length - step
    padded = np.concatenate([*held, np.zeros(reach, np.float32)])
    yield _convolved(padded, up, down, reach, -(-(length - reach) * up // down))


def _convolved(padded: "Samples", up: int, down: int, reach: int, count: int) -> "Samples":
    """Return `count` outputs of inputs that have `reach` more on each side.

    Outputs at the same fraction between two inputs share their weights, so each such phase is one
    matrix product."""
    import numpy as np

    scale = min(1.0, up / down)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        first, fraction = divmod(phase * down, up)
        distances = fraction / up - np.arange(-reach, reach + 1, dtype=np.float64)
        weights = scale * kernel(scale * distances)
        rows = len(range(phase, count, up))
        out[phase::up] = windows[first::down][:rows] @ weights.astype(np.float32)
    return out


def kernel(t: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return sin(π c t) / (π t), c = CUTOFF, under a Blackman-Harris window that ends at ±ZEROS."""
    import numpy as np

    angle = np.pi * np.clip(t / ZEROS, -1, 1)
    terms = (0.35875, 0.48829, 0.14128, 0.01168)
    window = sum(term * np.cos(order * angle) for order, term in enumerate(terms))
    return CUTOFF * np.sinc(CUTOFF * t) * window * (np.abs(t) < ZEROS)
