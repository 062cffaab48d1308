"""Time the embedding of texts: EmbeddingGemma's shape (300M) with random weights.

    python bench/embed.py [--texts 32,128] [--tokens 512] [--layers 24] [--peer]

Prints, for each number of texts, what one call of `embed` takes from ids to vectors on the host:
the median of some runs after warm-up, as texts and tokens per second. With --peer, the same ids go
through transformers' Gemma3TextModel in bfloat16, with mean pooling and the two dense layers that
sentence-transformers puts behind it (on CUDA if there is one). Nothing is downloaded.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.blank import embedding_300m
from shapes import RandomGguf

from webgemma.device import Device, open_device
from webgemma.engine.embedding import EmbeddingEngine
from webgemma.engine.selftest import check_matrix_units
from webgemma.gemma.config import Config
from webgemma.gemma.record.precision import PRECISIONS, choose_precision
from webgemma.gemma.weights import Model
from webgemma.media.encoders import EncoderFiles, gpu_encoders
from webgemma.progress import ignore_progress
from webgemma.sync import run_sync

STORED_WINDOW = 512  # in EmbeddingGemma's config.json; to one side it is half of that
Texts = Sequence[Sequence[int]]


def median_seconds(embed: Callable[[], None], runs: int, warm_up: int) -> float:
    """Return the median time of some runs."""
    seconds = []
    for _ in range(warm_up + runs):
        start = time.perf_counter()
        embed()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[warm_up:])


def line(who: str, texts: Texts, seconds: float) -> str:
    """Return the figures of one measurement."""
    tokens = sum(map(len, texts))
    return (
        f"{who}: {len(texts):4} texts of {len(texts[0])} tokens: {1000 * seconds:8.1f} ms, "
        f"{len(texts) / seconds:8.1f} texts/s, {tokens / seconds:9.0f} tokens/s"
    )


def open_ours(config: Config, device: Device, precision: str, format: str) -> EmbeddingEngine:
    """Load a model of this shape with random weights."""
    gguf = RandomGguf(config, format)
    model = run_sync(Model.load(gguf, config, device))  # type: ignore[arg-type]
    files = EncoderFiles(config.name, gguf, config.width)  # type: ignore[arg-type]
    encoders = gpu_encoders(files, device, None, precision)
    return EmbeddingEngine(gguf, model, config.context, precision, encoders)  # type: ignore[arg-type]


def time_ours(config: Config, batches: Sequence[Texts], options: argparse.Namespace) -> None:
    """Print the figures of webgemma."""
    device = open_device(options.gpu)
    if wrong := run_sync(check_matrix_units(device)):
        print(wrong)
    precision = choose_precision(options.precision, device)
    print(f"webgemma on {device.name}: {precision}, weights in {options.format}", flush=True)
    engine = open_ours(config, device, precision, options.format)
    for texts in batches:

        def embed(texts: Texts = texts) -> None:
            vectors = run_sync(engine.embed(texts, options.batch, ignore_progress))
            assert all(map(isfinite, memoryview(vectors).cast("f")[:: engine.size]))

        seconds = median_seconds(embed, options.runs, options.warm_up)
        print(line("webgemma", texts, seconds), flush=True)
    engine.free()
    device.close()


def time_peer(config: Config, batches: Sequence[Texts], options: argparse.Namespace) -> None:
    """Print the figures of transformers with sentence-transformers' pooling and dense layers."""
    import torch
    import transformers

    place = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if place == "cuda" else "CPU"
    layer, embedding = config.layers[0], config.embedding
    assert embedding is not None
    torch.manual_seed(1)
    shape = transformers.Gemma3TextConfig(
        vocab_size=config.vocab,
        hidden_size=config.width,
        intermediate_size=layer.ffn,
        num_hidden_layers=len(config.layers),
        num_attention_heads=layer.heads,
        num_key_value_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        query_pre_attn_scalar=layer.head_dim,
        max_position_embeddings=config.context,
        sliding_window=STORED_WINDOW,
        use_bidirectional_attention=True,
    )
    with torch.device(place):
        body = transformers.Gemma3TextModel._from_config(
            shape, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        dense = torch.nn.Sequential(
            torch.nn.Linear(config.width, embedding.hidden, bias=False),
            torch.nn.Linear(embedding.hidden, embedding.size, bias=False),
        ).to(torch.bfloat16)
    if options.compile:
        body = torch.compile(body)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__} on {card}: bfloat16, "
        f"sdpa, {'compiled' if options.compile else 'eager'}",
        flush=True,
    )
    for texts in batches:

        @torch.inference_mode()
        def embed(texts: Texts = texts) -> None:
            ids = torch.tensor(texts, device=place)  # all have the same length
            mask = torch.ones_like(ids)
            states = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
            torch.nn.functional.normalize(dense(pooled), dim=-1).float().cpu()

        seconds = median_seconds(embed, options.runs, options.warm_up)
        print(line("transformers", texts, seconds), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", default="32,128", help="how many at once, some numbers")
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, help="tokens of a pass, at most")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--gpu", help="a part of its name, or a library: dawn or wgpu")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS, help="of activations")
    parser.add_argument("--format", default="F16", choices=("F16", "Q8_0"), help="of our weights")
    parser.add_argument("--peer", action="store_true", help="time transformers, too")
    parser.add_argument("--compile", action="store_true", help="the peer, with torch.compile")
    options = parser.parse_args()
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if options.peer and missing:
        sys.exit(f"--peer needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    config = embedding_300m()
    config = replace(config, layers=config.layers[: options.layers])
    rng = random.Random(1)
    batches = [
        [[2, *rng.choices(range(3, config.vocab), k=options.tokens - 1)] for _ in range(int(count))]
        for count in options.texts.split(",")
    ]
    time_ours(config, batches, options)
    if options.peer:
        time_peer(config, batches, options)


if __name__ == "__main__":
    main()
