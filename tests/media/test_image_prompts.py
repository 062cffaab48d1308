"""Pictures in a chat, on the GPU and on the CPU: seen alike, in order, and only once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.questions import image, reply, user
from helpers.store import add_model
from helpers.tiny import LARGE, MOE, SMALL, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_eyes import (
    EMBEDDER,
    LARGE_EYES,
    SMALL_EYES,
    eyes_gguf,
    eyes_metadata,
    eyes_tensors,
)
from helpers.tiny_eyes import picture as fitting_picture
from tolerance import GPU_SOFT_TOKENS

from webgemma import Gemma, InputError, ModelNotFoundError
from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import gguf_bytes
from webgemma.images import RgbImage
from webgemma.media.encoders import KEPT
from webgemma.reference.pictures import pixel_values
from webgemma.reference.vision import VisionModel

KINDS = {
    "small": (replace(SMALL, context=1024), replace(SMALL_EYES, positions=96)),
    "large": (replace(MOE, context=1024), replace(LARGE_EYES, positions=96)),
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
    """KIND.gguf with KIND.mmproj, and KIND.one, which holds both."""
    made = tmp_path_factory.mktemp("models")
    for kind, (tiny, eyes) in KINDS.items():
        (made / f"{kind}.gguf").write_bytes(tiny_gguf(tiny))
        (made / f"{kind}.mmproj").write_bytes(eyes_gguf(eyes))
        metadata = tiny_metadata(tiny) | eyes_metadata(eyes, "gemma4.")
        tensors = [*tiny_tensors(tiny), *eyes_tensors(eyes)]
        (made / f"{kind}.one").write_bytes(gguf_bytes(metadata, tensors))
    tiny = replace(KINDS["embedder"][0], context=1200)
    metadata = tiny_metadata(tiny) | eyes_metadata(KINDS["embedder"][1], "gemma4.")
    tensors = [*tiny_tensors(tiny), *eyes_tensors(KINDS["embedder"][1])]
    (made / "wide.one").write_bytes(gguf_bytes(metadata, tensors))
    return made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chat pictures take 70 soft tokens, not 280: software GPUs are slow."""
    monkeypatch.setattr("webgemma.media.prompt.BUDGET", 70)


@pytest.fixture(scope="module", params=DEVICES)
def gemma(request: pytest.FixtureRequest, folder: Path) -> Iterator[Gemma]:
    path, mmproj = folder / "small.gguf", folder / "small.mmproj"
    with Gemma.load(path, request.param, mmproj=mmproj, **EXACT) as loaded:
        yield loaded


@pytest.fixture
def looks(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> list[RgbImage]:
    """What the tower is given to encode from now on."""
    gemma.encode_image(CAT, budget=140)
    tower = gemma._engine.senses._eyes.tower
    assert tower is not None
    given: list[RgbImage] = []
    look = tower.look

    async def counted(picture: RgbImage, *rest: object) -> object:
        given.append(picture)
        return await look(picture, *rest)

    monkeypatch.setattr(tower, "look", counted)
    return given


@pytest.fixture
def fresh(gemma: Gemma) -> None:
    """Nothing seen so far."""
    senses = gemma._engine.senses
    assert not any(seen.users for seen in senses._sensed.values())
    senses._free_idle(0)


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_encoded_as_the_reference_does(kind: str, on: str, folder: Path) -> None:
    with Gguf.open(folder / f"{kind}.mmproj") as gguf:
        tower = VisionModel.from_gguf(gguf)
        picture = RgbImage(47, 30, CAT.tobytes())
        wanted = tower.encode(pixel_values(picture, tower.vision, 70))
        rgb = fitting_picture(KINDS[kind][1], 3, 2)
        exact = RgbImage(*rgb.shape[1::-1], rgb.tobytes())
        unchanged = tower.encode(pixel_values(exact, tower.vision, resized=False))
    within = GPU_SOFT_TOKENS * np.abs(wanted).max()
    for files in ((f"{kind}.one", None), (f"{kind}.gguf", folder / f"{kind}.mmproj")):
        with Gemma.load(folder / files[0], on, mmproj=files[1], context=64) as gemma:
            found = gemma.encode_image(CAT, budget=70)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=0, atol=within)
            found = gemma.encode_image(rgb, resize=False)
            assert found.shape == (6, gemma.config.width)
            np.testing.assert_allclose(found, unchanged, rtol=0, atol=within)


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_answer_alike(kind: str, folder: Path) -> None:
    """And otherwise than to another picture; a model of one file as one of two."""
    answers = []
    for on in DEVICES:
        one = Gemma.load(folder / f"{kind}.one", on, **EXACT)
        two = Gemma.load(folder / f"{kind}.gguf", on, mmproj=folder / f"{kind}.mmproj", **EXACT)
        with one, two:
            asked = [user("see ", image(CAT), " and the ", image(DOG), "?")]
            answers += [reply(gemma, asked) for gemma in (one, two)]
            turned = [user("see ", image(DOG), " and the ", image(CAT), "?")]
            assert reply(one, turned) != answers[-1]
    assert len(answers[0]) == 8
    assert all(answer == answers[0] for answer in answers)


