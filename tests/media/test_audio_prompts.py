"""Audio and video in a chat on the GPU and the CPU: same replies, in order, each encoded once."""

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
from helpers.tiny_audio import (
    RAW_AUDIO,
    TINY_AUDIO,
    as_ollama,
    audio_config,
    audio_gguf,
    audio_metadata,
    audio_weights,
)
from helpers.tiny_vision import SMALL_VISION, vision_metadata, vision_weights
from PIL import Image
from tolerance import GPU_SOFT_TOKENS

from webgemma import Gemma, InputError
from webgemma.errors import DeviceError
from webgemma.gemma.encoder_config import encoder_nbytes
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.images import chosen_frames, timestamp
from webgemma.media.encoders import MediaSpan
from webgemma.reference.audio import AudioEncoder
from webgemma.reference.weights import Weights

WIDTH = SMALL.width
KINDS = {
    "small": (replace(SMALL, context=1024), replace(TINY_AUDIO, output=SMALL.width)),
    "raw": (replace(LARGE, context=1024), replace(RAW_AUDIO, output=LARGE.width)),
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


def audio(source: object) -> dict[str, object]:
    return {"type": "audio", "audio": source}


def video(source: object, **more: object) -> dict[str, object]:
    return {"type": "video", "video": source, **more}


def reply(gemma: Gemma, *content: object, count: int = 6) -> list[int]:
    pieces = gemma.chat([user(*content)], temperature=0, max_tokens=count)
    return [piece.token for piece in pieces]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of KIND.gguf with KIND.mmproj, and small.one, which holds text and both encoders.

    The audio encoder in small.one has Ollama's tensor names."""
    path = tmp_path_factory.mktemp("models")
    for kind, (tiny, config) in KINDS.items():
        (path / f"{kind}.gguf").write_bytes(tiny_gguf(tiny))
        data = gguf_bytes(audio_metadata(config), audio_weights(config))
        (path / f"{kind}.mmproj").write_bytes(data)
    tiny, config = KINDS["small"]
    vision = replace(SMALL_VISION, positions=96)
    metadata = (
        tiny_metadata(tiny) | vision_metadata(vision, "gemma4.") | audio_metadata(config, "gemma4")
    )
    tensors = [*tiny_tensors(tiny), *vision_weights(vision), *as_ollama(audio_weights(config))]
    (path / "small.one").write_bytes(gguf_bytes(metadata, tensors))
    (path / "song.wav").write_bytes(file_bytes(SONG))
    return path


@pytest.fixture(scope="module", params=DEVICES)
def gemma(request: pytest.FixtureRequest, folder: Path) -> Iterator[Gemma]:
    with Gemma.load(folder / "small.one", request.param, **EXACT) as loaded:
        yield loaded


def prompt_of(gemma: Gemma, *content: object) -> tuple[list[int], list[MediaSpan]]:
    """Return the ids of a prompt, and the media spans in it."""
    prompts = []
    generate = gemma._engine.generate

    def recorded(
        ids: list[int], settings: object, seed: int, spans: list[MediaSpan], *rest: object
    ) -> object:
        prompts.append((ids, spans))
        return generate(ids, settings, seed, spans, *rest)

    gemma._engine.generate = recorded
    try:
        reply(gemma, *content, count=1)
    finally:
        del gemma._engine.generate
    return prompts[0]


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_audio_is_encoded_as_in_the_reference(kind: str, on: str, folder: Path) -> None:
    gguf = audio_gguf(KINDS[kind][1], audio_weights(KINDS[kind][1]))
    expected = AudioEncoder(audio_config(gguf), Weights(gguf)).encode(SONG)
    path, mmproj = folder / f"{kind}.gguf", folder / f"{kind}.mmproj"
    with Gemma.load(path, on, mmproj=mmproj, context=64) as gemma:
        found = gemma.encode_audio(SONG)
        assert found.dtype == np.float32
    within = GPU_SOFT_TOKENS * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=within)


