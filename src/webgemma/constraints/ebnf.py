"""Grammars in xgrammar's EBNF: texts are rules for the states of their automata.

xgrammar is fast where a rule refers to another one at its end only, as those of automata do: a rule
for one character of a string, repeated, takes seconds for a mask."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from webgemma.constraints.escapes import escaped
from webgemma.constraints.grammar import (
    MAX_BLANKS,
    MAX_INDENTATION,
    Escapes,
    Grammar,
    Mark,
    Text,
)
from webgemma.constraints.languages import (
    NO_CHAR,
    NOTHING,
    Chars,
    Complement,
    Concat,
    Intersection,
    Language,
    Range,
    Repeat,
    State,
    Union,
    any_of,
    automaton,
    chars,
    concat,
    derivative,
    first,
    intersection,
    partition,
    repeat,
    union,
)
from webgemma.constraints.tokens import special_token
from webgemma.constraints.writing import Writer
from webgemma.errors import InputError
from webgemma.text.markup import Markup
from webgemma.text.tokenizer import Tokenizer

FIRST_PRIVATE = 0x100000  # characters from here on spell special tokens
MAX_STATES = 2000  # of all texts of a grammar
MAX_WIDE_STATES = 64  # of them, with so many next characters that each takes long to compile
WIDE = 5000  # characters

_TEXT = chars((0, FIRST_PRIVATE - 1))

_Ways: TypeAlias = frozenset[tuple[Language, int]]  # of bytes, each with the state it leads to


def private_spellings(tokenizer: Tokenizer) -> dict[int, str]:
    """Return a character for each special token: text in a grammar never has these."""
    special = sorted(tokenizer.special_ids.values())
    return {token: chr(FIRST_PRIVATE + at) for at, token in enumerate(special)}


def ebnf(grammar: Grammar, tokenizer: Tokenizer) -> str:
    """Return a grammar as EBNF, for one vocabulary with private spellings of special tokens."""
    writer = _EbnfWriter(tokenizer)
    rules = [f"{name} ::= {writer.expression(each)}" for name, each in grammar.rules.items()]
    blanks, indentation = f"[ \\t]{{0,{MAX_BLANKS}}}", f"[ \\t]{{0,{MAX_INDENTATION}}}"
    space = f'space ::= {blanks} | "\\r"? "\\n" {indentation}'
    return "\n".join((*rules, *writer.rules, space, ""))


class _EbnfWriter(Writer):
    """Writes expressions, and collects the rules of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._spellings = private_spellings(tokenizer)
        self._states = 0
        self._wide_states = 0
        self.rules: list[str] = []

    def mark(self, mark: Mark) -> str:
        """Return punctuation with white space around it."""
        parts = [*["space"] * mark.space_before, _quoted(mark.text), *["space"] * mark.space_after]
        return " ".join(parts)

    def special(self, token: Markup) -> str:
        """Return the private spelling of a special token."""
        return self._end(token)

    def _end(self, end: str) -> str:
        if isinstance(end, Markup):
            end = self._spellings[special_token(self._tokenizer, end)]
        return _quoted(end) if end else ""

    def text(self, text: Text) -> str:
        """Write the rules of a text, and return what stands for it."""
        states = automaton(intersection(text.language, repeat(_TEXT)))
        if isinstance(text.before, Markup) and _wide(states) > MAX_WIDE_STATES // 4:
            # To count characters and to watch for tags takes a state for every pair of both.
            states = automaton(intersection(text.language, repeat(_TEXT - any_of("<"))))
        if not states:
            raise InputError(
                f"Text with characters from U+{FIRST_PRIVATE:X} on cannot be written in a browser: "
                "leave them out."
            )
        self._count(states)
        rules = _TextRules(f"text{len(self.texts)}", states, text, self._end(text.after))
        self.rules += rules.written
        return f"{self._end(text.before)} {rules.start}".strip() or '""'

    def _count(self, states: list[State]) -> None:
        """Raise InputError for texts that would take a browser too long to compile."""
        self._states += len(states)
        self._wide_states += _wide(states)
        if self._states > MAX_STATES or self._wide_states > MAX_WIDE_STATES:
            raise InputError(
                "This takes too long to compile in a browser, which has to count characters: allow "
                f"strings of any length, or of at most {MAX_WIDE_STATES} characters in all, and "
                "fewer or shorter patterns."
            )


def _wide(states: list[State]) -> int:
    """Return how many states have very many next characters."""
    return sum(
        any(
            sum(last - first + 1 for first, last in part.ranges) >= WIDE
            for part in state.edges.values()
        )
        for state in states
    )


