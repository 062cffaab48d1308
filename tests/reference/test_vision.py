"""Reference vision encoder against transformers: soft tokens, and logits of a text with them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.tiny import LARGE, MOE, SMALL, Tiny, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_vision import (
    EMBEDDER,
    IMAGE_SIZES,
    LARGE_VISION,
    SMALL_VISION,
    TinyVision,
    tiny_image,
    vision_gguf,
    vision_metadata,
    vision_weights,
)
from tolerance import (
    LOGITS_INCREMENTAL,
    POOLED_OF_TRANSFORMERS,
    SOFT_LOGITS_OF_TRANSFORMERS,
    SOFT_TOKENS_OF_TRANSFORMERS,
)

from webgemma import GgufError, InputError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.images import RgbImage
from webgemma.reference.images import patches, pixel_values
from webgemma.reference.text import Cache, Soft, TextModel
from webgemma.reference.vision import BOUNDS, CLIPPED_LINEARS, VisionEncoder
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

KINDS = {
    "small": (SMALL, SMALL_VISION),
    "large": (MOE, LARGE_VISION),
    "embedder": (LARGE, EMBEDDER),
}
PLACEHOLDER = 14  # <|image|>


def opened(data: bytes) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def encoder_of(data: bytes) -> VisionEncoder:
    return VisionEncoder.from_gguf(opened(data))


def text_of(data: bytes) -> TextModel:
    gguf = opened(data)
    return TextModel(Config.from_gguf(gguf), Weights(gguf))


def encode_images(vision: TinyVision, data: bytes | None = None) -> list[np.ndarray]:
    """Return the soft tokens of each recorded image."""
    encoder = encoder_of(data or vision_gguf(vision))
    return [
        encoder.encode(patches(tiny_image(vision, *size), vision.patch)) for size in IMAGE_SIZES
    ]


def soft_tokens(ids: list[int], encoded: list[np.ndarray]) -> list[Soft]:
    first = [at for at in range(1, len(ids)) if ids[at] == PLACEHOLDER != ids[at - 1]]
    return [Soft(at, rows, image=True) for at, rows in zip(first, encoded, strict=True)]


def greedy(model: TextModel, ids: list[int], soft: list[Soft], count: int) -> list[int]:
    cache = Cache(model.config)
    logits = model.forward(ids, cache, soft=soft, last_only=True)
    tokens = []
    while len(tokens) < count:
        tokens.append(int(logits[-1].argmax()))
        logits = model.forward(tokens[-1:], cache)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_encoders_agree_with_transformers(kind: str) -> None:
    tiny, vision = KINDS[kind]
    recorded = np.load(FIXTURES / "mm" / f"{kind}_vision.npz")
    encoded = encode_images(vision)
    np.testing.assert_allclose(
        np.concatenate(encoded), recorded["soft"], rtol=0, atol=SOFT_TOKENS_OF_TRANSFORMERS
    )
    model, ids = text_of(tiny_gguf(tiny)), recorded["ids"].tolist()
    soft = soft_tokens(ids, encoded)
    np.testing.assert_allclose(
        model.forward(ids, soft=soft), recorded["logits"], rtol=0, atol=SOFT_LOGITS_OF_TRANSFORMERS
    )
    assert greedy(model, ids, soft, len(recorded["greedy"])) == recorded["greedy"].tolist()


@needs_shared
def test_the_mmproj_of_llama_cpp_agrees_with_transformers() -> None:
    folder = SHARED / "mm"
    recorded = {
        name: np.load(folder / f"image240x192.{name}.npy")
        for name in ("pixel_values", "vision_pooled", "embd", "logits")
    }
    ids, expected = (
        [int(word) for word in (folder / f"image240x192.{name}.txt").read_text().split()]
        for name in ("ids", "greedy")
    )
    with Gguf.open(folder / "mmproj-mm-f16.gguf") as mmproj, Gguf.open(folder / "mm-f16.gguf") as g:
        encoder = VisionEncoder.from_gguf(mmproj)
        rgb = (folder / "image-240x192.rgb").read_bytes()
        pixels = pixel_values(RgbImage(240, 192, rgb), encoder.vision, resized=False)
        np.testing.assert_array_equal(pixels.reshape(180, 768), recorded["pixel_values"])
        atol = POOLED_OF_TRANSFORMERS * np.abs(recorded["vision_pooled"]).max()
        np.testing.assert_allclose(
            encoder.pooled(pixels), recorded["vision_pooled"], rtol=0, atol=atol
        )
        encoded = encoder.encode(pixels)
        np.testing.assert_allclose(
            encoded, recorded["embd"], rtol=0, atol=SOFT_TOKENS_OF_TRANSFORMERS
        )
        model = TextModel(Config.from_gguf(g), Weights(g))
        soft = [Soft(ids.index(20), encoded, image=True)]
        np.testing.assert_allclose(
            model.forward(ids, soft=soft),
            recorded["logits"],
            rtol=0,
            atol=SOFT_LOGITS_OF_TRANSFORMERS,
        )
        assert greedy(model, ids, soft, len(expected)) == expected


def single_file(tiny: Tiny, vision: TinyVision, tensors: list[NewTensor]) -> bytes:
    metadata = tiny_metadata(tiny) | vision_metadata(vision, "gemma4.")
    return gguf_bytes(metadata, [*tiny_tensors(tiny), *tensors])


def clamp_data(bounds: Mapping[str, float]) -> NewTensor:
    names = [
        f"v.blk.{index}.{part}" for index in range(SMALL_VISION.layers) for part in CLIPPED_LINEARS
    ]
    values = [bounds.get(f"{name}.{bound}", 0) for name in [*names, "mm.input"] for bound in BOUNDS]
    return NewTensor("v.clamp_data", (len(values),), "F32", np.array(values, "<f4").tobytes())


def test_clamp_data_in_a_file_of_ollama_equals_scalar_bounds() -> None:
    bounds = {
        tensor.name: float(np.frombuffer(tensor.data, "<f4")[0])
        for tensor in vision_weights(SMALL_VISION)
        if tensor.name.endswith(BOUNDS)
    }
    plain = [tensor for tensor in vision_weights(SMALL_VISION) if tensor.name not in bounds]
    expected = encode_images(SMALL_VISION)
    packed = single_file(SMALL, SMALL_VISION, [*plain, clamp_data(bounds)])
    for one, other in zip(encode_images(SMALL_VISION, packed), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    both = single_file(SMALL, SMALL_VISION, [*vision_weights(SMALL_VISION), clamp_data({})])
    # Four zeros leave the scalar bounds in force.
    np.testing.assert_array_equal(encode_images(SMALL_VISION, both)[0], expected[0])
    unclipped = single_file(SMALL, SMALL_VISION, plain)
    assert np.abs(encode_images(SMALL_VISION, unclipped)[0] - expected[0]).max() > 0.1
    assert Config.from_gguf(opened(packed)) == Config.from_gguf(opened(tiny_gguf(SMALL)))


def test_a_missing_bound_is_infinite() -> None:
    kept = [t for t in vision_weights(SMALL_VISION) if not t.name.endswith(BOUNDS)]
    wide = [
        NewTensor(f"v.blk.0.attn_q.{bound}", (1,), "F32", np.float32(value).tobytes())
        for bound, value in zip(BOUNDS, (-1e9, 1e9, -1e9, 1e9), strict=True)
    ]
    files = [single_file(SMALL, SMALL_VISION, [*kept, *some]) for some in (wide, wide[1:2])]
    np.testing.assert_array_equal(
        encode_images(SMALL_VISION, files[0])[0], encode_images(SMALL_VISION, files[1])[0]
    )


def test_the_output_scale_of_a_layer_is_applied() -> None:
    tensors = vision_weights(LARGE_VISION)
    last = f"v.blk.{LARGE_VISION.layers - 1}.out_scale.weight"
    half = NewTensor(last, (1,), "F32", np.float32(0.5).tobytes())
    metadata = {"general.architecture": "clip", **vision_metadata(LARGE_VISION, "clip.")}
    plain = [t for t in tensors if not t.name.startswith("v.std")]
    pixels = patches(tiny_image(LARGE_VISION, 2, 1), LARGE_VISION.patch)
    halved = encoder_of(gguf_bytes(metadata, [*plain, half])).pooled(pixels)
    np.testing.assert_allclose(
        2 * halved, encoder_of(gguf_bytes(metadata, plain)).pooled(pixels), rtol=1e-6
    )


def test_images_and_text_in_two_calls_equal_one() -> None:
    recorded = np.load(FIXTURES / "mm" / "large_vision.npz")
    model, ids = text_of(tiny_gguf(MOE)), recorded["ids"].tolist()
    soft = soft_tokens(ids, encode_images(LARGE_VISION))
    cut = soft[1].first - 2
    cache = Cache(model.config)
    first = model.forward(ids[:cut], cache, soft=soft[:1])
    second = soft[1]._replace(first=soft[1].first - cut)
    rest = model.forward(ids[cut:], cache, soft=[second])
    np.testing.assert_allclose(
        np.concatenate([first, rest]), recorded["logits"], rtol=0, atol=SOFT_LOGITS_OF_TRANSFORMERS
    )


@pytest.mark.parametrize(("tiny", "both_ways"), [(SMALL, False), (LARGE, True)])
def test_image_tokens_attend_to_later_ones_only_in_large_models(
    tiny: Tiny, both_ways: bool
) -> None:
    model = text_of(tiny_gguf(tiny))
    rows = np.random.default_rng(1).standard_normal((5, tiny.width), np.float32)
    other = rows.copy()
    other[-1] += 1
    ids = [2, 30, *[PLACEHOLDER] * 5, 31]

    def first_row_changes(image: bool) -> bool:
        one, two = (model.forward(ids, soft=[Soft(2, r, image)])[2] for r in (rows, other))
        finite = np.isfinite(one)
        return bool(np.abs(one[finite] - two[finite]).max() > LOGITS_INCREMENTAL)

    assert first_row_changes(image=True) == both_ways
    assert not first_row_changes(image=False)  # audio is causal in all models


@pytest.mark.parametrize(
    "soft",
    [
        Soft(-1, np.zeros((1, 64), "f4")),
        Soft(3, np.zeros((2, 64), "f4")),
        Soft(0, np.zeros((1, 32), "f4")),
    ],
)
def test_soft_tokens_that_do_not_fit_raise_an_error(soft: Soft) -> None:
    with pytest.raises(InputError, match="do not fit"):
        text_of(tiny_gguf(SMALL)).forward([2, 3, 4, 5], soft=[soft])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 48), "multiple of 3 patches"),
        ((3, 18, 48), "at most 16"),
        ((3, 3, 27), "must be"),
        ((9, 48), "must be"),
        ((0, 3, 48), "must be"),
    ],
)
def test_images_that_do_not_fit_raise_an_error(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encoder_of(vision_gguf(SMALL_VISION)).encode(np.zeros(shape, np.float32))


def changed(name: str, tensor: NewTensor | None) -> bytes:
    metadata = {"general.architecture": "clip", **vision_metadata(SMALL_VISION, "clip.")}
    kept = [t for t in vision_weights(SMALL_VISION) if t.name != name]
    return gguf_bytes(metadata, kept + ([tensor] if tensor else []))


def floats(name: str, *shape: int, value: float = 1.0) -> NewTensor:
    return NewTensor(name, shape, "F32", np.full(shape, value, "<f4").tobytes())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("v.blk.1.ffn_up.weight", None, "v.blk.1.ffn_up.weight is missing"),
        ("v.patch_embd.weight", floats("v.patch_embd.weight", 48, 64), "needs 4 x 4 x 3 x 64"),
        ("v.blk.0.ln1.weight", floats("v.blk.0.ln1.weight", 32), "needs 64"),
        ("", floats("v.clamp_data", 8), "four for each of 15 linears"),
    ],
)
def test_a_damaged_encoder_raises_an_error(name: str, tensor: NewTensor, message: str) -> None:
    with pytest.raises(GgufError, match=message):
        encoder_of(changed(name, tensor))


def test_weights_that_are_not_finite_raise_an_error() -> None:
    data = changed("v.blk.0.ln1.weight", floats("v.blk.0.ln1.weight", 64, value=np.nan))
    with pytest.raises(GgufError, match="NaN"):
        encode_images(SMALL_VISION, data)


def test_heads_that_do_not_divide_the_width_raise_an_error() -> None:
    with pytest.raises(GgufError, match="3 heads"):
        encoder_of(vision_gguf(replace(SMALL_VISION, heads=3)))


def test_a_file_without_vision_encoder_raises_an_error() -> None:
    with pytest.raises(InputError, match="has no vision encoder"):
        encoder_of(tiny_gguf(SMALL))
