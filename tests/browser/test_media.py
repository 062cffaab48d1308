"""Images and audio in a tab: decoded as natively, in a worker and in the page's own thread."""

import io
import math
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile
from browser.serving import serving
from browser.test_tab import PYODIDE, Tab, wheel
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_audio import TINY_AUDIO, audio_metadata, audio_weights
from helpers.tiny_vision import SMALL_VISION, vision_metadata, vision_weights
from PIL import Image
from tolerance import GPU_SOFT_TOKENS

from webgemma import Gemma
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.media.audio_files import read_audio
from webgemma.media.image_files import decode

THREADS = {"worker": "python.html", "main": "main.html"}
RNG = np.random.default_rng(9)
SMOOTH = Image.fromarray(RNG.integers(0, 256, (4, 5, 3), np.uint8)).resize((61, 40))
NOISE = Image.fromarray(RNG.integers(0, 256, (40, 61, 3), np.uint8))
GLASS = Image.fromarray(RNG.integers(0, 256, (40, 61, 4), np.uint8))
EXACT, ROUNDED, JPEG = 0, 1, 2  # how far a pixel may be off
TEXT = replace(SMALL, context=64)
VISION = replace(SMALL_VISION, positions=96)
AUDIO = replace(TINY_AUDIO, output=SMALL.width)


def senses_gguf() -> bytes:
    """Both encoders in one file."""
    metadata = vision_metadata(VISION, "clip.") | audio_metadata(AUDIO)
    return gguf_bytes(metadata, [*vision_weights(VISION), *audio_weights(AUDIO)])


@pytest.fixture(scope="module", params=THREADS)
def tab(request: pytest.FixtureRequest, chromium: Any) -> Iterator[Tab]:
    files = {f"pyodide/{path.name}": path for path in PYODIDE.iterdir() if path.is_file()}
    models = {"text.gguf": tiny_gguf(TEXT), "senses.gguf": senses_gguf()}
    with serving({**files, **models, "webgemma.whl": wheel()}) as origin:
        page = chromium.new_page()
        page.goto(f"{origin}/{THREADS[request.param]}")
        page.wait_for_function("() => window.python")
        yield Tab(page, origin, [])
        page.close()


def in_worker(tab: Tab) -> bool:
    return bool(tab.page.url.endswith(THREADS["worker"]))


def base64(data: bytes) -> str:
    return b64encode(data).decode()


def file_bytes(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


PICTURES = {
    "png": (file_bytes(NOISE, "PNG"), EXACT),
    "grey": (file_bytes(NOISE.convert("L"), "PNG"), EXACT),
    "palette": (file_bytes(NOISE.convert("P"), "PNG"), EXACT),
    "clear": (file_bytes(GLASS, "PNG"), ROUNDED),
    "gif": (file_bytes(NOISE.convert("P"), "GIF"), EXACT),
    "bmp": (file_bytes(NOISE, "BMP"), EXACT),
    "webp": (file_bytes(NOISE, "WEBP", lossless=True), EXACT),
    "jpeg": (file_bytes(SMOOTH, "JPEG", quality=95, subsampling=0), JPEG),
    "line": (file_bytes(NOISE.resize((20_000, 3)), "PNG"), EXACT),
    "one": (file_bytes(NOISE.resize((1, 1)), "PNG"), EXACT),
    "profile": (file_bytes(NOISE, "PNG", icc_profile=b"not a profile"), EXACT),
}
FINE = {"quality": 95, "subsampling": 0}
PICTURES |= {
    f"turned {at}": (file_bytes(SMOOTH, "JPEG", exif=turned(at), **FINE), JPEG)
    for at in range(1, 9)
}


def rgb(found: Any) -> np.ndarray:
    width, height, data = found
    return np.frombuffer(b64decode(data), np.uint8).reshape(height, width, 3).astype(int)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_decoded_as_natively(tab: Tab, name: str) -> None:
    data, off = PICTURES[name]
    wanted = decode(data)
    found = tab.call("inside_media.picture", "File", base64(data))
    assert found[:2] == [wanted.width, wanted.height]
    pixels = np.frombuffer(wanted.rgb, np.uint8).reshape(wanted.height, wanted.width, 3)
    assert np.abs(rgb(found) - pixels).max() <= off


@pytest.mark.parametrize(
    "kind",
    [
        *("bytes", "bytearray", "memoryview", "path"),
        *("Uint8Array", "ArrayBuffer", "ImageBitmap", "canvas", "ImageData"),
    ],
)
def test_every_way_to_hand_in_a_picture(tab: Tab, kind: str) -> None:
    data = PICTURES["png"][0]
    found = tab.call("inside_media.picture", kind, base64(data))
    np.testing.assert_array_equal(rgb(found), np.asarray(NOISE))


def test_arrays(tab: Tab) -> None:
    assert tab.call("inside_media.pixels", [2, 5, 3]) == [5, 2]
    assert "is not an image: it must be uint8" in tab.call("inside_media.pixels", [2, 5, 4])
    assert "is not an image" in tab.call("inside_media.pixels", [2, 5, 3], "b")


def huge(width: int, height: int) -> bytes:
    """A PNG that claims to have so many pixels."""
    data = bytearray(PICTURES["png"][0])
    data[16:24] = struct.pack(">II", width, height)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is damaged, cut short or not an image that this browser can decode; JPEG, PNG"),
        (b"hello", "not an image that this browser can decode"),
        (PICTURES["png"][0][:2000], "is damaged, cut short"),
        (PICTURES["jpeg"][0][:1000], "is damaged, cut short"),
        (huge(30_000, 30_000), "has 30000 x 30000 pixels; at most 100 million are supported"),
    ],
)
def test_files_that_are_no_pictures(tab: Tab, data: bytes, sentence: str) -> None:
    assert sentence in tab.call("inside_media.picture", "bytes", base64(data))


