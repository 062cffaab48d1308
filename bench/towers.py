"""How long eyes and ears take: random weights of the true shapes, in float16, on this GPU.

    python bench/towers.py [MODEL.gguf]

prints milliseconds for a picture of about 280 soft tokens on both kinds of eyes and for 30 s of
sound, after a warm-up; every run must give the same soft tokens. With a model it adds what reading
as many tokens costs."""

import random
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from math import prod
from typing import Any

from webgemma.device import Device, open_device
from webgemma.gemma.audio import Ears, hear
from webgemma.gemma.encoder_config import (
    PART_SAMPLES,
    AudioConfig,
    VisionConfig,
    audio_tensors,
    vision_tensors,
)
from webgemma.gemma.vision import Eyes, see
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.images import RgbImage, target_size
from webgemma.sync import run_sync

REPETITIONS = 10
SMALL = VisionConfig(
    width=768, layers=16, heads=12, ffn=3072, patch=16, pool=3, positions=10240, output=1536,
    clipped=True, standardised=False,
)  # fmt: skip
LARGE = VisionConfig(
    width=1152, layers=27, heads=16, ffn=4304, patch=16, pool=3, positions=10240, output=2816,
    clipped=False, standardised=True,
)  # fmt: skip
CONFORMER = AudioConfig(width=1024, layers=12, heads=8, ffn=4096, features=1536, output=1536)
CLIPPED = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
# The upper bytes of float16 between 1/64 and 1/32, from any random byte: all are numbers.
SMALL_NUMBERS = bytes(byte & 0x83 | 0x24 for byte in range(256))


def random_halves(count: int) -> bytes:
    """So many float16 numbers."""
    data = bytearray(random.randbytes(2 * count))
    data[1::2] = data[1::2].translate(SMALL_NUMBERS)
    return bytes(data)


def tensors(wanted: Iterator[tuple[str, tuple[int, ...], bool]]) -> Iterator[NewTensor]:
    """Random matrices in float16; vectors of ones, bounds that bound little."""
    for name, shape, needed in wanted:
        if name.endswith(("_min", "_max")):
            bound = -30.0 if name.endswith("_min") else 30.0
            yield NewTensor(name, shape, "F32", struct.pack("<f", bound))
        elif needed and len(shape) > 1:
            yield NewTensor(name, shape, "F16", random_halves(prod(shape)))
        elif needed:
            yield NewTensor(name, shape, "F32", struct.pack("<f", 1.0) * shape[0])


def bounds(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """The names of a clipped tower's bounds."""
    for index in range(vision.layers if vision.clipped else 0):
        for part in CLIPPED:
            for side in ("input_min", "input_max", "output_min", "output_max"):
                yield f"v.blk.{index}.{part}.{side}", (1,), True


def opened(made: Iterator[NewTensor]) -> Gguf:
    data = gguf_bytes({"general.architecture": "clip"}, list(made))
    return run_sync(Gguf.aopen(BytesSource(data, "towers.gguf")))


def timed(what: str, device: Device, encode: Callable[[], Awaitable[Any]]) -> None:
    """Print the median of some runs, each waited for."""
    found, first = [], b""
    for number in range(REPETITIONS + 2):
        start = time.perf_counter()
        made = run_sync(encode())  # type: ignore[arg-type]
        data = run_sync(device.read(made.tokens.buffer, 0, made.tokens.nbytes).bytes())
        found.append(time.perf_counter() - start)
        made.close()
        first = first or data
        assert data == first, f"run {number} gave other soft tokens"
    median = 1000 * statistics.median(found[2:])
    best = 1000 * min(found[2:])
    print(f"{what}: {median:.1f} ms (best {best:.1f}, first {1000 * found[0]:.0f})", flush=True)


def main() -> None:
    """All three towers."""
    random.seed(1)
    device = open_device()
    print(device.name)
    picture = RgbImage(1024, 768, random.randbytes(3 * 1024 * 768))
    size = target_size(1024, 768)
    for name, vision in (("E2B's eyes", SMALL), ("the large eyes", LARGE)):
        gguf = opened(tensors(iter([*vision_tensors(vision), *bounds(vision)])))
        with run_sync(Eyes.load(gguf, vision, device)) as eyes:
            what = f"{name}, {size[0] // 48 * size[1] // 48} soft tokens"
            timed(what, device, lambda eyes=eyes: see(eyes, picture, *size))
    sound = bytes(4 * PART_SAMPLES)
    gguf = opened(tensors(audio_tensors(CONFORMER)))
    with run_sync(Ears.load(gguf, CONFORMER, device)) as ears:
        timed("the ears, 30 s", device, lambda: hear(ears, sound))
    if sys.argv[1:]:
        prompts(sys.argv[1])


def prompts(path: str) -> None:
    """What the text model takes to read as many soft tokens."""
    from webgemma.diagnostics.bench import Task, time_gpu
    from webgemma.gemma.config import Config
    from webgemma.gemma.weights import Model

    with Gguf.open(path) as gguf:
        model = run_sync(Model.load(gguf, Config.from_gguf(gguf), open_device()))
        for what, count in (("a picture", 280), ("30 s of sound", 750)):
            speed, _ = run_sync(time_gpu(model, Task(prompt=count, decode=2), "f16"))
            print(f"reading {what}: {1000 * count / speed.prompt:.1f} ms")
        model.close()


if __name__ == "__main__":
    main()
