"""Step 1 of the second training: sample new stories from the teacher on a CPU, as JSON lines."""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from filters import is_complete, is_gentle, is_good_story, is_happy
from openings import opening
from sampler import MIN_P, TEMPERATURE, Sampler
from settings import DATA, SEED_2
from teacher_vocabulary import TeacherVocabulary

WEIGHTS = DATA / "stories15m_f16.bin"
WAVE = 192  # stories sampled together
CANDIDATES = 64  # tokens that are considered; more are hardly ever above MIN_P


class Likely(Sampler):
    """The teacher's sampler, which draws from the likeliest tokens only: cheaper on a CPU."""

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        best, ids = logits.float().topk(CANDIDATES)
        p = torch.softmax(best / TEMPERATURE, -1)
        p = torch.where(p < MIN_P * p[:, :1], 0.0, p)
        return ids.gather(1, torch.multinomial(p, 1))[:, 0]


def main() -> None:
    """Sample for some seconds; store what is complete and gentle, with its fitting topic."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("seconds", type=float, help="of sampling, at least one wave")
    parser.add_argument("seed", type=int, nargs="?", default=SEED_2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small operations: two threads mostly wait for each other
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    words = TeacherVocabulary(WEIGHTS)
    sampler = Likely(WEIGHTS, "cpu", torch.bfloat16)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sampled = kept = tokens = 0
    started = time.monotonic()
    with options.out.open("w") as out:
        while not sampled or time.monotonic() - started < options.seconds:
            starts = [opening(rng) for _ in range(WAVE)]
            ids, ends = sampler.sample([words.encode(start.text) for start in starts])
            for start, row, end in zip(starts, ids, ends, strict=True):
                story = words.decode(row[:end].tolist())
                good = end < ids.shape[1] and is_complete(story) and is_gentle(story)
                if good and is_happy(story):
                    fits = is_good_story(story, start.keys)
                    topic = start.topic if fits else None
                    entry = {"text": story, "topic": topic, "keys": start.keys}
                    out.write(json.dumps(entry) + "\n")
                    kept += 1
            out.flush()
            sampled += WAVE
            tokens += int(ends.sum())
            seconds = time.monotonic() - started
            print(f"{sampled} sampled, {kept} kept, {tokens / seconds:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