def test_every_kind_of_source_is_encoded_alike(gemma: Gemma, folder: Path) -> None:
    path, data = folder / "song.wav", file_bytes(SONG)
    text = base64.b64encode(data).decode()
    expected = gemma.encode_audio(SONG)
    for source in (path, str(path), data, SONG.tolist(), f"data:audio/wav;base64,{text}"):
        np.testing.assert_array_equal(gemma.encode_audio(source), expected)
    answer = reply(gemma, audio(SONG), "?")
    for part in (
        {"type": "audio", "path": path},
        {"type": "audio", "url": f"data:;base64,{text}"},
        {"type": "audio_url", "audio_url": {"url": f"data:;base64,{text}"}},
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    ):
        assert reply(gemma, part, "?") == answer
    for source in (data, text, str(path)):  # Ollama has one list of all attachments
        messages = [{"role": "user", "content": "?", "images": [source]}]
        assert [p.token for p in gemma.chat(messages, temperature=0, max_tokens=6)] == answer


def test_both_engines_give_the_same_reply(folder: Path) -> None:
    answers = []
    for on in DEVICES:
        with Gemma.load(folder / "small.one", on, **EXACT) as gemma:
            still = {"type": "image", "image": FRAMES[0], "budget": 70}
            answers.append(reply(gemma, "hear ", audio(SONG), still, "and ", audio(WORD)))
            swapped = reply(gemma, "hear ", audio(WORD), still, "and ", audio(SONG))
            assert swapped != answers[-1]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


def test_audio_replaces_its_placeholders(gemma: Gemma) -> None:
    ids, spans = prompt_of(gemma, "a", audio(SONG), "b", audio(WORD))
    special = gemma.tokenizer.special_ids
    assert [span.media.count for span in spans] == [8, 3]
    for span in spans:
        assert ids[span.first - 1] == special["<|audio>"]
        assert set(ids[span.first : span.end]) == {special["<|audio|>"]}
        assert ids[span.end] == special["<audio|>"]


