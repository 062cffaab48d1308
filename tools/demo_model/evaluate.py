"""Part 6: greedy answers to the 60 held-out prompts, scored by skill; perplexity of stories.

usage: evaluate.py MODEL.gguf CORPUS_FOLDER [OUT.json] [cpu|gpu]
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from data import held_out_stories
from evaluation_set import Case, cases
from scorers import Answer, score, story_faults

from webgemma import Gemma

LONGEST = 500
STORIES = 60  # of the held-out ones, for perplexity


def main() -> None:
    """A table, every answer, and a JSON of both."""
    path, corpus = sys.argv[1], Path(sys.argv[2])
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    with Gemma.load(path, device=device) as gemma:
        found = [(case, answer(gemma, case)) for case in cases()]
        surprise = perplexity(gemma, held_out_stories(corpus)[:STORIES])
    right: dict[str, list[bool]] = defaultdict(list)
    for case, said in found:
        right[case.skill].append(score(case, said))
        mark = "right" if right[case.skill][-1] else "WRONG"
        print(f"[{mark}] {case.skill}: {' / '.join(case.turns)}\n    {said.text}")
        if case.skill == "story":
            print(
                "   ", len(said.text.split()), "words;", *story_faults(case, said.text) or ["fine"]
            )
    print("\n| skill | right |\n|---|---|")
    for skill, marks in right.items():
        print(f"| {skill} | {sum(marks)} of {len(marks)} |")
    total = sum(sum(marks) for marks in right.values())
    print(f"| all | {total} of {len(found)} |\n\nperplexity of held-out stories: {surprise:.2f}")
    if len(sys.argv) > 3:
        report = {
            "right": {skill: [sum(marks), len(marks)] for skill, marks in right.items()},
            "perplexity": round(surprise, 3),
            "answers": [{"turns": case.turns, "answer": said.text} for case, said in found],
        }
        Path(sys.argv[3]).write_text(json.dumps(report, indent=1, ensure_ascii=False))


def answer(gemma: Gemma, case: Case) -> Answer:
    """The answer to the last turn of a chat whose other answers are the model's own."""
    messages: list[dict[str, str]] = []
    for said in case.turns:
        messages.append({"role": "user", "content": said})
        pieces = list(gemma.chat(messages, temperature=0, max_tokens=LONGEST))
        text = "".join(piece.text for piece in pieces)
        messages.append({"role": "assistant", "content": text})
    return Answer(text.strip(), pieces[-1].finish == "stop")


def perplexity(gemma: Gemma, stories: list[str]) -> float:
    """Of a token, over whole stories."""
    total, count = 0.0, 0
    for story in stories:
        ids = [gemma.tokenizer.bos, *gemma.tokenizer.encode(story), gemma.tokenizer.eos]
        ids = ids[: gemma.config.context]
        logits = np.asarray(gemma.logits(ids), np.float64)[:-1]
        logits -= logits.max(1, keepdims=True)
        likely = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        total -= likely[np.arange(len(ids) - 1), ids[1:]].sum()
        count += len(ids) - 1
    return float(np.exp(total / count))


if __name__ == "__main__":
    main()
