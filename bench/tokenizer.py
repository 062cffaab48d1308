"""Time our tokenizer beside the `tokenizers` library."""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import models, normalizers

from webgemma.gguf.reader import Gguf
from webgemma.text.tokenizer import Tokenizer

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of the work, and the seconds it took."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def library_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the same vocabulary in the `tokenizers` library."""
    vocabulary = {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    pairs = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(vocabulary, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def main() -> None:
    """Print seconds to build and tokens per second; stop if the two tokenizers differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file with Gemma 4's vocabulary")
    parser.add_argument("text", type=Path, help="a UTF-8 text file, best of a megabyte or more")
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much of it to use")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")[: arguments.characters]

    gguf, opening = timed(lambda: Gguf.open(arguments.model))
    with gguf:
        lists = [f"tokenizer.ggml.{key}" for key in ("tokens", "merges", "token_type")]
        _, reading = timed(lambda: [gguf.metadata[key] for key in lists])
        ours, building = timed(lambda: Tokenizer.from_gguf(gguf))
        theirs, their_building = timed(lambda: library_tokenizer(gguf.metadata))
    print(f"open {opening:.3f} s, read lists {reading:.3f} s, build {building:.3f} s", end=" ")
    print(f"(tokenizers: build {their_building:.3f} s)")

    ids, cold = timed(lambda: ours.encode(text))
    warm = min(timed(lambda: ours.encode(text))[1] for _ in range(3))
    decoded, decoding = timed(lambda: ours.decode(ids))
    encoding = theirs.encode(text, add_special_tokens=False)
    library = min(timed(lambda: theirs.encode(text, add_special_tokens=False))[1] for _ in range(3))
    if encoding.ids != ids or decoded != text.replace("▁", " "):
        raise SystemExit("The two tokenizers disagree on this text: fix that before timing them.")
    print(f"{len(text)} characters, {len(ids)} tokens; tokens per second:")
    for name, seconds in (
        ("encode, cold", cold),
        ("encode, warm", warm),
        ("decode", decoding),
        ("tokenizers, encode", library),
    ):
        print(f"  {name:18} {len(ids) / seconds:12,.0f}")


if __name__ == "__main__":
    main()
