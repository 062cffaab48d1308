"""Time opening a GGUF file and reading its vocabulary, beside the gguf package."""

import argparse
import lzma
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import gguf

from webgemma.gguf.reader import Gguf

VOCABULARY = Path(__file__).resolve().parents[2] / "shared/fixtures/vocab/gemma4-vocab.gguf.xz"
T = TypeVar("T")
KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")


class Timed(NamedTuple):
    """Seconds to open a file, seconds to read its lists, and the lists."""

    opening: float
    reading: float
    lists: list[list[str]]


def timed(opening: Callable[[], T], reading: Callable[[T], list[list[str]]]) -> Timed:
    """Time opening and reading once."""
    start = time.perf_counter()
    file = opening()
    middle = time.perf_counter()
    lists = reading(file)
    return Timed(middle - start, time.perf_counter() - middle, lists)


def compare(path: Path, runs: int = 5) -> None:
    """Print our best times, the time of the gguf package, and the ratio."""
    theirs = timed(
        lambda: gguf.GGUFReader(path),
        lambda reader: [reader.fields[key].contents() for key in KEYS],
    )
    opening = reading = math.inf
    for _ in range(runs):
        ours = timed(lambda: Gguf.open(path), lambda file: [file.metadata[key] for key in KEYS])
        opening, reading = min(opening, ours.opening), min(reading, ours.reading)
    if ours.lists != theirs.lists:
        raise SystemExit("The two readers disagree on this file: fix that before timing them.")
    print(f"{'':28}{'webgemma':>10}{'gguf':>10}{'ratio':>8}")
    for what, a, b in (
        ("open", opening, theirs.opening),
        ("then read tokens and merges", reading, theirs.reading),
        ("both", opening + reading, theirs.opening + theirs.reading),
    ):
        print(f"{what:28}{a:8.3f} s{b:8.3f} s{b / a:7.0f}x")


def main() -> None:
    """Compare the readers on a file, or on Gemma's vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file with a vocabulary")
    path = parser.parse_args().file
    if path:
        compare(path)
        return
    if not VOCABULARY.exists():
        parser.error(f"{VOCABULARY} does not exist: name a GGUF file")
    with tempfile.TemporaryDirectory() as folder, lzma.open(VOCABULARY) as packed:
        path = Path(folder) / "vocab.gguf"
        path.write_bytes(packed.read())
        compare(path)


if __name__ == "__main__":
    main()
