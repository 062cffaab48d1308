"""Regular expressions as languages: what ECMAScript and Python both read in them.

Where the two disagree (`\\d` is ASCII in one, Unicode in the other) the narrow reading has what is
in both, the wide one what is in either."""

import re
import sys
from array import array
from dataclasses import dataclass, replace
from functools import cache, reduce

from webgemma.constraints.languages import (
    ANY_CHAR,
    ANYTHING,
    EMPTY,
    LAST,
    NO_CHAR,
    NOTHING,
    Chars,
    Complement,
    Concat,
    Intersection,
    Language,
    Repeat,
    Union,
    any_of,
    chars,
    concat,
    literal,
    optional,
    repeat,
    union,
)
from webgemma.errors import InputError
from webgemma.values import shown

MAX_LENGTH = 4096  # characters of an expression
MAX_DEPTH = 32  # of groups
MAX_SIZE = 20_000  # characters, where repetitions are written out

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/-,=!<>:#&~%@;\"'` ")  # escaped, they stand for themselves
_QUANTIFIER = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP_NAME = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}")}
_BRACED = re.compile(r"\{([0-9a-fA-F]{1,6})\}")
_UNSUPPORTED = {
    **dict.fromkeys("bB", "word boundaries"),
    **dict.fromkeys("123456789k", "references to groups"),
    **dict.fromkeys("pP", "Unicode properties"),
    **dict.fromkeys("AZzG", "anchors other than ^ and $"),
    "c": "control escapes",
}
_ECMA_SPACES = any_of("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | chars(
    (0x2000, 0x200A)
)
_ECMA_WORDS = chars((48, 57), (65, 90), (95, 95), (97, 122))


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of characters: some by themselves, some by the letters of their classes."""

    plain: Chars = NO_CHAR
    classes: frozenset[str] = frozenset()
    negated: bool = False

    def __or__(self, other: "_Set") -> "_Set":
        return _Set(self.plain | other.plain, self.classes | other.classes)

    def reading(self, wide: bool) -> Chars:
        """Return the characters, in the narrow or in the wide reading."""
        if self.negated:
            return ANY_CHAR - _Set(self.plain, self.classes).reading(not wide)
        return reduce(Chars.__or__, (_named(letter, wide) for letter in self.classes), self.plain)


@dataclass(frozen=True, slots=True)
class _Anchored:
    """One way to match: a language, and at which ends of the text it must be."""

    language: Language
    begins: bool = False
    ends: bool = False


def search(pattern: object, *, wide: bool = False) -> Language:
    """Return the texts in which an expression matches somewhere; InputError if it is not valid."""
    return union(
        *(
            concat(
                EMPTY if way.begins else ANYTHING,
                way.language,
                # Python's $ is also before a line break at the end.
                (optional(literal("\n")) if wide else EMPTY) if way.ends else ANYTHING,
            )
            for way in _ways(pattern, wide)
        )
    )


def full_match(pattern: object) -> Language:
    """Return the texts that an expression matches from begin to end; anchors change nothing."""
    return union(*(way.language for way in _ways(pattern, wide=False)))


@cache
def unicode_set(expression: str) -> Chars:
    """Return the characters that an expression of Python's `re` matches, such as \\w."""
    codes = array("I", range(LAST + 1)).tobytes()
    everything = codes.decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
    return chars(
        *((run.start(), run.end() - 1) for run in re.finditer(f"{expression}+", everything))
    )


@cache
def _named(letter: str, wide: bool) -> Chars:
    """Return the set of \\d, \\w or \\s, of their opposites, or of the dot."""
    if letter == ".":
        return ANY_CHAR - any_of("\n" if wide else "\n\r\u2028\u2029")
    if letter.isupper():
        return ANY_CHAR - _named(letter.lower(), not wide)
    ecma = {"d": chars((48, 57)), "w": _ECMA_WORDS, "s": _ECMA_SPACES}[letter]
    if wide:
        return ecma | unicode_set(f"\\{letter}")
    return ecma - any_of("\ufeff")  # the only one that is not in Python's


