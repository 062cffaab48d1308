"""What the second training may not contain: the prompts of every set, in nearly their words.

The first training refused a turn that equals a prompt; here a turn is also refused if it contains
one, if it shares nearly all words with one, or if it has one of the sums, in digits or in words,
in either order. The 25 taught greetings are no prompts in this sense, hence not the first set's
"hi!!" either: it is one of them, as far as the letters tell."""

import re
from functools import cache, lru_cache

from evaluation_set import GREETINGS, PROMPTS, PROMPTS_2, SUM, TO_CHOOSE, Case, cases, plain

NEARLY = 0.8  # of all words of two texts, in both: from there on they count as the same
FEWEST = 4  # words of a text that is compared by its words
UNITS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SIGNS = {"plus": "+", "minus": "-", "less": "-", "times": "*", "x": "*", "by": "", "and": "+"}
SIGNS |= {"divided": "/"}
COMMUTES = "+*"


@cache
def held_out_cases() -> tuple[Case, ...]:
    """Return the cases of all sets, without the greetings that are taught."""
    greetings = (case for case in cases(GREETINGS) if case.skill != "taught greeting")
    return (*cases(PROMPTS), *cases(PROMPTS_2), *cases(TO_CHOOSE), *greetings)


@cache
def prompts() -> frozenset[str]:
    """Return every turn that must not be trained on, in plain letters.

    Memory is held out by its names instead (see `names`): "What is my name?" is the question."""
    taught = {plain(case.turns[0]) for case in cases(GREETINGS) if case.skill == "taught greeting"}
    turns = (plain(case.turns[-1]) for case in held_out_cases() if case.skill != "memory")
    return frozenset(turns) - taught


@cache
def sums() -> frozenset[tuple[str, int, int]]:
    """Return the operations that must not be trained on, in both orders."""
    found = set()
    for case in held_out_cases():
        if match := SUM.fullmatch(case.sum):
            a, sign, b = int(match[1]), match[2], int(match[3])
            found |= {(sign, a, b)} | ({(sign, b, a)} if sign in COMMUTES else set())
    return frozenset(found)


@cache
def names() -> frozenset[str]:
    """Return the names and facts that users give in the prompts of memory, in small letters."""
    return frozenset(
        word for case in held_out_cases() if case.skill == "memory" for word in case.wanted
    )


@lru_cache(1 << 18)
def is_held_out(text: str) -> bool:
    """Return whether a user's turn is a prompt, contains one, or has nearly the same words."""
    said = plain(text)
    if said in prompts() or any(f" {prompt} " in f" {said} " for prompt in _long()):
        return True
    words = frozenset(said.split())
    return len(words) >= FEWEST and any(
        len(words & other) >= NEARLY * len(words | other) for other in _words()
    )


@lru_cache(1 << 18)
def has_held_out_sum(text: str) -> bool:
    """Return whether a text has one of the sums, in digits or in words."""
    words = re.findall(r"\d+|[a-z]+|[-+*/]", text.lower())
    words = [str(UNITS.index(word)) if word in UNITS else SIGNS.get(word, word) for word in words]
    plainly = " ".join(word for word in words if word)
    return any((sign, int(a), int(b)) in sums() for a, sign, b in SUM.findall(plainly))


@cache
def _long() -> tuple[str, ...]:
    return tuple(prompt for prompt in prompts() if len(prompt.split()) > 2)


@cache
def _words() -> tuple[frozenset[str], ...]:
    several = (frozenset(prompt.split()) for prompt in prompts())
    return tuple(words for words in several if len(words) >= FEWEST)
