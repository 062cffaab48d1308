"""The encoders of a model: loaded when first used, with the images and audio encoded last."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from webgemma.device import Device
from webgemma.errors import DeviceMemoryError, GgufError, InputError, MissingEncoderError
from webgemma.gemma import audio, vision
from webgemma.gemma.encoder_config import (
    AudioConfig,
    EncoderConfigs,
    VisionConfig,
    encoder_nbytes,
    is_of_gemma3,
)
from webgemma.gemma.record.staged_plan import EncoderWeights
from webgemma.gemma.soft_tokens import SoftTokens
from webgemma.gguf.reader import Gguf
from webgemma.images import RgbImage, check_budget, check_sides, soft_tokens, target_size
from webgemma.progress import Progress, ignore_progress

KEPT = 8  # encoded images and audio that are kept while unused


class Encoder(Protocol):
    """An encoder of an engine; `rows` are its own form of soft tokens."""

    async def read(self, rows: Any) -> Any: ...

    def free(self, rows: Any) -> None: ...

    def close(self) -> None: ...


class ImageEncoder(Encoder, Protocol):
    """An encoder of images."""

    vision: VisionConfig

    async def encode(self, image: RgbImage, width: int, height: int, progress: Progress) -> Any: ...


class SoundEncoder(Encoder, Protocol):
    """An encoder of audio: float32 samples at 16 kHz, of any length."""

    audio: AudioConfig

    async def encode(self, samples: memoryview, progress: Progress) -> Any: ...


@dataclass(slots=True)
class EncodedMedia:
    """An image or audio as soft tokens; it is kept as long as it has users."""

    count: int
    digest: int  # identifies it
    is_image: bool  # or audio
    rows: Any  # the encoder's: [count, width]
    encoder: Encoder
    users: int = 0


class MediaSpan(NamedTuple):
    """Encoded media in a prompt, in place of ids[first : first + media.count]."""

    first: int
    media: EncodedMedia

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.media.count


class EncoderFile(Protocol):
    """A file in which encoders may be."""

    @property
    def label(self) -> str: ...

    async def aopen(self) -> Gguf: ...


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """Where the encoders of a model may be: in projectors or, without any, in its file."""

    name: str  # of the model, for messages
    gguf: Gguf
    width: int  # of the text model
    projectors: Callable[[], Sequence[EncoderFile]] = tuple

    async def open(
        self, kind: Literal["vision", "audio"]
    ) -> tuple[Gguf, VisionConfig | AudioConfig]:
        """Return the file with an encoder, and the encoder's configuration."""
        medium = "images" if kind == "vision" else "audio"
        if is_of_gemma3(self.gguf):
            raise MissingEncoderError(
                f"{self.name} cannot read {medium}: webgemma runs only the text model of Gemma 3."
            )
        files = self.projectors()
        for file in files:
            gguf = await file.aopen()
            try:
                if is_of_gemma3(gguf):
                    raise GgufError(
                        f"{gguf.name} is the vision encoder of a Gemma 3, and webgemma runs only "
                        "the text model of that: use the mmproj of this model."
                    )
                config: VisionConfig | AudioConfig | None = getattr(
                    EncoderConfigs.from_gguf(gguf), kind
                )
                if config is not None:
                    return gguf, self._checked(config, gguf.name)
            except BaseException:
                gguf.close()
                raise
            gguf.close()
        refusal = f"{self.name} cannot read {medium}: there is no {kind} encoder in"
        if files:
            raise MissingEncoderError(f"{refusal} {', '.join(file.label for file in files)}.")
        config = getattr(EncoderConfigs.from_gguf(self.gguf), kind)
        if config is None:
            raise MissingEncoderError(
                f"{refusal} its file", "load it with mmproj, the path of the file that holds it"
            )
        return self.gguf, self._checked(config, self.gguf.name)

    def _checked(self, config: VisionConfig | AudioConfig, file: str) -> VisionConfig | AudioConfig:
        if config.output != self.width:
            raise GgufError(
                f"{file} makes soft tokens of {config.output} values, but {self.name} reads "
                f"{self.width}: it belongs to another model."
            )
        return config


T = TypeVar("T", bound=Encoder)


