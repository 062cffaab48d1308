"""Time decoding under a schema beside decoding without one, for one conversation and for many.

    python bench/constrained.py MODEL [VOCABULARY.gguf] [--counts 1,16] [--decode 128]

MODEL is a .gguf file, or e2b, 26b or 31b: that shape with random weights. VOCABULARY is the file
with the tokens, where the model has none. Prints how long the library's vocabulary, a schema and
the first mask take, then tokens per second with and without the schema: of random weights any
token may follow, so that what is written is valid but senseless. `--counts ""` ends after the
masks, for which MODEL may be the vocabulary's file."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from shapes import opened

from webgemma.constraints.compiling import constrain, open_compiler, prepare
from webgemma.constraints.specifications import specification
from webgemma.device import open_device
from webgemma.engine.batching import Batch
from webgemma.engine.constraints import Constraint
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.settings import resolve
from webgemma.sync import run_sync
from webgemma.text.tokenizer import Tokenizer

SETTINGS = resolve({"temperature": 1.0, "speculate": "off"})
SCHEMA: Any = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 20},
            "kind": {"enum": ["person", "place", "thing"]},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
            },
        },
        "required": ["name", "kind", "size", "tags", "address"],
    },
}
PROMPT = [2, *range(1000, 1063)]


def rate(model: Model, precision: str, decode: int, constraints: list[Constraint | None]) -> float:
    """Return the tokens per second of as many conversations as there are constraints."""
    slots = Slots(model, len(PROMPT) + 3 * decode + 64, count=len(constraints), precision=precision)
    batch = Batch(slots)
    try:
        generations = [
            run_sync(Session.in_slot(batch, at).begin([*PROMPT, at], SETTINGS, at, (), each))
            for at, each in enumerate(constraints)
        ]

        def take(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                for generation in generations:
                    run_sync(generation.next())
            return time.perf_counter() - start

        take(8)
        seconds = statistics.median(take(decode // 2) for _ in range(3))
        return len(constraints) * (decode // 2) / seconds
    finally:
        batch.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("vocabulary", type=Path, nargs="?")
    parser.add_argument("--counts", default="1,16")
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--gpu")
    parser.add_argument("--precision", default="auto")
    args = parser.parse_args()
    with Gguf.open(args.vocabulary or Path(args.model)) as file:
        tokenizer = Tokenizer.from_gguf(file)
    compiler = open_compiler(tokenizer, tokenizer.size)

    def constraint() -> Constraint:
        found = run_sync(constrain(compiler, specification(schema=SCHEMA)))
        assert found is not None
        return found

    start = time.perf_counter()
    run_sync(prepare(compiler))
    prepared = time.perf_counter()
    constraint().mask()
    masked = time.perf_counter()
    print(f"vocabulary of {tokenizer.size} tokens: {prepared - start:.2f} s; ", end="")
    print(f"schema and first mask: {1000 * (masked - prepared):.1f} ms", flush=True)
    if not args.counts:
        return
    with opened(args.model) as (gguf, config):
        device = open_device(args.gpu)
        model = run_sync(Model.load(gguf, config, device))
        print(device.name)
        for count in map(int, args.counts.split(",")):
            free = rate(model, args.precision, args.decode, [None] * count)
            bound = rate(model, args.precision, args.decode, [constraint() for _ in range(count)])
            print(f"{count} conversations: {free:.0f} tok/s free, {bound:.0f} with a schema each, ")
            print(f"  {bound / free:.3f} of that", flush=True)


if __name__ == "__main__":
    main()