def test_pictures_stand_where_their_placeholders_do(gemma: Gemma) -> None:
    taken = []
    generate = gemma._engine.generate

    def watched(ids: list[int], sampling: object, seed: int, pictures: list) -> object:
        taken.append((ids, pictures))
        return generate(ids, sampling, seed, pictures)

    gemma._engine.generate = watched
    try:
        ollama = {"role": "user", "content": "this?", "images": [DOG]}
        reply(gemma, [user("a", image(CAT), "b"), {"role": "assistant", "content": "c"}, ollama], 1)
    finally:
        del gemma._engine.generate
    ((ids, pictures),) = taken
    special = gemma.tokenizer.special_ids
    assert [place.sensed.count for place in pictures] == [SIZES["cat"], SIZES["dog"]]
    for place in pictures:
        assert ids[place.first - 1] == special["<|image>"]
        assert set(ids[place.first : place.end]) == {special["<|image|>"]}
        assert ids[place.end] == special["<image|>"]
    assert ids.count(special["<|image|>"]) == SIZES["cat"] + SIZES["dog"]


@pytest.mark.parametrize("on", DEVICES)
def test_a_picture_takes_280_soft_tokens(
    on: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Gemma.load(folder / "embedder.one", on, context=300) as gemma:
        assert len(gemma.encode_image(CAT)) == 20 * 13
        assert len(reply(gemma, [user(image(CAT))], 1)) == 1
        with pytest.raises(InputError, match=r"The prompt has 5\d\d tokens"):
            reply(gemma, [user(image(CAT), image(DOG))], 1)


@pytest.mark.usefixtures("fresh")
def test_the_next_turn_does_not_encode_again(gemma: Gemma, looks: list[RgbImage]) -> None:
    messages = [user(image(CAT), "this?")]
    answer = "".join(p.text for p in gemma.chat(messages, temperature=0, max_tokens=4))
    assert len(looks) == 1
    messages += [{"role": "assistant", "content": answer}, user("sure?")]
    again = reply(gemma, messages)
    assert len(looks) == 1
    reply(gemma, [user(image(DOG), "that?")])
    assert len(looks) == 2
    assert reply(gemma, messages) == again  # another conversation was in between
    assert len(looks) == 2


@pytest.mark.usefixtures("fresh")
def test_only_a_handful_is_kept(gemma: Gemma, looks: list[RgbImage]) -> None:
    seen = gemma._engine.senses._sensed
    many = [CAT ^ np.uint8(number) for number in range(KEPT + 2)]
    for rgb in many:
        gemma.encode_image(rgb, budget=70)
    assert len(seen) == KEPT
    before = gemma.memory_nbytes
    gemma.encode_image(many[2], budget=70)  # the oldest of those, and now the latest
    assert len(looks) == KEPT + 2
    gemma.encode_image(many[0], budget=70)
    gemma.encode_image(many[2], budget=70)
    assert len(looks) == KEPT + 3
    assert len(seen) == KEPT
    assert gemma.memory_nbytes == before


@pytest.mark.usefixtures("fresh")
def test_a_failed_chat_lets_its_pictures_go(gemma: Gemma) -> None:
    with pytest.raises(InputError, match="the context holds 1024"):
        reply(gemma, [user(*[image(CAT)] * 17)])
    pieces = gemma.chat([user(image(CAT), "this?")])
    next(pieces)
    assert [seen.users for seen in gemma._engine.senses._sensed.values()] == [1]
    pieces.close()
    assert [seen.users for seen in gemma._engine.senses._sensed.values()] == [0]


@pytest.mark.parametrize("on", DEVICES)
def test_models_without_eyes(on: str, folder: Path) -> None:
    with Gemma.load(folder / "small.gguf", on, context=64) as gemma:
        for ask in (lambda: gemma.encode_image(CAT), lambda: reply(gemma, [user(image(CAT))])):
            with pytest.raises(InputError, match=r"small\.gguf cannot see: .* load it with mmproj"):
                ask()
        assert len(reply(gemma, [user("the")], 2)) == 2
    with pytest.raises(InputError, match="is closed: load the model again"):
        gemma.encode_image(CAT)
    blind = folder / "large.gguf"
    with (
        Gemma.load(folder / "small.gguf", on, context=64, mmproj=blind) as gemma,
        pytest.raises(InputError, match=r"small\.gguf cannot see: .* in large\.gguf"),
    ):
        gemma.encode_image(CAT)


def test_an_mmproj_that_is_none(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"There is no file .*eyes\.gguf"):
        Gemma.load(folder / "small.gguf", mmproj=folder / "eyes.gguf")
    other = folder / "wider.mmproj"
    other.write_bytes(eyes_gguf(replace(SMALL_EYES, output=96)))
    with (
        Gemma.load(folder / "small.gguf", "cpu", mmproj=other) as gemma,
        pytest.raises(GgufError, match=r"soft tokens of 96 values, but small\.gguf reads 64"),
    ):
        gemma.encode_image(CAT)


def test_ollamas_projector(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, eyes = (folder / f"small.{end}" for end in ("gguf", "mmproj"))
    add_model(tmp_path, "two:1", gguf=text.read_bytes(), layers=[("projector", eyes.read_bytes())])
    add_model(tmp_path, "blind:1", gguf=text.read_bytes())
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with Gemma.load(text, "cpu", mmproj=eyes) as wanted, Gemma.load("two:1", "cpu") as found:
        np.testing.assert_array_equal(
            found.encode_image(CAT, budget=70), wanted.encode_image(CAT, budget=70)
        )
    with (
        Gemma.load("blind:1", "cpu") as gemma,
        pytest.raises(InputError, match=r"^blind:1 cannot see"),
    ):
        gemma.encode_image(CAT)


def test_forks_share_their_eyes(folder: Path) -> None:
    gemma = Gemma.load(folder / "small.one", "gpu", **EXACT)
    asked = [user(image(CAT), "this?")]
    wanted = reply(gemma, asked)
    fork = gemma.fork()
    gemma.close()
    assert reply(fork, asked) == wanted
    device = fork._engine._session.device
    fork.close()
    assert device.nbytes == 0


@needs_shared
@pytest.mark.parametrize("on", DEVICES)
def test_llama_cpps_files_as_transformers(on: str) -> None:
    files = SHARED / "mm"
    rgb = np.fromfile(files / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
    wanted = np.load(files / "image240x192.embd.npy")
    with Gemma.load(files / "mm-f16.gguf", on, mmproj=files / "mmproj-mm-f16.gguf") as gemma:
        found = gemma.encode_image(rgb, resize=False)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", ["large", "embedder"])
def test_pictures_larger_than_a_chunk(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that look both ways read them whole: their session grows, its forks and files too."""
    monkeypatch.setattr("webgemma.engine.session.CHUNK", 32)
    monkeypatch.setattr("webgemma.engine.session.BATCHES", (1, 8, 32))
    monkeypatch.setattr("webgemma.engine.session.LARGEST_CHUNK", 72)
    path = folder / f"{kind}.one"
    asked = [user("the dog sees ", image(CAT), "and the cat?")]
    with Gemma.load(path, "cpu") as gemma:
        wanted = reply(gemma, asked)
    with Gemma.load(path, "gpu", **EXACT) as gemma:
        reply(gemma, [user("the dog sees a cat")])
        before = gemma.memory_nbytes
        assert reply(gemma, asked) == wanted
        assert gemma.memory_nbytes > before
        with gemma.fork() as fork:
            assert reply(fork, asked) == wanted
        gemma.save(tmp_path / "saved")
    with Gemma.load(path, "gpu", **EXACT) as gemma:
        gemma.restore(tmp_path / "saved")
        assert reply(gemma, asked) == wanted


def test_the_largest_picture(folder: Path) -> None:
    tall = RNG.integers(0, 256, (40, 28, 3), np.uint8)
    asked = [user({**image(tall), "budget": 1120})]
    answers = []
    for on in DEVICES:
        with Gemma.load(folder / "wide.one", on, **EXACT) as gemma:
            assert len(gemma.encode_image(tall, budget=1120)) == 1120
            answers.append(reply(gemma, asked, 2))
    assert answers[0] == answers[1]
