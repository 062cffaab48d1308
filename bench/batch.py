"""Time conversations that decode together: tokens per second of all of them, and the first token.

    python bench/batch.py MODEL [--counts 1,4,16,64] [--prompt 512] [--decode 64]

MODEL is a .gguf file, or e2b, 26b or 31b: that shape with random weights. Prints, for each number
of conversations, what they write together (greedily, after prompts of their own), the
milliseconds and dispatches of a step, and the milliseconds until the first token of one more
prompt while the others go on. The peer's figures come from `peer_batch.py` in the same run."""

import argparse
import asyncio
import statistics
import time

from shapes import opened

from webgemma.device import open_device
from webgemma.engine.batching import Batch, Generation
from webgemma.engine.plans import PlanKey
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.gemma.gpu_sampler import MAX_SLOTS, plan_rows
from webgemma.gemma.weights import Model
from webgemma.settings import resolve

GREEDY = resolve({"temperature": 0.0, "speculate": "off"})
SAMPLED = resolve({"temperature": 1.0, "top_k": 64, "top_p": 0.95})
WARM_UP_STEPS = 8


def prompt_of(number: int, length: int, vocab: int) -> list[int]:
    """Return the ids of a prompt that differs from the others from its beginning on."""
    return [(7 + 37 * at + number) % min(1000, vocab) for at in range(length)]


async def take(generations: list[Generation], steps: int) -> None:
    """Read so many tokens of each conversation."""
    for _ in range(steps):
        for generation in generations:
            await generation.next()


async def measure(model: Model, count: int, prompt: int, decode: int, settings, precision) -> str:
    """Return a line with the figures of so many conversations."""
    more = 1 if count < MAX_SLOTS else 0  # the one that comes later
    slots = Slots(model, prompt + decode * 4 + 32, precision=precision, count=count + more)
    batch = Batch(slots)
    sessions = [Session.in_slot(batch, index) for index in range(count + more)]
    vocab = model.config.vocab
    try:
        start = time.perf_counter()
        generations = [
            await session.begin(prompt_of(number, prompt, vocab), settings, number)
            for number, session in enumerate(sessions[:count])
        ]
        await take(generations, 1)
        read = count * prompt / (time.perf_counter() - start)
        await take(generations, WARM_UP_STEPS)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            await take(generations, decode)
            seconds.append(time.perf_counter() - start)
        step = statistics.median(seconds) / decode
        key = PlanKey("decode", plan_rows(count), greedy=settings is GREEDY)
        dispatches = len(slots.plans.get(key).dispatches)
        line = (
            f"{count:3} conversations: {count / step:7.0f} tok/s together, {1000 * step:6.2f} ms a "
            f"step, {dispatches} dispatches, prompts {read:.0f} tok/s"
        )
        if more:
            times = []
            for number in range(3):
                start = time.perf_counter()
                ids = prompt_of(100 + number, prompt, vocab)
                late = await sessions[-1].begin(ids, settings, 1)
                await late.next()
                times.append(time.perf_counter() - start)
                late.leave()
            line += f", first token of one more {1000 * min(times):.1f} ms"
        return line
    finally:
        batch.close()


async def alone(model: Model, prompt: int, settings, precision) -> float:
    """Return the seconds until the first token of a prompt when nothing else runs."""
    session = Session(model, prompt + 32, precision=precision)
    times = []
    for number in range(4):
        session.rewind(0)
        await session.device.read(model.one.buffer, 0, 4).bytes()
        start = time.perf_counter()
        ids = prompt_of(200 + number, prompt, model.config.vocab)
        generation = await session.begin(ids, settings, 1)
        await generation.next()
        times.append(time.perf_counter() - start)
        generation.leave()
    session.close()
    return min(times[1:])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--counts", default="1,4,16,64")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--sampled", action="store_true", help="at temperature 1, not greedily")
    parser.add_argument("--gpu", default=None)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    settings = SAMPLED if options.sampled else GREEDY
    device = open_device(options.gpu, software=True)
    with opened(options.model) as (gguf, config):
        model = asyncio.run(Model.load(gguf, config, device))
        print(f"{device.name}: {gguf.name}, precision {options.precision}", flush=True)
        first = asyncio.run(alone(model, options.prompt, settings, options.precision))
        print(f"first token of {options.prompt} tokens alone: {1000 * first:.1f} ms", flush=True)
        for count in map(int, options.counts.split(",")):
            line = measure(
                model, count, options.prompt, options.decode, settings, options.precision
            )
            print(asyncio.run(line), flush=True)
        model.close()


if __name__ == "__main__":
    main()
