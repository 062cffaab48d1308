"""Audio decoding to 16 kHz mono, the resampler against its formula, and invalid inputs."""

import array
import io
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers.anything import shared
from tolerance import RESAMPLED

from webgemma import InputError
from webgemma.media.audio_files import CUTOFF, ZEROS, read_audio, resampled
from webgemma.values import shown

# Format, subtype, rate, and tolerance against the samples written.
FILES = [
    ("WAV", "PCM_16", 44100, 1e-4),
    ("WAV", "PCM_24", 8000, 1e-5),
    ("WAV", "FLOAT", 48000, 1e-5),
    ("WAV", "PCM_U8", 22050, 2e-2),
    ("FLAC", "PCM_16", 96000, 1e-4),
    ("OGG", "VORBIS", 44100, 3e-2),
    ("OGG", "OPUS", 48000, 3e-2),
    ("MP3", "MPEG_LAYER_III", 44100, 3e-2),
    ("AIFF", "PCM_16", 16000, 1e-4),
]


def tone(hertz: float, rate: int, count: int) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(count) / rate)


def file(samples: np.ndarray, rate: int, format: str = "WAV", subtype: str = "FLOAT") -> bytes:
    data = io.BytesIO()
    soundfile.write(data, samples, rate, format=format, subtype=subtype)
    return data.getvalue()


def stereo(format: str, subtype: str, rate: int) -> bytes:
    """Return a file of one second: a low tone on the left, a high one on the right."""
    both = [0.5 * tone(440, rate, rate), 0.3 * tone(880, rate, rate)]
    return file(np.stack(both, axis=1), rate, format, subtype)


@pytest.mark.parametrize(("format", "subtype", "rate", "error"), FILES)
def test_any_file_becomes_16_khz_mono(format: str, subtype: str, rate: int, error: float) -> None:
    samples = read_audio(stereo(format, subtype, rate))
    assert samples.dtype == np.float32
    assert samples.shape == (16000,)
    expected = 0.25 * tone(440, 16000, 16000) + 0.15 * tone(880, 16000, 16000)
    np.testing.assert_allclose(samples[400:-400], expected[400:-400], atol=error)


def test_a_path_and_its_bytes_give_the_same_samples(tmp_path: Path) -> None:
    path = tmp_path / "misleading.raw"
    path.write_bytes(stereo("FLAC", "PCM_16", 44100))
    for given in (path, str(path), bytearray(path.read_bytes()), memoryview(path.read_bytes())):
        np.testing.assert_array_equal(read_audio(given), read_audio(path.read_bytes()))


@pytest.mark.parametrize(("format", "subtype", "rate", "error"), FILES)
def test_long_files_have_no_gaps(format: str, subtype: str, rate: int, error: float) -> None:
    """They are decoded and resampled in pieces."""
    wave = 0.5 * tone(440, rate, 4 * rate)
    samples = read_audio(file(np.stack([wave, wave], axis=1), rate, format, subtype))
    assert samples.shape == (64000,)
    np.testing.assert_allclose(
        samples[400:-400], 0.5 * tone(440, 16000, 64000)[400:-400], atol=error
    )


def test_a_file_is_not_read_beyond_what_it_declares(tmp_path: Path) -> None:
    """One of 40 GB, almost all of which is a hole, is refused by its header."""
    path = tmp_path / "sparse.wav"
    header = bytearray(file(np.zeros(9), 16000, subtype="PCM_16")[:44])
    header[4:8] = header[40:44] = b"\xff" * 4
    with path.open("wb") as sparse:
        sparse.write(header)
        sparse.truncate(40 << 30)
    with pytest.raises(InputError, match="is longer than 3 hours"):
        read_audio(path)
    with path.open("r+b") as sparse:
        sparse.write(bytes(44))
    with pytest.raises(InputError, match="cannot be decoded"):
        read_audio(path)


def test_a_file_of_unknown_length_is_read_to_its_end() -> None:
    data = bytearray(file(0.5 * tone(440, 16000, 16000), 16000, "FLAC", "PCM_16"))
    expected = read_audio(bytes(data))
    data[21] &= 0xF0  # the number of samples, in 36 bits
    data[22:26] = bytes(4)
    np.testing.assert_array_equal(read_audio(bytes(data)), expected)
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    with pytest.raises(InputError, match="is longer than 3 hours"):
        read_audio(bytes(data))


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    return np.concatenate(list(resampled([samples], rate)))


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_pieces_are_resampled_as_the_whole(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(3).uniform(-1, 1, 3 * rate + 17).astype(np.float32)
    whole = resample(samples, rate)
    monkeypatch.setattr("webgemma.media.audio_files.CHUNK", 5000)
    pieces = np.concatenate(list(resampled(np.array_split(samples, 23), rate)))
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=RESAMPLED)


@pytest.mark.parametrize("given", [[0.5, -0.25], (0.5, -0.25), array.array("f", [0.5, -0.25])])
def test_float_samples_are_unchanged(given: object) -> None:
    samples = read_audio(given)
    assert samples.dtype == np.float32
    assert samples.tolist() == [0.5, -0.25]


RATES = [1000, 8000, 11025, 22050, 44100, 44101, 48000, 192000]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("count", [1, 7, 300])
def test_resampling_equals_its_formula(rate: int, count: int) -> None:
    x = np.random.default_rng(count).uniform(-1, 1, count)
    scale = min(1, 16000 / rate)
    expected = []
    for m in range(math.ceil(count * 16000 / rate)):
        t = scale * (m * rate / 16000 - np.arange(count))
        u = np.pi * t / ZEROS
        window = 0.35875 + 0.48829 * np.cos(u) + 0.14128 * np.cos(2 * u) + 0.01168 * np.cos(3 * u)
        taps = np.where(np.abs(t) < ZEROS, CUTOFF * np.sinc(CUTOFF * t) * window, 0)
        expected.append(scale * taps @ x)
    found = resample(x.astype(np.float32), rate)
    np.testing.assert_allclose(found, expected, rtol=0, atol=RESAMPLED)


