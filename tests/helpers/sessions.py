"""What tests of sessions share: a small model, what it says in truth, and how to take tokens."""

from dataclasses import replace
from functools import cache

from helpers.tiny import SMALL, Tiny, tiny_gguf
from webgemma.engine.cpu import CpuEngine
from webgemma.engine.session import Session
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sampler import Sampling
from webgemma.sync import run_sync

GREEDY = Sampling(temperature=0)
RANDOM = Sampling(temperature=1.5, top_k=0, top_p=1.0, presence_penalty=0.5)
# Sliding and full layers, some of which share their caches; SHORT is soon past its rings.
SHORT = replace(SMALL, pattern="sfsf", shared=2)
IDS = [2, *(24 + i * 7 % 280 for i in range(1, 120))]
CHUNK, WINDOW = 16, SHORT.window
RING = CHUNK + WINDOW


def open_tiny(tiny: Tiny) -> tuple[Gguf, Config]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return gguf, Config.from_gguf(gguf)


@cache
def reference() -> CpuEngine:
    return CpuEngine(*open_tiny(SHORT))


def take(
    engine: Session | CpuEngine, ids: list[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """The first tokens of a generation, which is then closed."""
    stream = engine.generate(ids, sampling, 5)
    tokens = [next_token(stream) for _ in range(count)]
    run_sync(closed(stream))
    return tokens


def next_token(stream) -> int:
    async def one() -> int:
        token, logprob, _ = await anext(stream)
        assert logprob <= 0
        return token

    return run_sync(one())


async def closed(stream) -> None:
    await stream.aclose()


def truth(ids: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    return take(reference(), ids, count, sampling)
