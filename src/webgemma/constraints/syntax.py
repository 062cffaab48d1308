"""How values are written: as JSON, or as arguments in Gemma 4's tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from webgemma.constraints.grammar import (
    Escapes,
    Expression,
    Mark,
    Text,
    characters,
    series,
)
from webgemma.constraints.languages import (
    Language,
    any_of,
    complement,
    containing,
    intersection,
    is_empty,
    literal,
    matches,
    repeat,
)
from webgemma.constraints.patterns import unicode_set
from webgemma.text.markup import CALL_CLOSE, QUOTE


@dataclass(frozen=True, slots=True)
class Brackets:
    """What stands before, between and after the parts of a value."""

    open: Expression
    comma: Expression
    close: Expression


class Syntax(Protocol):
    """How values are written."""

    array: Brackets
    object: Brackets

    def string(self, language: Language) -> Expression | None:
        """Return strings of a language; None if none of them can be written."""

    def name(self, name: str) -> Expression | None:
        """Return the name of a property, with its colon; None if it cannot be written."""

    def names(self, language: Language) -> Expression | None:
        """Return names of properties, with a colon; None if none of them can be written."""

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Return the names of properties in the order in which they are written."""


class JsonSyntax:
    """JSON, with white space where JSON allows it."""

    array = Brackets(Mark("[", space_before=False), Mark(","), Mark("]", space_after=False))
    object = Brackets(Mark("{", space_before=False), Mark(","), Mark("}", space_after=False))

    def string(self, language: Language) -> Expression:
        return Text(language, '"', '"', Escapes.ANY)

    def name(self, name: str) -> Expression:
        # Without needless escapes only one token may often come next.
        return series(Text(literal(name), '"', '"', Escapes.NEEDED), Mark(":"))

    def names(self, language: Language) -> Expression:
        return series(Text(language, '"', '"', Escapes.ANY), Mark(":"))

    def ordered(self, names: Iterable[str]) -> list[str]:
        return list(names)


class CallSyntax:
    """Arguments of tool calls as the chat template writes them, and as the reply parser reads them.

    Strings stand between quote tokens, without escapes; there is no white space; properties are
    sorted. The reply parser reads text: a string must not spell a quote token or the call's end."""

    array = Brackets(characters("["), characters(","), characters("]"))
    object = Brackets(characters("{"), characters(","), characters("}"))

    def string(self, language: Language) -> Expression | None:
        language = intersection(language, _without_tags())
        return None if is_empty(language) else Text(language, QUOTE, QUOTE)

    def name(self, name: str) -> Expression | None:
        if matches(_bare_names(), name):
            return characters(f"{name}:")
        quoted = self.string(literal(name))
        return None if quoted is None else series(quoted, characters(":"))

    def names(self, language: Language) -> Expression | None:
        language = intersection(language, _bare_names())
        return None if is_empty(language) else Text(language, after=":")

    def ordered(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=str.lower)


JSON = JsonSyntax()
CALL = CallSyntax()


@cache
def _without_tags() -> Language:
    return complement(containing(literal(QUOTE), literal(CALL_CLOSE)))


@cache
def _bare_names() -> Language:
    """Return the names that need no quotes."""
    return repeat(unicode_set(r"\w") | any_of("$@.-"), 1)
