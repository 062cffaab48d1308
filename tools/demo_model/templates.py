"""Reader and filler of the second training's templates: `templates/*.txt`."""

import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("templates")
INNERMOST = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")
BIG = {"n": (1000, 99999), "m": (1000, 99999), "k": (3, 97)}  # numbers that are slots


@dataclass
class Intent:
    """What users mean: their turns and the replies that fit all of them."""

    name: str
    asks: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)


@cache
def intents(file: str) -> list[Intent]:
    """Return the intents of a file."""
    found: list[Intent] = []
    for line in (FOLDER / file).read_text().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "=":
            found.append(Intent(rest))
        elif mark == "u":
            found[-1].asks.append(rest)
        elif mark == "a":
            found[-1].replies.append(rest)
        elif line and mark != "#":
            raise ValueError(f"templates/{file}: a line begins with =, u, a or #, not {line!r}.")
    return found


@cache
def slots() -> dict[str, list[str]]:
    """Return the words of every slot."""
    lines = (FOLDER / "slots.txt").read_text().splitlines()
    return {name: words.split("|") for name, _, words in (line.partition(": ") for line in lines)}


def fill(rng: random.Random, template: str) -> str:
    """Return a template with its choices made and its slots filled."""
    text = SLOT.sub(lambda match: word(rng, match[1]), template)
    while "{" in text:  # of a slot's own words
        text = SLOT.sub(lambda match: word(rng, match[1]), text)

    def chosen(match: re.Match[str]) -> str:
        if match[1] is not None:
            return rng.choice(match[1].split("|"))
        return rng.choice(match[2].split("|")) if rng.random() < 0.5 else ""

    count = 1
    while count:
        text, count = INNERMOST.subn(chosen, text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s+([?!,]|\.(?!\w))", r"\1", text)
    return re.sub(r"([?!])[.?]|,([?.!])", r"\1\2", text)


def word(rng: random.Random, slot: str) -> str:
    """Return a word, or a number, for a slot."""
    if slot in BIG:
        return str(rng.randint(*BIG[slot]))
    return rng.choice(slots()[slot])
