"""The prompts of the evaluation, which no template chat may contain."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts.jsonl"
PROMPTS_2 = HERE / "prompts_2.jsonl"  # of the second training: 100, which judge
TO_CHOOSE = HERE / "prompts_to_choose.jsonl"  # 50, by which a checkpoint is chosen
GREETINGS = HERE / "greetings.jsonl"  # 40; only the "taught" ones are in the templates
SUM = re.compile(r"(\d+) ?([-+*/]) ?(\d+)")


@dataclass(frozen=True)
class Case:
    """A question, which is the last of its user turns, and what a right answer contains."""

    skill: str
    turns: list[str]
    wanted: list[str]  # any of them, as whole words without regard to case
    sum: str = ""  # of arithmetic: the operation, which `skills.arithmetic` never uses


@cache
def cases(path: Path = PROMPTS) -> list[Case]:
    """Return all cases of a set."""
    return [Case(**json.loads(line)) for line in path.read_text().splitlines()]


@cache
def held_out_prompts() -> frozenset[str]:
    """Return the last question of every case, except those of memory."""
    return frozenset(plain(case.turns[-1]) for case in cases() if case.skill != "memory")


@cache
def held_out_sums() -> frozenset[tuple[str, int, int]]:
    """Return the operations of arithmetic that are not trained on."""
    matches = [SUM.fullmatch(case.sum) for case in cases() if case.sum]
    return frozenset((m[2], int(m[1]), int(m[3])) for m in matches if m)


def has_held_out_sum(text: str) -> bool:
    """Return whether a text has one of those operations in digits."""
    return any((sign, int(a), int(b)) in held_out_sums() for a, sign, b in SUM.findall(text))


def plain(text: str) -> str:
    """Return the letters and digits of a text, so that case and punctuation do not matter."""
    return " ".join(re.findall(r"[a-z0-9+*/-]+", text.lower()))
