"""Grammars in GBNF, which llama.cpp reads and, as EBNF, vLLM and xgrammar.

Matchers take each text of a grammar as far as it reaches: after [a-z]+ they would never find "ing".
So a grammar is one text, of a regular language, or if it is recursive, all texts are characters."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from webgemma.constraints.grammar import (
    ROOT,
    Choice,
    Expression,
    Grammar,
    Loop,
    Rule,
    Series,
    Text,
    choice,
    series,
)
from webgemma.constraints.languages import (
    ANY_CHAR,
    LAST,
    NOTHING,
    Chars,
    Concat,
    Language,
    chars,
    concat,
    literal,
    repeat,
    union,
)
from webgemma.constraints.patterns import size
from webgemma.errors import InputError
from webgemma.sync import checkpoint
from webgemma.values import shown

MAX_DEPTH = 64  # of groups, and of repetitions in a language
MAX_COUNT = 10_000  # of repetitions
MAX_SIZE = 20_000  # characters of a language, where repetitions are written out

_IS_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.ASCII | re.MULTILINE)
_IS_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
_NAME = re.compile(r"[\w-]+", re.ASCII)
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}", re.ASCII)
_HEX = {
    letter: re.compile(rf"[0-9a-fA-F]{{{n}}}") for letter, n in {"x": 2, "u": 4, "U": 8}.items()
}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF rather than in Lark."""
    return bool(_IS_GBNF.search(text)) and not _IS_LARK.search(text)


def gbnf(text: str) -> Grammar:
    """Return a grammar in GBNF, whose rules may be recursive; InputError if it cannot be used."""
    return _Rules(_Parser(text).rules()).grammar()


def _refuse(problem: str) -> NoReturn:
    raise InputError(f"grammar cannot be used: {problem}.")


class _Parser:
    """Recursive descent over a text; references are by the names that it has."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Expression]:
        """Return the rules by their names."""
        rules: dict[str, Expression] = {}
        self._skip(_LINES)
        while self._peek():
            name = self._name()
            self._skip(_BLANKS)
            if not self._take("::="):
                self._fail(f"::= must follow the name {shown(name)}")
            if name in rules:
                self._fail(f"there are two rules {shown(name)}")
            self._skip(_LINES)
            rules[name] = self._choice()
            if self._peek() not in ("", "\r", "\n"):
                self._fail(f"{shown(self._peek())} cannot stand here")
            self._skip(_LINES)
        return rules

    def _fail(self, problem: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        _refuse(f"in line {line}, {problem}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, expected: str) -> bool:
        found = self._text.startswith(expected, self._at)
        self._at += len(expected) * found
        return found

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _skip_in_rule(self) -> None:
        self._skip(_LINES if self._depth else _BLANKS)

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if not found:
            self._fail(f"there must be the name of a rule, not {shown(self._peek())}")
        self._at = found.end()
        return found[0]

    def _choice(self) -> Expression:
        checkpoint()
        items = [self._series()]
        while self._takes_alternative():
            self._skip(_LINES)
            items.append(self._series())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _takes_alternative(self) -> bool:
        """Take a |, which may also begin the next line."""
        before = self._at
        self._skip(_LINES)
        if self._take("|"):
            return True
        self._at = before
        return False

    def _series(self) -> Expression:
        items: list[Expression] = []
        while (item := self._item()) is not None:
            self._skip_in_rule()
            if (bounds := self._bounds()) is not None:
                item = Loop(item, *bounds)
                self._skip_in_rule()
                if self._bounds() is not None:
                    self._fail("a repetition follows a repetition: put the first into ( )")
            items.append(item)
        return items[0] if len(items) == 1 else Series(tuple(items))

    def _item(self) -> Expression | None:
        if self._take('"'):
            return Text(literal("".join(self._characters_until('"'))))
        if self._take("["):
            return Text(self._set())
        if self._take("."):
            return Text(ANY_CHAR)
        if self._take("("):
            return self._group()
        if self._peek() in ("<", "!"):
            self._fail("tokens such as <[10]> are not supported: write texts")
        found = _NAME.match(self._text, self._at)
        return Rule(self._name()) if found else None

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups nest more than {MAX_DEPTH} levels deep")
        self._skip(_LINES)
        inside = self._choice()
        self._skip(_LINES)
        if not self._take(")"):
            self._fail("a ( has no )")
        self._depth -= 1
        return inside

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        if self._peek() != "{":
            return None
        counts = _COUNTS.match(self._text, self._at)
        if counts is None:
            self._fail("{ must begin {m}, {m,} or {m,n}")
        least = int(counts[1][:9])
        most = None if counts[2] and not counts[3] else int((counts[3] or counts[1])[:9])
        if max(least, most or 0) > MAX_COUNT or (most is not None and least > most):
            self._fail(f"{shown(counts[0])} cannot be used: counts go up to {MAX_COUNT}")
        self._at = counts.end()
        return least, most

    def _set(self) -> Chars:
        negated, ranges = self._take("^"), []
        members = self._characters_until("]")
        for character in members:
            last = character
            if self._peek() == "-" and self._text[self._at : self._at + 2] != "-]":
                self._at += 1
                last = next(members, "")
            if last < character:
                self._fail("a range of characters begins after its end")
            ranges.append((ord(character), ord(last)))
        found = ANY_CHAR - chars(*ranges) if negated else chars(*ranges)
        if not found.ranges:
            self._fail("a set of characters is empty")
        return found

    def _characters_until(self, end: str) -> Iterator[str]:
        """Yield characters, those that are escaped as they are meant, up to the end of them."""
        while not self._take(end):
            character = self._peek()
            if not character:
                self._fail(f"the text ends before {end}")
            self._at += 1
            yield self._escaped() if character == "\\" else character

    def _escaped(self) -> str:
        letter = self._peek()
        self._at += 1
        if letter in _HEX:
            digits = _HEX[letter].match(self._text, self._at)
            code = int(digits[0], 16) if digits else LAST + 1
            if not digits or code > LAST or 0xD800 <= code <= 0xDFFF:
                self._fail(f"\\{letter} must be followed by the digits of a character")
            self._at = digits.end()
            return chr(code)
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        if not letter or letter not in string.punctuation:
            self._fail(f"\\{letter} stands for nothing")
        return letter


class _Rules:
    """Rules that refer to each other by names."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        if ROOT not in rules:
            _refuse(f"there is no rule {shown(ROOT)}, which stands for the whole reply")
        self._rules = rules

    def grammar(self) -> Grammar:
        """Return the grammar: of one language, or of characters if its rules are recursive."""
        language = self._root_language()
        if language is not None:
            return Grammar({ROOT: Text(language)})
        if ROOT not in self._productive():
            _refuse(f"{shown(ROOT)} stands for no text, as its rules lead only to each other")
        names = {name: f"r{number}" for number, name in enumerate(self._rules)}
        grammar = Grammar(
            {names[name]: _written(each, names) for name, each in self._rules.items()}
        )
        grammar.rules[ROOT] = Rule(names[ROOT])
        return grammar

    def _root_language(self) -> Language | None:
        """Return the language of the whole reply; None if it is recursive, or too large."""
        found: dict[str, _Sized] = {}
        for name in self._ordered():
            found[name] = _folded(self._rules[name], found)
            if found[name].size > MAX_SIZE or found[name].depth > MAX_DEPTH:
                return None
        return found[ROOT].language if ROOT in found else None

    def _productive(self) -> set[str]:
        """Return the rules that stand for some text."""
        found: set[str] = set()
        waiting = list(self._rules)
        while True:
            left = []
            for name in reversed(waiting):  # each time in the other direction
                if _is_productive(self._rules[name], found):
                    found.add(name)
                else:
                    left.append(name)
            if len(left) == len(waiting):
                return found
            waiting = left

    def _ordered(self) -> list[str]:
        """Return the rules that lead to no recursive one, after those to which they refer."""
        waits: dict[str, int] = {}  # for so many
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        for name, expression in self._rules.items():
            targets = set(_references(expression))
            for target in targets:
                if target not in users:
                    _refuse(f"there is no rule {shown(target)}, to which {shown(name)} refers")
                users[target].append(name)
            waits[name] = len(targets)
        ordered = [name for name, count in waits.items() if not count]
        for name in ordered:  # which grows
            for user in users[name]:
                waits[user] -= 1
                if not waits[user]:
                    ordered.append(user)
        return ordered