class _LazyEncoder(Generic[T]):
    """An encoder that is loaded when it is first used, until it is closed."""

    def __init__(
        self,
        files: EncoderFiles,
        kind: Literal["vision", "audio"],
        load: Callable[[Gguf, Any], Awaitable[T]],
    ) -> None:
        self.encoder: T | None = None
        self._files, self._kind, self._load = files, kind, load
        self._file = files.gguf

    async def get(self) -> T:
        """Return the encoder."""
        if self.encoder is None:
            file, config = await self._files.open(self._kind)
            try:
                self.encoder = await self._load(file, config)
            except BaseException:
                self._close_file(file)
                raise
            self._file = file
        return self.encoder

    def close(self) -> None:
        """Free its memory."""
        if self.encoder is not None:
            self.encoder.close()
            self._close_file(self._file)
            self.encoder = None

    def _close_file(self, file: Gguf) -> None:
        if file is not self._files.gguf:
            file.close()


LoadVision = Callable[[Gguf, VisionConfig], Awaitable[ImageEncoder]]
LoadAudio = Callable[[Gguf, AudioConfig], Awaitable[SoundEncoder]]


class Encoders:
    """Encodes images and audio as soft tokens; the same input is not encoded twice."""

    def __init__(self, files: EncoderFiles, load_vision: LoadVision, load_audio: LoadAudio) -> None:
        self.closed = False
        self._name = files.name
        self._vision = _LazyEncoder[ImageEncoder](files, "vision", load_vision)
        self._audio = _LazyEncoder[SoundEncoder](files, "audio", load_audio)
        self._encoded: dict[bytes, EncodedMedia] = {}  # the latest last

    async def encode_image(
        self, image: RgbImage, budget: int | None, progress: Progress = ignore_progress
    ) -> EncodedMedia:
        """Return the soft tokens of an image, until it is released.

        It is resized to fill a budget of them; without one its size has to fit as it is."""
        self._check_open()
        if budget is not None:
            check_budget(budget)
        encoder = await self._vision.get()
        key = _key(f"{image.width} {image.height} {budget}", image.rgb)
        if key not in self._encoded:
            width, height, count = _target(encoder.vision, image, budget)
            rows = await encoder.encode(image, width, height, progress)
            self._keep(key, count, True, rows, encoder)
        return self._use(key)

    async def image_tokens(self, image: RgbImage, budget: int) -> int:
        """Return how many soft tokens `encode_image` would give."""
        self._check_open()
        return _target((await self._vision.get()).vision, image, budget)[2]

    async def encode_audio(
        self, samples: memoryview, progress: Progress = ignore_progress
    ) -> EncodedMedia:
        """Return the soft tokens of audio, until it is released."""
        self._check_open()
        encoder = await self._audio.get()
        key = _key("audio", samples)
        if key not in self._encoded:
            rows = await encoder.encode(samples, progress)
            self._keep(key, encoder.audio.soft_tokens(len(samples)), False, rows, encoder)
        return self._use(key)

    async def audio_tokens(self, samples: memoryview) -> int:
        """Return how many soft tokens `encode_audio` would give."""
        self._check_open()
        return (await self._audio.get()).audio.soft_tokens(len(samples))

    async def read(self, media: EncodedMedia) -> Any:
        """Return the soft tokens as numbers: float32 [count, width], or their bytes."""
        self._check_open()
        return await media.encoder.read(media.rows)

    def release(self, *media: EncodedMedia) -> None:
        """Declare some unused by the caller; the last few unused ones are kept."""
        for each in media:
            each.users -= 1
        self._free_unused(KEPT)

    def free(self) -> None:
        """Free the encoders and what is unused; both are loaded again when needed."""
        self._free_unused(0)
        self._vision.close()
        self._audio.close()

    def close(self) -> None:
        """Free everything."""
        self.closed = True
        while self._encoded:
            _, each = self._encoded.popitem()
            each.encoder.free(each.rows)
        self._vision.close()
        self._audio.close()

    def _keep(self, key: bytes, count: int, is_image: bool, rows: Any, encoder: Encoder) -> None:
        if self.closed or key in self._encoded:  # meanwhile
            encoder.free(rows)
            self._check_open()
            return
        digest = int.from_bytes(key[:6])
        self._encoded[key] = EncodedMedia(count, digest, is_image, rows, encoder)

    def _use(self, key: bytes) -> EncodedMedia:
        each = self._encoded[key] = self._encoded.pop(key)
        each.users += 1
        return each

    def _free_unused(self, kept: int) -> None:
        unused = [key for key, each in self._encoded.items() if not each.users]
        for key in unused[: len(unused) - kept] if kept < len(unused) else ():
            each = self._encoded.pop(key)
            each.encoder.free(each.rows)

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self._name} is closed: load the model again.")


