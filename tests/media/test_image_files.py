"""Image decoding: every kind of input, orientation, transparency, and invalid inputs."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from webgemma import InputError
from webgemma.images import RgbImage, chosen_frames
from webgemma.media.image_files import decode, decode_frames

RGB = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 50, 3), np.uint8))
KINDS = ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"]


def file_bytes(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int, colours: int, rows: bytes) -> bytes:
    """Return a PNG that Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_every_kind_of_source_is_decoded(tmp_path: Path) -> None:
    image = Image.fromarray(RGB)
    data = file_bytes(image, "PNG")
    path = tmp_path / "image.png"
    path.write_bytes(data)
    expected = RgbImage(3, 2, RGB.tobytes())
    for source in (path, str(path), data, bytearray(data), image, RGB, memoryview(RGB)):
        assert decode(source) == expected
    mirrored = RGB[:, ::-1]  # not contiguous
    assert decode(mirrored) == RgbImage(3, 2, mirrored.tobytes())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_by_their_exif_orientation(orientation: int) -> None:
    """All eight orientations, undone by their definitions."""
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # light in the upper left
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: upright.swapaxes(0, 1)[::-1],
        7: upright.swapaxes(0, 1)[::-1, ::-1],
        8: upright.swapaxes(0, 1)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    for kind in ("PNG", "JPEG"):
        width, height, rgb = decode(file_bytes(image, kind, exif=exif.tobytes()))
        assert (width, height) == (32, 16)
        found = np.frombuffer(rgb, np.uint8).reshape(16, 32, 3).astype(int)
        assert np.abs(found - upright).max() < 8  # JPEG is lossy


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM"]
)
def test_unreadable_exif_is_ignored(exif: bytes) -> None:
    assert decode(file_bytes(NOISE, "JPEG", exif=exif)) == decode(file_bytes(NOISE, "JPEG"))


def test_transparent_pixels_become_white() -> None:
    clear, half = (10, 20, 30, 0), (0, 0, 0, 128)
    image = Image.new("RGBA", (2, 1), clear)
    image.putpixel((1, 0), half)
    assert decode(file_bytes(image, "PNG")).rgb == bytes([255] * 3 + [127] * 3)
    assert decode(Image.new("LA", (1, 1), (0, 128))).rgb == bytes([127] * 3)
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 100, 50, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        assert decode(file_bytes(palette, kind)).rgb == bytes([200, 100, 50, 1, 2, 3])
        clear_one = file_bytes(palette, kind, transparency=1)
        assert decode(clear_one).rgb == bytes([200, 100, 50, 255, 255, 255])


