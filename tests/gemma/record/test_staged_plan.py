"""Staged plans of encoders: inputs of one size are recorded once, and keep their own results."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import coroutine
from typing import Any

import numpy as np
import pytest
from helpers.gpu import device, get
from helpers.tiny_audio import RAW_AUDIO, TINY_AUDIO, audio_config, audio_gguf, audio_weights
from helpers.tiny_vision import EMBEDDER, SMALL_VISION, vision_gguf

from webgemma.device import Device, Plan
from webgemma.device.null import NullDevice
from webgemma.errors import DeviceError
from webgemma.gemma.audio import AudioEncoder, EncodedAudio, encode_audio
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.record import staged_plan
from webgemma.gemma.record.staged_plan import EncoderWeights
from webgemma.gemma.vision import EncodedImage, VisionEncoder, encode_image
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.progress import Progress, ignore_progress


class CancelledError(Exception):
    """Raised by a progress callback that cancels the work."""


def run_together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return the results of coroutines that alternate whenever one has to wait."""
    results: dict[int, Any] = {}
    while len(results) < len(work):
        for at, each in enumerate(work):
            try:
                if at not in results:
                    each.send(None)
            except StopIteration as done:
                results[at] = done.value
    return [results[at] for at in range(len(work))]


def run_alone(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of one coroutine."""
    return run_together(work)[0]


@dataclass
class Case:
    """An encoder, and a function that encodes a random input of a small or a large size."""

    weights: EncoderWeights
    encode: Callable[..., Coroutine[Any, Any, EncodedImage | EncodedAudio]]
    # (seed, large, progress)

    def encoded(
        self, seed: int, large: bool = False, progress: Progress = ignore_progress
    ) -> np.ndarray:
        """Return the soft tokens."""
        result = run_alone(self.encode(seed, large, progress))
        tokens = get(result.tokens)
        result.close()
        return tokens


def vision(on: Device, shape: object) -> Case:
    gguf = run_alone(Gguf.aopen(BytesSource(vision_gguf(shape))))
    config = EncoderConfigs.from_gguf(gguf).vision
    assert config is not None
    encoder, side = run_alone(VisionEncoder.load(gguf, config, on)), config.patch * config.pool

    async def encode(
        seed: int, large: bool = False, progress: Progress = ignore_progress
    ) -> EncodedImage:
        width, height = (31, 17) if large else (21, 35)
        target = (3 * side, 2 * side) if large else (side, 2 * side)
        rgb = np.random.default_rng(seed).bytes(3 * width * height)
        return await encode_image(encoder, RgbImage(width, height, rgb), *target, progress)

    return Case(encoder, encode)


def audio(on: Device, shape: object) -> Case:
    gguf = audio_gguf(shape, audio_weights(shape))
    encoder = run_alone(AudioEncoder.load(gguf, audio_config(gguf), on))

    async def encode(
        seed: int, large: bool = False, progress: Progress = ignore_progress
    ) -> EncodedAudio:
        samples = np.random.default_rng(seed).uniform(-1, 1, 3000 if large else 1500)
        return await encode_audio(encoder, samples.astype("<f4"), progress)

    return Case(encoder, encode)


KINDS = {
    "vision": lambda on: vision(on, SMALL_VISION),
    "vision without layers": lambda on: vision(on, EMBEDDER),
    "audio": lambda on: audio(on, TINY_AUDIO),
    "audio without layers": lambda on: audio(on, RAW_AUDIO),
}
MANY_STAGES = ["vision", "audio"]


@contextmanager
def opened(kind: str, on: Device | None = None) -> Iterator[Case]:
    """Open an encoder; check that closing it frees all memory."""
    on = on or device()
    nbytes = on.nbytes
    case = KINDS[kind](on)
    with case.weights:
        yield case
    assert on.nbytes == nbytes


def encoded_first(kind: str, seed: int, large: bool = False) -> np.ndarray:
    """Return the soft tokens of an encoder that has encoded nothing before."""
    with opened(kind) as case:
        return case.encoded(seed, large)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Yield a list that every plan recorded meanwhile is added to."""
    plans: list[Plan] = []
    plan = staged_plan.Recorder.plan

    def counting(self: staged_plan.Recorder) -> Plan:
        plans.append(plan(self))
        return plans[-1]

    with monkeypatch.context() as patched:
        patched.setattr(staged_plan.Recorder, "plan", counting)
        yield plans


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_size_is_recorded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [encoded_first(kind, seed) for seed in (1, 2)]
    assert np.abs(expected[0] - expected[1]).max() > 0
    with opened(kind) as case, counted(monkeypatch) as plans:
        first = run_alone(case.encode(1))
        recorded, nbytes = len(plans), device().nbytes
        second = run_alone(case.encode(2))
        assert len(plans) == recorded > 0
        np.testing.assert_array_equal(get(second.tokens), expected[1])
        np.testing.assert_array_equal(get(first.tokens), expected[0])  # not overwritten
        second.close()
        assert device().nbytes == nbytes
        np.testing.assert_array_equal(case.encoded(1), expected[0])
        case.weights.free_idle()
        np.testing.assert_array_equal(case.encoded(1), expected[0])
        assert len(plans) == 2 * recorded
        first.close()


@pytest.mark.parametrize("kind", MANY_STAGES)
def test_sizes_that_alternate(kind: str) -> None:
    with opened(kind) as case:
        for seed, large in enumerate((False, True, True, False)):
            expected = encoded_first(kind, seed, large)
            np.testing.assert_array_equal(case.encoded(seed, large), expected)


@pytest.mark.parametrize("kind", MANY_STAGES)
@pytest.mark.parametrize("replayed", [False, True])
def test_cancelling_between_two_stages(kind: str, replayed: bool) -> None:
    reported: list[tuple[int, int]] = []

    def cancel(done: int, total: int) -> None:
        reported.append((done, total))
        if done == 2:
            raise CancelledError

    with opened(kind) as case:
        loaded = device().nbytes
        if replayed:
            case.encoded(1)
        with pytest.raises(CancelledError):
            case.encoded(2, progress=cancel)
        stages = reported[0][1]
        assert reported == [(1, stages), (2, stages)]
        assert stages > 2
        assert device().nbytes == loaded  # a plan that failed is not kept
        np.testing.assert_array_equal(case.encoded(3), encoded_first(kind, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_progress_of_every_run(kind: str) -> None:
    with opened(kind) as case:
        for seed in range(3):
            reported: list[tuple[int, int]] = []
            case.encoded(seed, progress=lambda *done, reported=reported: reported.append(done))
            total = len(reported)
            assert reported == [(done, total) for done in range(1, total + 1)]


@coroutine
def pause() -> Iterator[None]:
    """Suspend the coroutine once."""
    yield


class SuspendingDevice(NullDevice):
    """A device whose readings suspend the reader, as in a browser."""

    def read(self, *part: object) -> object:
        reading = super().read(*part)

        class Later:
            async def bytes(self) -> bytes:
                await pause()
                return await reading.bytes()

        return Later()


@pytest.mark.parametrize("kind", MANY_STAGES)
def test_two_at_the_same_time_share_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = SuspendingDevice()

    with opened(kind, on) as case, counted(monkeypatch) as plans:
        run_alone(case.encode(0)).close()
        recorded, nbytes = len(plans), on.nbytes
        on.plans.clear()
        for result in run_together(case.encode(1), case.encode(2)):
            result.close()
        assert len(plans) == 2 * recorded  # one was idle
        assert len({id(plan) for plan in on.plans}) == len(on.plans) == 2 * recorded
        assert on.nbytes == nbytes  # one of both is kept


@pytest.mark.parametrize("kind", MANY_STAGES)
@pytest.mark.parametrize("replayed", [False, True])
def test_an_encoder_that_is_closed_at_work_raises(kind: str, replayed: bool) -> None:
    on = SuspendingDevice()
    with opened(kind, on) as case:
        if replayed:
            run_alone(case.encode(0)).close()
        with pytest.raises(DeviceError, match="freed while it was at work"):
            run_alone(case.encode(1, progress=lambda *_: case.weights.close()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_much_memory_is_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_plan, "KEPT_NBYTES", 1000)
    with opened(kind) as case:
        loaded = device().nbytes
        case.encoded(1)
        assert device().nbytes == loaded
