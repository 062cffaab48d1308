"""Sounds and films in a chat, on the GPU and on the CPU: taken in alike, in order, and once."""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import SHARED, needs_shared
from helpers.questions import user
from helpers.tiny import LARGE, SMALL, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_ears import (
    EARS,
    RAW_EARS,
    as_ollama,
    audio_of,
    ears_gguf,
    ears_metadata,
    ears_tensors,
)
from helpers.tiny_eyes import SMALL_EYES, eyes_metadata, eyes_tensors
from PIL import Image
from tolerance import GPU_SOFT_TOKENS

from webgemma import Gemma, InputError
from webgemma.errors import DeviceError
from webgemma.gemma.encoder_config import encoder_nbytes
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.images import chosen_frames, clock
from webgemma.media.encoders import MediaSpan
from webgemma.reference.audio import AudioModel
from webgemma.reference.weights import Weights

WIDTH = SMALL.width
KINDS = {
    "small": (replace(SMALL, context=1024), replace(EARS, output=SMALL.width)),
    "raw": (replace(LARGE, context=1024), replace(RAW_EARS, output=LARGE.width)),
}
DEVICES = ("gpu", "cpu")
EXACT = {"kv": "f32", "precision": "exact"}
RNG = np.random.default_rng(6)
SONG = (RNG.random(5000) - 0.5).astype(np.float32)
WORD = (RNG.random(1700) - 0.5).astype(np.float32)
FRAMES = [RNG.integers(0, 256, (24, 24, 3), np.uint8) for _ in range(3)]


def file_bytes(samples: np.ndarray, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def sound(source: object) -> dict[str, object]:
    return {"type": "audio", "audio": source}


def film(source: object, **more: object) -> dict[str, object]:
    return {"type": "video", "video": source, **more}


def reply(gemma: Gemma, *content: object, count: int = 6) -> list[int]:
    pieces = gemma.chat([user(*content)], temperature=0, max_tokens=count)
    return [piece.token for piece in pieces]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KIND.gguf with KIND.mmproj, and small.one, which holds text, eyes and Ollama's ears."""
    made = tmp_path_factory.mktemp("models")
    for kind, (tiny, ears) in KINDS.items():
        (made / f"{kind}.gguf").write_bytes(tiny_gguf(tiny))
        data = gguf_bytes(ears_metadata(ears), ears_tensors(ears))
        (made / f"{kind}.mmproj").write_bytes(data)
    tiny, ears = KINDS["small"]
    eyes = replace(SMALL_EYES, positions=96)
    metadata = tiny_metadata(tiny) | eyes_metadata(eyes, "gemma4.") | ears_metadata(ears, "gemma4")
    tensors = [*tiny_tensors(tiny), *eyes_tensors(eyes), *as_ollama(ears_tensors(ears))]
    (made / "small.one").write_bytes(gguf_bytes(metadata, tensors))
    (made / "song.wav").write_bytes(file_bytes(SONG))
    return made


@pytest.fixture(scope="module", params=DEVICES)
def gemma(request: pytest.FixtureRequest, folder: Path) -> Iterator[Gemma]:
    with Gemma.load(folder / "small.one", request.param, **EXACT) as loaded:
        yield loaded


def watched(gemma: Gemma, *content: object) -> tuple[list[int], list[MediaSpan]]:
    """The ids of a prompt, and what is placed in it."""
    taken = []
    generate = gemma._engine.generate

    def watching(ids: list[int], sampling: object, seed: int, placed: list[MediaSpan]) -> object:
        taken.append((ids, placed))
        return generate(ids, sampling, seed, placed)

    gemma._engine.generate = watching
    try:
        reply(gemma, *content, count=1)
    finally:
        del gemma._engine.generate
    return taken[0]


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_is_encoded_as_the_reference_does(kind: str, on: str, folder: Path) -> None:
    gguf = ears_gguf(KINDS[kind][1], ears_tensors(KINDS[kind][1]))
    wanted = AudioModel(audio_of(gguf), Weights(gguf)).hear(SONG)
    path, mmproj = folder / f"{kind}.gguf", folder / f"{kind}.mmproj"
    with Gemma.load(path, on, mmproj=mmproj, context=64) as gemma:
        found = gemma.encode_audio(SONG)
        assert found.dtype == np.float32
    within = GPU_SOFT_TOKENS * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=within)


