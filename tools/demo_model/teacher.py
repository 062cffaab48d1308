"""Part 2b: stories from the teacher for as many seconds as given, filtered, as training rows.

usage: teacher.py ROWS_FOLDER SECONDS [BATCH]
"""

import json
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from data import Shard, pool_size, writer
from documents import join_chats
from filters import is_gentle, is_good_story, is_whole
from openings import opening
from settings import DATA, SEED
from skills import chats
from stories import story_chat
from teacher_vocabulary import TeacherVocabulary

WEIGHTS = DATA / "stories15m_f16.bin"
PLAIN_SHARE = 0.5  # of the gentle stories: also learned as plain text
LONG_SHARE = 0.3  # of the story chats: go on in another chat, or follow one
SAMPLE = 400  # stories of the first wave that are written down to be read


def main() -> None:
    """Sample on the GPU while other processes filter and pack."""
    from sampler import Sampler  # here, so that the processes that pack need no torch
    from torch import cuda, manual_seed

    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    device = "cuda" if cuda.is_available() else "cpu"
    batch = int(sys.argv[3]) if len(sys.argv) > 3 else 8192
    folder.mkdir(parents=True, exist_ok=True)
    manual_seed(SEED)
    started = time.monotonic()
    sampler = Sampler(WEIGHTS, device)
    with ProcessPoolExecutor(pool_size(), mp_context=get_context("spawn")) as pool:
        coming = pool.submit(prompts, SEED, batch)
        packed = []
        wave = 0
        while time.monotonic() - started < seconds or not wave:
            given = coming.result()
            wave += 1
            coming = pool.submit(prompts, SEED + wave, batch)
            began = time.monotonic()
            ids, ends = sampler.sample(given)
            took = time.monotonic() - began
            for part in range(4):
                rows = slice(part, None, 4)
                job = (folder, SEED + wave - 1, batch, 4 * wave + part, part, ids[rows], ends[rows])
                packed.append(pool.submit(pack_stories, *job))
            print(f"wave {wave}: {int(ends.sum()) / took:,.0f} tokens/s, {took:.1f} s", flush=True)
        kept = np.sum([job.result() for job in packed], axis=0)
    print(f"{wave * batch} stories sampled, {kept[0]} whole and gentle, {kept[1]} on their topic,")
    print(f"{kept[2]:,} tokens as chats, {kept[3]:,} as text, {time.monotonic() - started:.0f} s")


@cache
def vocabulary() -> TeacherVocabulary:
    """One for each process."""
    return TeacherVocabulary(WEIGHTS)


def openings(seed: int, count: int) -> list:
    """The openings of a wave."""
    rng = random.Random(seed)
    return [opening(rng) for _ in range(count)]


def prompts(seed: int, count: int) -> list[list[int]]:
    """The same as the teacher reads them."""
    return [vocabulary().encode(start.text) for start in openings(seed, count)]


def pack_stories(
    folder: Path, seed: int, count: int, number: int, part: int, ids: np.ndarray, ends: np.ndarray
) -> tuple[int, int, int, int]:
    """Write a quarter of a wave as rows of chats and of plain text."""
    rng = random.Random(number)
    told, plain, gentle = [], [], 0
    for start, row, end in zip(openings(seed, count)[part::4], ids, ends, strict=True):
        story = vocabulary().decode(row[:end].tolist())
        if end == ids.shape[1] or not (is_whole(story) and is_gentle(story)):
            continue
        gentle += 1
        if rng.random() < PLAIN_SHARE:
            plain.append(story)
        if is_good_story(story, start.keys):
            told.append(story_chat(start, story, rng))
    if number < 8:
        lines = "".join(json.dumps(chat) + "\n" for chat in told[: SAMPLE // 4])
        (folder / f"sample-{part}.jsonl").write_text(lines)
    other = chats(DATA / "synth_chat.py", len(told), number)
    mixed = [
        x for chat in told for x in ([chat, next(other)] if rng.random() < LONG_SHARE else [chat])
    ]
    rng.shuffle(mixed)
    write = writer()
    documents = [write.conversation(chat, rng) for chat in join_chats(mixed, rng, LONG_SHARE)]
    talk = Shard(folder, "stories_chat", number).save(documents)
    text = Shard(folder, "stories", number).save([write.text(story) for story in plain])
    return gentle, len(told), talk, text


if __name__ == "__main__":
    main()
