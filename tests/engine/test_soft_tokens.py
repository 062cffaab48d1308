"""Images and audio in a prompt on the GPU: logits and greedy ids against transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device, put
from helpers.tiny import LARGE, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_vision import (
    EMBEDDER,
    IMAGE_SIZES,
    LARGE_VISION,
    SMALL_VISION,
    TinyVision,
    tiny_image,
    vision_gguf,
)
from tolerance import GPU_SOFT_LOGITS

from webgemma import InputError
from webgemma.engine.session import Session
from webgemma.gemma.audio import AudioEncoder, EncodedAudio, encode_audio
from webgemma.gemma.config import Config
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.soft_tokens import SoftTokens, marked
from webgemma.gemma.vision import EncodedImage, VisionEncoder, encode_image
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

KINDS = {
    "small": (SMALL, SMALL_VISION),
    "large": (MOE, LARGE_VISION),
    "embedder": (LARGE, EMBEDDER),
}
IMAGE = 14  # <|image|>
GREEDY = resolve({"temperature": 0})


def opened(data: bytes) -> Gguf:
    """Open the bytes of a file."""
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def encoded_images(gguf: Gguf, images: list[np.ndarray]) -> list[EncodedImage]:
    """Encode images that need not be resized."""
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with run_sync(VisionEncoder.load(gguf, vision, device())) as encoder:
        sizes = [rgb.shape[1::-1] for rgb in images]
        return [
            run_sync(encode_image(encoder, RgbImage(*size, rgb.tobytes()), *size))
            for size, rgb in zip(sizes, images, strict=True)
        ]


@contextmanager
def session_of(gguf: Gguf, **options: str) -> Iterator[Session]:
    """Load a model and open a session on it."""
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 256, kv="f32", precision="exact", **options)
    yield session
    session.close()
    model.close()


def soft_tokens(
    ids: list[int], images: list[EncodedImage], bidirectional: bool
) -> list[SoftTokens]:
    """Return the soft tokens of each run of <|image|> in a prompt."""
    first = [at for at in range(1, len(ids)) if ids[at] == IMAGE != ids[at - 1]]
    pairs = enumerate(zip(first, images, strict=True))
    return [SoftTokens(at, image.tokens, number, bidirectional) for number, (at, image) in pairs]


def generated(session: Session, ids: list[int], soft: list[SoftTokens], count: int) -> list[int]:
    """Return the first tokens of a greedy generation."""
    tokens = session.generate(ids, GREEDY, 0, soft)
    return [sampled.token for sampled in islice(iterate_sync(tokens), count)]


def assert_logits(logits: np.ndarray, expected: np.ndarray) -> None:
    finite = np.isfinite(logits)
    np.testing.assert_array_equal(finite, np.isfinite(expected))
    assert np.abs(logits[finite] - expected[finite]).max() <= GPU_SOFT_LOGITS


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_transformers(kind: str) -> None:
    tiny: Tiny
    vision: TinyVision
    tiny, vision = KINDS[kind]
    recorded = np.load(FIXTURES / "mm" / f"{kind}_vision.npz")
    ids, greedy = recorded["ids"].tolist(), recorded["greedy"].tolist()
    pixels = [tiny_image(vision, *size) for size in IMAGE_SIZES]
    images = encoded_images(opened(vision_gguf(vision)), pixels)
    with session_of(opened(tiny_gguf(tiny))) as session:
        soft = soft_tokens(ids, images, session.model.config.bidirectional_images)
        logits = np.frombuffer(run_sync(session.logits(ids, soft)), np.float32)
        logits = logits.reshape(recorded["logits"].shape)
        assert_logits(logits, recorded["logits"])
        assert generated(session, ids, soft, len(greedy)) == greedy
        assert session.reusable(session.tokens[: len(ids)], soft) == len(ids) - 1
        assert generated(session, ids, soft, len(greedy)) == greedy  # from the cache
        other = [replace(each, digest=each.digest + 7) for each in soft]
        assert session._agreed(marked(ids, other)) == soft[0].first
        assert generated(session, ids, other, len(greedy)) == greedy
        assert generated(session, ids, soft[:0], len(greedy)) != greedy
    for image in images:
        image.close()


@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize("chunk", [16, 13])
def test_prompts_in_chunks(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read bidirectional images whole, and split the others."""
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", chunk)
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 4, chunk))
    tiny, vision = KINDS[kind]
    recorded = np.load(FIXTURES / "mm" / f"{kind}_vision.npz")
    ids, greedy = recorded["ids"].tolist(), recorded["greedy"].tolist()
    pixels = [tiny_image(vision, *size) for size in IMAGE_SIZES]
    images = encoded_images(opened(vision_gguf(vision)), pixels)
    with session_of(opened(tiny_gguf(tiny))) as session:
        soft = soft_tokens(ids, images, session.model.config.bidirectional_images)
        assert generated(session, ids, soft, len(greedy)) == greedy
    for image in images:
        image.close()


def encoded_audio(gguf: Gguf, samples: np.ndarray) -> EncodedAudio:
    """Encode audio."""
    audio = EncoderConfigs.from_gguf(gguf).audio
    assert audio is not None
    with run_sync(AudioEncoder.load(gguf, audio, device())) as encoder:
        return run_sync(encode_audio(encoder, samples))


@needs_shared
@pytest.mark.parametrize(
    ("name", "marker"), [("image240x192", 20), ("audio24000", 21), ("audio40123", 21)]
)
def test_llama_cpps_files(name: str, marker: int) -> None:
    folder = SHARED / "mm"
    ids, greedy = (
        [int(word) for word in (folder / f"{name}.{kind}.txt").read_text().split()]
        for kind in ("ids", "greedy")
    )
    media: EncodedImage | EncodedAudio
    with Gguf.open(folder / "mmproj-mm-f16.gguf") as mmproj:
        if name.startswith("image"):
            rgb = np.fromfile(folder / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
            (media,) = encoded_images(mmproj, [rgb])
        else:
            media = encoded_audio(mmproj, np.fromfile(folder / f"audio-{name[5:]}.f32", np.float32))
    with Gguf.open(folder / "mm-f16.gguf") as gguf, session_of(gguf) as session:
        soft = [SoftTokens(ids.index(marker), media.tokens, 1)]
        expected = np.load(folder / f"{name}.logits.npy")
        logits = np.frombuffer(run_sync(session.logits(ids, soft)), np.float32)
        assert_logits(logits.reshape(expected.shape), expected)
        assert generated(session, ids, soft, len(greedy)) == greedy
    media.close()


def test_soft_tokens_that_do_not_fit_raise_an_error() -> None:
    with session_of(opened(tiny_gguf(SMALL))) as session:
        width = session.model.config.width

        def rows(count: int, columns: int = width) -> object:
            return put(np.zeros((count, columns), np.float32))

        for soft, message in (
            ([SoftTokens(0, rows(2, 8), 1)], "do not fit a model of"),
            ([SoftTokens(3, rows(2), 1)], "are not in their prompt"),
            ([SoftTokens(1, rows(2), 1), SoftTokens(2, rows(1), 2)], "are not in their prompt"),
            ([SoftTokens(0, rows(1200), 1, True)], "use a smaller budget"),
        ):
            ids = [2] * (1200 if "budget" in message else 4)
            with pytest.raises(InputError, match=message):
                run_sync(anext(session.generate(ids, GREEDY, 0, soft)))
