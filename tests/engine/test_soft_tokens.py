"""Pictures in a prompt on the GPU: logits and greedy ids as transformers', however it is cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device, put
from helpers.tiny import LARGE, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_eyes import EMBEDDER, LARGE_EYES, PICTURES, SMALL_EYES, Eyes, eyes_gguf, picture
from tolerance import GPU_SOFT_LOGITS

from webgemma import InputError
from webgemma.engine.session import Session
from webgemma.gemma.audio import Ears, Sound, hear
from webgemma.gemma.config import Config
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.soft_tokens import Soft, marked
from webgemma.gemma.vision import Eyes as DeviceEyes
from webgemma.gemma.vision import Sight, see
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.sampler import Sampling
from webgemma.sync import iterate_sync, run_sync

KINDS = {"small": (SMALL, SMALL_EYES), "large": (MOE, LARGE_EYES), "embedder": (LARGE, EMBEDDER)}
PLACE = 14  # <|image|>
GREEDY = Sampling(temperature=0)


def opened(data: bytes) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def look(gguf: Gguf, pictures: list[np.ndarray]) -> list[Sight]:
    """What the device makes of pictures that need not be resized."""
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    with run_sync(DeviceEyes.load(gguf, vision, device())) as eyes:
        sizes = [rgb.shape[1::-1] for rgb in pictures]
        return [
            run_sync(see(eyes, RgbImage(*size, rgb.tobytes()), *size))
            for size, rgb in zip(sizes, pictures, strict=True)
        ]


@contextmanager
def session_of(gguf: Gguf, **options: str) -> Iterator[Session]:
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 256, kv="f32", precision="exact", **options)
    yield session
    session.close()
    model.close()


def soft_tokens(ids: list[int], sights: list[Sight], both_ways: bool) -> list[Soft]:
    first = [at for at in range(1, len(ids)) if ids[at] == PLACE != ids[at - 1]]
    pairs = enumerate(zip(first, sights, strict=True))
    return [Soft(at, sight.tokens, number, both_ways) for number, (at, sight) in pairs]


def written(session: Session, ids: list[int], soft: list[Soft], count: int) -> list[int]:
    tokens = session.generate(ids, GREEDY, 0, soft)
    return [chosen.token for chosen in islice(iterate_sync(tokens), count)]


def assert_logits(logits: np.ndarray, truth: np.ndarray) -> None:
    finite = np.isfinite(logits)
    np.testing.assert_array_equal(finite, np.isfinite(truth))
    assert np.abs(logits[finite] - truth[finite]).max() <= GPU_SOFT_LOGITS


@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers(kind: str) -> None:
    tiny: Tiny
    eyes: Eyes
    tiny, eyes = KINDS[kind]
    truth = np.load(FIXTURES / "mm" / f"{kind}_eyes.npz")
    ids, wanted = truth["ids"].tolist(), truth["greedy"].tolist()
    sights = look(opened(eyes_gguf(eyes)), [picture(eyes, *size) for size in PICTURES])
    with session_of(opened(tiny_gguf(tiny))) as session:
        soft = soft_tokens(ids, sights, session.model.config.images_attend_both_ways)
        logits = np.frombuffer(run_sync(session.logits(ids, soft)), np.float32)
        logits = logits.reshape(truth["logits"].shape)
        assert_logits(logits, truth["logits"])
        assert written(session, ids, soft, len(wanted)) == wanted
        assert session._kept(session.tokens[: len(ids)], soft) == len(ids) - 1
        assert written(session, ids, soft, len(wanted)) == wanted  # from what the cache holds
        other = [Soft(s.first, s.rows, s.digest + 7, s.both_ways) for s in soft]
        assert session._agreed(marked(ids, other)) == soft[0].first
        assert written(session, ids, other, len(wanted)) == wanted
        assert written(session, ids, soft[:0], len(wanted)) != wanted
    for sight in sights:
        sight.close()


@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize("chunk", [16, 13])
def test_in_chunks(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that sees itself is never cut; one that does not may be."""
    monkeypatch.setattr("webgemma.engine.session.CHUNK", chunk)
    monkeypatch.setattr("webgemma.engine.session.BATCHES", (1, 4, chunk))
    tiny, eyes = KINDS[kind]
    truth = np.load(FIXTURES / "mm" / f"{kind}_eyes.npz")
    ids, wanted = truth["ids"].tolist(), truth["greedy"].tolist()
    sights = look(opened(eyes_gguf(eyes)), [picture(eyes, *size) for size in PICTURES])
    with session_of(opened(tiny_gguf(tiny))) as session:
        soft = soft_tokens(ids, sights, session.model.config.images_attend_both_ways)
        assert written(session, ids, soft, len(wanted)) == wanted
    for sight in sights:
        sight.close()


def listen(gguf: Gguf, samples: np.ndarray) -> Sound:
    """What the device makes of a sound."""
    audio = EncoderConfigs.from_gguf(gguf).audio
    assert audio is not None
    with run_sync(Ears.load(gguf, audio, device())) as ears:
        return run_sync(hear(ears, samples))


@needs_shared
@pytest.mark.parametrize(
    ("name", "place"), [("image240x192", 20), ("audio24000", 21), ("audio40123", 21)]
)
def test_llama_cpps_files(name: str, place: int) -> None:
    folder = SHARED / "mm"
    ids, wanted = (
        [int(word) for word in (folder / f"{name}.{kind}.txt").read_text().split()]
        for kind in ("ids", "greedy")
    )
    sight: Sight | Sound
    with Gguf.open(folder / "mmproj-mm-f16.gguf") as mmproj:
        if name.startswith("image"):
            rgb = np.fromfile(folder / "image-240x192.rgb", np.uint8).reshape(192, 240, 3)
            (sight,) = look(mmproj, [rgb])
        else:
            sight = listen(mmproj, np.fromfile(folder / f"audio-{name[5:]}.f32", np.float32))
    with Gguf.open(folder / "mm-f16.gguf") as gguf, session_of(gguf) as session:
        soft = [Soft(ids.index(place), sight.tokens, 1)]
        truth = np.load(folder / f"{name}.logits.npy")
        logits = np.frombuffer(run_sync(session.logits(ids, soft)), np.float32).reshape(truth.shape)
        assert_logits(logits, truth)
        assert written(session, ids, soft, len(wanted)) == wanted
    sight.close()


def test_soft_tokens_that_do_not_fit() -> None:
    with session_of(opened(tiny_gguf(SMALL))) as session:
        width = session.model.config.width

        def rows(count: int, columns: int = width) -> object:
            return put(np.zeros((count, columns), np.float32))

        for soft, sentence in (
            ([Soft(0, rows(2, 8), 1)], "do not fit a model of"),
            ([Soft(3, rows(2), 1)], "are not in their prompt"),
            ([Soft(1, rows(2), 1), Soft(2, rows(1), 2)], "are not in their prompt"),
            ([Soft(0, rows(1200), 1, True)], "take a smaller budget"),
        ):
            ids = [2] * (1200 if "budget" in sentence else 4)
            with pytest.raises(InputError, match=sentence):
                run_sync(anext(session.generate(ids, GREEDY, 0, soft)))
