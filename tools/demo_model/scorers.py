"""Whether an answer is right, by simple rules that need no model."""

import re
from dataclasses import dataclass

from evaluation_set import Case
from filters import is_gentle, is_whole

LEAST_WORDS = 100
REPEATED = 3  # how often a whole sentence may come up in a story


@dataclass(frozen=True)
class Answer:
    """What the model said, and whether it came to an end by itself."""

    text: str
    ended: bool


def score(case: Case, answer: Answer) -> bool:
    """Right or wrong."""
    if not answer.ended:
        return False
    if case.skill == "story":
        return not story_faults(case, answer.text)
    if case.skill == "arithmetic":
        return result(answer.text) in case.wanted
    return says(answer.text, case.wanted)


def says(text: str, wanted: list[str]) -> bool:
    """Whether any of the words comes up as a whole."""
    return any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in wanted)


def result(text: str) -> str:
    """The last number or the last word: what a sum comes to."""
    found = re.findall(r"[a-z-]+|\d+", text.lower())
    return found[-1] if found else ""


def story_faults(case: Case, text: str) -> list[str]:
    """What is wrong with a story, in words."""
    faults = []
    words = len(text.split())
    if words < LEAST_WORDS:
        faults.append(f"only {words} words")
    if not is_whole(text):
        faults.append("does not end as a sentence, or a quotation stays open")
    if not is_gentle(text):
        faults.append("holds a blocked word")
    if not says(text, case.wanted):
        faults.append("misses its topic")
    sentences = re.findall(r"[^.!?]+[.!?]", text)
    if any(sentences.count(sentence) > REPEATED for sentence in sentences):
        faults.append("repeats itself")
    return faults
