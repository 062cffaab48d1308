"""How fast DiffusionGemma denoises: a step, a block, and the bytes of experts that a step reads.

    python bench/diffusion.py FILE.gguf [--prompt 512] [--steps 8] [--blocks 3] [--layers N]

Without such a file, one of random weights with the true shapes and Q4_K_M's formats is written
there first (16 GB; fewer with --layers)."""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from blank import diffusion, q4_k_m  # noqa: E402
from tiny import _SCALES  # noqa: E402

from webgemma.denoising import Denoising  # noqa: E402
from webgemma.device import Device, open_device  # noqa: E402
from webgemma.engine.diffusion_session import DiffusionSession  # noqa: E402
from webgemma.gemma.config import Config  # noqa: E402
from webgemma.gemma.diffusion import CanvasRecorder, some_rows  # noqa: E402
from webgemma.gemma.moe import TILES  # noqa: E402
from webgemma.gemma.tensors import text_tensors  # noqa: E402
from webgemma.gemma.weights import Model  # noqa: E402
from webgemma.gguf.formats import FORMATS  # noqa: E402
from webgemma.gguf.reader import Gguf  # noqa: E402
from webgemma.gguf.writer import NewTensor, write_gguf  # noqa: E402
from webgemma.graph import Recorder, Tensor  # noqa: E402

REPEATED_BLOCKS = 1 << 18  # random blocks of a tensor; then they come again


def write_random(path: Path, layers: int) -> None:
    """A DiffusionGemma of the true shapes; its data is made when it is written."""
    whole = diffusion()
    config = replace(whole, layers=whole.layers[:layers])
    write_gguf(path, metadata(config), list(tensors(config)))


def metadata(config: Config) -> dict[str, object]:
    """What Config.from_gguf wants to know."""
    layers, experts, canvas = config.layers, config.experts, config.diffusion
    assert experts is not None
    assert canvas is not None
    own: dict[str, object] = {
        "block_count": len(layers),
        "context_length": config.context,
        "embedding_length": config.width,
        "feed_forward_length": layers[0].ffn,
        "attention.head_count": layers[0].heads,
        "attention.head_count_kv": [layer.kv_heads for layer in layers],
        "attention.key_length": 512,
        "attention.key_length_swa": 256,
        "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": [layer.sliding for layer in layers],
        "expert_count": experts.count,
        "expert_used_count": experts.used,
        "expert_feed_forward_length": experts.ffn,
    }
    return {
        "general.architecture": "diffusion-gemma",
        "general.name": "random weights",
        "tokenizer.ggml.model": "none",
        "diffusion.canvas_length": canvas.canvas,
        **{f"diffusion-gemma.{key}": value for key, value in own.items()},
    }


def tensors(config: Config) -> Iterator[NewTensor]:
    """Every tensor: vectors near one, matrices with a spread of about 1/√width."""
    rng = np.random.default_rng(1)
    for name, shape, needed in text_tensors(config):
        if not needed and not name.endswith("scale.weight"):
            continue
        if len(shape) == 1:
            size = 0.3 if "_norm.weight" in name and "attn_" in name else 1.0
            values = size * (1 + 0.02 * rng.standard_normal(shape[0]))
            yield NewTensor(name, shape, "F32", values.astype("<f4").tobytes())
        else:
            format = "Q5_0" if shape[0] % 256 else q4_k_m(name)
            yield NewTensor(name, shape, format, random_blocks(format, shape))