@pytest.mark.parametrize("what", ["dict", "number", "url"])
def test_things_that_are_neither(tab: Tab, what: str) -> None:
    kind = {"dict": "dict", "number": "int", "url": "URL"}[what]
    picture, sound = tab.call("inside_media.nonsense", what)
    assert picture.startswith("The image must be ")
    assert picture.endswith(f"not {kind}.")
    assert sound.startswith("The audio must be ")
    assert sound.endswith(f"not {kind}.")


@pytest.mark.parametrize("tab", ["worker"], indirect=True)  # either thread has the same GPU
def test_soft_tokens_are_natives_own(tab: Tab) -> None:
    """Both encoders of an address, on the browser's GPU."""
    data = PICTURES["png"][0]
    song = RNG.uniform(-0.5, 0.5, 5_000).astype(np.float32)
    given = ("text.gguf", "senses.gguf", base64(data), song.tolist())
    found = tab.call("inside_media.soft_tokens", *given)
    model, senses = BytesSource(tiny_gguf(TEXT)), BytesSource(senses_gguf())
    with Gemma.load(model, "cpu", mmproj=senses) as gemma:
        wanted = gemma.encode_image(data, budget=70), gemma.encode_audio(song)
    for here, there in zip(found, wanted, strict=True):
        within = GPU_SOFT_TOKENS * np.abs(there).max()
        np.testing.assert_allclose(np.array(here), there, rtol=0, atol=within)


# Sounds


def tone(rate: int, channels: int, seconds: float = 0.3) -> np.ndarray:
    """Audio whose channels differ."""
    at = np.arange(int(rate * seconds))[:, None] / rate
    phases = np.arange(channels)
    return 0.3 * np.sin(2 * np.pi * 440 * at + phases) + 0.2 * np.sin(2 * np.pi * 1000 * at)


def sound_file(rate: int, channels: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(rate, channels), rate, subtype, format=kind)
    return file.getvalue()


def samples(found: Any) -> np.ndarray:
    assert not found.startswith("The "), found
    return np.frombuffer(b64decode(found), np.float32)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (16_000, 3)])
def test_samples_of_16_khz_are_natives_own(
    tab: Tab, subtype: str, rate: int, channels: int
) -> None:
    data = sound_file(rate, channels, subtype=subtype)
    found = samples(tab.call("inside_media.sound", "File", base64(data)))
    np.testing.assert_allclose(found, read_audio(data), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 192_000])
def test_other_rates_are_resampled_as_natively(tab: Tab, rate: int) -> None:
    data = sound_file(rate, 2)
    found = samples(tab.call("inside_media.sound", "bytes", base64(data)))
    np.testing.assert_allclose(found, read_audio(data), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)])
def test_other_kinds(tab: Tab, kind: str, subtype: str | None) -> None:
    data = sound_file(48_000, 1, kind, subtype)
    found = tab.call("inside_media.sound", "ArrayBuffer", base64(data))
    if in_worker(tab):
        assert "a worker can decode nothing else: let the page decode it" in found
        return
    wanted = read_audio(data)
    assert len(samples(found)) == pytest.approx(len(wanted), abs=1_200)  # a codec's own silence
    assert np.abs(samples(found)).max() == pytest.approx(np.abs(wanted).max(), rel=0.05)


@pytest.mark.parametrize("kind", ["list", "f", "d"])
def test_samples_are_taken_as_they_are(tab: Tab, kind: str) -> None:
    assert tab.call("inside_media.samples", [0.5, -0.25, 1.5], kind) == [0.5, -0.25, 1.5]


def test_samples_of_javascript(tab: Tab) -> None:
    given = np.array([0.5, -1, 0.125], np.float32)
    found = tab.call("inside_media.sound", "Float32Array", base64(given.tobytes()))
    np.testing.assert_array_equal(samples(found), given)


@pytest.mark.parametrize(
    ("values", "kind", "sentence"),
    [
        ([], "f", "The audio holds no samples"),
        (["nan"], "f", "NaN or infinite"),
        (["inf", 0.5], "list", "NaN or infinite"),
        ([0.5, 30_000.0], "list", "The audio reaches 30000, but samples lie between -1 and 1"),
        ([[0.5]], "list", "one row of float samples at 16000 Hz"),
        ([1, 2], "h", "one row of float samples at 16000 Hz"),
    ],
)
def test_samples_that_nobody_can_hear(
    tab: Tab, values: list[Any], kind: str, sentence: str
) -> None:
    assert sentence in tab.call("inside_media.samples", values, kind)


NOT_A_NUMBER = struct.pack("<2f", 0.5, math.nan)


@pytest.mark.parametrize(
    ("kind", "data", "sentence"),
    [
        ("bytes", b"", "The audio is empty"),
        ("bytes", sound_file(16_000, 1)[:12], "The audio cannot be decoded: it is damaged"),
        ("File", sound_file(500, 1), "The audio has 500 samples a second; 1000 to 768000"),
        ("bytes", sound_file(16_000, 1)[:44], "The audio holds no samples"),
        ("Float32Array", NOT_A_NUMBER, "NaN or infinite"),
    ],
)
def test_sounds_that_cannot_be_taken(tab: Tab, kind: str, data: bytes, sentence: str) -> None:
    assert sentence in tab.call("inside_media.sound", kind, base64(data))


def test_a_sound_that_was_cut_has_what_came(tab: Tab) -> None:
    whole = sound_file(16_000, 1)
    found = samples(tab.call("inside_media.sound", "bytes", base64(whole[:2_044])))
    np.testing.assert_allclose(found, read_audio(whole)[:1_000], rtol=0, atol=1e-6)
