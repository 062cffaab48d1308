"""The vision encoder on the GPU against the reference and transformers, and resized pixels."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.gpu import device, get, hardware
from helpers.tiny_vision import (
    EMBEDDER,
    IMAGE_SIZES,
    LARGE_VISION,
    SMALL_VISION,
    TinyVision,
    tiny_image,
    vision_gguf,
)
from tolerance import GPU_SOFT_TOKENS

from webgemma.device.native import NativeDevice
from webgemma.device.null import NullDevice
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.image_resize import check_pixels, resized
from webgemma.gemma.matrices import whole_words
from webgemma.gemma.record import tiling
from webgemma.gemma.record.staged_plan import StagedPlan
from webgemma.gemma.vision import VisionEncoder, encode_image
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.reference import vision as reference
from webgemma.reference.images import patches, resize
from webgemma.sync import run_sync

KINDS = {
    "small": SMALL_VISION,
    "small, same bounds": replace(SMALL_VISION, same_bounds=True),
    "large": LARGE_VISION,
    "heads of 72": replace(LARGE_VISION, width=144),  # those of 26B-A4B and 31B
    "12B": EMBEDDER,
}


def encoded(
    gguf: Gguf, rgb: np.ndarray, on: NativeDevice | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode an image that need not be resized on a device: pooled features, soft tokens."""
    on = on or device()
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    height, width, _ = rgb.shape
    before = on.nbytes
    with run_sync(VisionEncoder.load(gguf, vision, on)) as encoder:
        image = RgbImage(width, height, rgb.tobytes())
        result = run_sync(encode_image(encoder, image, width, height))
        pooled, tokens = get(result.pooled, on=on), get(result.tokens, on=on)
        result.close()
    assert on.nbytes == before
    return pooled, tokens


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= GPU_SOFT_TOKENS * np.abs(expected).max()


@pytest.mark.parametrize("size", IMAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_reference(kind: str, size: tuple[int, int]) -> None:
    tiny: TinyVision = KINDS[kind]
    gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(tiny))))
    rgb = tiny_image(tiny, *size)
    encoder = reference.VisionEncoder.from_gguf(gguf)
    values = patches(rgb, tiny.patch)
    pooled, tokens = encoded(gguf, rgb)
    assert_close(pooled, encoder.pooled(values))
    assert_close(tokens, encoder.encode(values))


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_reference_divided_as_for_a_hardware_gpu(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the tiles of large products, however small these are."""
    monkeypatch.setattr(tiling, "MANY_GROUPS", 1)
    gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(KINDS[kind]))))
    rgb = tiny_image(KINDS[kind], *IMAGE_SIZES[-1])
    pooled, tokens = encoded(gguf, rgb, hardware())
    encoder, values = reference.VisionEncoder.from_gguf(gguf), patches(rgb, KINDS[kind].patch)
    assert_close(pooled, encoder.pooled(values))
    assert_close(tokens, encoder.encode(values))


@pytest.mark.parametrize(("kind", "stacked"), [("small", 0), ("small, same bounds", 1)])
def test_matrices_with_equal_inputs_and_bounds_are_multiplied_at_once(
    kind: str, stacked: int
) -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(KINDS[kind]))))
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with run_sync(VisionEncoder.load(gguf, vision, device())) as encoder:
        rows = [encoder.matrices[f"v.blk.0.{part}.weight"].rows for part in ("attn_q", "ffn_gate")]
    assert rows == [vision.width * (1 + 2 * stacked), vision.ffn * (1 + stacked)]


@needs_shared
def test_agrees_with_transformers() -> None:
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        rgb = np.fromfile(SHARED / "mm" / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
        pooled, tokens = encoded(gguf, rgb)
    assert_close(pooled, np.load(SHARED / "mm" / "image240x192.vision_pooled.npy"))
    assert_close(tokens, np.load(SHARED / "mm" / "image240x192.embd.npy"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 80, "heads": 2}, "heads of 40 dimensions"),
        ({"ffn": 82}, "feed-forward layers of 82"),
        ({"patch": 6}, "patches of 6"),
    ],
)
def test_shapes_without_a_kernel_raise_an_error(change: dict[str, int], message: str) -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(replace(SMALL_VISION, **change)))))
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with pytest.raises(DeviceError, match=f"{message}.*use device='cpu'"):
        run_sync(VisionEncoder.load(gguf, vision, device()))


def test_an_image_larger_than_a_binding_raises_an_error() -> None:
    limited = NullDevice()
    limited.limits = replace(limited.limits, binding_nbytes=1000)
    with pytest.raises(InputError, match="An image of 20 x 30 pixels is too large for"):
        check_pixels(limited, 20, 30)


@pytest.mark.parametrize(
    ("size", "target"),
    [
        ((1, 1), (48, 48)),
        ((1, 5000), (48, 480)),
        ((2000, 3), (960, 48)),
        ((97, 61), (97, 61)),
        ((97, 61), (240, 144)),
        ((640, 480), (144, 96)),
        ((100, 300), (96, 48)),  # columns first
        ((300, 100), (48, 100)),
    ],
)
def test_resizing_agrees_with_the_reference_byte_for_byte(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    width, height = size
    rgb = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    staged = StagedPlan(device())
    pixels = resized(staged, staged.upload(whole_words(rgb.tobytes()), "rgb"), size, target)
    plan = staged.recorder.plan()
    device().run(plan)
    found = get(pixels, np.uint32)
    plan.close(device())
    staged.close()
    expected = resize(rgb, *target).reshape(-1, 3)
    np.testing.assert_array_equal(found.view(np.uint8).reshape(-1, 4)[:, :3], expected)
    assert not found.view(np.uint8)[3::4].any()
