"""What older versions of Python do otherwise."""

import re
import tokenize
from pathlib import Path

import webgemma

# A group with a possessive quantifier, or an atomic group. Python before 3.11.5 (Debian 12 has
# 3.11.2) drops characters of their matches if something in the group backtracks (gh-106052).
POSSESSIVE_GROUP = re.compile(r"(?<![\\(])\)(?:[*+?]|\{\d*,?\d*\})\+|\(\?>")


def test_possessive_groups_are_recognised() -> None:
    for pattern in ("(?:ab)*+", "(a|b)++", "(ab)?+", "(a){2,3}+", "(?>ab)"):
        assert POSSESSIVE_GROUP.search(pattern), pattern
    for pattern in ("[^ab]*+", r"\s++", "(?:ab)*", r"\)++", "(a)(b)+", "[()*+]"):
        assert not POSSESSIVE_GROUP.search(pattern), pattern


def test_no_pattern_has_a_possessive_group() -> None:
    found = []
    for path in Path(webgemma.__file__).parent.rglob("*.py"):
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                is_text = token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith(
                    "FSTRING"
                )
                if is_text and '"""' not in token.string and POSSESSIVE_GROUP.search(token.string):
                    found.append(f"{path}:{token.start[0]}: {token.string}")
    assert not found
