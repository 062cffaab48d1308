"""How fast a model runs on this machine, measured as llama-bench does, and what limits it."""

import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, cast

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.engine.batching import STEPS_AHEAD
from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.graph import BufferPool, Recorder, folded
from webgemma.sampler import SampledToken
from webgemma.settings import resolve

GREEDY = resolve({"temperature": 0, "speculate": "off"})
WARM_UP_TOKENS = 4
COPY_NBYTES = 256 << 20  # well beyond the caches of a GPU
COPY_SECONDS, COPY_ROUNDS = 0.1, 8  # an idle GPU needs time to raise its clock
COPY_THREADS, COPY_EACH = 256, 4


@dataclass(frozen=True, slots=True)
class Task:
    """What to time: `prompt` tokens read after `depth` others, then `decode` tokens generated."""

    prompt: int = 512
    decode: int = 128
    depth: int = 0
    repetitions: int = 3

    def check(self, context: int) -> None:
        """Raise InputError if a model with this context cannot do it."""
        for name, least in (("prompt", 1), ("decode", 1), ("depth", 0), ("repetitions", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} is {getattr(self, name)}; it must be at least {least}.")
        needed = self.depth + self.prompt + self.decode
        if needed > context:
            raise InputError(
                f"This needs {needed} positions; the model's context is {context}. "
                "Use a smaller --prompt, --decode or --depth."
            )

    def ids(self, vocab: int) -> list[int]:
        """Return random tokens to read: they need no vocabulary."""
        return random.Random(1).choices(range(vocab), k=self.depth + self.prompt)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, the medians of all repetitions."""

    prompt: float
    decode: float

    @classmethod
    def of(cls, task: Task, prompts: list[float], decodes: list[float]) -> "Speed":
        """Return the speed, from the seconds that each repetition took."""
        median = statistics.median
        return cls(task.prompt / median(prompts), task.decode / median(decodes))


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decode step costs the GPU and the host."""

    weights_nbytes: int  # that the GPU reads
    dispatches: int
    host_seconds: float  # of the main thread, in Python and the driver, without waiting
    recording_seconds: float  # of another thread, which records the next step


async def time_gpu(
    model: Model, task: Task, kv: str, precision: str = "auto"
) -> tuple[Speed, StepCost]:
    """Return the speed on the device that holds the model, and what a step costs."""
    ids = task.ids(model.config.vocab)
    # This context ends with the prompt, so that no decode step is submitted after it.
    reader = Session(model, len(ids) + 1, kv=kv, precision=precision)
    context = len(ids) + 1 + task.decode + STEPS_AHEAD
    writer = Session(model, context, kv=kv, precision=precision)
    counter = _CountingDevice(model.device)
    writer.device = writer.batch.device = cast(Device, counter)
    try:
        await _prompt_seconds(reader, ids, task.depth)
        await _decode_seconds(writer, ids, min(WARM_UP_TOKENS, task.decode))
        prompts, decodes, hosts, recordings = [], [], [], []
        for _ in range(task.repetitions):
            prompts.append(await _prompt_seconds(reader, ids, task.depth))
            before = model.device.recording_seconds
            seconds, host_seconds = await _decode_seconds(writer, ids, task.decode)
            decodes.append(seconds)
            hosts.append(host_seconds / task.decode)
            recordings.append((model.device.recording_seconds - before) / task.decode)
        host, recording = statistics.median(hosts), statistics.median(recordings)
        step = StepCost(weights_read(model), counter.dispatches, host, recording)
        return Speed.of(task, prompts, decodes), step
    finally:
        reader.close()
        writer.close()


def time_reference(gguf: Gguf, config: Config, task: Task) -> Speed:
    """Return the speed of the reference, in numpy on the CPU."""
    from webgemma.reference.text import Cache, TextModel
    from webgemma.reference.weights import Weights

    model = TextModel(config, Weights(gguf))
    ids = task.ids(config.vocab)
    model.forward(ids[:1], last_only=True)  # the warm-up: it dequantises the weights
    prompts, decodes = [], []
    for _ in range(task.repetitions):
        cache = Cache(config)
        if task.depth:
            model.forward(ids[: task.depth], cache, last_only=True)
        start = time.perf_counter()
        logits = model.forward(ids[task.depth :], cache, last_only=True)
        prompts.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(task.decode):
            logits = model.forward([int(logits.argmax())], cache, last_only=True)
        decodes.append(time.perf_counter() - start)
    return Speed.of(task, prompts, decodes)


def weights_read(model: Model) -> int:
    """Return the bytes of weights that a decode step reads: a row of tables, the used experts."""
    config = model.config
    total = 0
    for name, weight in model.matrices.items():
        if (
            name in ("token_embd.weight", "per_layer_token_embd.weight")
            and weight is not model.head
        ):
            total += weight.nbytes // weight.rows
        elif name.endswith("_exps.weight") and config.experts:
            total += weight.nbytes * config.experts.used // config.experts.count
        else:
            total += weight.nbytes
    return total


async def copy_rate(device: Device) -> float:
    """Return the bytes per second, read and written, of a large copy in the GPU's memory."""
    nbytes = min(COPY_NBYTES, device.limits.binding_nbytes, device.limits.buffer_nbytes)
    nbytes -= nbytes % 16
    memory = BufferPool(device)
    grid = folded(-(-nbytes // (16 * COPY_THREADS * COPY_EACH)))

    async def seconds(times: int) -> float:
        recorder = Recorder(device)
        for _ in range(times):
            recorder.call(
                "copy",
                grid,
                source=source,
                to=to,
                vec4s=nbytes // 16,
                THREADS=COPY_THREADS,
                EACH=COPY_EACH,
            )
        plan = recorder.plan()
        start = time.perf_counter()
        device.run(plan)
        await device.read(to.buffer, 0, 16).bytes()
        taken = time.perf_counter() - start
        plan.close(device)
        return taken

    try:
        source, to = (memory.tensor(nbytes // 4, label="copy") for _ in range(2))
        await seconds(1)  # the memory is zeroed and the kernel compiled
        times = max(1, min(256, round(COPY_SECONDS / await seconds(1))))
        return 2 * nbytes * times / min([await seconds(times) for _ in range(COPY_ROUNDS)])
    finally:
        memory.close()


async def _prompt_seconds(session: Session, ids: list[int], depth: int) -> float:
    """Time reading the ids after the first `depth`, until the token that follows is known."""
    session.rewind(0)
    if depth:
        await _take(_tokens(session, ids[:depth]), 1)
        session.rewind(depth)
    # Until all is done: of what was generated before, steps may still be under way.
    await session.device.read(session.model.one.buffer, 0, 4).bytes()
    start = time.perf_counter()
    await _take(_tokens(session, ids), 1)
    return time.perf_counter() - start


async def _decode_seconds(session: Session, ids: list[int], count: int) -> tuple[float, float]:
    """Time generating `count` tokens; return the seconds, and those in which this thread works.

    Waiting does not count, wherever it happens: a driver may wait for the GPU inside a submit."""
    session.rewind(0)
    tokens = _tokens(session, ids)
    await anext(tokens)
    clock = _work_clock(session.device)
    start, before = time.perf_counter(), clock()
    await _take(tokens, count)
    return time.perf_counter() - start, clock() - before


def _work_clock(device: Device) -> Callable[[], float]:
    """Return a clock of this thread's work; in a browser, of the time spent in submitting."""
    if hasattr(time, "thread_time"):
        return time.thread_time
    counter = cast(_CountingDevice, device)
    return lambda: counter.seconds


def _tokens(session: Session, ids: list[int]) -> AsyncGenerator[SampledToken, None]:
    """Generate greedily after the ids."""
    tokens = session.generate(ids, GREEDY, 0)
    assert isinstance(tokens, AsyncGenerator)
    return tokens


async def _take(tokens: AsyncGenerator[SampledToken, None], count: int) -> None:
    for _ in range(count):
        await anext(tokens)
    await tokens.aclose()


class _CountingDevice:
    """A device that counts the dispatches of the last plan and the seconds spent in submitting."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.dispatches = 0
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> Reading | None:
        """Run a plan."""
        self.dispatches = len(plan.dispatches)
        start = time.perf_counter()
        try:
            return self._device.run(plan, read)
        finally:
            self.seconds += time.perf_counter() - start
