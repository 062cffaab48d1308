"""Encoders on matrix units: soft tokens and greedy ids, and which products they compute there."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device, get
from helpers.matrix_units import use_tiles
from helpers.tiny import SMALL as SMALL_TEXT
from helpers.tiny import tiny_gguf
from helpers.tiny_audio import TINY_AUDIO, audio_config, audio_gguf, audio_weights
from helpers.tiny_vision import (
    IMAGE_SIZES,
    LARGE_VISION,
    SMALL_VISION,
    TinyVision,
    tiny_image,
    vision_gguf,
)
from tolerance import F16_SOFT_TOKENS

from webgemma import Gemma
from webgemma.device import Limits, MatrixShape
from webgemma.device.null import NullDevice
from webgemma.engine.session import Session
from webgemma.gemma.audio import AudioEncoder, EncodedAudio, encode_audio
from webgemma.gemma.config import Config
from webgemma.gemma.encoder_config import (
    SEGMENT_SAMPLES,
    AudioConfig,
    EncoderConfigs,
    VisionConfig,
    audio_tensors,
    vision_tensors,
)
from webgemma.gemma.record.matrix_tiling import MatrixTile, MatrixUnits
from webgemma.gemma.soft_tokens import SoftTokens
from webgemma.gemma.tensors import TensorSpec
from webgemma.gemma.vision import EncodedImage, VisionEncoder, encode_image
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.graph import Recorder
from webgemma.images import RgbImage
from webgemma.reference import audio as audio_reference
from webgemma.reference import vision as vision_reference
from webgemma.reference.images import patches
from webgemma.reference.weights import Weights
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

on_units = pytest.mark.usefixtures("matrix_units", "small_tiles")

SAMPLES = np.fromfile(FIXTURES / "mm" / "audio-24000.f32", "<f4")
SMALL = replace(SMALL_VISION, format="F16")
LARGE = replace(LARGE_VISION, format="F16")
KINDS = {
    "small": SMALL,
    "small, same bounds": replace(SMALL, same_bounds=True),
    "heads of 72": replace(LARGE, width=144),  # those of 26B-A4B and 31B
    "float32": LARGE_VISION,  # which only attention rounds
}


@pytest.fixture
def small_tiles(matrix_units: MatrixUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix for each subgroup: such products compile in less than a second on a CPU."""
    m, n, _ = matrix_units.shape
    use_tiles(monkeypatch, MatrixTile(2 * m, 4 * n, m, n, 1, 1, 10, 1))


def image_of(gguf: Gguf, rgb: np.ndarray) -> EncodedImage:
    """Encode an image that need not be resized, in float16."""
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    size = rgb.shape[1::-1]
    with run_sync(VisionEncoder.load(gguf, vision, device(), "f16")) as encoder:
        return run_sync(encode_image(encoder, RgbImage(*size, rgb.tobytes()), *size))


def audio_of(gguf: Gguf, samples: np.ndarray) -> EncodedAudio:
    """Encode audio in float16."""
    with run_sync(AudioEncoder.load(gguf, audio_config(gguf), device(), "f16")) as encoder:
        return run_sync(encode_audio(encoder, samples.astype("<f4")))


def assert_close(encoded: EncodedImage | EncodedAudio, expected: np.ndarray) -> None:
    """Compare soft tokens: root mean square, relative. They are rounded, but not wrong."""
    found = get(encoded.tokens)
    encoded.close()
    error = np.sqrt(np.mean((found - expected.reshape(found.shape)) ** 2) / np.mean(expected**2))
    assert 1e-6 < error <= F16_SOFT_TOKENS


# Soft tokens


@on_units
@pytest.mark.parametrize("kind", KINDS)
def test_images_agree_with_the_reference(kind: str) -> None:
    tiny: TinyVision = KINDS[kind]
    gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(tiny))))
    rgb = tiny_image(tiny, *IMAGE_SIZES[0])
    encoder = vision_reference.VisionEncoder.from_gguf(gguf)
    assert_close(image_of(gguf, rgb), encoder.encode(patches(rgb, tiny.patch)))


@on_units
@pytest.mark.parametrize("clamped", [True, False])
def test_audio_agrees_with_the_reference(clamped: bool) -> None:
    gguf = audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO, clamped=clamped, format="F16"))
    encoder = audio_reference.AudioEncoder(audio_config(gguf), Weights(gguf))
    assert_close(audio_of(gguf, SAMPLES[:9000]), encoder.encode(SAMPLES[:9000]))


