"""Time decoding with drafts, of which a set share is right: what a drafter is worth.

    python bench/drafts.py MODEL [--draft FILE] [--shares 0.5,0.7,0.9] [--counts 1,2,3,4,5,7]

MODEL is a .gguf file, or e2b, 26b or 31b: that shape with random weights. Without --draft, a
drafter of random weights is made for it, with the published sizes where they are known (E4B:
width 256, 2 048 centroids; 31B: width 1 024) and alike where they are not. Its drafts are
computed, then replaced by the tokens that follow, or wrong ones: the time is that of a real
drafter, and the text has to be the one without drafts. Last comes what speculation costs by
itself where no draft is right."""

import argparse
import math
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from shapes import opened

from webgemma.device import open_device
from webgemma.diagnostics.bench import Task
from webgemma.diagnostics.drafts import time_drafts
from webgemma.engine.session import Session
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gemma.weights import DrafterModel, Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import NewTensor, write_gguf
from webgemma.settings import resolve
from webgemma.sync import run_sync

PATTERN = "sssf"
CENTROIDS, NEAREST = 2048, 32


def write_drafter(path: Path, target: Config) -> None:
    """Write a drafter of random weights, Q8_0, for a model."""
    small = bool(target.ple)
    width, ffn = (256, 2048) if small else (1024, 8192)
    donors = {layer.sliding: layer for layer in target.layers if not layer.shares_kv}
    layers = [donors[kind == "s"] for kind in PATTERN]
    metadata = {
        "general.architecture": "gemma4-assistant",
        "tokenizer.ggml.model": "none",
        **{f"gemma4-assistant.{key}": value for key, value in numbers(target, layers).items()},
        "gemma4-assistant.embedding_length": width,
        "gemma4-assistant.feed_forward_length": ffn,
        "gemma4-assistant.masked_embd_top_k": NEAREST,
    }
    write_gguf(path, metadata, tensors(target, layers, width, ffn, CENTROIDS if small else 0))


def numbers(target: Config, layers: list[Layer]) -> dict[str, object]:
    """Return the metadata that follow from the target."""
    size = {layer.sliding: layer.head_dim for layer in layers}
    lengths = {
        f"{key}{suffix}": size[bool(suffix)]
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        for suffix in ("", "_swa")
    }
    return {
        "block_count": len(layers),
        "context_length": target.context,
        "embedding_length_out": target.width,
        "attention.head_count": layers[0].heads,
        "attention.head_count_kv": [layer.kv_heads for layer in layers],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": target.window,
        "attention.sliding_window_pattern": [layer.sliding for layer in layers],
        "attention.shared_kv_layers": len(layers),
        **lengths,
    }


def tensors(
    target: Config, layers: list[Layer], width: int, ffn: int, centroids: int
) -> list[NewTensor]:
    """Return all weights."""
    rng = np.random.default_rng(1)
    q8 = FORMATS["Q8_0"]
    found = []

    def matrix(name: str, inputs: int, rows: int) -> None:
        count = rows * inputs // q8.block
        some = rng.integers(0, 256, (min(count, 1 << 16), q8.nbytes), dtype=np.uint8)
        scale = np.float16(0.7 / math.sqrt(inputs) / 64)
        some[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        data = np.resize(some, (count, q8.nbytes)).tobytes()
        found.append(NewTensor(name, (inputs, rows), "Q8_0", data))

    def vector(name: str, size: int) -> None:
        found.append(NewTensor(name, (size,), "F32", np.ones(size, "<f4").tobytes()))

    matrix("token_embd.weight", width, target.vocab)
    vector("output_norm.weight", width)
    matrix("nextn.pre_projection.weight", 2 * target.width, width)
    matrix("nextn.post_projection.weight", width, target.width)
    for index, layer in enumerate(layers):
        name, heads = f"blk.{index}.", layer.heads * layer.head_dim
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            vector(f"{name}{norm}.weight", width)
        vector(f"{name}attn_q_norm.weight", layer.head_dim)
        matrix(f"{name}attn_q.weight", width, heads)
        matrix(f"{name}attn_output.weight", heads, width)
        matrix(f"{name}ffn_gate.weight", width, ffn)
        matrix(f"{name}ffn_up.weight", width, ffn)
        matrix(f"{name}ffn_down.weight", ffn, width)
    if centroids:
        matrix("masked_embd_centroids.weight", width, centroids)
        ids = rng.permutation(target.vocab).astype("<i4").tobytes()
        found.append(NewTensor("masked_embd_ordering", (target.vocab,), "I32", ids))
    return found


async def sampled(session: Session, ids: list[int], count: int, speculate: str) -> float:
    """Return the tokens per second at temperature 1, where random drafts are never right."""
    session.rewind(0)
    settings = resolve({"temperature": 1.0, "speculate": speculate})
    generation = await session.begin(ids, settings, 1)
    try:
        await generation.next()
        start = time.perf_counter()
        for _ in range(count):
            await generation.next()
        return count / (time.perf_counter() - start)
    finally:
        generation.leave()


def rejected(model: Model, task: Task, precision: str) -> str:
    """Return a line about decoding with speculation that chooses by itself, and with none."""
    ids, count = task.ids(model.config.vocab), 3 * task.decode
    session = Session(model, len(ids) + count + 64, precision=precision)
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    try:
        for _ in range(1 + task.repetitions):  # the first one records plans
            for speculate, found in rates.items():
                found.append(run_sync(sampled(session, ids, count, speculate)))
    finally:
        session.close()
    off, auto = (statistics.median(found[1:]) for found in rates.values())
    return f"no draft is right: {off:.1f} tok/s off, {auto:.1f} auto, {auto / off:.3f}x"


def main() -> None:
    """Print a table: tokens per second by share and number of drafts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--shares", default="0.5,0.7,0.9")
    parser.add_argument("--counts", default="1,2,3,4,5,7")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--gpu")
    parser.add_argument("--precision", default="auto")
    args = parser.parse_args()
    with TemporaryDirectory() as folder, opened(args.model) as (gguf, config):
        path = args.draft or Path(folder) / "drafter.gguf"
        if args.draft is None:
            write_drafter(path, config)
        device = open_device(args.gpu)
        model = run_sync(Model.load(gguf, config, device))
        with Gguf.open(path) as draft:
            own = drafter_config(draft, config)
            model.drafter = run_sync(DrafterModel.load(draft, own, device))
        task = Task(args.prompt, args.decode, 0, args.repetitions)
        shares = [float(share) for share in args.shares.split(",")]
        counts = [int(count) for count in args.counts.split(",")]
        plain, found = run_sync(time_drafts(model, task, "f16", args.precision, shares, counts))
        print(f"{device.name}: {plain:.1f} tok/s without drafts", flush=True)
        for each in found:
            print(
                f"share {each.share}: {each.drafts} drafts, {each.accepted:.2f} accepted a step, "
                f"{each.rate:.1f} tok/s, {each.rate / plain:.2f}x",
                flush=True,
            )
        print(rejected(model, task, args.precision), flush=True)


if __name__ == "__main__":
    main()