def test_long_audio_is_encoded_in_segments(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.gemma.encoder_config.SEGMENT_SAMPLES", 1600)
    reported: list[tuple[int, int]] = []
    found = gemma.encode_audio(SONG[:4000], lambda *steps: reported.append(steps))
    alone = [gemma.encode_audio(SONG[at : at + 1600][: 4000 - at]) for at in (0, 1600, 3200)]
    np.testing.assert_array_equal(found, np.concatenate(alone))
    assert reported == sorted(reported)
    assert reported[-1][0] == reported[-1][1] >= 3
    first = reply(gemma, audio(SONG[:4000]), "?")
    again = reply(gemma, audio(SONG[:4000]), "?")  # from the cache
    assert first == again


def test_audio_is_encoded_once(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma.encode_audio(WORD)
    encoder = gemma._engine.encoders._audio.encoder
    assert encoder is not None
    encoded = []
    encode = encoder.encode

    async def counted(samples: memoryview, *rest: object) -> object:
        encoded.append(len(samples))
        return await encode(samples, *rest)

    monkeypatch.setattr(encoder, "encode", counted)
    other = WORD[:900]
    first = reply(gemma, audio(other), "?")
    assert reply(gemma, audio(WORD), "?") != first
    assert reply(gemma, audio(other), "?") == first
    assert encoded == [900]


def test_progress_is_reported_and_may_stop_encoding(gemma: Gemma) -> None:
    reported: list[tuple[int, int]] = []
    still = {"type": "image", "image": FRAMES[1], "budget": 70}
    parts = [audio(SONG[:1234]), still, "?"]
    list(gemma.chat([user(*parts)], max_tokens=1, progress=lambda *steps: reported.append(steps)))
    assert reported == sorted(reported)
    assert reported[-1] == (200, 200)

    class EnoughError(Exception):
        pass

    def stop(*_: int) -> None:
        raise EnoughError

    used = [gemma.memory_nbytes]
    for _ in range(2):
        with pytest.raises(EnoughError):
            gemma.encode_audio(SONG[:1235], stop)
        with pytest.raises(EnoughError):
            gemma.encode_image(FRAMES[2], budget=70, progress=stop)
        used.append(gemma.memory_nbytes)
    assert used[0] >= used[1] == used[2]  # the plan of another size is freed
    assert len(gemma.encode_audio(SONG[:1235])) == 2


def test_encoders_can_be_freed(folder: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", context=128) as gemma:
        empty = gemma.memory_nbytes
        expected = gemma.encode_audio(SONG), gemma.encode_image(FRAMES[0], budget=70)
        assert gemma.memory_nbytes > empty
        gemma.free_encoders()
        assert gemma.memory_nbytes == empty
        np.testing.assert_array_equal(gemma.encode_audio(SONG), expected[0])
        np.testing.assert_array_equal(gemma.encode_image(FRAMES[0], budget=70), expected[1])
        pieces = gemma.chat([user(audio(SONG), "?")], temperature=0)
        next(pieces)
        gemma.free_encoders()  # a chat in progress keeps what it uses
        next(pieces)
        pieces.close()
        gemma.free_encoders()
        assert gemma.memory_nbytes >= empty
    assert gemma.memory_nbytes == 0


def test_encoders_count_as_memory(folder: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", context=128) as gemma:
        used = gemma.memory_nbytes
    some = (used + 1000) / 1e9
    with Gemma.load(folder / "small.one", "gpu", context=128, memory_gb=some) as gemma:
        for encode in (lambda: gemma.encode_audio(SONG), lambda: gemma.encode_image(FRAMES[0])):
            with pytest.raises(
                DeviceError, match=r"GB more for its \w+ encoder, but .* by memory_gb, or"
            ):
                encode()
        assert gemma.memory_nbytes == used


def test_plans_of_the_vision_encoder_are_freed_for_the_audio_encoder(folder: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", context=128) as gemma:
        gemma.encode_image(FRAMES[0], budget=70)
        recorded = gemma.memory_nbytes
        gemma._engine.encoders._vision.encoder._weights.free_idle()
        needed = gemma.memory_nbytes + encoder_nbytes(gemma._engine.gguf, "audio")
        assert gemma.memory_nbytes < recorded
    with Gemma.load(
        folder / "small.one", "gpu", context=128, memory_gb=(needed + 1) / 1e9
    ) as gemma:
        gemma.encode_image(FRAMES[0], budget=70)
        assert len(gemma.encode_audio(SONG))


def test_a_video_is_frames_with_their_times(gemma: Gemma) -> None:
    ids, spans = prompt_of(gemma, "see ", video(FRAMES, fps=0.5), "?")
    special = gemma.tokenizer.special_ids
    assert len(spans) == 3
    for span in spans:
        assert ids[span.first - 1] == special["<|image>"]
        assert set(ids[span.first : span.end]) == {special["<|video|>"]}
        assert ids[span.end] == special["<image|>"]
    between = [ids[a.end + 1 : b.first - 1] for a, b in pairwise(spans)]
    assert [gemma.tokenizer.decode(text) for text in between] == [" 00:02 ", " 00:04 "]
    before = gemma.tokenizer.decode(ids[: spans[0].first - 1])
    assert before.endswith("see00:00 ")  # the template trims the text of a user


def test_animated_images_are_videos(gemma: Gemma, tmp_path: Path) -> None:
    path = tmp_path / "video.png"
    first, *rest = [Image.fromarray(frame) for frame in FRAMES]
    first.save(path, save_all=True, append_images=rest, duration=[1000, 90_000, 10])
    expected = reply(gemma, video(FRAMES, fps=1), "?")
    for source in (path, str(path), path.read_bytes()):
        ids, spans = prompt_of(gemma, video(source), "?")
        between = ids[spans[1].end + 1 : spans[2].first - 1]
        assert gemma.tokenizer.decode(between) == " 01:31 "
    assert reply(gemma, video(np.stack(FRAMES), fps=1), "?") == expected


def test_frames_of_long_videos_are_evenly_chosen() -> None:
    assert chosen_frames(0) == []
    assert chosen_frames(32) == list(range(32))
    assert chosen_frames(33)[-1] == 31
    assert chosen_frames(100) == [int(at * 100 / 32) for at in range(32)]
    assert [timestamp(seconds) for seconds in (0, 59.9, 60, 3725)] == [
        "00:00",
        "00:59",
        "01:00",
        "62:05",
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio"}, r"messages\[0\].content\[0\] has no audio: give it as 'audio'"),
        (audio("https://example.org/a.wav"), "nothing is fetched from servers"),
        ({"type": "audio", "url": "a.wav"}, "must be a data: URL"),
        (audio("no such file.wav"), "There is no audio file at no such file.wav"),
        (audio(b"nonsense"), r"content\[0\].audio: The audio cannot be decoded"),
        (audio([0.0, float("nan")]), "NaN or infinite"),
        (audio([]), "holds no samples"),
        ({"type": "input_audio", "input_audio": {}}, "as base64 in 'data'"),
        ({"type": "input_audio", "input_audio": {"data": "ä"}}, "neither a file nor base64"),
        ({"type": "video"}, "has no video: give it as 'video'"),
        (video([]), "is a video without frames"),
        (video(5), "must be a list of images, not int"),
        (video([b"x"]), "frame 0: The image is not an image"),
        (video(FRAMES, fps=0), "fps is 0, but it must be a number above zero"),
        (video(b"\0\0\0\x18ftypmp42"), "pass the frames of a video as a list"),
        (video("a.mp4"), "'a.mp4' cannot be opened"),
    ],
)
def test_invalid_parts_raise_an_error(gemma: Gemma, part: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reply(gemma, part, "?")


@pytest.mark.parametrize("on", DEVICES)
def test_models_without_audio_encoder_raise_an_error(on: str, folder: Path) -> None:
    with Gemma.load(folder / "small.gguf", on, context=64) as gemma:
        for call in (lambda: gemma.encode_audio(SONG), lambda: reply(gemma, audio(SONG))):
            with pytest.raises(
                InputError, match=r"small\.gguf cannot read audio: .* load it with mmproj"
            ):
                call()
    mmproj = folder / "small.mmproj"
    with (
        Gemma.load(folder / "small.gguf", on, context=64, mmproj=mmproj) as gemma,
        pytest.raises(
            InputError, match=r"cannot read images: there is no vision encoder in small\.mmproj"
        ),
    ):
        gemma.encode_image(FRAMES[0])


def test_an_mmproj_may_be_a_source_but_not_an_address(folder: Path) -> None:
    source = BytesSource((folder / "small.mmproj").read_bytes(), "audio")
    with Gemma.load(folder / "small.gguf", "cpu", mmproj=source) as gemma:
        assert len(gemma.encode_audio(WORD)) == 3
    with pytest.raises(InputError, match="is on a server"):
        Gemma.load(folder / "small.gguf", "cpu", mmproj="https://example.org/audio.gguf")
    with pytest.raises(InputError, match="is not a model"):
        Gemma.load(folder / "small.gguf", "cpu", mmproj=5)


def test_a_conversation_with_audio_is_saved(folder: Path, tmp_path: Path) -> None:
    with Gemma.load(folder / "small.one", "gpu", **EXACT) as gemma:
        expected = reply(gemma, audio(SONG), "?")
        gemma.save(tmp_path / "saved")
        assert reply(gemma, "other") != expected
        gemma.restore(tmp_path / "saved")
        assert reply(gemma, audio(SONG), "?") == expected


@needs_shared
@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("samples", [24000, 40123])
def test_llama_cpp_files_agree_with_transformers(samples: int, on: str) -> None:
    files = SHARED / "mm"
    given = np.fromfile(files / f"audio-{samples}.f32", np.float32)
    expected = np.load(files / f"audio{samples}.embd.npy")
    with Gemma.load(files / "mm-f16.gguf", on, mmproj=files / "mmproj-mm-f16.gguf") as gemma:
        found = gemma.encode_audio(given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)