class _TextRules:
    """The rules of a text: one for each state of its automaton that several ways lead to or from.

    Ways that begin alike have one rule for how they go on, so that each byte decides where to go:
    where it does not, xgrammar accepts wrong bytes."""

    def __init__(self, name: str, states: list[State], text: Text, after: str) -> None:
        self._name = name
        self._states = states
        self._after = after
        self._ways: list[_Ways] = [
            frozenset(
                (_in_bytes(part, text.escapes), target) for target, part in state.edges.items()
            )
            for state in states
        ]
        self._rules = {number: f"{name}_{number}" for number in self._joints()}
        self._shared: dict[_Ways, str] = {}  # rules for ways that began alike
        self.written: list[str] = []
        for number, rule in self._rules.items():
            end = [after or '""'] if states[number].accepting else []
            self._write(rule, [*self._options(self._ways[number]), *end])
        self.start = self._chain(0)

    def _joints(self) -> list[int]:
        """Return the states that need a rule: more than one way leads there, or on from there."""
        ways_in = Counter(target for ways in self._ways for _, target in ways)
        ways_in[0] += 1
        return [
            number
            for number, (state, ways) in enumerate(zip(self._states, self._ways, strict=True))
            if ways_in[number] > 1
            or len(ways) + state.accepting > 1
            or any(_row(language) is None for language, _ in ways)
        ]

    def _write(self, rule: str, options: list[str]) -> None:
        self.written.append(f"{rule} ::= {' | '.join(options)}")

    def _options(self, ways: _Ways) -> list[str]:
        """Return the sets of the next byte, each with what follows it."""
        following: dict[_Ways, Chars] = {}
        for part in partition(each for language, _ in ways for each in first(language)):
            byte = chr(part.ranges[0][0])
            found = ((derivative(language, byte), target) for language, target in ways)
            rest = frozenset(
                (language, target) for language, target in found if language != NOTHING
            )
            if rest:
                following[rest] = following.get(rest, NO_CHAR) | part
        return [f"{_set(part)} {self._rest(rest)}" for rest, part in following.items()]

    def _rest(self, ways: _Ways) -> str:
        """Return how ways go on that began alike."""
        [*found] = ways
        row = _row(found[0][0]) if len(found) == 1 else None
        if row is not None:
            return " ".join((*map(_set, row), self._chain(found[0][1])))
        if ways not in self._shared:
            rule = self._shared[ways] = f"{self._name}_w{len(self._shared)}"
            self._write(rule, self._options(ways))
        return self._shared[ways]

    def _chain(self, number: int) -> str:
        """Return what follows from a state on, up to the next one that has a rule."""
        parts: list[str] = []
        while number not in self._rules:
            if self._states[number].accepting:
                return " ".join((*parts, self._after))
            [(language, number)] = self._ways[number]
            parts += map(_set, _row(language) or ())
        return " ".join((*parts, self._rules[number]))


def _row(language: Language) -> tuple[Chars, ...] | None:
    """Return the sets of a language that has one after the other; None for any other."""
    items = language.items if isinstance(language, Concat) else (language,)
    sets = tuple(item for item in items if isinstance(item, Chars))
    return sets if len(sets) == len(items) else None


@lru_cache(1 << 12)
def _in_bytes(part: Chars, escapes: Escapes) -> Language:
    """Return the ways to write one character of a set; their characters are bytes of UTF-8."""
    return _utf8(part if escapes is Escapes.NONE else escaped(part, escapes))


def _utf8(language: Language) -> Language:
    match language:
        case Chars():
            sequences = (
                concat(*map(chars, sequence))
                for low, high in language.ranges
                for sequence in utf8_sequences(low, high)
            )
            return union(*sequences)
        case Union(items):
            return union(*map(_utf8, items))
        case Concat(items):
            return concat(*map(_utf8, items))
        case Repeat(item, least, most):
            return repeat(_utf8(item), least, most)
        case Intersection() | Complement():
            raise AssertionError("one character is written in one of some ways")


def utf8_sequences(first: int, last: int) -> Iterator[list[Range]]:
    """Yield sequences of ranges of bytes, which together are the UTF-8 of a range of characters."""
    for end in (0x7F, 0x7FF, 0xFFFF):
        if first <= end < last:
            yield from utf8_sequences(first, end)
            yield from utf8_sequences(end + 1, last)
            return
    for bits in (6, 12, 18):  # where the last bytes are not all that there can be
        mask = (1 << bits) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                yield from utf8_sequences(first, first | mask)
                yield from utf8_sequences((first | mask) + 1, last)
                return
            if last & mask != mask:
                yield from utf8_sequences(first, (last & ~mask) - 1)
                yield from utf8_sequences(last & ~mask, last)
                return
    yield list(zip(chr(first).encode(), chr(last).encode(), strict=True))


def _set(part: Chars) -> str:
    """Return a set of bytes."""
    # A set of one code is read as a character: written twice it is a byte.
    spans = (
        _character(first) + (f"-{_character(last)}" if last > first else _character(first))
        for first, last in part.ranges
    )
    return f"[{''.join(spans)}]"


def _quoted(text: str) -> str:
    return f'"{"".join(_character(ord(character)) for character in text)}"'


def _character(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
