"""Images in a chat on the GPU and the CPU: same replies, in order, each encoded once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.questions import image, reply, user
from helpers.store import add_model
from helpers.tiny import LARGE, MOE, SMALL, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_vision import (
    EMBEDDER,
    LARGE_VISION,
    SMALL_VISION,
    tiny_image,
    vision_gguf,
    vision_metadata,
    vision_weights,
)
from tolerance import GPU_SOFT_TOKENS

from webgemma import Gemma, InputError, ModelNotFoundError
from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import gguf_bytes
from webgemma.images import RgbImage
from webgemma.media.encoders import KEPT
from webgemma.reference.images import pixel_values
from webgemma.reference.vision import VisionEncoder

KINDS = {
    "small": (replace(SMALL, context=1024), replace(SMALL_VISION, positions=96)),
    "large": (replace(MOE, context=1024), replace(LARGE_VISION, positions=96)),
    "embedder": (replace(LARGE, context=1024), replace(EMBEDDER, positions=96)),
}
DEVICES = ("gpu", "cpu")
EXACT = {"kv": "f32", "precision": "exact"}
RNG = np.random.default_rng(5)
CAT = RNG.integers(0, 256, (30, 47, 3), np.uint8)
DOG = RNG.integers(0, 256, (64, 20, 3), np.uint8)
SIZES = {"cat": 10 * 6, "dog": 4 * 14}  # soft tokens, of 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of KIND.gguf with KIND.mmproj, and KIND.one, which holds both."""
    path = tmp_path_factory.mktemp("models")
    for kind, (tiny, vision) in KINDS.items():
        (path / f"{kind}.gguf").write_bytes(tiny_gguf(tiny))
        (path / f"{kind}.mmproj").write_bytes(vision_gguf(vision))
        metadata = tiny_metadata(tiny) | vision_metadata(vision, "gemma4.")
        tensors = [*tiny_tensors(tiny), *vision_weights(vision)]
        (path / f"{kind}.one").write_bytes(gguf_bytes(metadata, tensors))
    tiny = replace(KINDS["embedder"][0], context=1200)
    metadata = tiny_metadata(tiny) | vision_metadata(KINDS["embedder"][1], "gemma4.")
    tensors = [*tiny_tensors(tiny), *vision_weights(KINDS["embedder"][1])]
    (path / "wide.one").write_bytes(gguf_bytes(metadata, tensors))
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 70 soft tokens per image in chats, not 280: software GPUs are slow."""
    monkeypatch.setattr("webgemma.media.prompt.BUDGET", 70)


@pytest.fixture(scope="module", params=DEVICES)
def gemma(request: pytest.FixtureRequest, folder: Path) -> Iterator[Gemma]:
    path, mmproj = folder / "small.gguf", folder / "small.mmproj"
    with Gemma.load(path, request.param, mmproj=mmproj, **EXACT) as loaded:
        yield loaded


@pytest.fixture
def encodings(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> list[RgbImage]:
    """List of the images that the encoder encodes during the test."""
    gemma.encode_image(CAT, budget=140)
    encoder = gemma._engine.encoders._vision.encoder
    assert encoder is not None
    encoded: list[RgbImage] = []
    encode = encoder.encode

    async def counted(image: RgbImage, *rest: object) -> object:
        encoded.append(image)
        return await encode(image, *rest)

    monkeypatch.setattr(encoder, "encode", counted)
    return encoded


@pytest.fixture
def fresh(gemma: Gemma) -> None:
    """Start without encoded images."""
    encoders = gemma._engine.encoders
    assert not any(media.users for media in encoders._encoded.values())
    encoders._free_unused(0)


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_encoded_as_in_the_reference(kind: str, on: str, folder: Path) -> None:
    with Gguf.open(folder / f"{kind}.mmproj") as gguf:
        encoder = VisionEncoder.from_gguf(gguf)
        cat = RgbImage(47, 30, CAT.tobytes())
        expected = encoder.encode(pixel_values(cat, encoder.vision, 70))
        rgb = tiny_image(KINDS[kind][1], 3, 2)
        exact = RgbImage(*rgb.shape[1::-1], rgb.tobytes())
        unchanged = encoder.encode(pixel_values(exact, encoder.vision, resized=False))
    within = GPU_SOFT_TOKENS * np.abs(expected).max()
    for files in ((f"{kind}.one", None), (f"{kind}.gguf", folder / f"{kind}.mmproj")):
        with Gemma.load(folder / files[0], on, mmproj=files[1], context=64) as gemma:
            found = gemma.encode_image(CAT, budget=70)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=0, atol=within)
            found = gemma.encode_image(rgb, resize=False)
            assert found.shape == (6, gemma.config.width)
            np.testing.assert_allclose(found, unchanged, rtol=0, atol=within)


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_give_the_same_reply(kind: str, folder: Path) -> None:
    """Replies depend on the order of the images, but not on the number of files of a model."""
    answers = []
    for on in DEVICES:
        one = Gemma.load(folder / f"{kind}.one", on, **EXACT)
        two = Gemma.load(folder / f"{kind}.gguf", on, mmproj=folder / f"{kind}.mmproj", **EXACT)
        with one, two:
            messages = [user("see ", image(CAT), " and the ", image(DOG), "?")]
            answers += [reply(gemma, messages) for gemma in (one, two)]
            swapped = [user("see ", image(DOG), " and the ", image(CAT), "?")]
            assert reply(one, swapped) != answers[-1]
    assert len(answers[0]) == 8
    assert all(answer == answers[0] for answer in answers)


def test_images_replace_their_placeholders(gemma: Gemma) -> None:
    prompts = []
    generate = gemma._engine.generate

    def recorded(ids: list[int], settings: object, seed: int, spans: list, *rest: object) -> object:
        prompts.append((ids, spans))
        return generate(ids, settings, seed, spans, *rest)

    gemma._engine.generate = recorded
    try:
        ollama = {"role": "user", "content": "this?", "images": [DOG]}
        reply(gemma, [user("a", image(CAT), "b"), {"role": "assistant", "content": "c"}, ollama], 1)
    finally:
        del gemma._engine.generate
    ((ids, spans),) = prompts
    special = gemma.tokenizer.special_ids
    assert [span.media.count for span in spans] == [SIZES["cat"], SIZES["dog"]]
    for span in spans:
        assert ids[span.first - 1] == special["<|image>"]
        assert set(ids[span.first : span.end]) == {special["<|image|>"]}
        assert ids[span.end] == special["<image|>"]
    assert ids.count(special["<|image|>"]) == SIZES["cat"] + SIZES["dog"]


@pytest.mark.parametrize("on", DEVICES)
def test_an_image_uses_280_soft_tokens_by_default(
    on: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Gemma.load(folder / "embedder.one", on, context=300) as gemma:
        assert len(gemma.encode_image(CAT)) == 20 * 13
        assert len(reply(gemma, [user(image(CAT))], 1)) == 1
        with pytest.raises(InputError, match=r"The prompt has 5\d\d tokens"):
            reply(gemma, [user(image(CAT), image(DOG))], 1)


@pytest.mark.usefixtures("fresh")
def test_the_next_turn_does_not_encode_again(gemma: Gemma, encodings: list[RgbImage]) -> None:
    messages = [user(image(CAT), "this?")]
    answer = "".join(p.text for p in gemma.chat(messages, temperature=0, max_tokens=4))
    assert len(encodings) == 1
    messages += [{"role": "assistant", "content": answer}, user("sure?")]
    again = reply(gemma, messages)
    assert len(encodings) == 1
    reply(gemma, [user(image(DOG), "that?")])
    assert len(encodings) == 2
    assert reply(gemma, messages) == again  # another conversation was in between
    assert len(encodings) == 2


@pytest.mark.parametrize("kind", ["small", "embedder"])
def test_conversations_side_by_side_about_the_same_image(kind: str, folder: Path) -> None:
    """What is in common is known by the image's digest; one of the same size is read itself."""
    other = RNG.integers(0, 256, CAT.shape, np.uint8)
    chats = [
        [user(image(CAT), "this?")],
        [user(image(CAT), "is it a cat?")],
        [user(image(other), "this?")],
    ]
    with Gemma.load(folder / f"{kind}.one", "gpu", slots=1, **EXACT) as gemma:
        alone = []
        for chat in chats:
            reply(gemma, [user("nothing")])  # of which nothing is in common
            alone.append(reply(gemma, chat))
    with Gemma.load(folder / f"{kind}.one", "gpu", slots=3, **EXACT) as gemma:
        first = gemma.chat(chats[0], temperature=0, max_tokens=60)
        next(first)  # it is being written while the others begin
        found = dict(gemma.batch(chats[1:], temperature=0, max_tokens=8))
        for index, expected in enumerate(alone[1:]):
            assert [piece.token for piece in found[index].pieces] == expected
        assert found[0].usage.cached > SIZES["cat"]
        assert found[1].usage.cached < SIZES["cat"] / 2
        first.close()