@on_units
@needs_shared
@pytest.mark.parametrize(
    ("name", "marker"), [("image240x192", 20), ("audio24000", 21), ("audio40123", 21)]
)
def test_soft_tokens_and_greedy_ids_of_transformers(name: str, marker: int) -> None:
    folder = SHARED / "mm"
    ids, greedy = (
        [int(word) for word in (folder / f"{name}.{kind}.txt").read_text().split()]
        for kind in ("ids", "greedy")
    )
    media: EncodedImage | EncodedAudio
    with Gguf.open(folder / "mmproj-mm-f16.gguf") as mmproj:
        if name.startswith("image"):
            rgb = np.fromfile(folder / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
            media = image_of(mmproj, rgb)
        else:
            media = audio_of(mmproj, np.fromfile(folder / f"audio-{name[5:]}.f32", "<f4"))
    with Gguf.open(folder / "mm-f16.gguf") as gguf:
        model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
        session = Session(model, 256, kv="f32", precision="exact")
        soft = [SoftTokens(ids.index(marker), media.tokens, 1)]
        tokens = iterate_sync(session.generate(ids, resolve({"temperature": 0}), 0, soft))
        assert [sampled.token for sampled in islice(tokens, len(greedy))] == greedy
        session.close()
        model.close()
    assert_close(media, np.load(folder / f"{name}.embd.npy"))


@on_units
@pytest.mark.parametrize("precision", ["f16", "int16"])
def test_images_are_encoded_in_the_precision_of_the_model(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set()
    call = Recorder.call

    def recorded(self: Recorder, op: str, grid: Any, **arguments: Any) -> Any:
        called.add(op)
        return call(self, op, grid, **arguments)

    path, mmproj = tmp_path / "small.gguf", tmp_path / "small.mmproj"
    path.write_bytes(tiny_gguf(SMALL_TEXT))
    mmproj.write_bytes(vision_gguf(SMALL))
    rgb = tiny_image(SMALL, 2, 1)
    with Gemma.load(
        path, "gpu", gpu="dawn", precision=precision, mmproj=mmproj, context=64
    ) as gemma:
        monkeypatch.setattr(Recorder, "call", recorded)
        image = RgbImage(*rgb.shape[1::-1], rgb.tobytes())
        run_sync(gemma._engine.encoders.encode_image(image, None))
    assert ("vision_attention_matrix_units" in called) == (precision == "f16")
    assert ("attention_prefill" in called) == (precision == "int16")


# What is computed there, with the shapes of Gemma and the matrices of an NVIDIA GPU

E2B = VisionConfig(768, 3, 12, 3072, 16, 3, 64, 1536, clipped=True, standardised=False)
OF_31B = VisionConfig(1152, 3, 16, 4304, 16, 3, 64, 2816, clipped=False, standardised=True)
CONFORMER = AudioConfig(width=1024, layers=3, heads=8, ffn=4096, features=1536, output=1536)
LINEARS = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
VISION_LAYER = [
    "matmul/F16 epilogue=none tiled_product=matrix_units",  # queries, keys and values
    "vision_heads pair=f16",
    "vision_attention_matrix_units pair=f16",
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "residual added=one next_norms=whole store_whole=half",
    "matmul/F16 epilogue=none tiled_product=matrix_units",  # gate and up
    "round_f16 row_source=geglu",
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "residual added=one next_norms=whole store_whole=half",
]
FEED_FORWARD = [
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "round_f16 row_source=silu",
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "audio_residual store_whole=half",
]
AUDIO_LAYER = [
    *FEED_FORWARD,
    "matmul/F16 epilogue=none tiled_product=matrix_units",  # queries, keys and values
    "audio_attention",  # over twelve positions, in float32: 0.2 % of the multiplications
    "round_f16 row_source=plain",
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "audio_residual store_whole=half",
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "light_conv store_whole=half",
    "matmul/F16 epilogue=none tiled_product=matrix_units",
    "audio_residual store_whole=half",
    *FEED_FORWARD,
]
# Products elsewhere that are computed in float32: a hundredth of all.
CONVOLUTIONS = {"mel", "mel_conv", "audio_conv"}


def h200() -> NullDevice:
    """Return a device that records for matrices of 16 x 16, and computes nothing."""
    limits = Limits(1 << 31, 1 << 31, 48 << 10, 1024, 65535)
    made = NullDevice(frozenset({"subgroup-matrix", "shuffle32", "packed-dots"}), limits)
    made.subgroup_sizes, made.matrix_shapes = (32, 32), (MatrixShape(16, 16, 16),)
    return made


def blank_gguf(specs: Iterable[TensorSpec], linears: Iterable[str] = ()) -> Gguf:
    """Return a file of zeros in float16, and of the same bounds for all of these linears."""
    tensors = []
    for name, shape, needed in specs:
        bound = name.endswith(("_min", "_max"))
        if bound:
            value = -30.0 if name.endswith("_min") else 30.0
            tensors.append(NewTensor(name, shape, "F32", np.float32(value).tobytes()))
        elif needed:
            format, nbytes = ("F16", 2) if len(shape) > 1 else ("F32", 4)
            tensors.append(NewTensor(name, shape, format, bytes(nbytes * prod(shape))))
    for name, (end, value) in product(linears, (("min", -30.0), ("max", 30.0))):
        for side in ("input", "output"):
            data = np.float32(value).tobytes()
            tensors.append(NewTensor(f"{name}.{side}_{end}", (1,), "F32", data))
    data = gguf_bytes({"general.architecture": "clip"}, tensors)
    return run_sync(Gguf.aopen(BytesSource(data, "blank.gguf")))


def stages_of(gpu: NullDevice) -> list[list[str]]:
    """Return the kernels of every stage, without what the device decides, until they are freed."""
    decided = ("team=", "workgroup_", "lane_sum=")
    return [
        [
            " ".join(word for word in call.name.split() if not word.startswith(decided))
            for call in plan.dispatches
            if call.name != "sum_splits"
        ]
        for plan in gpu.plans
    ]


@pytest.mark.parametrize(("vision", "clamp"), [(E2B, "clamp"), (OF_31B, "none")])
def test_products_and_attention_of_vision_encoders(vision: VisionConfig, clamp: str) -> None:
    gpu = h200()
    layers = range(vision.layers if vision.clipped else 0)
    linears = [f"v.blk.{index}.{linear}" for index in layers for linear in LINEARS]
    gguf = blank_gguf(vision_tensors(vision), linears)
    with run_sync(VisionEncoder.load(gguf, vision, gpu, "f16")) as encoder:
        gpu.plans.clear()
        image = RgbImage(912, 672, bytes(3 * 912 * 672))
        run_sync(encode_image(encoder, image, 912, 672)).close()
        first, _, layer, last = stages_of(gpu)
    expected = list(VISION_LAYER)
    for at in (3, 5, 7):  # queries, keys and values are clamped later
        expected[at] = expected[at].replace("none", clamp)
    assert layer == expected
    assert sum("matrix_units" in name for name in first) == 1  # the patches
    assert (
        sum("matrix_units" in name for name in last) == 6
    )  # attention, products and the projection
    assert not any("slices" in name for name in first + last)


def test_products_of_the_audio_encoder() -> None:
    gpu = h200()
    gguf = blank_gguf(audio_tensors(CONFORMER))
    with run_sync(AudioEncoder.load(gguf, CONFORMER, gpu, "f16")) as encoder:
        gpu.plans.clear()
        run_sync(encode_audio(encoder, bytes(4 * SEGMENT_SAMPLES))).close()
        first, _, layer, last = stages_of(gpu)
    assert layer == AUDIO_LAYER
    assert sum("matrix_units" in name for name in first) == 1
    assert sum("matrix_units" in name for name in last) == 8 + 2  # and two projections
    assert not any("slices" in name for name in first + last)
    assert {name.split()[0] for name in first} > CONVOLUTIONS


def test_norms_beyond_float16_are_attended_to_in_float32() -> None:
    """Queries and keys are normed: these weights bound them."""
    gpu = h200()
    gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(SMALL))))
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with run_sync(VisionEncoder.load(gguf, vision, gpu, "f16")) as encoder:
        root = (vision.width // vision.heads) ** 0.5
        assert root <= encoder.largest_head <= 1.2 * root
        encoder.largest_head = 7e4
        image = RgbImage(24, 12, bytes(3 * 24 * 12))
        run_sync(encode_image(encoder, image, 24, 12)).close()
        names = {name.split()[0] for stage in stages_of(gpu) for name in stage}
    assert "vision_attention" in names
    assert "vision_attention_matrix_units" not in names
