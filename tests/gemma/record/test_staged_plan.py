"""Pictures and sounds of one size, one after the other: recorded once, and each its own."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import coroutine
from typing import Any

import numpy as np
import pytest
from helpers.gpu import device, get
from helpers.tiny_ears import EARS, RAW_EARS, audio_of, ears_gguf, ears_tensors
from helpers.tiny_eyes import EMBEDDER, SMALL_EYES, eyes_gguf

from webgemma.device import Device, Plan
from webgemma.device.null import NullDevice
from webgemma.errors import DeviceError
from webgemma.gemma.audio import Ears, Sound, hear
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.record import staged_plan as workbench
from webgemma.gemma.record.staged_plan import Tower
from webgemma.gemma.vision import Eyes, Sight, see
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.progress import Progress, unwatched


class EnoughError(Exception):
    """What a progress raises that has seen enough."""


def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of coroutines that take turns whenever one has to wait."""
    results: dict[int, Any] = {}
    while len(results) < len(work):
        for at, each in enumerate(work):
            try:
                if at not in results:
                    each.send(None)
            except StopIteration as done:
                results[at] = done.value
    return [results[at] for at in range(len(work))]


def alone(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of one."""
    return together(work)[0]


@dataclass
class Sense:
    """A tower, and how it encodes something random of a small or a large size."""

    tower: Tower
    encode: Callable[..., Coroutine[Any, Any, Sight | Sound]]  # (seed, large, progress)

    def encoded(self, seed: int, large: bool = False, progress: Progress = unwatched) -> np.ndarray:
        """The soft tokens."""
        made = alone(self.encode(seed, large, progress))
        tokens = get(made.tokens)
        made.close()
        return tokens


def eyes(on: Device, shape: object) -> Sense:
    gguf = alone(Gguf.aopen(BytesSource(eyes_gguf(shape))))
    vision = EncoderConfigs.from_gguf(gguf).vision
    assert vision is not None
    tower, side = alone(Eyes.load(gguf, vision, on)), vision.patch * vision.pool

    async def encode(seed: int, large: bool = False, progress: Progress = unwatched) -> Sight:
        width, height = (31, 17) if large else (21, 35)
        target = (3 * side, 2 * side) if large else (side, 2 * side)
        rgb = np.random.default_rng(seed).bytes(3 * width * height)
        return await see(tower, RgbImage(width, height, rgb), *target, progress)

    return Sense(tower, encode)


def ears(on: Device, shape: object) -> Sense:
    gguf = ears_gguf(shape, ears_tensors(shape))
    tower = alone(Ears.load(gguf, audio_of(gguf), on))

    async def encode(seed: int, large: bool = False, progress: Progress = unwatched) -> Sound:
        samples = np.random.default_rng(seed).uniform(-1, 1, 3000 if large else 1500)
        return await hear(tower, samples.astype("<f4"), progress)

    return Sense(tower, encode)


KINDS = {
    "eyes": lambda on: eyes(on, SMALL_EYES),
    "eyes without layers": lambda on: eyes(on, EMBEDDER),
    "ears": lambda on: ears(on, EARS),
    "ears without layers": lambda on: ears(on, RAW_EARS),
}
DEEP = ["eyes", "ears"]  # those that work in more than one step


@contextmanager
def opened(kind: str, on: Device | None = None) -> Iterator[Sense]:
    """A tower that gives all memory back in the end."""
    on = on or device()
    held = on.nbytes
    sense = KINDS[kind](on)
    with sense.tower:
        yield sense
    assert on.nbytes == held


def fresh(kind: str, seed: int, large: bool = False) -> np.ndarray:
    """What a tower makes of it that has seen and heard nothing before."""
    with opened(kind) as sense:
        return sense.encoded(seed, large)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The plans that are recorded meanwhile."""
    made: list[Plan] = []
    plan = workbench.Recorder.plan

    def counting(self: workbench.Recorder) -> Plan:
        made.append(plan(self))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(workbench.Recorder, "plan", counting)
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_size_is_recorded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [fresh(kind, seed) for seed in (1, 2)]
    assert np.abs(wanted[0] - wanted[1]).max() > 0
    with opened(kind) as sense, counted(monkeypatch) as plans:
        first = alone(sense.encode(1))
        recorded, held = len(plans), device().nbytes
        second = alone(sense.encode(2))
        assert len(plans) == recorded > 0
        np.testing.assert_array_equal(get(second.tokens), wanted[1])
        np.testing.assert_array_equal(get(first.tokens), wanted[0])  # still there
        second.close()
        assert device().nbytes == held
        np.testing.assert_array_equal(sense.encoded(1), wanted[0])
        sense.tower.rest()
        np.testing.assert_array_equal(sense.encoded(1), wanted[0])
        assert len(plans) == 2 * recorded
        first.close()


@pytest.mark.parametrize("kind", DEEP)
def test_sizes_that_alternate(kind: str) -> None:
    with opened(kind) as sense:
        for seed, large in enumerate((False, True, True, False)):
            np.testing.assert_array_equal(sense.encoded(seed, large), fresh(kind, seed, large))


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("replayed", [False, True])
def test_an_end_in_the_middle(kind: str, replayed: bool) -> None:
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done == 2:
            raise EnoughError

    with opened(kind) as sense:
        loaded = device().nbytes
        if replayed:
            sense.encoded(1)
        with pytest.raises(EnoughError):
            sense.encoded(2, progress=stop)
        steps = told[0][1]
        assert told == [(1, steps), (2, steps)]
        assert steps > 2
        assert device().nbytes == loaded  # what has failed is not kept
        np.testing.assert_array_equal(sense.encoded(3), fresh(kind, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_progress_of_every_run(kind: str) -> None:
    with opened(kind) as sense:
        for seed in range(3):
            told: list[tuple[int, int]] = []
            sense.encoded(seed, progress=lambda *steps, told=told: told.append(steps))
            total = len(told)
            assert told == [(done, total) for done in range(1, total + 1)]


@coroutine
def pause() -> Iterator[None]:
    """Let others work."""
    yield


class PatientDevice(NullDevice):
    """One on which others can work while bytes are on their way, as in a browser."""

    def read(self, *part: object) -> object:
        reading = super().read(*part)

        class Later:
            async def bytes(self) -> bytes:
                await pause()
                return await reading.bytes()

        return Later()


@pytest.mark.parametrize("kind", DEEP)
def test_two_at_the_same_time_share_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = PatientDevice()

    with opened(kind, on) as sense, counted(monkeypatch) as plans:
        alone(sense.encode(0)).close()
        recorded, held = len(plans), on.nbytes
        on.plans.clear()
        for made in together(sense.encode(1), sense.encode(2)):
            made.close()
        assert len(plans) == 2 * recorded  # one was free
        assert len({id(plan) for plan in on.plans}) == len(on.plans) == 2 * recorded
        assert on.nbytes == held  # one of both is kept


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("replayed", [False, True])
def test_a_tower_that_is_closed_at_work_says_so(kind: str, replayed: bool) -> None:
    on = PatientDevice()
    with opened(kind, on) as sense:
        if replayed:
            alone(sense.encode(0)).close()
        with pytest.raises(DeviceError, match="given back while it was at work"):
            alone(sense.encode(1, progress=lambda *_: sense.tower.close()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_much_memory_is_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "KEPT_NBYTES", 1000)
    with opened(kind) as sense:
        loaded = device().nbytes
        sense.encoded(1)
        assert device().nbytes == loaded
