"""Scorers: whether an answer is right, by simple rules without a model."""

import re
from dataclasses import dataclass

from evaluation_set import Case
from filters import is_complete, is_gentle

MIN_WORDS = 100
MAX_REPEATS = 3  # of a sentence in a story


@dataclass(frozen=True)
class Answer:
    """The text of an answer, and whether the model ended it."""

    text: str
    ended: bool


def score(case: Case, answer: Answer) -> bool:
    """Return whether an answer is right."""
    if not answer.ended:
        return False
    if case.skill == "story":
        return not story_faults(case, answer.text)
    if case.skill == "arithmetic":
        return result(answer.text) in case.wanted
    return contains(answer.text, case.wanted)


def contains(text: str, wanted: list[str]) -> bool:
    """Return whether any of the words occurs as a whole word."""
    return any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in wanted)


def result(text: str) -> str:
    """Return the last number or word of a text: the result of a sum."""
    words = re.findall(r"[a-z-]+|\d+", text.lower())
    return words[-1] if words else ""


def story_faults(case: Case, text: str) -> list[str]:
    """Return what is wrong with a story, in words."""
    faults = []
    words = len(text.split())
    if words < MIN_WORDS:
        faults.append(f"only {words} words")
    if not is_complete(text):
        faults.append("does not end as a sentence, or has an open quotation")
    if not is_gentle(text):
        faults.append("has a blocked word")
    if not contains(text, case.wanted):
        faults.append("misses its topic")
    sentences = re.findall(r"[^.!?]+[.!?]", text)
    if any(sentences.count(sentence) > MAX_REPEATS for sentence in sentences):
        faults.append("repeats itself")
    return faults