@pytest.mark.usefixtures("fresh")
def test_a_limited_number_of_encoded_images_is_kept(
    gemma: Gemma, encodings: list[RgbImage]
) -> None:
    encoded = gemma._engine.encoders._encoded
    many = [CAT ^ np.uint8(number) for number in range(KEPT + 2)]
    for rgb in many:
        gemma.encode_image(rgb, budget=70)
    assert len(encoded) == KEPT
    before = gemma.memory_nbytes
    gemma.encode_image(many[2], budget=70)  # the oldest of those, which becomes the latest
    assert len(encodings) == KEPT + 2
    gemma.encode_image(many[0], budget=70)
    gemma.encode_image(many[2], budget=70)
    assert len(encodings) == KEPT + 3
    assert len(encoded) == KEPT
    assert gemma.memory_nbytes == before


@pytest.mark.usefixtures("fresh")
def test_a_failed_chat_releases_its_images(gemma: Gemma) -> None:
    with pytest.raises(InputError, match="the context holds 1024"):
        reply(gemma, [user(*[image(CAT)] * 17)])
    pieces = gemma.chat([user(image(CAT), "this?")])
    next(pieces)
    encoded = gemma._engine.encoders._encoded
    assert [media.users for media in encoded.values()] == [1]
    pieces.close()
    assert [media.users for media in encoded.values()] == [0]


