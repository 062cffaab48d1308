"""The reference as an engine: one conversation's cache, reused where the next prompt agrees."""

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from webgemma.denoising import Canvas, Denoising
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.encoder_config import AudioConfig, VisionConfig
from webgemma.gguf.reader import Gguf
from webgemma.images import RgbImage
from webgemma.media.encoders import EncoderFiles, Encoders, MediaSpan
from webgemma.progress import Progress
from webgemma.reference.audio import AudioModel
from webgemma.reference.diffusion import DiffusionModel, SeededDraws
from webgemma.reference.lora import AdaptedWeights, Pair
from webgemma.reference.pictures import patches, resize, rgb_of
from webgemma.reference.sampling import sample
from webgemma.reference.text import PADDING, Cache, Soft, TextModel
from webgemma.reference.vision import VisionModel
from webgemma.reference.weights import Floats, Weights
from webgemma.sampler import Chosen, Sampling

Mark: TypeAlias = int | tuple[int, int]  # a token or, of something sensed, digest and number


class ReferenceTower:
    """What the encoders on the CPU have in common."""

    async def read(self, rows: Floats) -> Floats:
        """The same."""
        return rows

    def free(self, rows: Floats) -> None:
        """Nothing is to be done."""

    def close(self) -> None:
        """Nothing is to be done."""


class ReferenceEyes(ReferenceTower):
    """The picture encoder, as `Encoders` uses it."""

    def __init__(self, vision: VisionConfig, weights: Weights) -> None:
        self.vision = vision
        self._tower = VisionModel(vision, weights)

    async def look(self, picture: RgbImage, width: int, height: int, progress: Progress) -> Floats:
        """The soft tokens of a picture: [n, output]."""
        rgb = resize(rgb_of(picture), width, height)
        soft = self._tower.encode(patches(rgb, self.vision.patch))
        progress(1, 1)
        return soft


class ReferenceEars(ReferenceTower):
    """The sound encoder, as `Encoders` uses it."""

    def __init__(self, audio: AudioConfig, weights: Weights) -> None:
        self.audio = audio
        self._tower = AudioModel(audio, weights)

    async def listen(self, samples: memoryview, progress: Progress) -> Floats:
        """The soft tokens of a sound, each 30 s heard on their own: [n, output]."""
        heard, parts = [], self.audio.parts(len(samples))
        for part in parts:
            heard.append(self._tower.hear(np.frombuffer(samples[part], np.float32)))
            progress(len(heard), len(parts))
        return np.concatenate(heard)


async def open_eyes(gguf: Gguf, vision: VisionConfig) -> ReferenceEyes:
    """The picture encoder of a file."""
    return ReferenceEyes(vision, Weights(gguf))


async def open_ears(gguf: Gguf, audio: AudioConfig) -> ReferenceEars:
    """The sound encoder of a file."""
    return ReferenceEars(audio, Weights(gguf))


class CpuEngine:
    """The text model on the CPU. Its coroutines never suspend."""

    name = "CPU (numpy)"

    def __init__(self, gguf: Gguf, config: Config, towers: EncoderFiles | None = None) -> None:
        self.gguf = gguf
        self.closed = False
        self.model = TextModel(config, Weights(gguf))
        self.diffusion = DiffusionModel(config, self.model.weights) if config.diffusion else None
        self.cache = Cache(config)
        towers = towers or EncoderFiles(gguf.name, gguf, config.width)
        self.senses = Encoders(towers, open_eyes, open_ears)
        self.held: list[Mark] = []  # whose keys and values the cache holds

    async def logits(self, ids: Sequence[int]) -> Floats:
        """The logits after each of the ids: [T, vocab]."""
        self._check_open()
        return self.model.forward(ids)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int, placed: Sequence[MediaSpan] = ()
    ) -> AsyncIterator[Chosen]:
        """Token after token with its log-probability, without end: the caller stops it."""
        marks = _marks(ids, placed)
        while True:
            logits = self._read(marks, placed)
            chosen = sample(logits, sampling, _plain(marks), seed)
            yield chosen
            marks.append(chosen.token)

    async def denoise(
        self, ids: Sequence[int], denoising: Denoising, seed: int, placed: Sequence[MediaSpan] = ()
    ) -> AsyncIterator[Canvas]:
        """Step after step, block after block, without end; DiffusionGemma only."""
        model, marks, block = self.diffusion, _marks(ids, placed), 0
        assert model is not None
        draws = SeededDraws(seed, model.canvas, model.config.vocab)
        while True:
            if self.held[: len(marks)] != marks:
                self._read(marks, placed)
            self.cache.truncate(len(marks))
            self.held = list(marks)
            for canvas in model.denoise(self.cache, denoising, draws, block):
                yield canvas
                self._check_open()
            marks += canvas.best
            block += 1

    def _read(self, marks: list[Mark], placed: Sequence[MediaSpan]) -> Floats:
        """Logits [vocab] after the last token; only what the cache does not hold is computed."""
        self._check_open()
        pairs = zip(self.held, marks, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        agreed = min(agreed, len(marks) - 1)  # the last one is computed, for its logits
        for each in placed:
            if each.first < agreed < each.end:  # one is read whole
                agreed = each.first
        self.cache.truncate(agreed)
        self.held = marks[:agreed]
        soft = [Soft(at - agreed, x.rows, x.picture) for at, x in placed if at >= agreed]
        tokens = _plain(marks[agreed:])
        logits: Floats = self.model.forward(tokens, self.cache, soft=soft, last_only=True)[0]
        self.held = list(marks)
        return logits

    def set_adapters(self, adapters: Sequence[tuple[Mapping[str, Any], float]]) -> None:
        """Have these on from now on; what was read without them is read again."""
        self._check_open()
        made = [
            {name: Pair.of_bytes(name, pair, scale) for name, pair in pairs.items()}
            for pairs, scale in adapters
        ]
        weights = AdaptedWeights(self.gguf, made)
        self.model, self.held = TextModel(self.model.config, weights), []
        self.cache.truncate(0)

    def close(self) -> None:
        """Let the file go."""
        self.closed = True
        self.senses.close()
        self.gguf.close()

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self.gguf.name} is closed: load the model again.")


def _marks(ids: Sequence[int], placed: Sequence[MediaSpan]) -> list[Mark]:
    marks: list[Mark] = list(ids)
    for at, sensed in placed:
        numbers = range(sensed.count)
        marks[at : at + sensed.count] = [(sensed.digest, number) for number in numbers]
    return marks


def _plain(marks: list[Mark]) -> list[int]:
    return [mark if isinstance(mark, int) else PADDING for mark in marks]
