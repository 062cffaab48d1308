"""Write short stories as prompts and canvases to demo-data/canvases.npz, for training."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from shape import BUNDLED, CANVASES, DATA, DEMO, PROMPT

from demo_model.filters import is_complete, is_gentle
from webgemma.gguf.reader import Gguf
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

MAX_STORIES = 12  # of one topic: there are hundreds about a girl
TOPIC = re.compile(r"about (.+?)(?:, please)?[.?!]?$", re.IGNORECASE)
POLITE = re.compile(r"^(?:(?:Sure!|Okay!|Of course!|Here is a story(?: for you)?\.) )+")
END = "<turn|>"


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the bundled model."""
    return Tokenizer.from_gguf(Gguf.open(BUNDLED))


def prompt(topic: str) -> list[int]:
    """Return the prompt that `webgemma` writes for a model without per-layer embeddings."""
    messages = [{"role": "user", "content": f"Tell me a story about {topic}."}]
    return Chat("large").encode(tokenizer(), messages)


def main() -> None:
    """Write all stories that fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="the folder of the unpacked text.tar.xz")
    corpus = parser.parse_args().corpus / "tinystories_chat.jsonl"
    end = tokenizer().special_ids[END]
    prompts, replies, counts = [], [], Counter()
    for topic, story in stories(corpus):
        request, ids = prompt(topic), tokenizer().encode(story)
        free = CANVASES * DEMO.canvas - len(ids)
        if free < 1 or len(request) > PROMPT or counts[topic] == MAX_STORIES:
            continue
        counts[topic] += 1
        prompts.append([0] * (PROMPT - len(request)) + request)
        replies.append(ids + [end] * free)
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, prompts=np.int16(prompts), replies=np.int16(replies))
    print(f"{len(replies)} stories about {len(counts)} topics: {DATA.stat().st_size:,} bytes")


def stories(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each gentle, complete story in one paragraph, with its topic."""
    for line in path.read_text().splitlines():
        (_, request), (_, reply) = json.loads(line)["turns"][:2]
        story = POLITE.sub("", " ".join(reply.split()))
        match = TOPIC.search(request)
        if match and is_gentle(story) and is_complete(story):
            yield match[1], story


def canvases(path: Path = DATA) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all canvases: the ids before each, padded on the left; the padding; its own ids.

    Canvases that would have nothing but the end are left out."""
    file, size = np.load(path), DEMO.canvas
    prompts, replies = file["prompts"].astype(np.int64), file["replies"].astype(np.int64)
    end = tokenizer().special_ids[END]
    before, empty, after = [], [], []
    for number in range(CANVASES):
        start = number * size
        rows = replies[:, start] != end if number else np.full(len(replies), True)
        known = np.concatenate([prompts[rows], replies[rows, :start]], 1)
        before.append(np.pad(known, ((0, 0), (DEMO.before - known.shape[1], 0))))
        empty.append(np.argmax(before[-1] == tokenizer().bos, 1))
        after.append(replies[rows, start : start + size])
    return np.concatenate(before), np.concatenate(empty), np.concatenate(after)


if __name__ == "__main__":
    main()
