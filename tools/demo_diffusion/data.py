"""Short stories as prompts and canvases, packed into one file that travels to the GPU.

usage: data.py CORPUS_FOLDER   (the unpacked text.tar.xz; writes demo-data/canvases.npz)
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from shape import BLOCKS, BUNDLED, DATA, DEMO, PROMPT

from demo_model.filters import is_gentle, is_whole
from webgemma.gguf.reader import Gguf
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

MOST_OF_A_TOPIC = 12  # stories: there are hundreds about a girl
ASKED = re.compile(r"about (.+?)(?:, please)?[.?!]?$", re.IGNORECASE)
POLITE = re.compile(r"^(?:(?:Sure!|Okay!|Of course!|Here is a story(?: for you)?\.) )+")
END = "<turn|>"


@cache
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.from_gguf(Gguf.open(BUNDLED))


def prompt(topic: str) -> list[int]:
    """As `webgemma` writes it for a model without per-layer embeddings."""
    messages = [{"role": "user", "content": f"Tell me a story about {topic}."}]
    return Chat("large").encode(tokenizer(), messages)


def main() -> None:
    """All stories that fit."""
    corpus = Path(sys.argv[1]) / "tinystories_chat.jsonl"
    end = tokenizer().special_ids[END]
    prompts, replies, told = [], [], Counter()
    for topic, story in stories(corpus):
        asked, ids = prompt(topic), tokenizer().encode(story)
        room = BLOCKS * DEMO.canvas - len(ids)
        if room < 1 or len(asked) > PROMPT or told[topic] == MOST_OF_A_TOPIC:
            continue
        told[topic] += 1
        prompts.append([0] * (PROMPT - len(asked)) + asked)
        replies.append(ids + [end] * room)
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, prompts=np.int16(prompts), replies=np.int16(replies))
    print(f"{len(replies)} stories about {len(told)} topics: {DATA.stat().st_size:,} bytes")


def stories(path: Path) -> Iterator[tuple[str, str]]:
    """Topic and story, in one paragraph."""
    for line in path.read_text().splitlines():
        (_, ask), (_, reply) = json.loads(line)["turns"][:2]
        story = POLITE.sub("", " ".join(reply.split()))
        found = ASKED.search(ask)
        if found and is_gentle(story) and is_whole(story):
            yield found[1], story


def canvases(path: Path = DATA) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every canvas of every story: what stands before it, filled up in front; how much is filled;
    the canvas. Those that would hold nothing but the end are left out."""
    file, size = np.load(path), DEMO.canvas
    prompts, replies = file["prompts"].astype(np.int64), file["replies"].astype(np.int64)
    end = tokenizer().special_ids[END]
    before, empty, after = [], [], []
    for block in range(BLOCKS):
        start = block * size
        rows = replies[:, start] != end if block else np.full(len(replies), True)
        known = np.concatenate([prompts[rows], replies[rows, :start]], 1)
        before.append(np.pad(known, ((0, 0), (DEMO.before - known.shape[1], 0))))
        empty.append(np.argmax(before[-1] == tokenizer().bos, 1))
        after.append(replies[rows, start : start + size])
    return np.concatenate(before), np.concatenate(empty), np.concatenate(after)


if __name__ == "__main__":
    main()
