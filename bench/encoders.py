"""Time the vision and audio encoders: random float16 weights of the real shapes, on this GPU.

    python bench/encoders.py [MODEL.gguf] [--gpu dawn] [--precision f16]

prints milliseconds for an image of about 280 soft tokens with both vision encoders and for 30 s of
audio, after a second in which the GPU raises its clock; every run must compute the same soft
tokens. The precision is the one that `load` chooses for this GPU, unless it is given. With a model
it adds how long the text model takes to read as many tokens."""

import argparse
import random
import statistics
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from webgemma.device import Device, open_device
from webgemma.engine.selftest import check_matrix_units
from webgemma.gemma.audio import AudioEncoder, encode_audio
from webgemma.gemma.encoder_config import (
    SEGMENT_SAMPLES,
    AudioConfig,
    VisionConfig,
    audio_tensors,
    vision_tensors,
)
from webgemma.gemma.record.precision import PRECISIONS, choose_precision
from webgemma.gemma.tensors import TensorSpec
from webgemma.gemma.vision import VisionEncoder, encode_image
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.images import RgbImage, soft_tokens, target_size
from webgemma.sync import run_sync

WARM_UP_SECONDS, RUNS = 1.5, 20
SMALL = VisionConfig(
    width=768, layers=16, heads=12, ffn=3072, patch=16, pool=3, positions=10240, output=1536,
    clipped=True, standardised=False,
)  # fmt: skip
LARGE = VisionConfig(
    width=1152, layers=27, heads=16, ffn=4304, patch=16, pool=3, positions=10240, output=2816,
    clipped=False, standardised=True,
)  # fmt: skip
CONFORMER = AudioConfig(width=1024, layers=12, heads=8, ffn=4096, features=1536, output=1536)
VISION = {"E2B's vision encoder": SMALL, "the large vision encoder": LARGE}
AUDIO = {"the audio encoder, 30 s": CONFORMER}
CLIPPED = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
# The upper bytes of float16 between 1/64 and 1/32, from any random byte: all are finite.
SMALL_NUMBERS = bytes(byte & 0x83 | 0x24 for byte in range(256))


def random_halves(count: int) -> bytes:
    """Return so many random float16 numbers."""
    data = bytearray(random.randbytes(2 * count))
    data[1::2] = data[1::2].translate(SMALL_NUMBERS)
    return bytes(data)


def tensors(specs: Iterable[TensorSpec]) -> Iterator[NewTensor]:
    """Yield random matrices in float16, vectors of ones, and bounds that clamp little."""
    for name, shape, needed in specs:
        if name.endswith(("_min", "_max")):
            bound = -30.0 if name.endswith("_min") else 30.0
            yield NewTensor(name, shape, "F32", struct.pack("<f", bound))
        elif needed and len(shape) > 1:
            yield NewTensor(name, shape, "F16", random_halves(prod(shape)))
        elif needed:
            yield NewTensor(name, shape, "F32", struct.pack("<f", 1.0) * shape[0])


def bounds(vision: VisionConfig) -> Iterator[TensorSpec]:
    """Yield the bounds of an encoder's clipped linears, if it has some."""
    for index in range(vision.layers if vision.clipped else 0):
        for linear in CLIPPED:
            for side in ("input_min", "input_max", "output_min", "output_max"):
                yield f"v.blk.{index}.{linear}.{side}", (1,), True


def encoder_gguf(specs: Iterable[TensorSpec]) -> Gguf:
    """Return a file in memory with these tensors."""
    data = gguf_bytes({"general.architecture": "clip"}, list(tensors(specs)))
    return run_sync(Gguf.aopen(BytesSource(data, "encoders.gguf")))


def timed(what: str, device: Device, encode: Callable[[], Awaitable[Any]], runs: int) -> None:
    """Print the median time of some runs, each until its soft tokens are on the host."""
    seconds, first = [], b""
    begin = time.perf_counter()
    while time.perf_counter() < begin + WARM_UP_SECONDS or len(seconds) < runs:
        start = time.perf_counter()
        encoded = run_sync(encode())  # type: ignore[arg-type]
        data = run_sync(device.read(encoded.tokens.buffer, 0, encoded.tokens.nbytes).bytes())
        seconds.append(time.perf_counter() - start)
        encoded.close()
        first = first or data
        assert data == first, f"run {len(seconds)} computed other soft tokens than the first one"
    median = 1000 * statistics.median(seconds[-runs:])
    best = 1000 * min(seconds[-runs:])
    print(f"{what}: {median:.1f} ms (best {best:.1f}, first {1000 * seconds[0]:.0f})", flush=True)


def main() -> None:
    """Time all three encoders, and the text model if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a text model, to read soft tokens")
    parser.add_argument("--gpu", help="a part of its name, or a library: dawn or wgpu")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS, help="of activations")
    parser.add_argument("--tiny", action="store_true", help="one layer and a small image")
    options = parser.parse_args()
    random.seed(1)
    device = open_device(options.gpu)
    if wrong := run_sync(check_matrix_units(device)):
        print(wrong)
    precision = choose_precision(options.precision, device)
    print(f"{device.name}, in {'float16' if precision == 'f16' else 'float32'}", flush=True)
    runs = 1 if options.tiny else RUNS
    image = RgbImage(1024, 768, random.randbytes(3 * 1024 * 768))
    size = target_size(1024, 768, 70) if options.tiny else target_size(1024, 768)
    for name, vision in VISION.items():
        vision = replace(vision, layers=1) if options.tiny else vision
        gguf = encoder_gguf([*vision_tensors(vision), *bounds(vision)])
        with run_sync(VisionEncoder.load(gguf, vision, device, precision)) as encoder:
            what = f"{name}, {soft_tokens(*size)} soft tokens"
            timed(what, device, lambda encoder=encoder: encode_image(encoder, image, *size), runs)
    samples = bytes(4 * SEGMENT_SAMPLES)
    for name, audio in AUDIO.items():
        audio = replace(audio, layers=1) if options.tiny else audio
        gguf = encoder_gguf(audio_tensors(audio))
        with run_sync(AudioEncoder.load(gguf, audio, device, precision)) as encoder:
            timed(name, device, lambda encoder=encoder: encode_audio(encoder, samples), runs)
    if options.model:
        time_reading(options.model, options.gpu, precision)


def time_reading(path: Path, gpu: str | None, precision: str) -> None:
    """Print how long the text model takes to read as many soft tokens."""
    from webgemma.diagnostics.bench import Task, time_gpu
    from webgemma.gemma.config import Config
    from webgemma.gemma.weights import Model

    with Gguf.open(path) as gguf:
        model = run_sync(Model.load(gguf, Config.from_gguf(gguf), open_device(gpu)))
        for what, count in (("an image", 280), ("30 s of audio", 750)):
            speed, _ = run_sync(time_gpu(model, Task(prompt=count, decode=2), "f16", precision))
            print(f"reading {what}: {1000 * count / speed.prompt:.1f} ms")
        model.close()


if __name__ == "__main__":
    main()
