"""What every engine offers, and what a user may choose when loading one."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from webgemma.denoising import Canvas, Denoising
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.kv_cache import ELEMENT_NBYTES
from webgemma.gemma.lora_weights import ScaledAdapter
from webgemma.gemma.record.quantised import choose_precision
from webgemma.gguf.reader import Gguf
from webgemma.media.encoders import EncoderFile, EncoderFiles, Encoders, MediaSpan
from webgemma.progress import Progress
from webgemma.sampler import SampledToken
from webgemma.settings import Settings

DeviceName = Literal["auto", "gpu", "cpu"]
KvName = Literal["f16", "f32"]
PrecisionName = Literal["auto", "exact", "int16", "int8"]


class Engine(Protocol):
    """What computes: the GPU, or the reference on the CPU."""

    name: str
    encoders: Encoders

    async def logits(self, ids: Sequence[int]) -> Any: ...

    def generate(
        self, ids: Sequence[int], settings: Settings, seed: int, media: Sequence[MediaSpan] = ()
    ) -> AsyncGenerator[SampledToken, None]: ...

    def denoise(
        self, ids: Sequence[int], denoising: Denoising, seed: int, media: Sequence[MediaSpan] = ()
    ) -> AsyncGenerator[Canvas, None]: ...

    def set_adapters(self, adapters: Sequence[ScaledAdapter]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load an engine; see `Gemma.load`."""

    device: DeviceName = "auto"
    kv: KvName = "f16"
    precision: PrecisionName = "auto"
    gpu: str | None = None  # a part of the GPU's name
    memory_gb: float | None = None
    progress: Progress | None = None
    label: str = ""  # the model's name, where it is not that of its file
    projectors: Callable[[], Sequence[EncoderFile]] = tuple

    def encoder_files(self, gguf: Gguf, config: Config) -> EncoderFiles:
        """Return where a model's encoders may be."""
        return EncoderFiles(self.label or gguf.name, gguf, config.width, self.projectors)

    def check(self) -> None:
        """Raise InputError for an option that does not exist, before anything is loaded."""
        if self.device not in ("auto", "gpu", "cpu"):
            raise InputError(f"The device {self.device!r} does not exist; use auto, gpu or cpu.")
        if self.kv not in ELEMENT_NBYTES:
            raise InputError(f"The KV cache cannot be {self.kv!r}; use f16 or f32.")
        choose_precision(self.precision, software=False)
        limit = self.memory_gb
        if limit is not None and not (isinstance(limit, int | float) and 0 < limit < float("inf")):
            raise InputError(f"memory_gb is {limit!r}; it must be a number above zero.")
