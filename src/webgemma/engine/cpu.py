"""The engine on the CPU: the numpy reference with one conversation's cache."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from webgemma.denoising import Canvas, Denoising
from webgemma.engine.constraints import Constraint, choices
from webgemma.errors import InputError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.encoder_config import AudioConfig, VisionConfig
from webgemma.gemma.lora_weights import NO_CHOICE, Adapters, Choice, ScaledAdapter
from webgemma.gguf.reader import Gguf
from webgemma.images import RgbImage
from webgemma.media.encoders import EncoderFiles, Encoders, MediaSpan
from webgemma.progress import Progress
from webgemma.reference.audio import AudioEncoder
from webgemma.reference.diffusion import DiffusionModel, SeededDraws
from webgemma.reference.embedding import EmbeddingModel
from webgemma.reference.images import patches, resize, rgb_array
from webgemma.reference.lora import AdaptedWeights, scaled_pairs
from webgemma.reference.sampling import sample
from webgemma.reference.text import PADDING, Cache, Soft, TextModel
from webgemma.reference.vision import VisionEncoder
from webgemma.reference.weights import Floats, Weights
from webgemma.sampler import SampledToken
from webgemma.settings import Settings
from webgemma.sync import checkpoint

Mark: TypeAlias = int | tuple[int, int]  # a token or, of a soft token, digest and number


class _CpuEncoder:
    """What both encoders have in common: their soft tokens are arrays, which need no freeing."""

    async def read(self, rows: Floats) -> Floats:
        """Return the soft tokens."""
        return rows

    def free(self, rows: Floats) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class CpuVisionEncoder(_CpuEncoder):
    """The vision encoder in numpy."""

    def __init__(self, vision: VisionConfig, weights: Weights) -> None:
        self.vision = vision
        self._encoder = VisionEncoder(vision, weights)

    async def encode(self, image: RgbImage, width: int, height: int, progress: Progress) -> Floats:
        """Return the soft tokens of an image: [n, output]."""
        rgb = resize(rgb_array(image), width, height)
        soft = self._encoder.encode(patches(rgb, self.vision.patch))
        progress(1, 1)
        return soft


class CpuAudioEncoder(_CpuEncoder):
    """The audio encoder in numpy."""

    def __init__(self, audio: AudioConfig, weights: Weights) -> None:
        self.audio = audio
        self._encoder = AudioEncoder(audio, weights)

    async def encode(self, samples: memoryview, progress: Progress) -> Floats:
        """Return the soft tokens of audio, each 30 s encoded separately: [n, output]."""
        encoded, segments = [], self.audio.segments(len(samples))
        for segment in segments:
            encoded.append(self._encoder.encode(np.frombuffer(samples[segment], np.float32)))
            progress(len(encoded), len(segments))
        return np.concatenate(encoded)


async def _load_vision(gguf: Gguf, vision: VisionConfig) -> CpuVisionEncoder:
    return CpuVisionEncoder(vision, Weights(gguf))


async def _load_audio(gguf: Gguf, audio: AudioConfig) -> CpuAudioEncoder:
    return CpuAudioEncoder(audio, Weights(gguf))


class CancellableModel(TextModel):
    """The text model, which a cancelled call leaves between layers."""

    def layer_output(
        self, layer: Layer, x: Floats, ple: Floats | None, cache: Cache, ends: np.ndarray
    ) -> Floats:
        """Return a layer's output, unless the call was cancelled."""
        checkpoint()
        return super().layer_output(layer, x, ple, cache, ends)


class CancellableEmbedding(EmbeddingModel):
    """The same of an embedding model."""

    def layer_output(
        self, layer: Layer, x: Floats, ple: Floats | None, cache: Cache, ends: np.ndarray
    ) -> Floats:
        """Return a layer's output, unless the call was cancelled."""
        checkpoint()
        return super().layer_output(layer, x, ple, cache, ends)


def _cancellable(config: Config, weights: Weights) -> TextModel:
    return (CancellableEmbedding if config.embedding else CancellableModel)(config, weights)


