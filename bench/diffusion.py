"""Time DiffusionGemma: a denoising step, a canvas, and the expert bytes that a step reads.

    python bench/diffusion.py FILE.gguf [--prompt 512] [--steps 8] [--canvases 3] [--layers N]

If the file does not exist, one of random weights with the real shapes and Q4_K_M's formats is
written there first (16 GB; less with --layers)."""

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

from helpers.blank import diffusion, q4_k_m  # noqa: E402
from helpers.tiny import _SCALES  # noqa: E402

from webgemma.denoising import Denoising  # noqa: E402
from webgemma.device import Device, open_device  # noqa: E402
from webgemma.engine.diffusion_session import DiffusionSession  # noqa: E402
from webgemma.engine.plans import PlanKey  # noqa: E402
from webgemma.gemma.config import Config, text_tensors  # noqa: E402
from webgemma.gemma.diffusion import CanvasRecorder  # noqa: E402
from webgemma.gemma.record.matmul_backward import MatmulBackward  # noqa: E402
from webgemma.gemma.weights import Model  # noqa: E402
from webgemma.gguf.formats import FORMATS  # noqa: E402
from webgemma.gguf.reader import Gguf  # noqa: E402
from webgemma.gguf.writer import NewTensor, write_gguf  # noqa: E402
from webgemma.graph import Recorder, Tensor  # noqa: E402

DISTINCT_BLOCKS = 1 << 18  # random blocks of a tensor, which then repeat


def write_random(path: Path, layers: int) -> None:
    """Write a DiffusionGemma of the real shapes; its data is computed as it is written."""
    full = diffusion()
    config = replace(full, layers=full.layers[:layers])
    write_gguf(path, metadata(config), list(tensors(config)))


def metadata(config: Config) -> dict[str, object]:
    """Return the metadata that Config.from_gguf reads."""
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
    """Yield every tensor: vectors near one, matrices with a standard deviation near 1/√width."""
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
    """Return a function that computes the bytes of a random matrix."""

    def data() -> bytes:
        width, rows, fmt = shape[0], prod(shape[1:]), FORMATS[format]
        rng = np.random.default_rng(width + rows)
        if fmt.block == 1:
            return (rng.standard_normal(width * rows) / math.sqrt(width)).astype("<f4").tobytes()
        count = rows * width // fmt.block
        blocks = rng.integers(0, 256, (min(count, DISTINCT_BLOCKS), fmt.nbytes), np.uint8)
        for at, size in _SCALES[format]:
            scale = np.float16(1.4 / math.sqrt(width) / size)
            blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        return np.resize(blocks, (count, fmt.nbytes)).tobytes()

    return data


async def measure(model: Model, prompt: int, steps: int, canvases: int) -> None:
    """Read a prompt, denoise some canvases, and print how long that took."""
    vocab, canvas = model.config.vocab, model.config.diffusion
    assert canvas is not None
    ids = random.Random(1).choices(range(vocab), k=prompt)
    session = DiffusionSession(model, prompt + (canvases + 1) * canvas.canvas)
    all_steps = Denoising(steps=steps, confidence_threshold=0)  # no canvas is done early
    await denoise(session, ids[:-1], all_steps, 2)  # the warm-up compiles the kernels
    start = time.perf_counter()
    stamps = await denoise(session, ids, all_steps, canvases)
    ends = stamps[steps - 1 :: steps]
    inside = [b - a for at, (a, b) in enumerate(pairwise(stamps)) if (at + 1) % steps]
    step_ms = 1000 * statistics.median(inside)
    canvas_ms = 1000 * statistics.median(b - a for a, b in pairwise([start, *ends]))
    size, plan = canvas.canvas, session.plans.get(PlanKey("denoise", canvas.canvas))
    print(
        f"a denoising step, canvas {size} after a prompt of {prompt}: {step_ms:.1f} ms, "
        f"{len(plan.dispatches)} dispatches"
    )
    print(
        f"a canvas of {steps} steps, with reading it into the cache: {canvas_ms:.0f} ms, "
        f"{1000 * size / canvas_ms:.0f} tokens/s"
    )
    for stage, seconds in (await stage_seconds(session)).items():
        print(f"  {stage}: {1000 * seconds:.1f} ms")
    print_expert_reads(model, size, step_ms)
    session.close()


