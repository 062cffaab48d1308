"""Step 2b: sample stories from the teacher for some seconds, filter them, write training rows."""

import argparse
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from data import Shard, pool_size, writer
from documents import join_chats
from filters import is_complete, is_gentle, is_good_story
from openings import opening
from settings import DATA, SEED
from skills import chats
from stories import story_chat
from teacher_vocabulary import TeacherVocabulary

WEIGHTS = DATA / "stories15m_f16.bin"
PLAIN_SHARE = 0.5  # of the gentle stories, which are learnt as plain text too
LONG_SHARE = 0.3  # of the story chats, which are joined with another chat
SAMPLE = 400  # stories of the first wave that are stored for reading


def main() -> None:
    """Sample on the GPU while other processes filter and pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="the folder to write to")
    parser.add_argument("seconds", type=float, help="of sampling, at least one wave")
    parser.add_argument("batch", type=int, nargs="?", default=8192, help="stories of a wave (8192)")
    options = parser.parse_args()
    folder, seconds, batch = options.rows, options.seconds, options.batch
    from sampler import Sampler  # imported here, so that the packing processes do not import torch
    from torch import cuda, manual_seed

    device = "cuda" if cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    manual_seed(SEED)
    started = time.monotonic()
    sampler = Sampler(WEIGHTS, device)
    with ProcessPoolExecutor(pool_size(), mp_context=get_context("spawn")) as pool:
        next_prompts = pool.submit(prompts, SEED, batch)
        packing = []
        wave = 0
        while time.monotonic() - started < seconds or not wave:
            batch_prompts = next_prompts.result()
            wave += 1
            next_prompts = pool.submit(prompts, SEED + wave, batch)
            start = time.monotonic()
            ids, ends = sampler.sample(batch_prompts)
            took = time.monotonic() - start
            for quarter in range(4):
                rows = slice(quarter, None, 4)
                number = 4 * wave + quarter
                job = (folder, SEED + wave - 1, batch, number, quarter, ids[rows], ends[rows])
                packing.append(pool.submit(pack_stories, *job))
            print(f"wave {wave}: {int(ends.sum()) / took:,.0f} tokens/s, {took:.1f} s", flush=True)
        kept = np.sum([job.result() for job in packing], axis=0)
    print(
        f"{wave * batch} stories sampled, {kept[0]} complete and gentle, {kept[1]} on their topic,"
    )
    print(f"{kept[2]:,} tokens as chats, {kept[3]:,} as text, {time.monotonic() - started:.0f} s")


@cache
def vocabulary() -> TeacherVocabulary:
    """Return the teacher's vocabulary, one for each process."""
    return TeacherVocabulary(WEIGHTS)


def openings(seed: int, count: int) -> list:
    """Return the openings of a wave."""
    rng = random.Random(seed)
    return [opening(rng) for _ in range(count)]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return the same openings as the teacher's token ids."""
    return [vocabulary().encode(start.text) for start in openings(seed, count)]


def pack_stories(
    folder: Path,
    seed: int,
    count: int,
    number: int,
    quarter: int,
    ids: np.ndarray,
    ends: np.ndarray,
) -> tuple[int, int, int, int]:
    """Write a quarter of a wave as rows of chats and of plain text.

    Return the numbers of gentle stories, of stories on their topic, and of tokens in chats and in
    plain text."""
    rng = random.Random(number)
    story_chats, plain, gentle = [], [], 0
    for start, row, end in zip(openings(seed, count)[quarter::4], ids, ends, strict=True):
        story = vocabulary().decode(row[:end].tolist())
        if end == ids.shape[1] or not (is_complete(story) and is_gentle(story)):
            continue
        gentle += 1
        if rng.random() < PLAIN_SHARE:
            plain.append(story)
        if is_good_story(story, start.keys):
            story_chats.append(story_chat(start, story, rng))
    if number < 8:
        lines = "".join(json.dumps(chat) + "\n" for chat in story_chats[: SAMPLE // 4])
        (folder / f"sample-{quarter}.jsonl").write_text(lines)
    other = chats(DATA / "synth_chat.py", len(story_chats), number)
    mixed = [
        x
        for chat in story_chats
        for x in ([chat, next(other)] if rng.random() < LONG_SHARE else [chat])
    ]
    rng.shuffle(mixed)
    write = writer()
    documents = [write.conversation(chat, rng) for chat in join_chats(mixed, rng, LONG_SHARE)]
    chat_tokens = Shard(folder, "stories_chat", number).save(documents)
    text_tokens = Shard(folder, "stories", number).save([write.text(story) for story in plain])
    return gentle, len(story_chats), chat_tokens, text_tokens


if __name__ == "__main__":
    main()
