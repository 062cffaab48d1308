"""The reference as an engine: one conversation's cache, reused where the next prompt agrees."""

from collections.abc import AsyncIterator, Sequence
from itertools import takewhile
from typing import TypeAlias

from webgemma.denoising import Canvas, Denoising
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.towers import Vision
from webgemma.gguf.reader import Gguf
from webgemma.pictures import Picture
from webgemma.reference.diffusion import DiffusionModel, SeededDraws
from webgemma.reference.pictures import patches, resize, rgb_of
from webgemma.reference.sampling import sample
from webgemma.reference.text import PADDING, Cache, Soft, TextModel
from webgemma.reference.vision import VisionTower
from webgemma.reference.weights import Floats, Weights
from webgemma.sampler import Chosen, Sampling
from webgemma.seeing import EyeFiles, Placed, Seeing

Mark: TypeAlias = int | tuple[int, int]  # a token or, of a picture's, its digest and number


class ReferenceTower:
    """The picture encoder on the CPU, as `Seeing` uses it."""

    def __init__(self, vision: Vision, weights: Weights) -> None:
        self.vision = vision
        self._tower = VisionTower(vision, weights)

    def look(self, picture: Picture, width: int, height: int) -> Floats:
        """The soft tokens of a picture: [n, output]."""
        rgb = resize(rgb_of(picture), width, height)
        return self._tower.encode(patches(rgb, self.vision.patch))

    async def read(self, rows: Floats) -> Floats:
        """The same."""
        return rows

    def free(self, rows: Floats) -> None:
        """Nothing is to be done."""

    def close(self) -> None:
        """Nothing is to be done."""


async def open_tower(gguf: Gguf, vision: Vision) -> ReferenceTower:
    """The tower of a file."""
    return ReferenceTower(vision, Weights(gguf))


class ReferenceEngine:
    """The text model on the CPU. Its coroutines never suspend."""

    name = "CPU (numpy)"

    def __init__(self, gguf: Gguf, config: Config, eyes: EyeFiles | None = None) -> None:
        self.gguf = gguf
        self.closed = False
        self.model = TextModel(config, Weights(gguf))
        self.diffusion = DiffusionModel(config, self.model.weights) if config.diffusion else None
        self.cache = Cache(config)
        self.seeing = Seeing(eyes or EyeFiles(gguf.name, gguf, config.width), open_tower)
        self.held: list[Mark] = []  # whose keys and values the cache holds

    async def logits(self, ids: Sequence[int]) -> Floats:
        """The logits after each of the ids: [T, vocab]."""
        self._check_open()
        return self.model.forward(ids)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int, pictures: Sequence[Placed] = ()
    ) -> AsyncIterator[Chosen]:
        """Token after token with its log-probability, without end: the caller stops it."""
        marks = _marks(ids, pictures)
        while True:
            logits = self._read(marks, pictures)
            chosen = sample(logits, sampling, _plain(marks), seed)
            yield chosen
            marks.append(chosen.token)

    async def denoise(
        self, ids: Sequence[int], denoising: Denoising, seed: int, pictures: Sequence[Placed] = ()
    ) -> AsyncIterator[Canvas]:
        """Step after step, block after block, without end; DiffusionGemma only."""
        model, marks, block = self.diffusion, _marks(ids, pictures), 0
        assert model is not None
        draws = SeededDraws(seed, model.canvas, model.config.vocab)
        while True:
            if self.held[: len(marks)] != marks:
                self._read(marks, pictures)
            self.cache.truncate(len(marks))
            self.held = list(marks)
            for canvas in model.denoise(self.cache, denoising, draws, block):
                yield canvas
                self._check_open()
            marks += canvas.best
            block += 1

    def _read(self, marks: list[Mark], pictures: Sequence[Placed]) -> Floats:
        """Logits [vocab] after the last token; only what the cache does not hold is computed."""
        self._check_open()
        pairs = zip(self.held, marks, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        agreed = min(agreed, len(marks) - 1)  # the last one is computed, for its logits
        for picture in pictures:
            if picture.first < agreed < picture.end:  # one is read whole
                agreed = picture.first
        self.cache.truncate(agreed)
        self.held = marks[:agreed]
        soft = [Soft(at - agreed, seen.rows, True) for at, seen in pictures if at >= agreed]
        tokens = _plain(marks[agreed:])
        logits = self.model.forward(tokens, self.cache, soft=soft, last_only=True)[0]
        self.held = list(marks)
        return logits

    def close(self) -> None:
        """Let the file go."""
        self.closed = True
        self.seeing.close()
        self.gguf.close()

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self.gguf.name} is closed: load the model again.")


def _marks(ids: Sequence[int], pictures: Sequence[Placed]) -> list[Mark]:
    marks: list[Mark] = list(ids)
    for at, seen in pictures:
        marks[at : at + seen.count] = [(seen.digest, number) for number in range(seen.count)]
    return marks


def _plain(marks: list[Mark]) -> list[int]:
    return [mark if isinstance(mark, int) else PADDING for mark in marks]