def test_16_bit_images_become_8_bit() -> None:
    grey = Image.fromarray(np.array([[0, 128, 129, 32768, 65535]], np.uint16))
    expected = bytes(level for level in (0, 0, 1, 128, 255) for _ in range(3))
    for source in (grey, file_bytes(grey, "PNG"), file_bytes(grey, "TIFF")):
        assert decode(source).rgb == expected
    colours = png(1, 1, 16, 2, bytes([0, 200, 1, 100, 2, 50, 3]))
    assert decode(colours).rgb == bytes([200, 100, 50])
    with_alpha = png(1, 1, 16, 6, bytes([0, 200, 1, 100, 2, 50, 3, 0, 0]))
    assert decode(with_alpha).rgb == bytes([255, 255, 255])


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(kind: str) -> None:
    red = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert decode(file_bytes(red, kind)).rgb == bytes([255, 0, 0])


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "RGBa", "RGBX", "YCbCr", "LAB", "HSV", "I"])
def test_other_modes_become_rgb(mode: str) -> None:
    assert len(decode(Image.new(mode, (2, 3))).rgb) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files_raise_an_error(kind: str, tmp_path: Path) -> None:
    data = file_bytes(NOISE, kind)
    path = tmp_path / f"half.{kind.lower()}"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"half.*damaged or cut short"):
        decode(path)
    for length in (0, 1, 10, 30, 100):
        with pytest.raises(InputError, match=r"The image (is damaged|is not an image)"):
            decode(data[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_give_an_image_or_an_error(kind: str) -> None:
    rng = np.random.default_rng(7)
    data = np.frombuffer(file_bytes(NOISE, kind), np.uint8)
    for _ in range(60):
        broken = data.copy()
        broken[rng.integers(0, len(data), 4)] = rng.integers(0, 256, 4)
        try:
            width, height, rgb = decode(broken.tobytes())
        except InputError:
            continue
        assert len(rgb) == 3 * width * height


def test_a_pillow_image_that_cannot_be_loaded_raises_an_error() -> None:
    half = Image.open(io.BytesIO(file_bytes(NOISE, "PNG")[:4000]))
    with pytest.raises(InputError, match="damaged or cut short"):
        decode(half)


@pytest.mark.parametrize("side", [10_001, 20_000, 200_000])
def test_images_too_large_are_rejected_before_decoding(side: int) -> None:
    with pytest.raises(InputError, match="at most 100 million"):
        decode(png(side, side, 8, 2, b""))
    huge = np.lib.stride_tricks.as_strided(RGB, (side, side, 3), (0, 0, 1))
    with pytest.raises(InputError, match="at most 100 million"):
        decode(huge)


def animation(width: int, height: int, frames: int) -> bytes:
    """Return a GIF whose frames change one pixel of a canvas."""
    pixel = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB6x", width, height, 128, 0, 0) + pixel * frames + b";"


def test_small_files_with_many_large_frames_are_rejected_before_decoding() -> None:
    bomb = animation(9999, 9999, 64)
    assert len(bomb) == 980
    with pytest.raises(InputError, match="64 frames of 9999 x 9999 pixels, too many to decode"):
        decode_frames(bomb, chosen_frames)
    with pytest.raises(InputError, match="100000 frames of 1000 x 1000 pixels, too many"):
        decode_frames(animation(1000, 1000, 100_000), chosen_frames)
    with pytest.raises(InputError, match="at most 100 million"):
        decode_frames(animation(10_001, 10_000, 1), chosen_frames)
    assert len(decode_frames(animation(100, 100, 500), chosen_frames)) == 32
    assert len(decode_frames(animation(1920, 1080, 40), chosen_frames)) == 32


def test_a_pillow_image_is_not_changed() -> None:
    image = NOISE.copy()
    image.getexif()[0x0112] = 6
    for _ in range(2):
        assert decode(image)[:2] == (60, 50)
    assert image.size == (50, 60)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/file.png", "cannot be opened: No such file"),
        (".", "cannot be opened: it is not a file"),
        ("/dev/zero", "cannot be opened"),
        ("x" * 10_000, "cannot be opened"),
        ("a\0b", "cannot be opened"),
        (b"no image at all", "is not an image that Pillow can decode"),
        (Image.new("F", (1, 1)), "floating-point"),
        (Image.new("RGB", (0, 3)), "it is empty"),
        (np.zeros((0, 4, 3), np.uint8), "it is empty"),
        (np.zeros((4, 4), np.uint8), "uint8"),
        (np.zeros((4, 4, 4), np.uint8), "uint8"),
        (np.zeros((4, 4, 3), np.float32), "uint8"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else type(value).__name__,
)
def test_invalid_sources_raise_an_error(source: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(source)


def test_no_other_program_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives EPS files, which are programs, to Ghostscript."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **_: started.append(args))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 48 48\n%%EndComments\nshowpage\n%%EOF\n"
    Image.open(io.BytesIO(eps)).verify()  # it is one
    with pytest.raises(InputError, match="The image is not an image"):
        decode(eps)
    assert not started


@pytest.mark.parametrize("kind", [*KINDS, "ICO", "JPEG2000", "PPM", "TGA"])
def test_pictures_that_people_have(kind: str) -> None:
    assert decode(file_bytes(NOISE, kind)).rgb
