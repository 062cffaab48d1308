"""The prompts of the evaluation, which no chat made from templates may contain."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROMPTS = Path(__file__).with_name("prompts.jsonl")
SUM = re.compile(r"(\d+) ?([-+*/]) ?(\d+)")


@dataclass(frozen=True)
class Case:
    """One thing to ask, the last of its user turns, and what a right answer looks like."""

    skill: str
    turns: list[str]
    wanted: list[str]  # any of them, as whole words without regard to case
    sum: str = ""  # of arithmetic: the operation, which `skills.arithmetic` asks for in no words


@cache
def cases() -> list[Case]:
    """All of them."""
    return [Case(**json.loads(line)) for line in PROMPTS.read_text().splitlines()]


@cache
def held_out_prompts() -> frozenset[str]:
    """The last question of every case."""
    return frozenset(plain(case.turns[-1]) for case in cases() if case.skill != "memory")


@cache
def held_out_sums() -> frozenset[tuple[str, int, int]]:
    """The operations of arithmetic that training must not see."""
    found = [SUM.fullmatch(case.sum) for case in cases() if case.sum]
    return frozenset((m[2], int(m[1]), int(m[3])) for m in found if m)


def asks_held_out_sum(text: str) -> bool:
    """Whether a text spells one of those operations in digits."""
    return any((sign, int(a), int(b)) in held_out_sums() for a, sign, b in SUM.findall(text))


def plain(text: str) -> str:
    """Letters and digits only, so that case and marks make no difference."""
    return " ".join(re.findall(r"[a-z0-9+*/-]+", text.lower()))