def test_every_way_to_give_a_sound(gemma: Gemma, folder: Path) -> None:
    path, data = folder / "song.wav", file_bytes(SONG)
    text = base64.b64encode(data).decode()
    wanted = gemma.encode_audio(SONG)
    for source in (path, str(path), data, SONG.tolist(), f"data:audio/wav;base64,{text}"):
        np.testing.assert_array_equal(gemma.encode_audio(source), wanted)
    answer = reply(gemma, sound(SONG), "?")
    for part in (
        {"type": "audio", "path": path},
        {"type": "audio", "url": f"data:;base64,{text}"},
        {"type": "audio_url", "audio_url": {"url": f"data:;base64,{text}"}},
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    ):
        assert reply(gemma, part, "?") == answer
    for source in (data, text, str(path)):  # Ollama has one list for all attachments
        asked = [{"role": "user", "content": "?", "images": [source]}]
        assert [p.token for p in gemma.chat(asked, temperature=0, max_tokens=6)] == answer


def test_both_engines_answer_alike(folder: Path) -> None:
    answers = []
    for on in DEVICES:
        with Gemma.load(folder / "small.one", on, **EXACT) as gemma:
            picture = {"type": "image", "image": FRAMES[0], "budget": 70}
            answers.append(reply(gemma, "hear ", sound(SONG), picture, "and ", sound(WORD)))
            turned = reply(gemma, "hear ", sound(WORD), picture, "and ", sound(SONG))
            assert turned != answers[-1]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


def test_sounds_stand_where_their_placeholders_do(gemma: Gemma) -> None:
    ids, placed = watched(gemma, "a", sound(SONG), "b", sound(WORD))
    special = gemma.tokenizer.special_ids
    assert [each.sensed.count for each in placed] == [8, 3]
    for each in placed:
        assert ids[each.first - 1] == special["<|audio>"]
        assert set(ids[each.first : each.end]) == {special["<|audio|>"]}
        assert ids[each.end] == special["<audio|>"]


def test_long_sounds_are_heard_in_parts(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.gemma.encoder_config.PART_SAMPLES", 1600)
    told: list[tuple[int, int]] = []
    found = gemma.encode_audio(SONG[:4000], lambda *steps: told.append(steps))
    alone = [gemma.encode_audio(SONG[at : at + 1600][: 4000 - at]) for at in (0, 1600, 3200)]
    np.testing.assert_array_equal(found, np.concatenate(alone))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] >= 3
    whole = reply(gemma, sound(SONG[:4000]), "?")
    again = reply(gemma, sound(SONG[:4000]), "?")  # the cache holds all of it
    assert whole == again


