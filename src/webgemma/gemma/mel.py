"""A sound on the device: its samples as rows of mel bins, and as raw frames."""

import math
import struct
from dataclasses import dataclass
from typing import Self

from webgemma.gemma.encoder_config import RAW_SAMPLES, SAMPLE_RATE
from webgemma.gemma.matrices import Matrices
from webgemma.gemma.record.staged_plan import Bench
from webgemma.graph import Tensor
from webgemma.kernels import link

FRAME, HOP, FFT = 320, 160, 512  # samples: a frame of 20 ms every 10 ms, in a transform of 512
MEL_BINS = 128
THREADS, SOFTWARE_THREADS = 64, 8


@dataclass(frozen=True, slots=True)
class MelTables:
    """What every frame meets on a device, made in double precision: see ops/mel.wgsl."""

    window: Tensor
    turns: Tensor
    filters: Tensor
    weights: Tensor
    widest: int  # points of the transform under one filter

    @classmethod
    def on(cls, ears: Matrices) -> Self:
        """Brought to the device, where they live as long as the ears."""
        angles = [2 * math.pi * i / FFT for i in range(FFT)]
        turns = [part for angle in angles for part in (math.cos(angle), -math.sin(angle))]
        triangles = mel_triangles()
        places = [number for first, line in triangles for number in (first, len(line))]
        widest = max(len(line) for _, line in triangles)
        lines = [value for _, line in triangles for value in (line + [0.0] * widest)[:widest]]
        return cls(
            window=ears.vector_of(
                [0.5 - 0.5 * math.cos(2 * math.pi * i / FRAME) for i in range(FRAME)]
            ),
            turns=ears.vector_of(turns),
            filters=ears.tensor(struct.pack(f"<{len(places)}I", *places), "filters", MEL_BINS, 2),
            weights=ears.vector_of(lines),
            widest=widest,
        )


def mel_triangles() -> list[tuple[int, list[float]]]:
    """Of each bin the first point of the transform that it hears, and how much of it and the next.

    Peaks are evenly spaced in mel = 2595 · log10(1 + hertz / 700) up to half the sample rate."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    mels = [top * i / (MEL_BINS + 1) for i in range(MEL_BINS + 2)]
    edges = [700 * (10 ** (mel / 2595) - 1) for mel in mels]  # in hertz
    found = []
    for low, peak, high in zip(edges, edges[1:], edges[2:], strict=False):
        hertz = ((k, k * SAMPLE_RATE / FFT) for k in range(FFT // 2 + 1))
        shares = {k: min((f - low) / (peak - low), (high - f) / (high - peak)) for k, f in hertz}
        inside = [k for k, share in shares.items() if share > 0]
        found.append((min(inside, default=0), [shares[k] for k in inside]))
    return found


def log_mel(bench: Bench, tables: MelTables, samples: Tensor) -> Tensor:
    """ln(mel + 0.001) of each frame of float32 samples: [frames, bins].

    Less than one frame is filled up with silence."""
    (count,) = samples.shape
    mel = bench.room(max(1, (count - 1) // HOP), MEL_BINS, label="mel")
    constants = {
        "THREADS": SOFTWARE_THREADS if bench.device.software else THREADS,
        "FRAME": FRAME,
        "HOP": HOP,
        "BINS": MEL_BINS,
        "WIDEST": tables.widest,
    }
    bench.recorder.call(
        link("mel", bench.device.features, constants=constants),
        (mel.shape[0],),
        [count],
        samples,
        *(tables.window, tables.turns, tables.filters, tables.weights, mel),
    )
    return mel


def raw_frames(samples: bytes) -> bytes:
    """Float32 samples with silence behind them, so that they fill rows of 640."""
    return samples + bytes(-len(samples) % (4 * RAW_SAMPLES))