def random_blocks(format: str, shape: tuple[int, ...]) -> Callable[[], bytes]:
    """What gives the bytes of a matrix."""

    def data() -> bytes:
        width, rows, fmt = shape[0], prod(shape[1:]), FORMATS[format]
        rng = np.random.default_rng(width + rows)
        if fmt.block == 1:
            return (rng.standard_normal(width * rows) / math.sqrt(width)).astype("<f4").tobytes()
        count = rows * width // fmt.block
        made = rng.integers(0, 256, (min(count, REPEATED_BLOCKS), fmt.nbytes), np.uint8)
        for at, size in _SCALES[format]:
            scale = np.float16(1.4 / math.sqrt(width) / size)
            made[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        return np.resize(made, (count, fmt.nbytes)).tobytes()

    return data


async def measure(model: Model, prompt: int, steps: int, blocks: int) -> None:
    """Read a prompt, denoise some blocks, and say how long it took."""
    vocab, canvas = model.config.vocab, model.config.diffusion
    assert canvas is not None
    ids = random.Random(1).choices(range(vocab), k=prompt)
    session = DiffusionSession(model, prompt + (blocks + 1) * canvas.canvas)
    never = Denoising(steps=steps, confidence_threshold=0)
    await denoise(session, ids[:-1], never, 2)  # the warm-up compiles
    start = time.perf_counter()
    stamps = await denoise(session, ids, never, blocks)
    ends = stamps[steps - 1 :: steps]
    inside = [b - a for at, (a, b) in enumerate(pairwise(stamps)) if (at + 1) % steps]
    step_ms = 1000 * statistics.median(inside)
    block_ms = 1000 * statistics.median(b - a for a, b in pairwise([start, *ends]))
    size, plan = canvas.canvas, session._plan("denoise", canvas.canvas)
    print(f"a step of {size} after {prompt}: {step_ms:.1f} ms, {len(plan.dispatches)} dispatches")
    print(f"a block of {steps} steps: {block_ms:.0f} ms, {1000 * size / block_ms:.0f} tokens/s")
    for part, seconds in (await part_seconds(session)).items():
        print(f"  {part}: {1000 * seconds:.1f} ms")
    explain_experts(model, size, step_ms)
    session.close()


async def part_seconds(session: DiffusionSession) -> dict[str, float]:
    """How long the parts of a step take by themselves; those after the layers for all rows."""
    device, found = session.device, {}
    logits: Tensor | None = None
    h: Tensor | None = None
    for part in ("layers", "head", "survey", "expect"):
        recorder = Recorder(device)
        kv = "kv_" + session.kv
        canvas = CanvasRecorder(
            session.model, recorder, session._canvas, session._easel, kv, session.precision
        )
        if part == "layers":
            h = canvas.body()
        elif part == "head":
            assert h is not None
            logits = canvas.logits(some_rows(h, 0, min(canvas.rows_at_once(), canvas.batch)))
        else:
            assert logits is not None
            getattr(canvas, part)(logits, 0)
        plan = recorder.plan()
        times = []
        for _ in range(4):
            start = time.perf_counter()
            device.run(plan)
            await device.read(session._easel.left.buffer, 0, 16).bytes()
            times.append(time.perf_counter() - start)
        rounds = 1 if part == "layers" else -(-canvas.batch // canvas.rows_at_once())
        found[part] = rounds * min(times[1:])
    return found


async def denoise(
    session: DiffusionSession, ids: list[int], denoising: Denoising, blocks: int
) -> list[float]:
    """When each step was done."""
    session.rewind(0)
    stamps = []
    async for canvas in session.denoise(ids, denoising, 1):
        stamps.append(time.perf_counter())
        if canvas.done and canvas.block + 1 == blocks:
            break
    return stamps


def explain_experts(model: Model, canvas: int, step_ms: float) -> None:
    """What all positions together read of the experts, if they choose evenly."""
    experts = model.config.experts
    assert experts is not None
    whole = sum(w.nbytes for name, w in model.matrices.items() if name.endswith("_exps.weight"))
    places = canvas * experts.used
    asked = 1 - (1 - experts.used / experts.count) ** canvas
    tile = next((n for n in TILES if places <= n * experts.count), TILES[-1])
    rng = np.random.default_rng(1)
    drawn = rng.multinomial(places, [1 / experts.count] * experts.count, size=200)
    times = (-(-drawn // tile)).sum(axis=1).mean() / experts.count
    print(
        f"experts: {whole / 1e9:.2f} GB, {asked:.1%} of them asked by some position; "
        f"{places / experts.count:.0f} places each in tiles of {tile}: read {times:.2f} times, "
        f"{times * whole / 1e9:.1f} GB a step, {times * whole / step_ms / 1e6:.0f} GB/s"
    )


def load(gguf: Gguf, device: Device) -> Model:
    """The weights on the device."""
    return asyncio.run(Model.load(gguf, Config.from_gguf(gguf), device))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    for name, default in (("prompt", 512), ("steps", 8), ("blocks", 3), ("layers", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if not given.file.exists():
        start = time.perf_counter()
        write_random(given.file, given.layers)
        print(f"{given.file} written in {time.perf_counter() - start:.0f} s")
    device = open_device(None, software=True)
    with Gguf.open(given.file) as gguf:
        start = time.perf_counter()
        model = load(gguf, device)
        print(f"{device.name}: {model.config.name}, loaded in {time.perf_counter() - start:.1f} s")
        asyncio.run(measure(model, given.prompt, given.steps, given.blocks))
        model.close()


if __name__ == "__main__":
    main()
