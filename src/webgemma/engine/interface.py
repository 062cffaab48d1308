"""What every engine offers, and what a user may choose when loading one."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from webgemma.denoising import Canvas, Denoising
from webgemma.engine.constraints import Constraint
from webgemma.engine.speculation import DraftCounts
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.gpu_sampler import MAX_SLOTS
from webgemma.gemma.kv_cache import ELEMENT_NBYTES
from webgemma.gemma.lora_weights import NO_CHOICE, Adapters, Choice, ScaledAdapter
from webgemma.gemma.record.precision import check_precision
from webgemma.gguf.reader import Gguf
from webgemma.media.encoders import EncoderFile, EncoderFiles, Encoders, MediaSpan
from webgemma.progress import Progress
from webgemma.sampler import SampledToken
from webgemma.settings import Settings
from webgemma.sync import Detached, ForDriver
from webgemma.values import real_number, shown, whole_number

DeviceName = Literal["auto", "gpu", "cpu"]
KvName = Literal["f16", "f32"]
PrecisionName = Literal["auto", "exact", "int16", "int8", "f16"]


class Started(Detached):
    """What a generation yields before its tokens, if it is computed together with others."""

    def __init__(self, cached: int, drafts: DraftCounts) -> None:
        self.cached = cached  # tokens of the prompt that need not be read again
        self.drafts = drafts  # those checked so far, as the generation goes on


@dataclass(frozen=True, slots=True)
class Slot:
    """What computes one conversation at a time, beside those of a model's other slots."""

    id: int
    busy: bool  # whether a conversation is being computed
    tokens: int  # that its cache holds, of that conversation or the one before
    context: int  # positions of prompt and reply together, at most


class Engine(Protocol):
    """What computes: the GPU, or the reference on the CPU."""

    name: str
    encoders: Encoders

    @property
    def adapters(self) -> Adapters: ...

    async def logits(self, ids: Sequence[int]) -> Any: ...

    def generate(
        self,
        ids: Sequence[int],
        settings: Settings,
        seed: int,
        media: Sequence[MediaSpan] = (),
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> "AsyncGenerator[SampledToken | ForDriver, None]": ...

    def denoise(
        self,
        ids: Sequence[int],
        denoising: Denoising,
        seed: int,
        media: Sequence[MediaSpan] = (),
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[Canvas, None]: ...

    def set_adapters(
        self,
        always: Sequence[ScaledAdapter] | None = None,
        named: Mapping[str, ScaledAdapter] | None = None,
    ) -> None: ...

    def slot_states(self, streams: int) -> list[tuple[bool, int]]: ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """What the engine of an embedding model offers more."""

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        batch: int | None,
        progress: Progress,
        choice: Choice = NO_CHOICE,
        media: Sequence[Sequence[MediaSpan]] = (),
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load an engine; see `Gemma.load`."""

    device: DeviceName = "auto"
    kv: KvName = "f16"
    precision: PrecisionName = "auto"
    gpu: str | None = None  # a part of the GPU's name
    memory_gb: float | None = None
    slots: int | None = None  # conversations with memory of their own; None: a few, when needed
    progress: Progress | None = None
    label: str = ""  # the model's name, where it is not that of its file
    projectors: Callable[[], Sequence[EncoderFile]] = tuple
    draft: Callable[[], Awaitable[Gguf]] | None = None  # opens the file of its drafter

    def encoder_files(self, gguf: Gguf, config: Config) -> EncoderFiles:
        """Return where a model's encoders may be."""
        return EncoderFiles(self.label or gguf.name, gguf, config.width, self.projectors)

    def check(self) -> None:
        """Raise InputError for an option that does not exist, before anything is loaded."""
        if not _is_one_of(self.device, get_args(DeviceName)):
            raise InputError(
                f"The device {shown(self.device)} does not exist; use auto, gpu or cpu."
            )
        if not _is_one_of(self.kv, ELEMENT_NBYTES):
            raise InputError(f"The KV cache cannot be {shown(self.kv)}; use f16 or f32.")
        check_precision(self.precision)
        if self.gpu is not None and not isinstance(self.gpu, str):
            raise InputError(f"gpu is {shown(self.gpu)}; it must be a part of a GPU's name.")
        if self.memory_gb is not None and (real_number(self.memory_gb) or 0) <= 0:
            raise InputError(
                f"memory_gb is {shown(self.memory_gb)}; it must be a number above zero."
            )
        check_slots(self.slots)


def check_slots(slots: object) -> int | None:
    """Return how many conversations are computed at once; InputError if no engine does that."""
    if slots is not None and not 1 <= (whole_number(slots) or 0) <= MAX_SLOTS:
        raise InputError(
            f"slots is {shown(slots)}; it must be a whole number from 1 to {MAX_SLOTS}: how many "
            "conversations are computed at once."
        )
    return whole_number(slots)


def _is_one_of(value: object, names: Iterable[str]) -> bool:
    return isinstance(value, str) and value in names