TONES = [
    (rate, hertz)
    for rate in RATES
    for hertz in (0, 100, 1000, 3000, 7000, 8200, 9000, 21000)
    if hertz < 0.87 * rate / 2  # the source rate cannot represent higher tones
]


@pytest.mark.parametrize(("rate", "hertz"), TONES)
def test_tones_pass_below_the_cutoff_and_vanish_above(rate: int, hertz: int) -> None:
    count = rate // 10 if rate > 1000 else rate
    wave = np.cos(2 * np.pi * hertz * np.arange(count) / rate).astype(np.float32)
    found = resample(wave, rate)
    expected = np.cos(2 * np.pi * hertz * np.arange(len(found)) / 16000) * (hertz < 8000)
    edge = math.ceil(ZEROS * max(1, 16000 / rate)) + 1
    assert len(found) > 2 * edge
    np.testing.assert_allclose(found[edge:-edge], expected[edge:-edge], atol=RESAMPLED)


def test_silence_and_very_short_audio_are_resampled() -> None:
    assert not read_audio(file(np.zeros(48000), 48000)).any()
    assert len(read_audio(file(np.ones(48) / 2, 48000))) == 16
    assert len(read_audio(file(np.ones(1) / 2, 192000))) == 1


def samples_or_none(data: bytes | bytearray) -> np.ndarray | None:
    """Return the samples, or None after an InputError."""
    try:
        return read_audio(data)
    except InputError:
        return None


@pytest.mark.parametrize(("format", "subtype", "rate", "_"), FILES)
def test_truncated_files_give_fewer_samples_or_an_error(
    format: str, subtype: str, rate: int, _: float
) -> None:
    """Which of the two depends on the decoder."""
    data = stereo(format, subtype, rate)
    ends = [0, 24, *(int(part * len(data)) for part in (0.01, 0.3, 0.7, 0.999))]
    found = [samples_or_none(data[:end]) for end in ends]
    assert found[0] is found[1] is None
    assert all(0 < len(samples) <= 16000 for samples in found if samples is not None)
    if format in ("WAV", "AIFF", "MP3"):
        lengths = [len(samples) / 16000 for samples in found[3:] if samples is not None]
        assert lengths == pytest.approx([0.3, 0.7, 0.999], abs=0.15)


@pytest.mark.parametrize(("format", "subtype", "rate", "_"), FILES)
def test_damaged_files_give_finite_samples_or_an_error(
    format: str, subtype: str, rate: int, _: float
) -> None:
    data, chance = stereo(format, subtype, rate), random.Random(7)
    for _round in range(25):
        damaged = bytearray(data)
        for _byte in range(chance.choice([1, 3, 20])):
            damaged[chance.randrange(chance.choice([64, len(data)]))] = chance.randrange(256)
        samples = samples_or_none(damaged)
        assert samples is None or np.isfinite(samples).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "is empty"),
        (b"This is no sound. " * 50, "not audio; WAV, FLAC, OGG and MP3 are supported"),
        (bytes(1000), "cannot be decoded"),
        (file(np.zeros(0), 16000), "holds no samples"),
        (file(np.array([0.1, np.nan]), 44100), "NaN or infinite"),
        (file(np.array([0.1, np.inf]), 16000), "NaN or infinite"),
        (file(np.zeros(9), 1), "has 1 samples a second; 1000 to 768000"),
        (file(np.zeros(9), 10**9), "has 1000000000 samples a second"),
        ("there/is/none.wav", "no audio file at there"),
        ("a\0b", "no audio file"),
        (Path(), "no audio file at"),
        ([], "holds no samples"),
        ([0.1, math.nan], "NaN or infinite"),
        ([0.1, -math.inf], "NaN or infinite"),
        ([1e300], "reaches 1e.300.*divide"),
        ([0.0, 32767.0], "reaches 32767.*by 32768"),
        ([1, 2, 3], "float samples at 16000 Hz.*int64"),
        (np.zeros(4, np.int16), "int16"),
        (np.zeros((4, 2)), r"shape \(4, 2\)"),
        ([[0.1], [0.1, 0.2]], "a value of type list"),
        ([0.1, None], "a value of type list"),
        (["a"], "not samples of type"),
        (None, "a value of type NoneType"),
        (0.5, "a value of type float"),
        ({"a": 0.5}, "a value of type dict"),
        (range(10**12), "a value of type range"),
        ([range(10**12)], "a value of type list"),
        (shared(40), "a value of type list"),
        (np.broadcast_to(np.float32(0), 10**12), "longer than 3 hours"),
    ],
    ids=lambda x: shown(x)[:20],
)
def test_invalid_inputs_raise_an_error(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_audio(given)


def test_audio_that_is_too_long_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.media.audio_files.MAX_SECONDS", 2)
    assert len(read_audio(file(np.zeros(2 * 192000), 192000))) == 32000
    for long in (np.zeros(32001), file(np.zeros(16001), 8000)):
        with pytest.raises(InputError, match="cut it into pieces"):
            read_audio(long)


def test_a_file_without_its_decoder_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = stereo("WAV", "PCM_16", 16000)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InputError, match=r"soundfile package.*install it, or pass samples"):
        read_audio(data)
    assert len(read_audio([0.1])) == 1
