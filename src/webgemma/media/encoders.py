"""An engine's eyes and ears: opened when they are first needed, with what they last took in."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from webgemma.errors import GgufError, InputError
from webgemma.gemma.encoder_config import AudioConfig, EncoderConfigs, VisionConfig
from webgemma.gguf.reader import Gguf
from webgemma.images import RgbImage, check_sides, soft_tokens, target_size
from webgemma.progress import Progress, unwatched

KEPT = 8  # pictures and sounds that nobody uses at the moment


class Tower(Protocol):
    """An encoder where an engine computes; what it makes of something is its own affair."""

    async def read(self, rows: Any) -> Any: ...

    def free(self, rows: Any) -> None: ...

    def close(self) -> None: ...


class Eyes(Tower, Protocol):
    """One for pictures."""

    vision: VisionConfig

    async def look(self, picture: RgbImage, width: int, height: int, progress: Progress) -> Any: ...


class Ears(Tower, Protocol):
    """One for sounds: float32 samples at 16 kHz, of any length."""

    audio: AudioConfig

    async def listen(self, samples: memoryview, progress: Progress) -> Any: ...


OpenEyes = Callable[[Gguf, VisionConfig], Awaitable[Eyes]]
OpenEars = Callable[[Gguf, AudioConfig], Awaitable[Ears]]


@dataclass(slots=True)
class EncodedMedia:
    """A picture or a sound as soft tokens; it stays as long as it has users."""

    count: int
    digest: int  # tells it from others
    picture: bool  # or a sound
    rows: Any  # the tower's: [count, width]
    tower: Tower
    users: int = 0


class MediaSpan(NamedTuple):
    """Something sensed in a prompt, in place of ids[first : first + sensed.count]."""

    first: int
    sensed: EncodedMedia

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.sensed.count


class EncoderFile(Protocol):
    """A file in which towers may be."""

    @property
    def label(self) -> str: ...

    async def aopen(self) -> Gguf: ...


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """Where the towers of a model may be: in projectors or, where there are none, in its file."""

    name: str  # of the model, for sentences
    gguf: Gguf
    width: int  # of what the model reads
    projectors: Callable[[], Sequence[EncoderFile]] = tuple

    async def open(
        self, kind: Literal["vision", "audio"]
    ) -> tuple[Gguf, VisionConfig | AudioConfig]:
        """The file with a tower, and the tower's blueprint."""
        files = self.projectors()
        for file in files:
            gguf = await file.aopen()
            try:
                tower: VisionConfig | AudioConfig | None = getattr(
                    EncoderConfigs.from_gguf(gguf), kind
                )
                if tower is not None:
                    return gguf, self._fitting(tower, gguf.name)
            except BaseException:
                gguf.close()
                raise
            gguf.close()
        cannot = f"{self.name} cannot {'see' if kind == 'vision' else 'hear'}"
        if files:
            names = ", ".join(file.label for file in files)
            raise InputError(f"{cannot}: there is no {kind} tower in {names}.")
        tower = getattr(EncoderConfigs.from_gguf(self.gguf), kind)
        if tower is None:
            raise InputError(
                f"{cannot}: there is no {kind} tower in its file; "
                "load it with mmproj, the path of the file that holds it."
            )
        return self.gguf, self._fitting(tower, self.gguf.name)

    def _fitting(self, tower: VisionConfig | AudioConfig, file: str) -> VisionConfig | AudioConfig:
        if tower.output != self.width:
            raise GgufError(
                f"{file} makes soft tokens of {tower.output} values, but {self.name} reads "
                f"{self.width}: it belongs to another model."
            )
        return tower


T = TypeVar("T", bound=Tower)