async def stage_seconds(session: DiffusionSession) -> dict[str, float]:
    """Time each stage of a step by itself; those after the layers, for all rows of the canvas."""
    device, seconds = session.device, dict[str, float]()
    logits: Tensor | None = None
    h: Tensor | None = None
    for stage in ("layers", "head", "canvas_stats", "expected_embedding"):
        recorder = Recorder(device)
        state = session.state
        canvas = CanvasRecorder(
            session.model, recorder, session.canvas_inputs, state, session.kv, session.precision
        )
        if stage == "layers":
            h = canvas.body()
        elif stage == "head":
            assert h is not None
            logits = canvas.logits(h.rows(0, min(canvas.rows_at_once(), canvas.rows)))
        else:
            assert logits is not None
            if stage == "canvas_stats":
                canvas.canvas_stats(logits, 0)
            else:
                MatmulBackward(canvas.matmul).expected_embedding(
                    session.model.matrices["token_embd.weight"],
                    logits,
                    state.stats,
                    state.denoising,
                    0,
                    state.expected,
                )
        plan = recorder.plan()
        times = []
        for _ in range(4):
            start = time.perf_counter()
            device.run(plan)
            await device.read(state.result.buffer, 0, 16).bytes()
            times.append(time.perf_counter() - start)
        rounds = 1 if stage == "layers" else -(-canvas.rows // canvas.rows_at_once())
        seconds[stage] = rounds * min(times[1:])
    return seconds


async def denoise(
    session: DiffusionSession, ids: list[int], denoising: Denoising, canvases: int
) -> list[float]:
    """Denoise some canvases after the ids; return the time at which each step was done."""
    session.rewind(0)
    stamps = []
    async for canvas in session.denoise(ids, denoising, 1):
        stamps.append(time.perf_counter())
        if canvas.done and canvas.number + 1 == canvases:
            break
    return stamps


def print_expert_reads(model: Model, canvas: int, step_ms: float) -> None:
    """Print how many bytes of experts a step reads at least, if positions are routed evenly."""
    experts = model.config.experts
    assert experts is not None
    nbytes = sum(w.nbytes for name, w in model.matrices.items() if name.endswith("_exps.weight"))
    routed = 1 - (1 - experts.used / experts.count) ** canvas
    print(
        f"experts: {nbytes / 1e9:.2f} GB, {routed:.1%} of them used by some position, "
        f"{canvas * experts.used / experts.count:.0f} positions each: at least "
        f"{routed * nbytes / step_ms / 1e6:.0f} GB/s"
    )


def load(gguf: Gguf, device: Device) -> Model:
    """Load the weights on the device."""
    return asyncio.run(Model.load(gguf, Config.from_gguf(gguf), device))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a DiffusionGemma; written if it does not exist")
    for name, default, help in (
        ("prompt", 512, "tokens of the prompt"),
        ("steps", 8, "denoising steps of a canvas"),
        ("canvases", 3, "canvases to time"),
        ("layers", 30, "layers of a file that is written"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{help} ({default})")
    options = parser.parse_args()
    if not options.file.exists():
        start = time.perf_counter()
        write_random(options.file, options.layers)
        print(f"{options.file} written in {time.perf_counter() - start:.0f} s")
    device = open_device(None, software=True)
    with Gguf.open(options.file) as gguf:
        start = time.perf_counter()
        model = load(gguf, device)
        print(f"{device.name}: {model.config.name}, loaded in {time.perf_counter() - start:.1f} s")
        asyncio.run(measure(model, options.prompt, options.steps, options.canvases))
        model.close()


if __name__ == "__main__":
    main()