@pytest.mark.parametrize("on", DEVICES)
def test_models_without_vision_encoder_raise_an_error(on: str, folder: Path) -> None:
    with Gemma.load(folder / "small.gguf", on, context=64) as gemma:
        for call in (lambda: gemma.encode_image(CAT), lambda: reply(gemma, [user(image(CAT))])):
            with pytest.raises(
                InputError, match=r"small\.gguf cannot read images: .* load it with mmproj"
            ):
                call()
        assert len(reply(gemma, [user("the")], 2)) == 2
    with pytest.raises(InputError, match="is closed: load the model again"):
        gemma.encode_image(CAT)
    text_only = folder / "large.gguf"
    with (
        Gemma.load(folder / "small.gguf", on, context=64, mmproj=text_only) as gemma,
        pytest.raises(InputError, match=r"small\.gguf cannot read images: .* in large\.gguf"),
    ):
        gemma.encode_image(CAT)


def test_a_missing_or_unfitting_mmproj_raises_an_error(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"There is no file .*missing\.gguf"):
        Gemma.load(folder / "small.gguf", mmproj=folder / "missing.gguf")
    other = folder / "wider.mmproj"
    other.write_bytes(vision_gguf(replace(SMALL_VISION, output=96)))
    with (
        Gemma.load(folder / "small.gguf", "cpu", mmproj=other) as gemma,
        pytest.raises(GgufError, match=r"soft tokens of 96 values, but small\.gguf reads 64"),
    ):
        gemma.encode_image(CAT)


def test_the_projector_of_an_ollama_model_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, vision = (folder / f"small.{end}" for end in ("gguf", "mmproj"))
    add_model(
        tmp_path, "two:1", gguf=text.read_bytes(), layers=[("projector", vision.read_bytes())]
    )
    add_model(tmp_path, "text:1", gguf=text.read_bytes())
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with Gemma.load(text, "cpu", mmproj=vision) as expected, Gemma.load("two:1", "cpu") as found:
        np.testing.assert_array_equal(
            found.encode_image(CAT, budget=70), expected.encode_image(CAT, budget=70)
        )
    with (
        Gemma.load("text:1", "cpu") as gemma,
        pytest.raises(InputError, match=r"^text:1 cannot read images"),
    ):
        gemma.encode_image(CAT)


def test_forks_share_their_vision_encoder(folder: Path) -> None:
    gemma = Gemma.load(folder / "small.one", "gpu", **EXACT)
    messages = [user(image(CAT), "this?")]
    expected = reply(gemma, messages)
    fork = gemma.fork()
    gemma.close()
    assert reply(fork, messages) == expected
    device = fork._engine._session.device
    fork.close()
    assert device.nbytes == 0


@needs_shared
@pytest.mark.parametrize("on", DEVICES)
def test_llama_cpp_files_agree_with_transformers(on: str) -> None:
    files = SHARED / "mm"
    rgb = np.fromfile(files / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
    expected = np.load(files / "image240x192.embd.npy")
    with Gemma.load(files / "mm-f16.gguf", on, mmproj=files / "mmproj-mm-f16.gguf") as gemma:
        found = gemma.encode_image(rgb, resize=False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", ["large", "embedder"])
def test_images_larger_than_a_chunk_enlarge_the_session(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bidirectional attention needs a whole image in one chunk, in forks and saved sessions too."""
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", 32)
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 8, 32))
    monkeypatch.setattr("webgemma.engine.slots.LARGEST_CHUNK", 72)
    path = folder / f"{kind}.one"
    messages = [user("the dog sees ", image(CAT), "and the cat?")]
    with Gemma.load(path, "cpu") as gemma:
        expected = reply(gemma, messages)
    with Gemma.load(path, "gpu", **EXACT) as gemma:
        reply(gemma, [user("the dog sees a cat")])
        before = gemma.memory_nbytes
        assert reply(gemma, messages) == expected
        assert gemma.memory_nbytes > before
        with gemma.fork() as fork:
            assert reply(fork, messages) == expected
        gemma.save(tmp_path / "saved")
    with Gemma.load(path, "gpu", **EXACT) as gemma:
        gemma.restore(tmp_path / "saved")
        assert reply(gemma, messages) == expected


def test_the_largest_budget_gives_the_same_reply_on_both_devices(folder: Path) -> None:
    tall = RNG.integers(0, 256, (40, 28, 3), np.uint8)
    messages = [user({**image(tall), "budget": 1120})]
    answers = []
    for on in DEVICES:
        with Gemma.load(folder / "wide.one", on, **EXACT) as gemma:
            assert len(gemma.encode_image(tall, budget=1120)) == 1120
            answers.append(reply(gemma, messages, 2))
    assert answers[0] == answers[1]