@dataclass(frozen=True, slots=True)
class _Sized:
    """A language; its size is one of characters, and its depth one of repetitions."""

    language: Language
    size: int
    depth: int = 0


def _folded(expression: Expression, rules: dict[str, _Sized]) -> _Sized:
    """Return the language of an expression that refers to these rules."""
    checkpoint()
    match expression:
        case Text(language):
            return _Sized(language, size(language))
        case Rule(name):
            return rules[name]
        case Series(items) | Choice(items):
            parts = [_folded(item, rules) for item in items]
            total = 1 + sum(part.size for part in parts)
            if total > MAX_SIZE:  # which the caller notices
                return _Sized(NOTHING, total)
            join = concat if isinstance(expression, Series) else union
            depth = max((part.depth for part in parts), default=0)
            return _Sized(join(*(part.language for part in parts)), total, depth)
        case Loop(item, least, most):
            part = _folded(item, rules)
            total = part.size * max(1, least, most or 0)
            return _Sized(repeat(part.language, least, most), total, part.depth + 1)
        case _:
            raise AssertionError("a parser makes no other expressions")


def _written(expression: Expression, names: dict[str, str]) -> Expression:
    """Return an expression whose texts are single characters, with other names of its rules."""
    checkpoint()
    match expression:
        case Text(Concat(items)):
            return series(*map(Text, items))
        case Rule(name):
            return Rule(names[name])
        case Series(items):
            return series(*(_written(item, names) for item in items))
        case Choice(items):
            return choice(*(_written(item, names) for item in items))
        case Loop(item, least, most):
            return Loop(_written(item, names), least, most)
        case _:
            return expression


def _is_productive(expression: Expression, rules: set[str]) -> bool:
    """Return whether an expression stands for some text, if only these rules do."""
    checkpoint()
    match expression:
        case Rule(name):
            return name in rules
        case Series(items):
            return all(_is_productive(item, rules) for item in items)
        case Choice(items):
            return any(_is_productive(item, rules) for item in items)
        case Loop(item, least):
            return least == 0 or _is_productive(item, rules)
        case _:
            return True


def _references(expression: Expression) -> Iterator[str]:
    """Yield the names of the rules to which an expression refers."""
    match expression:
        case Rule(name):
            yield name
        case Series(items) | Choice(items):
            for item in items:
                yield from _references(item)
        case Loop(item):
            yield from _references(item)
