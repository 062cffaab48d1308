"""Step 6: score answers to a set of prompts by skill; perplexity of held-out stories."""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from data import held_out_stories
from evaluation_set import PROMPTS, Case, cases
from scorers import Answer, score, story_faults

from webgemma import Gemma

MAX_TOKENS = 500
STORIES = 60  # of the held-out ones, for perplexity


def main() -> None:
    """Print every answer and a table; write both as JSON if a path is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file of the demo model")
    parser.add_argument("corpus", type=Path, help="the folder of the unpacked text.tar.xz")
    parser.add_argument("out", type=Path, nargs="?", help="a JSON file to write")
    parser.add_argument("device", nargs="?", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="the set (prompts.jsonl)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="if the temperature is not 0")
    options = parser.parse_args()
    how = {"temperature": options.temperature, "seed": options.seed}
    with Gemma.load(options.model, device=options.device) as gemma:
        answers = [(case, answer(gemma, case, how)) for case in cases(options.prompts)]
        story_perplexity = perplexity(gemma, held_out_stories(options.corpus)[:STORIES])
    right: dict[str, list[bool]] = defaultdict(list)
    for case, given in answers:
        right[case.skill].append(score(case, given))
        mark = "right" if right[case.skill][-1] else "WRONG"
        print(f"[{mark}] {case.skill}: {' / '.join(case.turns)}\n    {given.text}")
        if case.skill == "story":
            faults = story_faults(case, given.text) or ["no faults"]
            print("   ", len(given.text.split()), "words;", *faults)
    print("\n| skill | right |\n|---|---|")
    for skill, marks in right.items():
        print(f"| {skill} | {sum(marks)} of {len(marks)} |")
    total = sum(sum(marks) for marks in right.values())
    print(f"| all | {total} of {len(answers)} |")
    print(f"\nperplexity of held-out stories: {story_perplexity:.2f}")
    if options.out:
        report = {
            "right": {skill: [sum(marks), len(marks)] for skill, marks in right.items()},
            "perplexity": round(story_perplexity, 3),
            "answers": [{"turns": case.turns, "answer": given.text} for case, given in answers],
        }
        options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))


def answer(gemma: Gemma, case: Case, how: dict[str, float]) -> Answer:
    """Return the answer to the last turn of a chat whose other answers are the model's own."""
    messages: list[dict[str, str]] = []
    for turn in case.turns:
        messages.append({"role": "user", "content": turn})
        pieces = list(gemma.chat(messages, max_tokens=MAX_TOKENS, **how))
        text = "".join(piece.text for piece in pieces)
        messages.append({"role": "assistant", "content": text})
    return Answer(text.strip(), pieces[-1].finish == "stop")


def perplexity(gemma: Gemma, stories: list[str]) -> float:
    """Return the perplexity of a token, over whole stories."""
    total, count = 0.0, 0
    for story in stories:
        ids = [gemma.tokenizer.bos, *gemma.tokenizer.encode(story), gemma.tokenizer.eos]
        ids = ids[: gemma.config.context]
        logits = np.asarray(gemma.logits(ids), np.float64)[:-1]
        logits -= logits.max(1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        total -= logprobs[np.arange(len(ids) - 1), ids[1:]].sum()
        count += len(ids) - 1
    return float(np.exp(total / count))


if __name__ == "__main__":
    main()