def test_a_sound_is_encoded_once(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma.encode_audio(WORD)
    ears = gemma._engine.senses._ears.tower
    assert ears is not None
    heard = []
    listen = ears.listen

    async def counted(samples: memoryview, *rest: object) -> object:
        heard.append(len(samples))
        return await listen(samples, *rest)

    monkeypatch.setattr(ears, "listen", counted)
    fresh = WORD[:900]
    first = reply(gemma, sound(fresh), "?")
    assert reply(gemma, sound(WORD), "?") != first
    assert reply(gemma, sound(fresh), "?") == first
    assert heard == [900]


def test_progress_and_an_end_to_it(gemma: Gemma) -> None:
    told: list[tuple[int, int]] = []
    picture = {"type": "image", "image": FRAMES[1], "budget": 70}
    parts = [sound(SONG[:1234]), picture, "?"]
    list(gemma.chat([user(*parts)], max_tokens=1, progress=lambda *steps: told.append(steps)))
    assert told == sorted(told)
    assert told[-1] == (200, 200)

    class EnoughError(Exception):
        pass

    def stop(*_: int) -> None:
        raise EnoughError

    held = [gemma.memory_nbytes]
    for _ in range(2):
        with pytest.raises(EnoughError):
            gemma.encode_audio(SONG[:1235], stop)
        with pytest.raises(EnoughError):
            gemma.encode_image(FRAMES[2], budget=70, progress=stop)
        held.append(gemma.memory_nbytes)
    assert held[0] >= held[1] == held[2]  # what a tower has recorded goes with another size
    assert len(gemma.encode_audio(SONG[:1235])) == 2


def test_towers_can_be_given_back(folder: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", context=128) as gemma:
        empty = gemma.memory_nbytes
        wanted = gemma.encode_audio(SONG), gemma.encode_image(FRAMES[0], budget=70)
        assert gemma.memory_nbytes > empty
        gemma.free_encoders()
        assert gemma.memory_nbytes == empty
        np.testing.assert_array_equal(gemma.encode_audio(SONG), wanted[0])
        np.testing.assert_array_equal(gemma.encode_image(FRAMES[0], budget=70), wanted[1])
        pieces = gemma.chat([user(sound(SONG), "?")], temperature=0)
        next(pieces)
        gemma.free_encoders()  # while a chat is under way, which keeps what it uses
        next(pieces)
        pieces.close()
        gemma.free_encoders()
        assert gemma.memory_nbytes >= empty
    assert gemma.memory_nbytes == 0


def test_towers_count_as_memory(folder: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", context=128) as gemma:
        used = gemma.memory_nbytes
    some = (used + 1000) / 1e9
    with Gemma.load(folder / "small.one", "gpu", context=128, memory_gb=some) as gemma:
        for encode in (lambda: gemma.encode_audio(SONG), lambda: gemma.encode_image(FRAMES[0])):
            with pytest.raises(DeviceError, match=r"GB more for its \w+ tower, but .* memory_gb="):
                encode()
        assert gemma.memory_nbytes == used


def test_what_eyes_have_recorded_makes_room_for_ears(folder: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", context=128) as gemma:
        gemma.encode_image(FRAMES[0], budget=70)
        recorded = gemma.memory_nbytes
        gemma._engine.senses._eyes.tower._weights.rest()
        most = gemma.memory_nbytes + encoder_nbytes(gemma._engine.gguf, "audio")
        assert gemma.memory_nbytes < recorded
    with Gemma.load(folder / "small.one", "gpu", context=128, memory_gb=(most + 1) / 1e9) as gemma:
        gemma.encode_image(FRAMES[0], budget=70)
        assert len(gemma.encode_audio(SONG))


def test_a_film_is_frames_with_their_times(gemma: Gemma) -> None:
    ids, placed = watched(gemma, "see ", film(FRAMES, fps=0.5), "?")
    special = gemma.tokenizer.special_ids
    assert len(placed) == 3
    for each in placed:
        assert ids[each.first - 1] == special["<|image>"]
        assert set(ids[each.first : each.end]) == {special["<|video|>"]}
        assert ids[each.end] == special["<image|>"]
    between = [ids[a.end + 1 : b.first - 1] for a, b in pairwise(placed)]
    assert [gemma.tokenizer.decode(text) for text in between] == [" 00:02 ", " 00:04 "]
    before = gemma.tokenizer.decode(ids[: placed[0].first - 1])
    assert before.endswith("see00:00 ")  # the template trims what a user writes


def test_animated_pictures_are_films(gemma: Gemma, tmp_path: Path) -> None:
    path = tmp_path / "film.png"
    first, *rest = [Image.fromarray(frame) for frame in FRAMES]
    first.save(path, save_all=True, append_images=rest, duration=[1000, 90_000, 10])
    wanted = reply(gemma, film(FRAMES, fps=1), "?")
    for source in (path, str(path), path.read_bytes()):
        ids, placed = watched(gemma, film(source), "?")
        between = ids[placed[1].end + 1 : placed[2].first - 1]
        assert gemma.tokenizer.decode(between) == " 01:31 "
    assert reply(gemma, film(np.stack(FRAMES), fps=1), "?") == wanted


def test_of_long_films_some_frames_are_seen() -> None:
    assert chosen_frames(0) == []
    assert chosen_frames(32) == list(range(32))
    assert chosen_frames(33)[-1] == 31
    assert chosen_frames(100) == [int(at * 100 / 32) for at in range(32)]
    assert [clock(seconds) for seconds in (0, 59.9, 60, 3725)] == [
        "00:00",
        "00:59",
        "01:00",
        "62:05",
    ]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "audio"}, r"messages\[0\].content\[0\] has no sound: give it as 'audio'"),
        (sound("https://example.org/a.wav"), "nothing is fetched from there"),
        ({"type": "audio", "url": "a.wav"}, "must be a data: URL"),
        (sound("no such file.wav"), "There is no sound file at no such file.wav"),
        (sound(b"nonsense"), r"content\[0\].audio: The sound cannot be decoded"),
        (sound([0.0, float("nan")]), "NaN or infinite"),
        (sound([]), "holds no samples"),
        ({"type": "input_audio", "input_audio": {}}, "as base64 in 'data'"),
        ({"type": "input_audio", "input_audio": {"data": "ä"}}, "neither a file nor base64"),
        ({"type": "video"}, "has no film: give it as 'video'"),
        (film([]), "is a film without a frame"),
        (film(5), "must be a list of pictures, not int"),
        (film([b"x"]), "frame 0: The picture holds nothing"),
        (film(FRAMES, fps=0), "fps is 0, but it must be a number above zero"),
        (film(b"\0\0\0\x18ftypmp42"), "give the frames of a film as a list"),
        (film("a.mp4"), "'a.mp4' cannot be opened"),
    ],
)
def test_what_cannot_be_taken(gemma: Gemma, part: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        reply(gemma, part, "?")


@pytest.mark.parametrize("on", DEVICES)
def test_models_without_ears(on: str, folder: Path) -> None:
    with Gemma.load(folder / "small.gguf", on, context=64) as gemma:
        for ask in (lambda: gemma.encode_audio(SONG), lambda: reply(gemma, sound(SONG))):
            with pytest.raises(
                InputError, match=r"small\.gguf cannot hear: .* load it with mmproj"
            ):
                ask()
    mmproj = folder / "small.mmproj"
    with (
        Gemma.load(folder / "small.gguf", on, context=64, mmproj=mmproj) as gemma,
        pytest.raises(InputError, match=r"cannot see: there is no vision tower in small\.mmproj"),
    ):
        gemma.encode_image(FRAMES[0])


def test_an_mmproj_that_is_no_path(folder: Path) -> None:
    source = BytesSource((folder / "small.mmproj").read_bytes(), "ears")
    with Gemma.load(folder / "small.gguf", "cpu", mmproj=source) as gemma:
        assert len(gemma.encode_audio(WORD)) == 3
    with pytest.raises(InputError, match="is on a server"):
        Gemma.load(folder / "small.gguf", "cpu", mmproj="https://example.org/ears.gguf")
    with pytest.raises(InputError, match="is no model"):
        Gemma.load(folder / "small.gguf", "cpu", mmproj=5)


def test_a_conversation_with_sounds_is_saved(folder: Path, tmp_path: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", **EXACT) as gemma:
        wanted = reply(gemma, sound(SONG), "?")
        gemma.save(tmp_path / "saved")
        assert reply(gemma, "other") != wanted
        gemma.restore(tmp_path / "saved")
        assert reply(gemma, sound(SONG), "?") == wanted


@needs_shared
@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("samples", [24000, 40123])
def test_llama_cpps_files_as_transformers(samples: int, on: str) -> None:
    files = SHARED / "mm"
    given = np.fromfile(files / f"audio-{samples}.f32", np.float32)
    wanted = np.load(files / f"audio{samples}.embd.npy")
    with Gemma.load(files / "mm-f16.gguf", on, mmproj=files / "mmproj-mm-f16.gguf") as gemma:
        found = gemma.encode_audio(given)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3)
