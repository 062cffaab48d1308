"""Opening what computes: the GPU where there is one, else the reference on the CPU."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from webgemma.defaults import context_of
from webgemma.denoising import Canvas, Denoising
from webgemma.device import Device, aopen_device
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.engine.saved_session import SavedPath
from webgemma.engine.selftest import selftest
from webgemma.engine.session import Session
from webgemma.errors import DeviceError, DeviceMemoryError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.kv_cache import ELEMENT_NBYTES
from webgemma.gemma.lora_weights import Scaled
from webgemma.gemma.record.quantised import chosen_precision
from webgemma.gemma.soft_tokens import Soft
from webgemma.gemma.stacks import weights_nbytes
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.media.encoders import EncoderFile, EncoderFiles, Encoders, MediaSpan
from webgemma.media.gpu_encoders import gpu_encoders
from webgemma.sampler import Chosen, Sampling


class Engine(Protocol):
    """What computes: the reference on the CPU, or the GPU."""

    name: str
    senses: Encoders

    async def logits(self, ids: Sequence[int]) -> Any: ...

    def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int, placed: Sequence[MediaSpan] = ()
    ) -> AsyncIterator[Chosen]: ...

    def denoise(
        self, ids: Sequence[int], denoising: Denoising, seed: int, placed: Sequence[MediaSpan] = ()
    ) -> AsyncIterator[Canvas]: ...

    def set_adapters(self, adapters: Sequence[Scaled]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may ask of the engine; see `Gemma.aload`."""

    device: str = "auto"
    kv: str = "f16"
    precision: str = "auto"
    adapter: str | None = None
    memory_gb: float | None = None
    progress: Callable[[int, int], None] | None = None
    label: str = ""  # the model's name, where it is not that of its file
    projectors: Callable[[], Sequence[EncoderFile]] = tuple

    def towers(self, gguf: Gguf, config: Config) -> EncoderFiles:
        """Where a model's eyes and ears may be."""
        return EncoderFiles(self.label or gguf.name, gguf, config.width, self.projectors)

    def check(self) -> None:
        """InputError for what does not exist, before anything is loaded."""
        if self.device not in ("auto", "gpu", "cpu"):
            raise InputError(f"There is no device {self.device!r}; choose auto, gpu or cpu.")
        if self.kv not in ELEMENT_NBYTES:
            raise InputError(f"There is no kv {self.kv!r}; choose f16 or f32.")
        chosen_precision(self.precision, software=False)
        if self.memory_gb is not None and not 0 < self.memory_gb < float("inf"):
            raise InputError(f"memory_gb is {self.memory_gb}; it must be a number above zero.")


class GpuEngine:
    """A session as `api.Gemma` uses it, with the model it runs on; forks share the model."""

    def __init__(
        self,
        gguf: Gguf,
        session: Session,
        senses: Encoders,
        sharing: "list[GpuEngine] | None" = None,
    ) -> None:
        self.name = session.device.name
        self.senses = senses  # shared too
        self.gguf = gguf
        self._session = session
        self._sharing = [] if sharing is None else sharing  # every open engine on this model
        self._sharing.append(self)

    @property
    def nbytes(self) -> int:
        """Memory of the device that is in use, by all engines on it."""
        return self._session.device.nbytes

    @property
    def model(self) -> Model:
        """The weights it computes with."""
        return self._session.model

    async def logits(self, ids: Sequence[int]) -> bytes:
        """Float32 logits after each of the ids: [len(ids), vocab]."""
        return await self._session.logits(ids)

    def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int, placed: Sequence[MediaSpan] = ()
    ) -> AsyncIterator[Chosen]:
        """Token after token with its log-probability."""
        return self._session.generate(ids, sampling, seed, self._soft(placed))

    def denoise(
        self, ids: Sequence[int], denoising: Denoising, seed: int, placed: Sequence[MediaSpan] = ()
    ) -> AsyncIterator[Canvas]:
        """Step after step, block after block; DiffusionGemma only."""
        assert isinstance(self._session, DiffusionSession)
        return self._session.denoise(ids, denoising, seed, self._soft(placed))

    def _soft(self, placed: Sequence[MediaSpan]) -> list[Soft]:
        both_ways = self._session.model.config.images_attend_both_ways
        soft: list[Soft] = []
        for first, sensed in placed:
            for number, part in enumerate(sensed.rows):  # of a long sound there are several
                digest = sensed.digest + number
                soft.append(Soft(first, part.tokens, digest, both_ways and sensed.picture))
                first = soft[-1].end
        return soft

    def set_adapters(self, adapters: Sequence[Scaled]) -> None:
        """Have these on from now on; forks too."""
        self._session.model.set_adapters(adapters)

    def fork(self) -> "GpuEngine":
        """An engine on the same model whose session goes on from here."""
        return GpuEngine(self.gguf, self._session.fork(), self.senses, self._sharing)

    async def save(self, path: SavedPath) -> None:
        """Write the session to a file."""
        await self._session.save(path)

    async def restore(self, path: SavedPath) -> list[int]:
        """Go on where a saved session was; gives its tokens."""
        await self._session.take_over(path)
        return list(self._session.tokens)

    def close(self) -> None:
        """Free the session and, with the last engine on it, the model and its device."""
        if self not in self._sharing:
            return
        self._sharing.remove(self)
        self._session.close()
        if not self._sharing:
            self.senses.close()
            self._session.model.close()
            self._session.device.close()
            self.gguf.close()


