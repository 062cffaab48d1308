"""How long eyes and ears take in PyTorch and transformers: random weights of towers.py's shapes.

usage: peer_towers.py [--tiny]

Prints milliseconds from pixel values or mel frames that already lie on the device to soft tokens
there, pooler and projector included, in float32 without TF32 and in bfloat16. towers.py measures
more: it also brings the picture or sound to the device, resizes it or makes its mel frames, and
reads the soft tokens back. --tiny: one layer and a small picture, to see on any machine that all
of this runs. Needs torch and transformers with Gemma 4; nothing is downloaded.
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
from towers import CONFORMER, LARGE, SMALL
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4AudioModel,
    Gemma4MultimodalEmbedder,
    Gemma4VisionModel,
)

from webgemma.gemma.encoder_config import (
    PART_SAMPLES,
    AudioConfig,
    VisionConfig,
    audio_tensors,
    vision_tensors,
)
from webgemma.gemma.mel import HOP, MEL_BINS
from webgemma.gemma.tensors import Wanted
from webgemma.images import target_size

TOWERS = {"E2B's eyes": SMALL, "the large eyes": LARGE, "the ears, 30 s": CONFORMER}
WARM_UP, RUNS = 5, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FRAMES = (PART_SAMPLES - 1) // HOP  # of 30 s of sound, as in log_mel


@dataclass(frozen=True)
class Peer:
    """A tower with its projector, and what it gets."""

    parts: torch.nn.ModuleList
    encode: Callable[[], torch.Tensor]
    soft_tokens: tuple[int, int]  # how many, how wide

    def check(self, wanted: Iterable[Wanted]) -> int:
        """The parameters, as many as ours: speeds of different models say nothing."""
        ours = sum(prod(shape) for _, shape, needed in wanted if needed)
        theirs = sum(x.numel() for x in self.parts.parameters())
        standard = (x.numel() for name, x in self.parts.named_buffers() if ".std_" in name)
        if (theirs := theirs + sum(standard)) != ours:
            raise ValueError(f"transformers' tower has {theirs:,} parameters, ours {ours:,}.")
        return ours


def main() -> None:
    """Time every tower in both precisions; one that fails says so and the next one follows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    warm_up, runs = (1, 3) if tiny else (WARM_UP, RUNS)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__} on {card}: from "
        "pixel values or mel frames on the device to soft tokens there, pooler and projector "
        f"included, sdpa for eyes, no TF32, median of {runs} runs after {warm_up}",
        flush=True,
    )
    for dtype in (torch.float32, torch.bfloat16):
        for name, shape in TOWERS.items():
            what = f"transformers {str(dtype).removeprefix('torch.')}, {name}"
            try:
                print(f"{what}: {measured(shape, dtype, tiny, warm_up, runs)}", flush=True)
            except Exception as error:  # the others are still worth their figures
                said = (str(error).strip().splitlines() or ["no reason given"])[0]
                print(f"{what}: failed: {type(error).__name__}: {said[:200]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


@torch.no_grad()
def measured(
    shape: VisionConfig | AudioConfig, dtype: torch.dtype, tiny: bool, warm_up: int, runs: int
) -> str:
    """Milliseconds of one tower, and what it is."""
    torch.manual_seed(1)
    shape = replace(shape, layers=1) if tiny else shape
    with torch.device(DEVICE):
        if isinstance(shape, VisionConfig):
            peer = eyes(shape, dtype, target_size(1024, 768, 70 if tiny else 280))
            parameters = peer.check(vision_tensors(shape))
        else:
            peer = ears(shape, dtype)
            parameters = peer.check(audio_tensors(shape))
    found = []
    for _ in range(warm_up + runs):
        synchronise()
        start = time.perf_counter()
        tokens = peer.encode()
        synchronise()
        found.append(1000 * (time.perf_counter() - start))
    if (made := tuple(tokens.shape[-2:])) != peer.soft_tokens:
        raise ValueError(f"soft tokens of {made}, not of {peer.soft_tokens}.")
    if not tokens.isfinite().all() or tokens.dtype != dtype:
        raise ValueError(f"soft tokens that are not finite numbers in {dtype}.")
    times = found[warm_up:]
    return (
        f"{median(times):.2f} ms (best {min(times):.2f}, worst {max(times):.2f}, "
        f"first {found[0]:.0f}), {made[0]} soft tokens, {parameters:,} parameters as ours"
    )


def eyes(vision: VisionConfig, dtype: torch.dtype, size: tuple[int, int]) -> Peer:
    """A picture encoder before its patches, in rows from left to right; none is padding."""
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
    tower = Gemma4VisionModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
    projector = projector_of(config, vision.output, dtype)
    columns, rows = size[0] // vision.patch, size[1] // vision.patch
    pixels = torch.rand(1, columns * rows, 3 * vision.patch**2, dtype=dtype)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)[None]
    return Peer(
        torch.nn.ModuleList([tower, projector]).eval(),
        lambda: projector(tower(pixels, places).last_hidden_state),
        (columns * rows // vision.pool**2, vision.output),
    )


def ears(audio: AudioConfig, dtype: torch.dtype) -> Peer:
    """A sound encoder before 30 s of mel frames; it computes attention in its own way."""
    config = transformers.Gemma4AudioConfig(
        hidden_size=audio.width,
        num_hidden_layers=audio.layers,
        num_attention_heads=audio.heads,
        output_proj_dims=audio.features,
    )
    tower = Gemma4AudioModel._from_config(config, dtype=dtype)
    projector = projector_of(config, audio.output, dtype)
    mel = torch.randn(1, FRAMES, MEL_BINS, dtype=dtype)
    heard = torch.ones(1, FRAMES, dtype=torch.bool)
    return Peer(
        torch.nn.ModuleList([tower, projector]).eval(),
        lambda: projector(tower(mel, heard).last_hidden_state),
        (audio.soft_tokens(PART_SAMPLES), audio.output),
    )


def projector_of(
    config: transformers.PreTrainedConfig, output: int, dtype: torch.dtype
) -> Gemma4MultimodalEmbedder:
    """What makes soft tokens of the text model's width."""
    text = transformers.Gemma4TextConfig(hidden_size=output)
    return Gemma4MultimodalEmbedder(config, text).to(dtype)


def synchronise() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
