"""Audio features on the device: the log-mel spectrum of samples, and raw frames."""

import math
import struct
from dataclasses import dataclass
from typing import Self

from webgemma.gemma.encoder_config import RAW_SAMPLES, SAMPLE_RATE
from webgemma.gemma.matrices import Matrices
from webgemma.gemma.record.staged_plan import StagedPlan
from webgemma.graph import Tensor

FRAME, HOP, FFT = 320, 160, 512  # samples: a frame of 20 ms every 10 ms, in a transform of 512
MEL_BINS = 128
THREADS, SOFTWARE_THREADS = 64, 8


@dataclass(frozen=True, slots=True)
class MelTables:
    """Tables of ops/mel.wgsl on a device, computed in double precision."""

    window: Tensor
    roots: Tensor  # of unity
    filters: Tensor
    weights: Tensor
    widest: int  # points of the transform under one filter

    @classmethod
    def upload(cls, encoder: Matrices) -> Self:
        """Upload the tables; they live as long as the encoder's weights."""
        angles = [2 * math.pi * i / FFT for i in range(FFT)]
        roots = [part for angle in angles for part in (math.cos(angle), -math.sin(angle))]
        filters = mel_filters()
        ranges = [number for first, weights in filters for number in (first, len(weights))]
        widest = max(len(weights) for _, weights in filters)
        padded = [w for _, weights in filters for w in (weights + [0.0] * widest)[:widest]]
        packed = struct.pack(f"<{len(ranges)}I", *ranges)
        return cls(
            window=encoder.vector_of(
                [0.5 - 0.5 * math.cos(2 * math.pi * i / FRAME) for i in range(FRAME)]
            ),
            roots=encoder.vector_of(roots),
            filters=encoder.memory.upload(packed, MEL_BINS, 2, label="mel filters"),
            weights=encoder.vector_of(padded),
            widest=widest,
        )


def mel_filters() -> list[tuple[int, list[float]]]:
    """Return for each bin the first point of the transform under its triangle, and the weights.

    Peaks are evenly spaced in mel = 2595 · log10(1 + hertz / 700) up to half the sample rate."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    mels = [top * i / (MEL_BINS + 1) for i in range(MEL_BINS + 2)]
    edges = [700 * (10 ** (mel / 2595) - 1) for mel in mels]  # in hertz
    filters = []
    for low, peak, high in zip(edges, edges[1:], edges[2:], strict=False):
        hertz = ((k, k * SAMPLE_RATE / FFT) for k in range(FFT // 2 + 1))
        weights = {k: min((f - low) / (peak - low), (high - f) / (high - peak)) for k, f in hertz}
        inside = [k for k, weight in weights.items() if weight > 0]
        filters.append((min(inside, default=0), [weights[k] for k in inside]))
    return filters


def log_mel(plan: StagedPlan, tables: MelTables, samples: Tensor) -> Tensor:
    """Record ln(mel + 0.001) of each frame of float32 samples: [frames, bins].

    Less than one frame is padded with zeros."""
    (count,) = samples.shape
    mel = plan.memory.tensor(max(1, (count - 1) // HOP), MEL_BINS, label="mel")
    plan.recorder.call(
        "mel",
        (mel.shape[0],),
        samples=samples,
        window=tables.window,
        roots=tables.roots,
        mel=mel,
        filters=tables.filters,
        weights=tables.weights,
        count=count,
        THREADS=SOFTWARE_THREADS if plan.device.software else THREADS,
        FRAME=FRAME,
        HOP=HOP,
        BINS=MEL_BINS,
        WIDEST=tables.widest,
    )
    return mel


def raw_frames(samples: bytes) -> bytes:
    """Pad float32 samples with zeros, so that they fill rows of 640."""
    return samples + bytes(-len(samples) % (4 * RAW_SAMPLES))