async def open_engine(gguf: Gguf, config: Config, context: int, options: EngineOptions) -> Engine:
    """The GPU where there is one (with "auto", no software one), else the reference.

    A browser has no reference: there is no numpy."""
    options.check()
    in_browser = sys.platform == "emscripten"
    if options.device == "cpu" and in_browser:
        raise DeviceError("A browser computes on its GPU only: load the model with device='gpu'.")
    if options.device != "cpu":
        asked = options.device == "gpu" or options.adapter is not None or in_browser
        try:
            device = await aopen_device(options.adapter, software=asked)
        except DeviceError:
            if asked:
                raise
        else:
            return await _gpu_engine(gguf, config, device, context, options)
    from webgemma.engine.cpu import CpuEngine  # numpy: natively only

    return CpuEngine(gguf, config, options.towers(gguf, config))


async def _gpu_engine(
    gguf: Gguf, config: Config, device: Device, context: int, options: EngineOptions
) -> Engine:
    loaded = 0

    def advance(nbytes: int) -> None:
        nonlocal loaded
        loaded += nbytes
        if options.progress is not None:
            options.progress(loaded, gguf.nbytes)

    try:
        await selftest(device)
        needs = Needs.of(gguf, config, context, options)
        session = await _reserve(gguf, config, device, needs, options)
        await session.model.derive(gguf)
        if sys.platform == "emscripten":
            session.prepare()
        await session.model.fill(gguf, advance)
        senses = gpu_encoders(options.towers(gguf, config), device, options.memory_gb)
        return GpuEngine(gguf, session, senses)
    except BaseException:
        device.close()
        raise


async def _reserve(
    gguf: Gguf, config: Config, device: Device, needs: "Needs", options: EngineOptions
) -> Session:
    """All memory for weights and cache, before the first byte is loaded, or a DeviceError.

    Where the table of per-layer embeddings is too much, it stays in the file."""
    table = needs.place_of_table()
    free_nbytes = machine_free_nbytes() if device.unified else None
    if free_nbytes is not None:  # it promises more than there is, and then the process is killed
        if needs.nbytes(table) > free_nbytes:
            table = "host"
        if needs.nbytes(table) > free_nbytes:
            raise needs.refusal(
                f"{device.name} computes in this machine's memory, of which "
                f"{_gb(free_nbytes)} is free"
            )
    places: list[Literal["device", "host"]] = [table]
    if table == "device" and needs.table_nbytes:
        places.append("host")
    for place in places:
        try:
            return await _session(gguf, config, device, needs, options, place)
        except DeviceMemoryError as error:
            failed = error
    had = f"{device.name} could give only {_gb(failed.held_nbytes)}"
    raise needs.refusal(had) from failed


async def _session(
    gguf: Gguf,
    config: Config,
    device: Device,
    needs: "Needs",
    options: EngineOptions,
    table: Literal["device", "host"],
) -> Session:
    with ExitStack() as made:
        model = Model.reserve(gguf, config, device, table=table)
        made.callback(model.close)
        kind = DiffusionSession if config.diffusion else Session
        session = kind(model, needs.context, kv=options.kv, precision=options.precision)
        made.callback(session.close)
        await device.read(model.one.buffer, 0, 4).bytes()  # a browser tells of missing memory late
        made.pop_all()  # it is all there
    return session


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes of a device's memory; a step works in some hundred megabytes more."""

    name: str
    weights_nbytes: int  # without the table of per-layer embeddings
    table_nbytes: int
    cache_nbytes: int
    context: int
    memory_gb: float | None

    @classmethod
    def of(cls, gguf: Gguf, config: Config, context: int, options: EngineOptions) -> "Needs":
        """The needs of a model with a context."""
        table, weights = weights_nbytes(gguf, config)
        cache = config.kv_nbytes(context, element_nbytes=ELEMENT_NBYTES[options.kv])
        return cls(gguf.name, weights, table, cache, context, options.memory_gb)

    def nbytes(self, table: str) -> int:
        """With the table on the device, or in the file."""
        kept = self.table_nbytes if table == "device" else 0
        return self.weights_nbytes + self.cache_nbytes + kept

    def place_of_table(self) -> Literal["device", "host"]:
        """Where memory_gb leaves it; DeviceError when the rest is too much for it."""
        if self.memory_gb is None or self.nbytes("device") <= self.memory_gb * 1e9:
            return "device"
        if self.nbytes("host") > self.memory_gb * 1e9:
            raise self.refusal(f"memory_gb={self.memory_gb:g}")
        return "host"

    def refusal(self, had: str) -> DeviceMemoryError:
        """The sentence for a model that does not fit: what it needs, what there is, what to do."""
        beside = f" (and {_gb(self.table_nbytes)} left in the file)" if self.table_nbytes else ""
        return DeviceMemoryError(
            f"{self.name} needs {_gb(self.weights_nbytes)} for weights{beside} and "
            f"{_gb(self.cache_nbytes)} for a cache of {self.context} tokens, but {had}; "
            "take a smaller model or quantisation, or a shorter context.",
            self.nbytes("host"),
        )


def gpu_needs(gguf: Gguf) -> tuple[int, int]:
    """What a model takes of a GPU with the context it is given unless another is asked for: all
    of it, and with the table of per-layer embeddings left in the file. GgufError: it cannot run."""
    config = Config.from_gguf(gguf)
    needs = Needs.of(gguf, config, context_of(config, None, None), EngineOptions())
    return needs.nbytes("device"), needs.nbytes("host")


def machine_free_nbytes() -> int | None:
    """The memory that programs can still have, where the system tells: on Linux."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
