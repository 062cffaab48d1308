"""Grammars between schemas and matchers: rules of texts, tokens, series, choices and loops.

Rules do not refer to each other in a circle: what is recursive is written out to a depth."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from webgemma.constraints import languages
from webgemma.constraints.languages import Language
from webgemma.errors import InputError
from webgemma.text.markup import Markup

ROOT = "root"
MAX_RULES = 20_000
# White space in one place: none, a blank or two, or a line break with an indentation. A model that
# likes lines could write nothing else otherwise.
MAX_BLANKS, MAX_INDENTATION = 2, 40


class Escapes(Enum):
    """Which characters of a text are written with escapes of JSON strings."""

    NONE = auto()  # the text is not in a JSON string
    NEEDED = auto()  # those that have to be, and those that are not ASCII if the writer likes
    ANY = auto()  # all, if the writer likes


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a language between two ends, which are characters or special tokens."""

    language: Language = languages.EMPTY
    before: str | Markup = ""
    after: str | Markup = ""
    escapes: Escapes = Escapes.NONE


@dataclass(frozen=True, slots=True)
class Mark:
    """Punctuation with white space, up to a limit, before or after it."""

    text: str
    space_before: bool = True
    space_after: bool = True


@dataclass(frozen=True, slots=True)
class Special:
    """A special token, which no text can spell."""

    token: Markup


@dataclass(frozen=True, slots=True)
class Series:
    """Expressions one after the other."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of several expressions."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """An expression `least` to `most` times; None: any number of times."""

    item: "Expression"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule of a name stands for."""

    name: str


Expression: TypeAlias = Text | Mark | Special | Series | Choice | Loop | Rule


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by their names; a reply is what ROOT stands for."""

    rules: dict[str, Expression] = field(default_factory=dict)

    def add(self, name: str, expression: Expression) -> Rule:
        """Add a rule; its name gets a number if there is one of that name."""
        if name in self.rules:
            name = f"{name}{len(self.rules)}"
        if len(self.rules) == MAX_RULES:
            raise InputError(f"The grammar would have more than {MAX_RULES} rules: ask for less.")
        self.rules[name] = expression
        return Rule(name)


EMPTY = Text()


def series(*items: Expression) -> Expression:
    """Return expressions one after the other, simplified."""
    flat: list[Expression] = []
    for item in items:
        flat += item.items if isinstance(item, Series) else (item,)
    kept = [item for item in flat if item != EMPTY]
    if not kept:
        return EMPTY
    return kept[0] if len(kept) == 1 else Series(tuple(kept))


def choice(*items: Expression) -> Expression:
    """Return any one of some expressions, simplified."""
    kept = tuple(dict.fromkeys(item for item in items if item != EMPTY))
    if EMPTY in items:
        return maybe(choice(*kept)) if kept else EMPTY
    return kept[0] if len(kept) == 1 else Choice(kept)


def maybe(item: Expression) -> Expression:
    """Return an expression that may be left out."""
    return Loop(item, 0, 1)


def characters(text: str) -> Text:
    """Return a text of its own, without white space around it."""
    return Text(before=text)
