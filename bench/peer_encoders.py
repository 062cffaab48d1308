"""Time the vision and audio encoders in PyTorch and transformers: encoders.py's shapes.

usage: peer_encoders.py [--tiny]

Prints milliseconds from pixel values or mel frames on the device to soft tokens there, pooler and
projector included, in float32 without TF32 and in bfloat16. encoders.py measures more: it also
uploads the image or audio, resizes it or computes its mel frames, and reads the soft tokens back.
--tiny: one layer and a small image, to check on any machine that all of this runs. Needs torch and
transformers with Gemma 4; the weights are random and nothing is downloaded.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import transformers
from encoders import AUDIO, VISION
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4AudioModel,
    Gemma4MultimodalEmbedder,
    Gemma4VisionModel,
)

from webgemma.gemma.encoder_config import (
    SEGMENT_SAMPLES,
    AudioConfig,
    VisionConfig,
    audio_tensors,
    vision_tensors,
)
from webgemma.gemma.mel import HOP, MEL_BINS
from webgemma.gemma.tensors import TensorSpec
from webgemma.images import target_size

ENCODERS = {**VISION, **AUDIO}
WARM_UP, RUNS = 5, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FRAMES = (SEGMENT_SAMPLES - 1) // HOP  # of 30 s of audio, as in log_mel


@dataclass(frozen=True)
class Peer:
    """An encoder with its projector, and a function that encodes one input."""

    modules: torch.nn.ModuleList
    encode: Callable[[], torch.Tensor]
    soft_tokens: tuple[int, int]  # how many, how wide

    def check(self, specs: Iterable[TensorSpec]) -> int:
        """Return the number of parameters; ValueError if ours has another number of them."""
        ours = sum(prod(shape) for _, shape, needed in specs if needed)
        theirs = sum(x.numel() for x in self.modules.parameters())
        standard = (x.numel() for name, x in self.modules.named_buffers() if ".std_" in name)
        if (theirs := theirs + sum(standard)) != ours:
            raise ValueError(f"transformers' encoder has {theirs:,} parameters, ours {ours:,}.")
        return ours


def main() -> None:
    """Time every encoder in both precisions; a failure is printed and the next one follows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="one layer and a small image")
    tiny = parser.parse_args().tiny
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    warm_up, runs = (1, 3) if tiny else (WARM_UP, RUNS)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__} on {card}: from "
        "pixel values or mel frames on the device to soft tokens there, pooler and projector "
        f"included, sdpa for vision, no TF32, median of {runs} runs after {warm_up}",
        flush=True,
    )
    for dtype in (torch.float32, torch.bfloat16):
        for name, config in ENCODERS.items():
            what = f"transformers {str(dtype).removeprefix('torch.')}, {name}"
            try:
                print(f"{what}: {measured(config, dtype, tiny, warm_up, runs)}", flush=True)
            except Exception as error:  # the figures of the others are still useful
                reason = (str(error).strip().splitlines() or ["no reason given"])[0]
                print(f"{what}: failed: {type(error).__name__}: {reason[:200]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


@torch.no_grad()
def measured(
    config: VisionConfig | AudioConfig, dtype: torch.dtype, tiny: bool, warm_up: int, runs: int
) -> str:
    """Return the milliseconds of one encoder, and its size."""
    torch.manual_seed(1)
    config = replace(config, layers=1) if tiny else config
    with torch.device(DEVICE):
        if isinstance(config, VisionConfig):
            peer = vision_peer(config, dtype, target_size(1024, 768, 70 if tiny else 280))
            parameters = peer.check(vision_tensors(config))
        else:
            peer = audio_peer(config, dtype)
            parameters = peer.check(audio_tensors(config))
    milliseconds = []
    for _ in range(warm_up + runs):
        synchronise()
        start = time.perf_counter()
        tokens = peer.encode()
        synchronise()
        milliseconds.append(1000 * (time.perf_counter() - start))
    if (shape := tuple(tokens.shape[-2:])) != peer.soft_tokens:
        raise ValueError(f"soft tokens of shape {shape}, not {peer.soft_tokens}.")
    if not tokens.isfinite().all() or tokens.dtype != dtype:
        raise ValueError(f"soft tokens that are not finite numbers in {dtype}.")
    times = milliseconds[warm_up:]
    return (
        f"{median(times):.2f} ms (best {min(times):.2f}, worst {max(times):.2f}, "
        f"first {milliseconds[0]:.0f}), {shape[0]} soft tokens, {parameters:,} parameters as ours"
    )


def vision_peer(vision: VisionConfig, dtype: torch.dtype, size: tuple[int, int]) -> Peer:
    """Return a vision encoder with the patches of an image, row by row; none is padding."""
    config = transformers.Gemma4VisionConfig(
        hidden_size=vision.width,
        intermediate_size=vision.ffn,
        num_hidden_layers=vision.layers,
        num_attention_heads=vision.heads,
        num_key_value_heads=vision.heads,
        head_dim=vision.width // vision.heads,
        pooling_kernel_size=vision.pool,
        patch_size=vision.patch,
        position_embedding_size=vision.positions,
        use_clipped_linears=vision.clipped,
        standardize=vision.standardised,
    )
    encoder = Gemma4VisionModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
    projector = projector_of(config, vision.output, dtype)
    columns, rows = size[0] // vision.patch, size[1] // vision.patch
    pixels = torch.rand(1, columns * rows, 3 * vision.patch**2, dtype=dtype)
    positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)[None]
    return Peer(
        torch.nn.ModuleList([encoder, projector]).eval(),
        lambda: projector(encoder(pixels, positions).last_hidden_state),
        (columns * rows // vision.pool**2, vision.output),
    )


def audio_peer(audio: AudioConfig, dtype: torch.dtype) -> Peer:
    """Return an audio encoder with 30 s of mel frames; it has its own kind of attention."""
    config = transformers.Gemma4AudioConfig(
        hidden_size=audio.width,
        num_hidden_layers=audio.layers,
        num_attention_heads=audio.heads,
        output_proj_dims=audio.features,
    )
    encoder = Gemma4AudioModel._from_config(config, dtype=dtype)
    projector = projector_of(config, audio.output, dtype)
    mel = torch.randn(1, FRAMES, MEL_BINS, dtype=dtype)
    valid = torch.ones(1, FRAMES, dtype=torch.bool)
    return Peer(
        torch.nn.ModuleList([encoder, projector]).eval(),
        lambda: projector(encoder(mel, valid).last_hidden_state),
        (audio.soft_tokens(SEGMENT_SAMPLES), audio.output),
    )


def projector_of(
    config: transformers.PreTrainedConfig, output: int, dtype: torch.dtype
) -> Gemma4MultimodalEmbedder:
    """Return the projector of soft tokens to the text model's width."""
    text = transformers.Gemma4TextConfig(hidden_size=output)
    return Gemma4MultimodalEmbedder(config, text).to(dtype)


def synchronise() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
