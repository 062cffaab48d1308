"""The vision tower against transformers: soft tokens, and what the text model makes of them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.tiny import LARGE, MOE, SMALL, Tiny, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_eyes import (
    EMBEDDER,
    LARGE_EYES,
    PICTURES,
    SMALL_EYES,
    Eyes,
    eyes_gguf,
    eyes_metadata,
    eyes_tensors,
    picture,
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
from webgemma.reference.pictures import patches, pixel_values
from webgemma.reference.text import Cache, Soft, TextModel
from webgemma.reference.vision import BOUNDS, CLAMPED, VisionModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

KINDS = {"small": (SMALL, SMALL_EYES), "large": (MOE, LARGE_EYES), "embedder": (LARGE, EMBEDDER)}
PLACE = 14  # <|image|>


def opened(data: bytes) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def tower_of(data: bytes) -> VisionModel:
    return VisionModel.from_gguf(opened(data))


def text_of(data: bytes) -> TextModel:
    gguf = opened(data)
    return TextModel(Config.from_gguf(gguf), Weights(gguf))


def see(eyes: Eyes, data: bytes | None = None) -> list[np.ndarray]:
    """The soft tokens of each picture of the truth."""
    tower = tower_of(data or eyes_gguf(eyes))
    return [tower.encode(patches(picture(eyes, *size), eyes.patch)) for size in PICTURES]


def places(ids: list[int], seen: list[np.ndarray]) -> list[Soft]:
    first = [at for at in range(1, len(ids)) if ids[at] == PLACE != ids[at - 1]]
    return [Soft(at, rows, picture=True) for at, rows in zip(first, seen, strict=True)]


def greedy(model: TextModel, ids: list[int], soft: list[Soft], count: int) -> list[int]:
    cache = Cache(model.config)
    logits = model.forward(ids, cache, soft=soft, last_only=True)
    tokens = []
    while len(tokens) < count:
        tokens.append(int(logits[-1].argmax()))
        logits = model.forward(tokens[-1:], cache)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_eyes_agree_with_transformers(kind: str) -> None:
    tiny, eyes = KINDS[kind]
    truth = np.load(FIXTURES / "mm" / f"{kind}_eyes.npz")
    seen = see(eyes)
    np.testing.assert_allclose(
        np.concatenate(seen), truth["soft"], rtol=0, atol=SOFT_TOKENS_OF_TRANSFORMERS
    )
    model, ids = text_of(tiny_gguf(tiny)), truth["ids"].tolist()
    soft = places(ids, seen)
    np.testing.assert_allclose(
        model.forward(ids, soft=soft), truth["logits"], rtol=0, atol=SOFT_LOGITS_OF_TRANSFORMERS
    )
    assert greedy(model, ids, soft, len(truth["greedy"])) == truth["greedy"].tolist()


@needs_shared
def test_llama_cpps_mmproj_agrees_with_transformers() -> None:
    folder = SHARED / "mm"
    truth = {
        name: np.load(folder / f"image240x192.{name}.npy")
        for name in ("pixel_values", "vision_pooled", "embd", "logits")
    }
    ids, wanted = (
        [int(word) for word in (folder / f"image240x192.{name}.txt").read_text().split()]
        for name in ("ids", "greedy")
    )
    with Gguf.open(folder / "mmproj-mm-f16.gguf") as mmproj, Gguf.open(folder / "mm-f16.gguf") as g:
        tower = VisionModel.from_gguf(mmproj)
        rgb = (folder / "image-240x192.rgb").read_bytes()
        pixels = pixel_values(RgbImage(240, 192, rgb), tower.vision, resized=False)
        np.testing.assert_array_equal(pixels.reshape(180, 768), truth["pixel_values"])
        atol = POOLED_OF_TRANSFORMERS * np.abs(truth["vision_pooled"]).max()
        np.testing.assert_allclose(tower.pooled(pixels), truth["vision_pooled"], rtol=0, atol=atol)
        seen = tower.encode(pixels)
        np.testing.assert_allclose(seen, truth["embd"], rtol=0, atol=SOFT_TOKENS_OF_TRANSFORMERS)
        model = TextModel(Config.from_gguf(g), Weights(g))
        soft = [Soft(ids.index(20), seen, picture=True)]
        np.testing.assert_allclose(
            model.forward(ids, soft=soft), truth["logits"], rtol=0, atol=SOFT_LOGITS_OF_TRANSFORMERS
        )
        assert greedy(model, ids, soft, len(wanted)) == wanted


def single_file(tiny: Tiny, eyes: Eyes, tensors: list[NewTensor]) -> bytes:
    metadata = tiny_metadata(tiny) | eyes_metadata(eyes, "gemma4.")
    return gguf_bytes(metadata, [*tiny_tensors(tiny), *tensors])


def clamp_data(bounds: Mapping[str, float]) -> NewTensor:
    names = [f"v.blk.{index}.{part}" for index in range(SMALL_EYES.layers) for part in CLAMPED]
    values = [bounds.get(f"{name}.{bound}", 0) for name in [*names, "mm.input"] for bound in BOUNDS]
    return NewTensor("v.clamp_data", (len(values),), "F32", np.array(values, "<f4").tobytes())


def test_ollamas_file_in_one_with_clamps_in_one() -> None:
    bounds = {
        tensor.name: float(np.frombuffer(tensor.data, "<f4")[0])
        for tensor in eyes_tensors(SMALL_EYES)
        if tensor.name.endswith(BOUNDS)
    }
    plain = [tensor for tensor in eyes_tensors(SMALL_EYES) if tensor.name not in bounds]
    wanted = see(SMALL_EYES)
    packed = single_file(SMALL, SMALL_EYES, [*plain, clamp_data(bounds)])
    for one, other in zip(see(SMALL_EYES, packed), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    both = single_file(SMALL, SMALL_EYES, [*eyes_tensors(SMALL_EYES), clamp_data({})])
    np.testing.assert_array_equal(see(SMALL_EYES, both)[0], wanted[0])  # zeros leave the scalars
    unclipped = single_file(SMALL, SMALL_EYES, plain)
    assert np.abs(see(SMALL_EYES, unclipped)[0] - wanted[0]).max() > 0.1
    assert Config.from_gguf(opened(packed)) == Config.from_gguf(opened(tiny_gguf(SMALL)))


def test_a_missing_bound_is_none() -> None:
    kept = [t for t in eyes_tensors(SMALL_EYES) if not t.name.endswith(BOUNDS)]
    wide = [
        NewTensor(f"v.blk.0.attn_q.{bound}", (1,), "F32", np.float32(value).tobytes())
        for bound, value in zip(BOUNDS, (-1e9, 1e9, -1e9, 1e9), strict=True)
    ]
    files = [single_file(SMALL, SMALL_EYES, [*kept, *some]) for some in (wide, wide[1:2])]
    np.testing.assert_array_equal(see(SMALL_EYES, files[0])[0], see(SMALL_EYES, files[1])[0])


def test_a_layers_scale() -> None:
    tensors = eyes_tensors(LARGE_EYES)
    last = f"v.blk.{LARGE_EYES.layers - 1}.out_scale.weight"
    half = NewTensor(last, (1,), "F32", np.float32(0.5).tobytes())
    metadata = {"general.architecture": "clip", **eyes_metadata(LARGE_EYES, "clip.")}
    plain = [t for t in tensors if not t.name.startswith("v.std")]
    pixels = patches(picture(LARGE_EYES, 2, 1), LARGE_EYES.patch)
    halved = tower_of(gguf_bytes(metadata, [*plain, half])).pooled(pixels)
    np.testing.assert_allclose(
        2 * halved, tower_of(gguf_bytes(metadata, plain)).pooled(pixels), rtol=1e-6
    )


def test_pictures_and_text_in_pieces_as_in_one() -> None:
    truth = np.load(FIXTURES / "mm" / "large_eyes.npz")
    model, ids = text_of(tiny_gguf(MOE)), truth["ids"].tolist()
    soft = places(ids, see(LARGE_EYES))
    cut = soft[1].first - 2
    cache = Cache(model.config)
    first = model.forward(ids[:cut], cache, soft=soft[:1])
    second = soft[1]._replace(first=soft[1].first - cut)
    rest = model.forward(ids[cut:], cache, soft=[second])
    np.testing.assert_allclose(
        np.concatenate([first, rest]), truth["logits"], rtol=0, atol=SOFT_LOGITS_OF_TRANSFORMERS
    )


@pytest.mark.parametrize(("tiny", "both_ways"), [(SMALL, False), (LARGE, True)])
def test_who_sees_what_comes_later(tiny: Tiny, both_ways: bool) -> None:
    """The last soft token of a picture changes what stands before it only in the large models."""
    model = text_of(tiny_gguf(tiny))
    rows = np.random.default_rng(1).standard_normal((5, tiny.width), np.float32)
    other = rows.copy()
    other[-1] += 1
    ids = [2, 30, *[PLACE] * 5, 31]

    def first_row_moved(picture: bool) -> bool:
        one, two = (model.forward(ids, soft=[Soft(2, r, picture)])[2] for r in (rows, other))
        finite = np.isfinite(one)
        return bool(np.abs(one[finite] - two[finite]).max() > LOGITS_INCREMENTAL)

    assert first_row_moved(picture=True) == both_ways
    assert not first_row_moved(picture=False)  # sound never does


@pytest.mark.parametrize(
    "soft",
    [
        Soft(-1, np.zeros((1, 64), "f4")),
        Soft(3, np.zeros((2, 64), "f4")),
        Soft(0, np.zeros((1, 32), "f4")),
    ],
)
def test_soft_tokens_that_do_not_fit(soft: Soft) -> None:
    with pytest.raises(InputError, match="do not fit"):
        text_of(tiny_gguf(SMALL)).forward([2, 3, 4, 5], soft=[soft])


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((2, 3, 48), "multiple of 3 patches"),
        ((3, 18, 48), "at most 16"),
        ((3, 3, 27), "must be"),
        ((9, 48), "must be"),
        ((0, 3, 48), "must be"),
    ],
)
def test_pictures_that_do_not_fit(shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        tower_of(eyes_gguf(SMALL_EYES)).encode(np.zeros(shape, np.float32))


def changed(name: str, tensor: NewTensor | None) -> bytes:
    metadata = {"general.architecture": "clip", **eyes_metadata(SMALL_EYES, "clip.")}
    kept = [t for t in eyes_tensors(SMALL_EYES) if t.name != name]
    return gguf_bytes(metadata, kept + ([tensor] if tensor else []))


def floats(name: str, *shape: int, value: float = 1.0) -> NewTensor:
    return NewTensor(name, shape, "F32", np.full(shape, value, "<f4").tobytes())


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("v.blk.1.ffn_up.weight", None, "v.blk.1.ffn_up.weight is missing"),
        ("v.patch_embd.weight", floats("v.patch_embd.weight", 48, 64), "needs 4 x 4 x 3 x 64"),
        ("v.blk.0.ln1.weight", floats("v.blk.0.ln1.weight", 32), "needs 64"),
        ("", floats("v.clamp_data", 8), "four for each of 15 linears"),
    ],
)
def test_a_damaged_tower_gets_a_sentence(name: str, tensor: NewTensor, sentence: str) -> None:
    with pytest.raises(GgufError, match=sentence):
        tower_of(changed(name, tensor))


def test_weights_that_are_not_finite_get_a_sentence() -> None:
    data = changed("v.blk.0.ln1.weight", floats("v.blk.0.ln1.weight", 64, value=np.nan))
    with pytest.raises(GgufError, match="NaN"):
        see(SMALL_EYES, data)


def test_heads_that_cannot_be_turned_get_a_sentence() -> None:
    with pytest.raises(GgufError, match="3 heads"):
        tower_of(eyes_gguf(replace(SMALL_EYES, heads=3)))


def test_a_model_without_eyes_says_so() -> None:
    with pytest.raises(InputError, match="cannot see"):
        tower_of(tiny_gguf(SMALL))