def _target(config: VisionConfig, image: RgbImage, budget: int | None) -> tuple[int, int, int]:
    """Return the width and height that an image is resized to, and its number of soft tokens."""
    size, side = (image.width, image.height), config.patch * config.pool
    if budget is not None:
        size = target_size(*size, budget, side)
    check_sides(*size, config.positions // config.pool, side)
    return *size, soft_tokens(*size, side)


def _key(kind: str, data: bytes | memoryview) -> bytes:
    digest = sha256(kind.encode() + b"\n")
    digest.update(data)
    return digest.digest()


# On the GPU


def gpu_encoders(
    files: EncoderFiles, device: Device, memory_gb: float | None, precision: str = "exact"
) -> Encoders:
    """Return the encoders of a model on a device, of whose memory so much may be in use.

    With the precision f16, matrix units multiply; else they compute in float32."""
    loaded: WeakSet[EncoderWeights] = WeakSet()

    def check_memory(file: Gguf, kind: str) -> None:
        for weights in loaded:
            weights.free_idle()
        nbytes = encoder_nbytes(file, kind)
        if memory_gb is not None and device.nbytes + nbytes > memory_gb * 1e9:
            raise DeviceMemoryError(
                f"{files.name} needs {nbytes / 1e9:.2g} GB more for its {kind} encoder, but "
                f"{device.nbytes / 1e9:.2g} GB are in use of the {memory_gb:g} GB that it may take",
                device.nbytes + nbytes,
                "allow more by memory_gb, or load it with a shorter context",
            )

    async def load_vision(file: Gguf, config: VisionConfig) -> GpuVisionEncoder:
        check_memory(file, "vision")
        weights = await vision.VisionEncoder.load(file, config, device, precision)
        loaded.add(weights)
        return GpuVisionEncoder(weights)

    async def load_audio(file: Gguf, config: AudioConfig) -> GpuAudioEncoder:
        check_memory(file, "audio")
        weights = await audio.AudioEncoder.load(file, config, device, precision)
        loaded.add(weights)
        return GpuAudioEncoder(weights)

    return Encoders(files, load_vision, load_audio)


def gpu_soft_tokens(
    spans: Sequence[MediaSpan], *, bidirectional: bool = False, offset: int = 0
) -> list[SoftTokens]:
    """Return the rows of media on a device, at their positions and so many more.

    With `bidirectional`, each of an image's attends to all of them."""
    soft: list[SoftTokens] = []
    for first, media in spans:
        at = offset + first
        for number, segment in enumerate(media.rows):  # long audio has several
            digest = media.digest + number
            image = bidirectional and media.is_image
            soft.append(SoftTokens(at, segment.tokens, digest, image))
            at = soft[-1].end
    return soft


class _GpuEncoder:
    """What both encoders have in common; soft tokens come in one tensor or several."""

    def __init__(self, weights: EncoderWeights) -> None:
        self._weights = weights

    async def read(self, rows: list[Any]) -> bytes:
        """Return float32 soft tokens: [n, width]."""
        device = self._weights.device
        readings = [device.read(x.tokens.buffer, 0, x.tokens.nbytes) for x in rows]
        return b"".join([await reading.bytes() for reading in readings])

    def free(self, rows: list[Any]) -> None:
        """Free encoded media."""
        for each in rows:
            each.close()

    def close(self) -> None:
        """Free the weights."""
        self._weights.close()


class GpuVisionEncoder(_GpuEncoder):
    """A vision encoder on a device."""

    def __init__(self, weights: vision.VisionEncoder) -> None:
        super().__init__(weights)
        self.vision = weights.vision
        self._encoder = weights

    async def encode(
        self, image: RgbImage, width: int, height: int, progress: Progress
    ) -> list[vision.EncodedImage]:
        """Encode an image."""
        return [await vision.encode_image(self._encoder, image, width, height, progress)]


class GpuAudioEncoder(_GpuEncoder):
    """An audio encoder on a device."""

    def __init__(self, weights: audio.AudioEncoder) -> None:
        super().__init__(weights)
        self.audio = weights.audio
        self._encoder = weights

    async def encode(self, samples: memoryview, progress: Progress) -> list[audio.EncodedAudio]:
        """Encode audio, each segment of 30 s separately."""
        encoded: list[audio.EncodedAudio] = []
        segments = self.audio.segments(len(samples))

        def report(done: int, total: int) -> None:
            progress(len(encoded) * total + done, len(segments) * total)

        try:
            for segment in segments:
                encoded.append(await audio.encode_audio(self._encoder, samples[segment], report))
        except BaseException:
            self.free(encoded)
            raise
        return encoded
