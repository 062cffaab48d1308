"""Images and audio that EmbeddingGemma 2 embeds: both engines, what is read, groups, refusals."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.questions import image, user
from helpers.tiny import EMBEDDING, EMBEDDING2, tiny_gguf
from helpers.tiny_audio import TINY_AUDIO, audio_metadata, audio_weights
from helpers.tiny_vision import SMALL_VISION, vision_metadata, vision_weights
from tolerance import GPU_VECTORS

from webgemma import Gemma, InputError, embeddings
from webgemma.embeddings import PREFIXES
from webgemma.errors import MissingEncoderError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import gguf_bytes
from webgemma.reference.embedding import EmbeddingModel
from webgemma.reference.text import Soft
from webgemma.reference.weights import Floats, Weights

TEXT = replace(EMBEDDING2, context=512)
VISION = replace(SMALL_VISION, positions=96)
AUDIO = replace(TINY_AUDIO, output=TEXT.width)
RNG = np.random.default_rng(6)
CAT = RNG.integers(0, 256, (30, 47, 3), np.uint8)
DOG = RNG.integers(0, 256, (64, 20, 3), np.uint8)
SOUND = RNG.uniform(-1, 1, 16000).astype(np.float32)
WITHIN = 3 * GPU_VECTORS["exact"]  # the encoders' own differences are added


def parts(*content: object) -> list[dict[str, Any]]:
    return user(*content)["content"]  # type: ignore[return-value]


def small(pixels: np.ndarray) -> dict[str, Any]:
    return image(pixels) | {"budget": 70}


SOUNDING = {"type": "audio", "audio": SOUND}
ITEMS = [
    "the inner",
    parts(small(CAT)),
    parts(SOUNDING),
    parts("the ", small(DOG), "thin end", SOUNDING, small(CAT)),
    [2, 40, 41],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedding")
    metadata = audio_metadata(AUDIO) | vision_metadata(VISION, "clip.")
    (path / "text.gguf").write_bytes(tiny_gguf(TEXT))
    (path / "first.gguf").write_bytes(tiny_gguf(EMBEDDING))
    tensors = [*vision_weights(VISION), *audio_weights(AUDIO)]
    (path / "mmproj.gguf").write_bytes(gguf_bytes(metadata, tensors))
    return path


def load(folder: Path, device: Any = "cpu", **options: Any) -> Gemma:
    options = {"precision": "exact", "mmproj": folder / "mmproj.gguf", **options}
    return Gemma.load(folder / "text.gguf", device, **options)


@pytest.fixture(scope="module")
def gemma(folder: Path) -> Iterator[Gemma]:
    with load(folder) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> Iterator[Gemma]:
    with load(folder, "gpu") as loaded:
        yield loaded


def defined(gemma: Gemma, folder: Path, text: str, *media: Any) -> Floats:
    """Return the vector as the model is defined: <bos>, media between their marks, the text."""
    special, ids, soft = gemma.tokenizer.special_ids, [gemma.tokenizer.bos], []
    for each in media:
        kind = "audio" if each.ndim == 1 else "image"
        rows = gemma.encode_audio(each) if each.ndim == 1 else gemma.encode_image(each, budget=70)
        soft.append(Soft(len(ids) + 1, rows))
        marks = [special[f"<|{kind}|>"]] * len(rows)
        ids += [special[f"<|{kind}>"], *marks, special[f"<{kind}|>"]]
    ids += gemma.tokenizer.encode(text)
    with Gguf.open(folder / "text.gguf") as gguf:
        return EmbeddingModel(gemma.config, Weights(gguf)).vector(ids, soft=soft)


def test_media_come_before_the_text(gemma: Gemma, folder: Path) -> None:
    found = gemma.embed(ITEMS)
    expected = [
        defined(gemma, folder, "the inner"),
        defined(gemma, folder, "", CAT),
        defined(gemma, folder, "", SOUND),
        defined(gemma, folder, "the thin end", DOG, SOUND, CAT),
    ]
    np.testing.assert_allclose(found[:4], expected, rtol=0, atol=1e-6)
    assert abs(found @ found.T - np.eye(5)).max() < 0.999  # no two alike


def test_both_engines_agree(gemma: Gemma, on_gpu: Gemma) -> None:
    """Packed with texts, in one pass and in several, in any order, and again."""
    expected = gemma.embed(ITEMS)
    for batch in (None, 64):
        np.testing.assert_allclose(on_gpu.embed(ITEMS, batch=batch), expected, rtol=0, atol=WITHIN)
    np.testing.assert_allclose(on_gpu.embed(ITEMS[::-1]), expected[::-1], rtol=0, atol=WITHIN)
    np.testing.assert_allclose(on_gpu.embed(ITEMS[:1]), expected[:1], rtol=0, atol=WITHIN)


def test_a_task_and_a_size(gemma: Gemma, folder: Path) -> None:
    found = gemma.embed([parts(small(CAT), "thin")], "query", 16)[0]
    whole = defined(gemma, folder, PREFIXES["query"] + "thin", CAT)[:16]
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole), rtol=0, atol=1e-6)


def test_parts_of_text_alone_are_the_text(gemma: Gemma) -> None:
    found = gemma.embed([parts("the ", "inner"), "the inner"])
    np.testing.assert_array_equal(found[0], found[1])


def test_many_are_encoded_in_groups(
    gemma: Gemma, on_gpu: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory holds the media of some; progress counts all."""
    expected, seen = gemma.embed(ITEMS), []
    monkeypatch.setattr(embeddings, "MEDIA_TOKENS", 40)
    before = on_gpu.memory_nbytes
    found = on_gpu.embed(ITEMS, progress=lambda done, total: seen.append((done, total)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=WITHIN)
    assert seen[-1] == (5, 5)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert on_gpu.memory_nbytes <= before + (1 << 20)


def test_it_can_be_awaited(on_gpu: Gemma) -> None:
    found = asyncio.run(on_gpu.aembed(ITEMS))
    np.testing.assert_array_equal(found, on_gpu.embed(ITEMS))


def test_a_long_text_is_cut_and_media_are_not(folder: Path) -> None:
    with load(folder, context=100) as gemma:
        with pytest.warns(UserWarning, match="Text 0 has more than 100 tokens"):
            found = gemma.embed([parts(small(CAT), "x" * 100)])
        # <bos>, 60 soft tokens and two marks leave 37 of the text.
        np.testing.assert_allclose(found[0], defined(gemma, folder, "x" * 37, CAT), atol=1e-6)
        with pytest.raises(InputError, match=r"Text 1 has images or audio of \d+ tokens, but"):
            gemma.embed(["", parts(small(CAT), small(DOG))])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (parts({"type": "video", "video": [CAT]}), r"Text 0\[0\].video is a video, which is not"),
        (parts({"type": "image"}), r"Text 0\[0\] has no image: give it"),
        (parts({"type": "image", "url": "https://host/a.png"}), "nothing is fetched from servers"),
        (parts({"type": "image", "path": "no/such.png"}), "no/such.png"),
        (parts(image(CAT) | {"budget": 71}), "71"),
        (parts({"type": "other"}), "Text 0 has no text and no media"),
        ([{"type": "text", "text": 5}], r"Text 0\[0\].text must be a string"),
        ([{"text": "a"}], r"Text 0\[0\].type"),
        ([*parts("a"), "b"], r"Text 0\[1\]"),
    ],
)
def test_what_cannot_be_embedded(item: Any, message: str, gemma: Gemma) -> None:
    with pytest.raises(InputError, match=message):
        gemma.embed([item])


def test_models_that_neither_see_nor_hear(folder: Path) -> None:
    with Gemma.load(folder / "first.gguf", "cpu") as first:
        with pytest.raises(InputError, match=r"Text 1 is a list .*first.* reads text only"):
            first.embed(["a", parts(small(CAT))])
        assert first.embed(["a"]).shape == (1, 64)
    with Gemma.load(folder / "text.gguf", "cpu") as second:
        for item, kind in ((small(CAT), "images"), (SOUNDING, "audio")):
            with pytest.raises(MissingEncoderError, match=f"cannot read {kind}"):
                second.embed([parts(item)])


def test_a_model_that_writes_does_not_embed_images() -> None:
    """It says so before anything is decoded."""
    with Gemma.load(device="cpu") as gemma, pytest.raises(InputError, match="does not embed"):
        gemma.embed([parts({"type": "image", "path": "no/such.png"})])
