"""Step 2a: write the texts and chats of the corpora as training rows."""

import argparse
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from documents import Document, Writer, join_chats
from filters import is_complete, is_gentle
from packing import pack
from settings import DATA, ROW, SEED
from skills import chats
from vocabulary_file import load_tokenizer

CHATS = 3_000_000
CHATS_PER_SHARD = 100_000
HELD_OUT = 200  # stories of TinyStories, for perplexity
SENTENCES = 12  # of Tatoeba per document
JOIN_SHARE = 0.25
FIRST_PERSONA = 9700  # lines of the chit-chat; other personas follow, with other answers
CONTRADICTS = re.compile(
    r"\b(name|bot|bots|robot|age|human|created?|made|built|program\w*)\b", re.I
)


@dataclass(frozen=True)
class Shard:
    """A shard of a source, stored as two files."""

    folder: Path
    source: str
    number: int = 0

    def save(self, documents: list[Document]) -> int:
        """Write its rows; return how many tokens they have."""
        tokens, kinds = pack(documents, ROW, writer().tokenizer.pad or 0)
        np.save(self.folder / f"{self.source}.{self.number}.tokens.npy", tokens)
        np.save(self.folder / f"{self.source}.{self.number}.kinds.npy", kinds)
        return int((kinds > 0).sum())


@cache
def writer() -> Writer:
    """Return the document writer, one for each process."""
    return Writer(load_tokenizer())


def pool_size() -> int:
    """Return a number of processes that leaves one core to the main one."""
    return max(1, (os.cpu_count() or 2) // 2 - 1)


def main() -> None:
    """Write every source in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="the folder of the unpacked text.tar.xz")
    parser.add_argument("rows", type=Path, help="the folder to write to")
    parser.add_argument(
        "chats", type=int, nargs="?", default=CHATS, help=f"template chats ({CHATS})"
    )
    options = parser.parse_args()
    corpus, folder, count = options.corpus, options.rows, options.chats
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(pool_size(), mp_context=get_context("spawn")) as pool:
        jobs = {name: pool.submit(save_text, name, corpus, folder) for name in SOURCES}
        shards = range(max(1, count // CHATS_PER_SHARD))
        size = min(count, CHATS_PER_SHARD)
        chat_jobs = [pool.submit(save_chats, folder, number, size) for number in shards]
        for name, job in jobs.items():
            print(f"{name}: {job.result():,} tokens", flush=True)
        print(f"synth: {sum(job.result() for job in chat_jobs):,} tokens", flush=True)


def save_text(name: str, corpus: Path, folder: Path) -> int:
    """Write one source of the corpus; return its tokens."""
    return Shard(folder, name).save(list(SOURCES[name](corpus)))


def save_chats(folder: Path, number: int, count: int) -> int:
    """Write a shard of template chats; return its tokens."""
    rng = random.Random(SEED + number)
    template_chats = chats(DATA / "synth_chat.py", count, SEED + 1000 + number)
    joined = join_chats(template_chats, rng, JOIN_SHARE)
    documents = [writer().conversation(chat, rng) for chat in joined]
    rng.shuffle(documents)
    return Shard(folder, "synth", number).save(documents)


def entries(corpus: Path, *names: str) -> Iterator[dict]:
    """Yield the lines of corpus files."""
    for name in names:
        with (corpus / f"{name}.jsonl").open() as lines:
            yield from map(json.loads, lines)


def gentle(corpus: Path, *names: str) -> Iterator[Document]:
    """Return texts without violence."""
    return (writer().text(e["text"]) for e in entries(corpus, *names) if is_gentle(e["text"]))


def flat(text: str) -> str:
    """Return a text in which every run of white space is one space."""
    return " ".join(text.split())


def held_out_stories(corpus: Path) -> list[str]:
    """Return stories that are not trained on."""
    return [e["text"] for e in entries(corpus, "tinystories_samples") if is_usable(e["text"])][
        :HELD_OUT
    ]


def is_usable(text: str) -> bool:
    """Return whether a story may be trained on."""
    return is_gentle(text) and is_complete(text)


def tinystories(corpus: Path) -> Iterator[Document]:
    """Yield TinyStories as plain text."""
    held_out = set(held_out_stories(corpus))
    for entry in entries(corpus, "tinystories_samples"):
        if is_usable(entry["text"]) and entry["text"] not in held_out:
            yield writer().text(entry["text"])


def tinystories_chat(corpus: Path) -> Iterator[Document]:
    """Yield TinyStories as chats."""
    held_out = {flat(story)[-120:] for story in held_out_stories(corpus)}
    rng = random.Random(SEED)
    for entry in entries(corpus, "tinystories_chat"):
        story = entry["turns"][1][1]
        if is_usable(story) and flat(story)[-120:] not in held_out:
            yield writer().conversation(entry["turns"], rng)


def tatoeba(corpus: Path) -> Iterator[Document]:
    """Yield documents of a dozen sentences."""
    sentences = [e["text"] for e in entries(corpus, "tatoeba_en") if is_gentle(e["text"])]
    random.Random(SEED).shuffle(sentences)
    for at in range(0, len(sentences), SENTENCES):
        yield writer().text("\n".join(sentences[at : at + SENTENCES]))


def chitchat(corpus: Path) -> Iterator[Document]:
    """Return chats of one persona of three, without those that contradict the model's identity."""
    rng = random.Random(SEED)
    lines = [entry["turns"] for entry in entries(corpus, "ms_chitchat")][:FIRST_PERSONA]
    usable = [turns for turns in lines if not CONTRADICTS.search(" ".join(t for _, t in turns))]
    rng.shuffle(usable)
    return (writer().conversation(chat, rng) for chat in join_chats(usable, rng, 0.6))


def conversations(corpus: Path, *names: str) -> Iterator[Document]:
    """Yield gentle chats, otherwise unchanged."""
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
