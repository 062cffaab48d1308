"""Opening what computes: the GPU where there is one, else the reference on the CPU."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from webgemma.device import Device, open_device
from webgemma.errors import DeviceError, InputError, WebgemmaError
from webgemma.gemma.cache import ELEMENT_NBYTES
from webgemma.gemma.config import Config
from webgemma.gemma.integers import chosen_precision
from webgemma.gemma.weights import Model, weights_nbytes
from webgemma.gguf.reader import Gguf
from webgemma.sampler import Chosen, Sampling
from webgemma.selftest import selftest
from webgemma.session import GpuEngine, Session


class Engine(Protocol):
    """What computes: the reference on the CPU, or the GPU."""

    name: str

    async def logits(self, ids: Sequence[int]) -> Any: ...

    def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncIterator[Chosen]: ...

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

    def check(self) -> None:
        """InputError for what does not exist, before anything is loaded."""
        if self.device not in ("auto", "gpu", "cpu"):
            raise InputError(f"There is no device {self.device!r}; choose auto, gpu or cpu.")
        if self.kv not in ELEMENT_NBYTES:
            raise InputError(f"There is no kv {self.kv!r}; choose f16 or f32.")
        chosen_precision(self.precision, software=False)
        if self.memory_gb is not None and not 0 < self.memory_gb < float("inf"):
            raise InputError(f"memory_gb is {self.memory_gb}; it must be a number above zero.")


async def open_engine(gguf: Gguf, config: Config, context: int, options: EngineOptions) -> Engine:
    """The GPU where there is one (with "auto", no software one), else the reference."""
    options.check()
    if config.diffusion:
        raise WebgemmaError(f"{gguf.name}: this version reads DiffusionGemma but cannot run it.")
    if options.device != "cpu":
        asked = options.device == "gpu" or options.adapter is not None
        try:
            device = open_device(options.adapter, software=asked)
        except DeviceError:
            if asked:
                raise
        else:
            return await _gpu_engine(gguf, config, device, context, options)
    from webgemma.reference.engine import ReferenceEngine  # numpy: natively only

    return ReferenceEngine(gguf, config)


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
        budget = _weights_budget(gguf, config, context, options)
        model = await Model.load(gguf, config, device, advance, budget_nbytes=budget)
        session = Session(model, context, kv=options.kv, precision=options.precision)
        return GpuEngine(gguf, session)
    except BaseException:
        device.close()
        raise


def _weights_budget(gguf: Gguf, config: Config, context: int, options: EngineOptions) -> int | None:
    """Bytes that the cache leaves for the weights; DeviceError when they do not suffice."""
    if options.memory_gb is None:
        return None
    cache = config.kv_nbytes(context, element_nbytes=ELEMENT_NBYTES[options.kv])
    _, weights = weights_nbytes(gguf, config)  # the table may stay in the file
    if weights + cache > options.memory_gb * 1e9:
        raise DeviceError(
            f"{gguf.name} needs {weights / 1e9:.3g} GB for weights and {cache / 1e9:.3g} GB for a "
            f"cache of {context} tokens, but memory_gb={options.memory_gb:g}; "
            "take a smaller model or quantisation, or a shorter context."
        )
    return int(options.memory_gb * 1e9) - cache