def _ways(pattern: object, wide: bool) -> list[_Anchored]:
    if not isinstance(pattern, str):
        raise InputError(f"a regular expression must be a string, not {shown(pattern)}")
    if len(pattern) > MAX_LENGTH:
        raise InputError(f"a regular expression has more than {MAX_LENGTH} characters")
    ways = _Parser(pattern, wide).parse()
    if sum(size(way.language) for way in ways) > MAX_SIZE:
        raise InputError(
            f"the regular expression {shown(pattern)} stands for more than {MAX_SIZE} characters; "
            "use shorter repetitions"
        )
    return ways


def size(language: Language) -> int:
    """Return about how many characters a language has if its repetitions are written out."""
    match language:
        case Chars():
            return 1
        case Concat() | Union() | Intersection():
            return 1 + sum(map(size, language.items))
        case Complement():
            return 1 + size(language.item)
        case Repeat(item, least, most):
            return size(item) * max(1, least, most or 0)


class _Parser:
    """Recursive descent over one expression."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self._pattern = pattern
        self._wide = wide
        self._at = 0
        self._depth = 0

    def parse(self) -> list[_Anchored]:
        ways = self._union()
        if self._at < len(self._pattern):
            raise self._error("has a ) without (")
        return ways

    def _error(self, problem: str) -> InputError:
        return InputError(
            f"the regular expression {shown(self._pattern)} {problem} (character {self._at + 1})"
        )

    def _peek(self, length: int = 1) -> str:
        return self._pattern[self._at : self._at + length]

    def _take(self, expected: str) -> bool:
        found = self._pattern.startswith(expected, self._at)
        self._at += len(expected) * found
        return found

    def _union(self) -> list[_Anchored]:
        ways = self._concat()
        while self._take("|"):
            ways += self._concat()
        return ways

    def _concat(self) -> list[_Anchored]:
        """Parse items up to | or ); anchors may be only at their ends."""
        ways = [_Anchored(EMPTY)]
        while self._peek() not in ("", "|", ")"):
            if self._take("^"):
                following = [_Anchored(EMPTY, begins=True)]
            elif self._take("$"):
                following = [_Anchored(EMPTY, ends=True)]
            else:
                following = self._repeated(self._item())
            ways = [self._joined(left, right) for left in ways for right in following]
            if len(ways) > MAX_LENGTH:
                raise self._error("has too many ways to be anchored")
        return ways

    def _joined(self, left: _Anchored, right: _Anchored) -> _Anchored:
        if (right.begins and left.language != EMPTY) or (left.ends and right.language != EMPTY):
            raise self._error("has an anchor in the middle, which is not supported")
        return _Anchored(
            concat(left.language, right.language),
            left.begins or right.begins,
            left.ends or right.ends,
        )

    def _repeated(self, ways: list[_Anchored]) -> list[_Anchored]:
        """Parse a quantifier, if there is one, after an item."""
        bounds = self._quantifier()
        if bounds is None:
            # Without anchors there is one way, so that their number does not grow.
            free = [way.language for way in ways if not (way.begins or way.ends)]
            anchored = [way for way in ways if way.begins or way.ends]
            return [*([_Anchored(union(*free))] if free else []), *anchored]
        if any(way.begins or way.ends for way in ways):
            raise self._error("repeats an anchor, which is not supported")
        self._take("?")  # a lazy quantifier matches the same texts
        if self._peek() in ("*", "+", "?") or _QUANTIFIER.match(self._pattern, self._at):
            raise self._error("has a quantifier after a quantifier")
        return [_Anchored(repeat(union(*(way.language for way in ways)), *bounds))]

    def _quantifier(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        if self._peek() != "{":
            return None
        counts = _QUANTIFIER.match(self._pattern, self._at)
        if counts is None:
            if self._peek(2) == "{,":  # a quantifier in Python, text in ECMAScript
                raise self._error("has {,n}: write {0,n}")
            return None
        self._at = counts.end()
        least = int(counts[1][:9])
        most = None if counts[2] and not counts[3] else int((counts[3] or counts[1])[:9])
        if max(least, most or 0) > MAX_SIZE or (most is not None and least > most):
            raise self._error("has counts that cannot be used")
        return least, most

    def _item(self) -> list[_Anchored]:
        if self._take("("):
            return self._group()
        if self._take("["):
            return self._one(self._set())
        if self._take("."):
            return self._one(_Set(classes=frozenset(".")))
        if self._take("\\"):
            return self._one(self._escape())
        if self._peek() in ("*", "+", "?") or _QUANTIFIER.match(self._pattern, self._at):
            raise self._error("has a quantifier with nothing before it")
        return self._one(self._plain())

    def _one(self, characters: _Set) -> list[_Anchored]:
        found = characters.reading(self._wide)
        return [_Anchored(found if found.ranges else NOTHING)]

    def _group(self) -> list[_Anchored]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"nests groups more than {MAX_DEPTH} levels deep")
        if self._peek() == "?":
            opening = _GROUP_NAME.match(self._pattern, self._at)
            if opening is None:
                raise self._error("looks around or sets flags, which is not supported")
            self._at = opening.end()
        ways = self._union()
        if not self._take(")"):
            raise self._error("has a ( without )")
        self._depth -= 1
        return ways

    def _plain(self) -> _Set:
        character = self._peek()
        if "\ud800" <= character <= "\udfff":
            raise self._error("has a lone surrogate")
        self._at += 1
        return _Set(any_of(character))

    def _set(self) -> _Set:
        negated = self._take("^")
        found = _Set()
        if self._peek() == "]":  # text in Python, the end in ECMAScript
            raise self._error("has a set that begins with ]: write \\]")
        while not self._take("]"):
            first = self._member()
            if self._peek() == "-" and self._peek(2) not in ("-]", "-"):
                self._at += 1
                first = self._range(first, self._member())
            found |= first
        return replace(found, negated=negated)

    def _member(self) -> _Set:
        if not self._peek():
            raise self._error("has a [ without ]")
        return self._escape() if self._take("\\") else self._plain()

    def _range(self, first: _Set, last: _Set) -> _Set:
        if first.classes or last.classes or first.plain.ranges > last.plain.ranges:
            raise self._error("has a range of characters that is not one")
        return _Set(chars((first.plain.ranges[0][0], last.plain.ranges[0][1])))

    def _escape(self) -> _Set:
        letter = self._peek()
        self._at += 1
        if letter in _UNSUPPORTED:
            raise self._error(f"uses {_UNSUPPORTED[letter]}, which are not supported")
        if letter and letter in "dDwWsS":
            return _Set(classes=frozenset(letter))
        if letter in _ESCAPES:
            return _Set(any_of(_ESCAPES[letter]))
        if letter in _HEX:
            return _Set(any_of(chr(self._code(letter))))
        if letter in _SYNTAX and letter:
            return _Set(any_of(letter))
        raise self._error("has a \\ before a character that it does not change")

    def _code(self, letter: str) -> int:
        """Parse the digits of \\xhh, \\uhhhh (or a pair of surrogates) or \\u{h}."""
        braced = _BRACED.match(self._pattern, self._at) if letter == "u" else None
        if braced:
            self._at = braced.end()
            code = int(braced[1], 16)
        else:
            code = self._digits(letter)
            if 0xD800 <= code < 0xDC00 and self._take("\\u"):
                code = 0x10000 + (code - 0xD800 << 10) + self._digits(letter) - 0xDC00
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise self._error("has a code that is no character")
        return code

    def _digits(self, letter: str) -> int:
        digits = _HEX[letter].match(self._pattern, self._at)
        if digits is None:
            raise self._error(f"has \\{letter} without digits")
        self._at = digits.end()
        return int(digits[0], 16)
