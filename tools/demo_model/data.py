"""Part 2a: texts and chats of the shared corpus as training rows.

usage: data.py CORPUS_FOLDER ROWS_FOLDER [CHATS]   (the unpacked text.tar.xz; 3000000 chats)
"""

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from documents import Document, Writer, join_chats
from filters import is_gentle, is_whole
from packing import pack
from pieces import load_tokenizer
from settings import DATA, ROW, SEED
from skills import chats

CHATS = 3_000_000
CHATS_OF_A_SHARD = 100_000
HELD_OUT = 200  # stories of TinyStories, for perplexity
SENTENCES = 12  # of Tatoeba in a document
JOIN_SHARE = 0.25
FIRST_PERSONA = 9700  # lines of the chit-chat; the others answer the same questions otherwise
CONTRADICTS = re.compile(
    r"\b(name|bot|bots|robot|age|human|created?|made|built|program\w*)\b", re.I
)


@dataclass(frozen=True)
class Shard:
    """A part of a source, as two files."""

    folder: Path
    source: str
    number: int = 0

    def save(self, documents: list[Document]) -> int:
        """Write its rows; how many tokens they hold."""
        tokens, kinds = pack(documents, ROW, writer().tokenizer.pad or 0)
        np.save(self.folder / f"{self.source}.{self.number}.tokens.npy", tokens)
        np.save(self.folder / f"{self.source}.{self.number}.kinds.npy", kinds)
        return int((kinds > 0).sum())


@cache
def writer() -> Writer:
    """One for each process."""
    return Writer(load_tokenizer())


def pool_size() -> int:
    """Processes that leave one core to the main one."""
    return max(1, (os.cpu_count() or 2) // 2 - 1)


def main() -> None:
    """Every source in its own process."""
    corpus, folder = Path(sys.argv[1]), Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else CHATS
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(pool_size(), mp_context=get_context("spawn")) as pool:
        jobs = {name: pool.submit(save_text, name, corpus, folder) for name in SOURCES}
        shards = range(max(1, count // CHATS_OF_A_SHARD))
        size = min(count, CHATS_OF_A_SHARD)
        made = [pool.submit(save_chats, folder, number, size) for number in shards]
        for name, job in jobs.items():
            print(f"{name}: {job.result():,} tokens", flush=True)
        print(f"synth: {sum(job.result() for job in made):,} tokens", flush=True)


def save_text(name: str, corpus: Path, folder: Path) -> int:
    """One source of the corpus."""
    return Shard(folder, name).save(list(SOURCES[name](corpus)))


def save_chats(folder: Path, number: int, count: int) -> int:
    """A shard of made chats."""
    rng = random.Random(SEED + number)
    made = chats(DATA / "synth_chat.py", count, SEED + 1000 + number)
    documents = [writer().conversation(c, rng) for c in join_chats(made, rng, JOIN_SHARE)]
    rng.shuffle(documents)
    return Shard(folder, "synth", number).save(documents)


def entries(corpus: Path, *names: str) -> Iterator[dict]:
    """The lines of corpus files."""
    for name in names:
        with (corpus / f"{name}.jsonl").open() as lines:
            yield from map(json.loads, lines)


def gentle(corpus: Path, *names: str) -> Iterator[Document]:
    """Texts without violence."""
    return (writer().text(e["text"]) for e in entries(corpus, *names) if is_gentle(e["text"]))


def flat(text: str) -> str:
    """With every space and newline the same."""
    return " ".join(text.split())


def held_out_stories(corpus: Path) -> list[str]:
    """Stories that training never sees."""
    return [e["text"] for e in entries(corpus, "tinystories_samples") if is_fine(e["text"])][
        :HELD_OUT
    ]


def is_fine(text: str) -> bool:
    """A story to learn from."""
    return is_gentle(text) and is_whole(text)


def tinystories(corpus: Path) -> Iterator[Document]:
    """As plain text."""
    held = set(held_out_stories(corpus))
    for entry in entries(corpus, "tinystories_samples"):
        if is_fine(entry["text"]) and entry["text"] not in held:
            yield writer().text(entry["text"])


def tinystories_chat(corpus: Path) -> Iterator[Document]:
    """As chats."""
    held = {flat(story)[-120:] for story in held_out_stories(corpus)}
    rng = random.Random(SEED)
    for entry in entries(corpus, "tinystories_chat"):
        story = entry["turns"][1][1]
        if is_fine(story) and flat(story)[-120:] not in held:
            yield writer().conversation(entry["turns"], rng)


def tatoeba(corpus: Path) -> Iterator[Document]:
    """Sentences, a dozen together."""
    sentences = [e["text"] for e in entries(corpus, "tatoeba_en") if is_gentle(e["text"])]
    random.Random(SEED).shuffle(sentences)
    for at in range(0, len(sentences), SENTENCES):
        yield writer().text("\n".join(sentences[at : at + SENTENCES]))


def chitchat(corpus: Path) -> Iterator[Document]:
    """One persona of three, and nothing that says it is somebody else."""
    rng = random.Random(SEED)
    lines = [entry["turns"] for entry in entries(corpus, "ms_chitchat")][:FIRST_PERSONA]
    fine = [turns for turns in lines if not CONTRADICTS.search(" ".join(t for _, t in turns))]
    rng.shuffle(fine)
    return (writer().conversation(chat, rng) for chat in join_chats(fine, rng, 0.6))


def conversations(corpus: Path, *names: str) -> Iterator[Document]:
    """Chats as they are."""
    rng = random.Random(SEED)
    for entry in entries(corpus, *names):
        if is_gentle(" ".join(text for _, text in entry["turns"])):
            yield writer().conversation(entry["turns"], rng)


SOURCES: dict[str, Callable[[Path], Iterable[Document]]] = {
    "prose": lambda c: gentle(
        c, "classics_children", "gutenberg_fairy", "aesop_loc", "fairytaleqa_stories"
    ),
    "storybooks": lambda c: gentle(c, "african_storybook", "pratham_books", "tinyfabulist"),
    "tinystories": tinystories,
    "tinystories_chat": tinystories_chat,
    "dialogue": lambda c: conversations(c, "self_dialogue", "taskmaster4"),
    "tatoeba": tatoeba,
    "chitchat": chitchat,
    "definitions": lambda c: conversations(c, "wordnet_defs"),
}

if __name__ == "__main__":
    main()