class CpuEngine:
    """The text model on the CPU. Its coroutines never suspend."""

    name = "CPU (numpy)"

    def __init__(self, gguf: Gguf, config: Config, files: EncoderFiles | None = None) -> None:
        self.gguf = gguf
        self.closed = False
        self.adapters = Adapters()
        self._weights = AdaptedWeights(gguf, [])
        self.model = _cancellable(config, self._weights)
        self.diffusion = DiffusionModel(config, self._weights) if config.diffusion else None
        self.cache = Cache(config)
        files = files or EncoderFiles(gguf.name, gguf, config.width)
        self.encoders = Encoders(files, _load_vision, _load_audio)
        self._cached: list[Mark] = []  # whose keys and values the cache holds
        self._choice = NO_CHOICE  # the adapters by name that are applied now

    async def logits(self, ids: Sequence[int]) -> Floats:
        """Return the logits after each of the ids: [T, vocab]."""
        self._check_open()
        self._choose(NO_CHOICE)
        return self.model.forward(ids)

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        batch: int | None,
        progress: Progress,
        choice: Choice = NO_CHOICE,
        media: Sequence[Sequence[MediaSpan]] = (),
    ) -> Floats:
        """Return the vector of each text, not normalised: [texts, size]; one after another.

        `media` are those of each text, if some have any."""
        del batch
        self._check_open()
        self._choose(choice)
        model = self.model
        assert isinstance(model, EmbeddingModel)
        vectors = np.empty((len(texts), model.embedding.size), np.float32)
        for index, ids in enumerate(texts):
            soft = [Soft(at, x.rows, x.is_image) for at, x in media[index]] if media else ()
            vectors[index] = model.raw_vector(ids, soft)
            progress(index + 1, len(texts))
        return vectors

    async def generate(
        self,
        ids: Sequence[int],
        settings: Settings,
        seed: int,
        media: Sequence[MediaSpan] = (),
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[SampledToken, None]:
        """Yield token after token with its log-probability, without end: the caller stops it.

        The adapters of the choice are applied, beside those that always are."""
        marks, adapters = _marked(ids, media), self.adapters
        while True:
            self._check_unchanged(adapters)
            self._choose(choice)
            logits = self._read(marks, media)
            mask = None if constraint is None else choices(constraint, len(logits))[0]
            sampled = sample(logits, settings, _unmarked(marks), seed, mask)
            if constraint is not None:
                constraint.accept(sampled.token)
            yield sampled
            marks.append(sampled.token)

    async def denoise(
        self,
        ids: Sequence[int],
        denoising: Denoising,
        seed: int,
        media: Sequence[MediaSpan] = (),
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[Canvas, None]:
        """Yield step after step, canvas after canvas, without end; DiffusionGemma only."""
        model, marks, number = self.diffusion, _marked(ids, media), 0
        adapters = self.adapters
        assert model is not None
        draws = SeededDraws(seed, model.canvas, model.config.vocab)
        while True:
            self._choose(choice)
            if self._cached[: len(marks)] != marks:
                self._read(marks, media, head=False)
            self.cache.truncate(len(marks))
            self._cached = list(marks)
            for canvas in model.denoise(self.cache, denoising, draws, number):
                yield canvas
                self._check_unchanged(adapters)
            marks += canvas.best
            number += 1

    def _read(self, marks: list[Mark], media: Sequence[MediaSpan], head: bool = True) -> Floats:
        """Return logits [vocab] after the last token; only what is not cached is computed."""
        self._check_open()
        pairs = zip(self._cached, marks, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        agreed = min(agreed, len(marks) - 1)  # the last one is computed, for its logits
        for span in media:
            if span.first < agreed < span.end:  # media are read whole
                agreed = span.first
        self.cache.truncate(agreed)
        self._cached = marks[:agreed]
        soft = [Soft(at - agreed, x.rows, x.is_image) for at, x in media if at >= agreed]
        tokens = _unmarked(marks[agreed:])
        out = self.model.forward(tokens, self.cache, soft=soft, last_only=True, head=head)
        self._cached = list(marks)
        logits: Floats = out[0]
        return logits

    def set_adapters(
        self,
        always: Sequence[ScaledAdapter] | None = None,
        named: Mapping[str, ScaledAdapter] | None = None,
    ) -> None:
        """Apply adapters from now on, or attach some that conversations may choose.

        What was read without them is read again."""
        self._check_open()
        self.adapters = self.adapters.changed(always, named)
        self._apply(NO_CHOICE)

    def _choose(self, choice: Choice) -> None:
        """Apply the adapters of a conversation."""
        if choice != self._choice:
            self._apply(choice)

    def _apply(self, choice: Choice) -> None:
        scaled = self.adapters.scaled(choice)
        self._weights.adapters = scaled_pairs([each for each in scaled if each[1]])
        self._choice, self._cached = choice, []
        self.cache.truncate(0)

    def slot_states(self, streams: int) -> list[tuple[bool, int]]:
        """Return whether a conversation is being computed, and the tokens of the last one."""
        return [(streams > 0, len(self._cached))]

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self.encoders.close()
        self.gguf.close()

    def _check_unchanged(self, adapters: Adapters) -> None:
        self._check_open()
        if adapters is not self.adapters:
            raise InputError("The adapters were changed meanwhile: start again.")

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self.gguf.name} is closed: load the model again.")


def _marked(ids: Sequence[int], spans: Sequence[MediaSpan]) -> list[Mark]:
    """Return the ids with marks for soft tokens: equal prefixes of marks are equal prompts."""
    marks: list[Mark] = list(ids)
    for at, media in spans:
        numbers = range(media.count)
        marks[at : at + media.count] = [(media.digest, number) for number in numbers]
    return marks


def _unmarked(marks: list[Mark]) -> list[int]:
    return [mark if isinstance(mark, int) else PADDING for mark in marks]
