"""Sessions for tests: a small model, its reference, and the first tokens of a generation."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache

from helpers.gpu import device, hardware
from helpers.tiny import SMALL, Tiny, tiny_gguf
from webgemma.engine.batching import Batch
from webgemma.engine.cpu import CpuEngine
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sampler import SampledToken
from webgemma.settings import Settings, resolve
from webgemma.sync import run_sync

GREEDY = resolve({"temperature": 0})
RANDOM = resolve({"temperature": 1.5, "top_k": 0, "top_p": 1.0, "presence_penalty": 0.5})
# Sliding and full layers, some of which share caches; the rings of SHORT are soon full.
SHORT = replace(SMALL, pattern="sfsf", shared=2)
IDS = [2, *(24 + i * 7 % 280 for i in range(1, 120))]
CHUNK, WINDOW = 16, SHORT.window
RING = CHUNK + WINDOW


def open_tiny(tiny: Tiny) -> tuple[Gguf, Config]:
    """Open a tiny model; return its file and its configuration."""
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return gguf, Config.from_gguf(gguf)


def load_tiny(tiny: Tiny, divided: str = "software") -> Model:
    """Load a tiny model, with work divided as for a software GPU or as for hardware."""
    gguf, config = open_tiny(tiny)
    return run_sync(Model.load(gguf, config, hardware() if divided == "hardware" else device()))


def open_batch(
    model: Model, count: int = 1, precision: str = "exact", context: int = 160, kv: str = "f16"
) -> tuple[Batch, list[Session]]:
    """Return a batch on so many slots, and a session in each."""
    batch = Batch(Slots(model, context, count=count, precision=precision, kv=kv))
    return batch, [Session.in_slot(batch, index) for index in range(count)]


@cache
def reference() -> CpuEngine:
    """Return the reference of SHORT."""
    return CpuEngine(*open_tiny(SHORT))


def take(
    engine: Session | CpuEngine, ids: list[int], count: int, settings: Settings = GREEDY
) -> list[int]:
    """Return the first tokens of a generation, and close it."""
    stream = engine.generate(ids, settings, 5)
    tokens = [next_token(stream) for _ in range(count)]
    close(stream)
    return tokens


def next_token(stream: AsyncIterator[SampledToken]) -> int:
    """Return the next token of a generation."""

    async def one() -> int:
        token, logprob, _ = await anext(stream)
        assert logprob <= 0
        return token

    return run_sync(one())


def close(stream: AsyncIterator[SampledToken]) -> None:
    """Close a generation."""

    async def one() -> None:
        await stream.aclose()

    run_sync(one())


def expected(ids: list[int], count: int, settings: Settings = GREEDY) -> list[int]:
    """Return the first tokens that the reference generates."""
    return take(reference(), ids, count, settings)
