"""Step 2 of the second training: write its chats and stories as rows of 512 tokens."""

import argparse
import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
from chats_2 import Chats
from data import writer
from documents import Document
from held_out import is_held_out
from packing import pack
from settings import DATA, ROW_2, SEED_2
from stories import request, story_chat

CHATS = 24_000
HELD_OUT = 300  # chats of another seed, whose loss is logged
PLAIN_SHARE = 0.5  # of the stories on their topic, which are learnt as plain text, not as a chat


def main() -> None:
    """Write the rows of three sources, and of the chats that are not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="the folder to write to")
    parser.add_argument("stories", type=Path, nargs="+", help="what fresh_stories.py wrote")
    parser.add_argument("--chats", type=int, default=CHATS)
    options = parser.parse_args()
    options.rows.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED_2)
    chats, plain = stories(options.stories, rng)
    save(options.rows, "stories_chat", chats)
    save(options.rows, "stories", plain)
    save(options.rows, "held_out", talk(HELD_OUT, SEED_2 + 1, rng))
    save(options.rows, "talk", talk(options.chats, SEED_2, rng))


def talk(count: int, seed: int, rng: random.Random) -> list[Document]:
    """Return template chats."""
    made = islice(Chats(DATA / "synth_chat.py", seed), count)
    return [writer().conversation(chat, rng) for chat in made]


def stories(paths: list[Path], rng: random.Random) -> tuple[list[Document], list[Document]]:
    """Return the stories that answer a request, and the others as plain text."""
    chats, plain = [], []
    for path in paths:
        for entry in map(json.loads, path.read_text().splitlines()):
            start = Fitting(entry["topic"] or "", entry["keys"])
            if not entry["topic"] or rng.random() < PLAIN_SHARE:
                plain.append(writer().text(entry["text"]))
                continue
            chat = story_chat(start, entry["text"], rng)
            while is_held_out(chat[0][1]):
                chat[0][1] = request(start.topic, rng)
            chats.append(writer().conversation(chat, rng))
    return chats, plain


class Fitting:
    """The topic of a story and the words in it, as `story_chat` reads them."""

    def __init__(self, topic: str, keys: list[str]) -> None:
        self.topic, self.keys = topic, keys


def save(folder: Path, source: str, documents: list[Document]) -> None:
    """Write the rows of a source."""
    tokens, kinds = pack(documents, ROW_2, writer().tokenizer.pad or 0)
    np.save(folder / f"{source}.0.tokens.npy", tokens)
    np.save(folder / f"{source}.0.kinds.npy", kinds)
    used = int((kinds > 0).sum())
    print(f"{source}: {len(documents)} documents, {len(tokens)} rows, {used:,} tokens", flush=True)


if __name__ == "__main__":
    main()
