"""What a caller may ask a reply to be: JSON of a schema or type, a pattern, a grammar, a choice."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from webgemma.constraints.documents import has_surrogates
from webgemma.constraints.gbnf import gbnf, is_gbnf
from webgemma.constraints.grammar import MAX_BLANKS, ROOT, Grammar, Text, series
from webgemma.constraints.languages import (
    Language,
    any_of,
    concat,
    is_empty,
    literal,
    optional,
    repeat,
    union,
)
from webgemma.constraints.patterns import full_match
from webgemma.constraints.python_types import (
    as_type,
    is_pydantic_model,
    type_schema,
)
from webgemma.constraints.syntax import JSON
from webgemma.constraints.values import add_values
from webgemma.errors import InputError
from webgemma.values import shown

MAX_CHOICES = 1000
MAX_CHARACTERS = 1 << 16  # of a grammar, or of all choices

ANY_OBJECT = {"type": "object"}

# White space around JSON: a blank or two, and a line break at its end. With more, a small model
# begins with an empty, indented line, and goes on from there.
_BLANKS = repeat(any_of(" \t"), 0, MAX_BLANKS)
_BEFORE_JSON = Text(_BLANKS)
_AFTER_JSON = Text(union(_BLANKS, concat(optional(literal("\r")), literal("\n"))))


@dataclass(frozen=True, slots=True)
class Json:
    """JSON of a schema; `kind` is the Python type that it becomes, if there is one.

    If it is `closed`, objects have the properties that are declared and no others, unless
    `additionalProperties` allows them."""

    schema: Any
    kind: Any = None
    closed: bool = False
    where: str = "The schema"  # in errors

    def grammar(self) -> Grammar:
        """Return the grammar of the JSON texts; InputError for a schema that is not supported."""
        grammar = Grammar()
        value = add_values(grammar, self.schema, JSON, self.where, closed=self.closed)
        grammar.rules[ROOT] = series(_BEFORE_JSON, value, _AFTER_JSON)
        return grammar

    def parse(self, text: str) -> Any:
        """Return the value, or instance, that a whole reply stands for."""
        try:
            if is_pydantic_model(self.kind):
                return self.kind.model_validate_json(text)
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = "complete JSON" if self.kind is None else f"{self.kind.__name__} in JSON"
            raise InputError(
                f"The reply is no {what}: {error}. If it was cut off, allow more tokens."
            ) from error
        return value if self.kind is None else as_type(self.kind, value)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text of a language: that of a regular expression, or one of some choices."""

    language: Language

    def grammar(self) -> Grammar:
        """Return the grammar of the texts."""
        return Grammar({ROOT: Text(self.language)})

    def parse(self, text: str) -> str:
        """Return the text itself."""
        return text


@dataclass(frozen=True, slots=True)
class Gbnf:
    """Text of a grammar in llama.cpp's GBNF."""

    text: str

    def grammar(self) -> Grammar:
        """Return the grammar; InputError for one that cannot be used."""
        return gbnf(self.text)

    def parse(self, text: str) -> str:
        """Return the text itself."""
        return text


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a grammar in llguidance's dialect of Lark."""

    text: str

    def grammar(self) -> str:
        """Return the grammar's text."""
        return self.text

    def parse(self, text: str) -> str:
        """Return the text itself."""
        return text


Specification: TypeAlias = Json | Pattern | Gbnf | Lark


def specification(
    *, schema: Any = None, regex: Any = None, grammar: Any = None, choices: Any = None
) -> Specification | None:
    """Return what a caller asks for, at most one thing; InputError if it cannot be used.

    A schema is a JSON Schema (a mapping or a boolean), a pydantic model, a dataclass or another
    type. A regular expression has to match the whole reply. A grammar is in Lark, as llguidance
    reads it, or in GBNF. Choices are texts."""
    given = {"schema": schema, "regex": regex, "grammar": grammar, "choices": choices}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InputError(f"Only one of {' and '.join(names)} can be given.")
    if not names:
        return None
    if schema is not None:
        return _json(schema)
    if regex is not None:
        return _regex(regex)
    return _grammar(grammar) if grammar is not None else _choices(choices)


def _json(schema: Any) -> Json:
    if isinstance(schema, Json):
        return schema
    if isinstance(schema, Mapping | bool):
        return Json(schema)
    if isinstance(schema, str):
        raise InputError("schema is a text: give the JSON Schema itself, or a Python type.")
    # A pydantic model drops other properties: then they need not be written.
    written = schema.model_json_schema() if is_pydantic_model(schema) else type_schema(schema)
    return Json(written, schema, closed=True)


def _regex(regex: Any) -> Pattern:
    try:
        language = full_match(regex)
        if is_empty(language):
            raise InputError(f"the regular expression {shown(regex)} matches nothing")
    except InputError as error:
        raise InputError(f"regex cannot be used: {error}.") from None
    return Pattern(language)


def _grammar(grammar: Any) -> Gbnf | Lark:
    if not isinstance(grammar, str):
        raise InputError(f"grammar is {shown(grammar)}; it must be a text in Lark or GBNF.")
    if not grammar.strip() or len(grammar) > MAX_CHARACTERS or has_surrogates(grammar):
        raise InputError(f"grammar must be a text of 1 to {MAX_CHARACTERS} characters.")
    return Gbnf(grammar) if is_gbnf(grammar) else Lark(grammar)


def _choices(choices: Any) -> Pattern:
    if not isinstance(choices, list | tuple):
        raise InputError(f"choices is {shown(choices)}; it must be a list of texts.")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InputError(f"choices has {len(choices)} texts; it must have 1 to {MAX_CHOICES}.")
    for choice in choices:
        if not isinstance(choice, str) or not choice or has_surrogates(choice):
            raise InputError(f"choices has {shown(choice)}; each must be a text that is not empty.")
    if sum(map(len, choices)) > MAX_CHARACTERS:
        raise InputError(f"choices has more than {MAX_CHARACTERS} characters.")
    return Pattern(union(*map(literal, choices)))