class _Opened(Generic[T]):
    """One tower: loaded when it is first asked for, until it is closed."""

    def __init__(
        self,
        files: EncoderFiles,
        kind: Literal["vision", "audio"],
        load: Callable[[Gguf, Any], Awaitable[T]],
    ) -> None:
        self.tower: T | None = None
        self._files, self._kind, self._load = files, kind, load
        self._file = files.gguf

    async def get(self) -> T:
        """The tower."""
        if self.tower is None:
            file, blueprint = await self._files.open(self._kind)
            try:
                self.tower = await self._load(file, blueprint)
            except BaseException:
                self._let_go(file)
                raise
            self._file = file
        return self.tower

    def close(self) -> None:
        """Give its memory back."""
        if self.tower is not None:
            self.tower.close()
            self._let_go(self._file)
            self.tower = None

    def _let_go(self, file: Gguf) -> None:
        if file is not self._files.gguf:
            file.close()


class Encoders:
    """Pictures and sounds in, soft tokens out. What is known already is not encoded again."""

    def __init__(self, files: EncoderFiles, open_eyes: OpenEyes, open_ears: OpenEars) -> None:
        self.closed = False
        self._name = files.name
        self._eyes = _Opened[Eyes](files, "vision", open_eyes)
        self._ears = _Opened[Ears](files, "audio", open_ears)
        self._sensed: dict[bytes, EncodedMedia] = {}  # the latest last

    async def see(
        self, picture: RgbImage, budget: int | None, progress: Progress = unwatched
    ) -> EncodedMedia:
        """The soft tokens of a picture, until it is released.

        It is resized to fill a budget of them; without one it has to have a fitting size."""
        self._check_open()
        eyes = await self._eyes.get()
        key = _key(f"{picture.width} {picture.height} {budget}", picture.rgb)
        if key not in self._sensed:
            side, size = eyes.vision.patch * eyes.vision.pool, (picture.width, picture.height)
            if budget is not None:
                size = target_size(*size, budget, side)
            check_sides(*size, eyes.vision.positions // eyes.vision.pool, side)
            rows = await eyes.look(picture, *size, progress)
            self._keep(key, soft_tokens(*size, side), True, rows, eyes)
        return self._use(key)

    async def hear(self, samples: memoryview, progress: Progress = unwatched) -> EncodedMedia:
        """The soft tokens of a sound, until it is released."""
        self._check_open()
        ears = await self._ears.get()
        key = _key("sound", samples)
        if key not in self._sensed:
            rows = await ears.listen(samples, progress)
            self._keep(key, ears.audio.soft_tokens(len(samples)), False, rows, ears)
        return self._use(key)

    async def read(self, sensed: EncodedMedia) -> Any:
        """The soft tokens as numbers: float32 [count, width], or their bytes."""
        self._check_open()
        return await sensed.tower.read(sensed.rows)

    def release(self, *sensed: EncodedMedia) -> None:
        """Say that some are not in use any more; the last few of those are kept."""
        for each in sensed:
            each.users -= 1
        self._free_idle(KEPT)

    def free(self) -> None:
        """Give back what towers take, and what nobody uses; both come back when needed."""
        self._free_idle(0)
        self._eyes.close()
        self._ears.close()

    def close(self) -> None:
        """Give everything back."""
        self.closed = True
        while self._sensed:
            _, each = self._sensed.popitem()
            each.tower.free(each.rows)
        self._eyes.close()
        self._ears.close()

    def _keep(self, key: bytes, count: int, picture: bool, rows: Any, tower: Tower) -> None:
        if self.closed or key in self._sensed:  # meanwhile
            tower.free(rows)
            self._check_open()
            return
        self._sensed[key] = EncodedMedia(count, int.from_bytes(key[:6]), picture, rows, tower)

    def _use(self, key: bytes) -> EncodedMedia:
        each = self._sensed[key] = self._sensed.pop(key)
        each.users += 1
        return each

    def _free_idle(self, kept: int) -> None:
        idle = [key for key, each in self._sensed.items() if not each.users]
        for key in idle[: len(idle) - kept] if kept < len(idle) else ():
            each = self._sensed.pop(key)
            each.tower.free(each.rows)

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self._name} is closed: load the model again.")


def _key(kind: str, data: bytes | memoryview) -> bytes:
    digest = sha256(kind.encode() + b"\n")
    digest.update(data)
    return digest.digest()
