"""Characters in JSON strings: plain, after a backslash, or by the digits of their code."""

from collections.abc import Iterator
from functools import cache, lru_cache

from webgemma.constraints.grammar import Escapes
from webgemma.constraints.languages import (
    ANY_CHAR,
    Chars,
    Complement,
    Concat,
    Intersection,
    Language,
    Repeat,
    Union,
    any_of,
    chars,
    complement,
    concat,
    intersection,
    literal,
    repeat,
    union,
)

_LETTERS = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NEVER_PLAIN = chars((0, 0x1F)) | any_of('"\\')
_ASCII = chars((0x20, 0x7E)) - _NEVER_PLAIN
_BASIC = chars((0, 0xFFFF))  # of the basic plane: one code of four digits
_DIGITS = "0123456789abcdef"


@lru_cache(1 << 12)
def escaped(characters: Chars, escapes: Escapes) -> Language:
    """Return how one character of a set is written in a JSON string."""
    may_escape = characters - (_ASCII if escapes is Escapes.NEEDED else chars())
    letters = "".join(letter for letter, each in _LETTERS.items() if each in may_escape)
    plain = characters - _NEVER_PLAIN
    ways: list[Language] = [plain] if plain.ranges else []
    if letters:
        ways.append(concat(literal("\\"), any_of(letters)))
    if may_escape.ranges:
        ways.append(concat(literal("\\u"), union(*_codes(may_escape))))
    return union(*ways)


def escaped_text(language: Language, escapes: Escapes) -> Language:
    """Return how the texts of a language are written in a JSON string, without its quotes."""
    match language:
        case Chars():
            return escaped(language, escapes)
        case Concat():
            return concat(*(escaped_text(item, escapes) for item in language.items))
        case Union():
            return union(*(escaped_text(item, escapes) for item in language.items))
        case Repeat(item, least, most):
            return repeat(escaped_text(item, escapes), least, most)
        case Intersection():
            # What is written stands for one text only, so it is in both if the text is.
            return intersection(*(escaped_text(item, escapes) for item in language.items))
        case Complement():
            anything = repeat(escaped(ANY_CHAR, escapes))
            return intersection(anything, complement(escaped_text(language.item, escapes)))


def _codes(characters: Chars) -> Iterator[Language]:
    """Yield the digits of the codes of characters; of those beyond the basic plane, two codes."""
    for first, last in (characters & _BASIC).ranges:
        yield from _hexadecimal(first, last)
    for first, last in (characters - _BASIC).ranges:
        while first <= last:
            high, low = divmod(first - 0x10000, 0x400)
            rows = (last - first + 1) // 0x400 if low == 0 else 0  # that are in it as a whole
            count = rows * 0x400 or min(last - first + 1, 0x400 - low)
            yield concat(
                union(*_hexadecimal(0xD800 + high, 0xD800 + high + max(rows, 1) - 1)),
                literal("\\u"),
                union(*_hexadecimal(0xDC00 + low, 0xDFFF if rows else 0xDC00 + low + count - 1)),
            )
            first += count


def _hexadecimal(first: int, last: int) -> Iterator[Language]:
    """Yield languages of the four digits of the numbers from one to another."""
    while first <= last:
        # The largest block of numbers that begin with the same digits.
        size = 1
        while size < 0x1000 and first % (size * 16) == 0 and first + size * 16 - 1 <= last:
            size *= 16
        free = len(f"{size:x}") - 1  # digits after the one that counts the blocks
        digit = first // size % 16
        count = min(16 - digit, (last - first + 1) // size)
        fixed = f"{first // size // 16:0{3 - free}x}" if free < 3 else ""
        yield concat(
            *(any_of(each + each.upper()) for each in fixed),
            _digit_set(digit, count),
            repeat(_digit_set(0, 16), free, free),
        )
        first += size * count


@cache
def _digit_set(first: int, count: int) -> Chars:
    found = _DIGITS[first : first + count]
    return any_of(found + found.upper())
