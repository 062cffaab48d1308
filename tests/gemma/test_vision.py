"""The eyes on the GPU: pixels as Pillow's, soft tokens as the reference's and transformers'."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.gpu import device, get, hardware
from helpers.tiny_eyes import EMBEDDER, LARGE_EYES, PICTURES, SMALL_EYES, Eyes, eyes_gguf
from helpers.tiny_eyes import picture as pixels_of_picture
from tolerance import GPU_SOFT_TOKENS

from webgemma.device.native import NativeDevice
from webgemma.device.null import NullDevice
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.image_resize import check_pixels, resized
from webgemma.gemma.matrices import whole_words
from webgemma.gemma.record import tiling as tiles
from webgemma.gemma.record.staged_plan import Bench
from webgemma.gemma.vision import Eyes as DeviceEyes
from webgemma.gemma.vision import see
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.reference.pictures import patches, resize
from webgemma.reference.vision import VisionModel
from webgemma.sync import run_sync

KINDS = {
    "small": SMALL_EYES,
    "small, bounds alike": replace(SMALL_EYES, alike=True),
    "large": LARGE_EYES,
    "heads of 72": replace(LARGE_EYES, width=144),  # as 26B-A4B and 31B have them
    "12B": EMBEDDER,
}


def seen(
    gguf: Gguf, rgb: np.ndarray, on: NativeDevice | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What a device makes of a picture that need not be resized: pooled, soft tokens."""
    on = on or device()
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    height, width, _ = rgb.shape
    held = on.nbytes
    with run_sync(DeviceEyes.load(gguf, vision, on)) as eyes:
        sight = run_sync(see(eyes, RgbImage(width, height, rgb.tobytes()), width, height))
        found = get(sight.pooled, on=on), get(sight.tokens, on=on)
        sight.close()
    assert on.nbytes == held
    return found


def assert_same(found: np.ndarray, truth: np.ndarray) -> None:
    assert found.shape == truth.shape
    assert np.abs(found - truth).max() <= GPU_SOFT_TOKENS * np.abs(truth).max()


@pytest.mark.parametrize("size", PICTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference(kind: str, size: tuple[int, int]) -> None:
    eyes: Eyes = KINDS[kind]
    gguf = run_sync(Gguf.aopen(BytesSource(eyes_gguf(eyes))))
    rgb = pixels_of_picture(eyes, *size)
    tower = VisionModel.from_gguf(gguf)
    values = patches(rgb, eyes.patch)
    pooled, tokens = seen(gguf, rgb)
    assert_same(pooled, tower.pooled(values))
    assert_same(tokens, tower.encode(values))


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference_where_work_is_cut_as_for_a_real_gpu(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiles of large products, however small these are."""
    monkeypatch.setattr(tiles, "MANY_GROUPS", 1)
    gguf = run_sync(Gguf.aopen(BytesSource(eyes_gguf(KINDS[kind]))))
    rgb = pixels_of_picture(KINDS[kind], *PICTURES[-1])
    pooled, tokens = seen(gguf, rgb, hardware())
    tower, values = VisionModel.from_gguf(gguf), patches(rgb, KINDS[kind].patch)
    assert_same(pooled, tower.pooled(values))
    assert_same(tokens, tower.encode(values))


@pytest.mark.parametrize(("kind", "together"), [("small", 0), ("small, bounds alike", 1)])
def test_matrices_that_read_and_are_held_alike_are_multiplied_at_once(
    kind: str, together: int
) -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(eyes_gguf(KINDS[kind]))))
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with run_sync(DeviceEyes.load(gguf, vision, device())) as eyes:
        rows = [eyes.matrices[f"v.blk.0.{part}.weight"].rows for part in ("attn_q", "ffn_gate")]
    assert rows == [vision.width * (1 + 2 * together), vision.ffn * (1 + together)]


@needs_shared
def test_as_transformers() -> None:
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        rgb = np.fromfile(SHARED / "mm" / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
        pooled, tokens = seen(gguf, rgb)
    assert_same(pooled, np.load(SHARED / "mm" / "image240x192.vision_pooled.npy"))
    assert_same(tokens, np.load(SHARED / "mm" / "image240x192.embd.npy"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 80, "heads": 2}, "heads of 40 dimensions"),
        ({"ffn": 82}, "feed-forward layers of 82"),
        ({"patch": 6}, "patches of 6"),
    ],
)
def test_shapes_without_a_kernel_get_a_sentence(change: dict[str, int], sentence: str) -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(eyes_gguf(replace(SMALL_EYES, **change)))))
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with pytest.raises(DeviceError, match=f"{sentence}.*use device='cpu'"):
        run_sync(DeviceEyes.load(gguf, vision, device()))


def test_a_picture_larger_than_a_binding_gets_a_sentence() -> None:
    limited = NullDevice()
    limited.limits = replace(limited.limits, binding_nbytes=1000)
    with pytest.raises(InputError, match="A picture of 20 x 30 pixels is too large for"):
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
def test_resized_byte_for_byte_as_the_reference(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    width, height = size
    rgb = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    bench = Bench(device())
    pixels = resized(bench, bench.put(whole_words(rgb.tobytes()), "rgb"), size, target)
    plan = bench.recorder.plan()
    device().run(plan)
    found = get(pixels, np.uint32)
    plan.close(device())
    bench.clear()
    wanted = resize(rgb, *target).reshape(-1, 3)
    np.testing.assert_array_equal(found.view(np.uint8).reshape(-1, 4)[:, :3], wanted)
    assert not found.view(np.uint8)[3::4].any()
