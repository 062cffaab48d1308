"""JSON Schema documents: checked within limits, references resolved, each keyword known or refused.

Schemas come from strangers: nothing is used before it was checked, and what is not supported is
refused by its name and place, never ignored. Keywords that JSON Schema does not know mean nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

from webgemma.errors import InputError
from webgemma.values import real_number, shortened, shown, whole_number

MAX_CHARACTERS = 1 << 18  # of all keys and strings
MAX_VALUES = 1 << 14
MAX_LEVELS = 100
MAX_COUNT = 10_000  # of characters, items and properties in bounds
UNREACHABLE = 1 << 25  # no reply has so many characters, or items
MAX_DIGITS = 64  # of a number

ROOT = "#"  # the pointer of the whole schema
OBJECTS = "objects"  # a pointer in every document, of the schema of all objects

TYPES = ("null", "boolean", "number", "string", "array", "object")

Pointer: TypeAlias = str  # a JSON pointer as a fragment, such as #/properties/name
Schema: TypeAlias = dict[str, Any] | bool

# What is not supported, with what to do instead, by the type of the values it is about; "" is any.
_REFUSED = {
    "": {
        "not": "",
        "if": "use anyOf",
        "$dynamicRef": "use $ref",
        "$recursiveRef": "use $ref",
        "disallow": "",
        "extends": "use allOf",
    },
    "number": {"divisibleBy": "use multipleOf"},
    "array": {
        "contains": "",
        "uniqueItems": "leave it out, and remove what is there twice",
        "unevaluatedItems": "use items",
        "additionalItems": "use prefixItems and items",
    },
    "object": {
        "dependencies": "",
        "dependentRequired": "",
        "dependentSchemas": "",
        "unevaluatedProperties": "use additionalProperties",
    },
}


class Document:
    """A JSON Schema whose parts are found by their pointers."""

    def __init__(self, schema: object, where: str = "The schema") -> None:
        self._where = where
        self._values = 0
        self._characters = 0
        self._root = self._copied(schema, 0)
        self._checked: set[Pointer] = set()

    def error(self, pointer: Pointer, problem: object) -> InputError:
        """Return the error for a part of the schema."""
        return InputError(f"{self._where} at {shortened(pointer)}: {problem}.")

    def at(self, pointer: Pointer) -> Schema:
        """Return the schema at a pointer after checking its keywords."""
        schema: Schema = self._found(pointer)
        if not isinstance(schema, dict | bool):
            raise self.error(
                pointer, f"a schema must be an object, true or false, not {shown(schema)}"
            )
        if pointer not in self._checked and isinstance(schema, dict):
            self._check(schema, pointer)
            self.refuse(schema, pointer)
        self._checked.add(pointer)
        return schema

    def target(self, reference: str, pointer: Pointer) -> Pointer:
        """Return the pointer that a `$ref` leads to, which has to be in the document."""
        target = unquote(reference)
        if target != ROOT and not target.startswith("#/"):
            raise self.error(
                pointer, f"$ref {shown(reference)} must be within the schema, such as #/$defs/name"
            )
        try:
            self._found(target)
        except LookupError:
            raise self.error(
                pointer, f"$ref {shown(reference)} leads to nothing in the schema"
            ) from None
        return target

    def refuse(self, schema: Mapping[str, Any], pointer: Pointer, kind: str = "") -> None:
        """Raise InputError for a keyword about values of a kind that is not supported."""
        for name, advice in _REFUSED.get(kind, {}).items():
            if name in schema and not _means_nothing(schema, name):
                raise self.error(
                    pointer, f"{name} is not supported{f': {advice}' if advice else ''}"
                )

    def _found(self, pointer: Pointer) -> Any:
        if pointer == OBJECTS:
            return {"type": "object"}
        value: Any = self._root
        for token in pointer.split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdigit():
                value = value[int(name[:9])]
            else:
                raise LookupError
        return value

    def _copied(self, value: object, depth: int) -> Any:
        """Return a copy in plain types: a given object may contain itself, or change later."""
        self._values += 1
        if self._values > MAX_VALUES or self._characters > MAX_CHARACTERS or depth > MAX_LEVELS:
            raise InputError(
                f"{self._where} is too large: at most {MAX_VALUES} values, {MAX_CHARACTERS} "
                f"characters and {MAX_LEVELS} levels are supported."
            )
        if isinstance(value, Mapping):
            return {self._name(key): self._copied(value[key], depth + 1) for key in value}
        if isinstance(value, list | tuple):
            return [self._copied(item, depth + 1) for item in value]
        if isinstance(value, str):
            return self._name(value)
        if value is None or isinstance(value, bool):
            return value
        whole = whole_number(value)
        number = real_number(value) if whole is None else whole
        if number is None or (whole is not None and abs(whole) >= 10**MAX_DIGITS):
            raise InputError(
                f"{self._where} has {shown(value)}, which is no JSON value of at most "
                f"{MAX_DIGITS} digits."
            )
        return number

    def _name(self, value: object) -> str:
        if not isinstance(value, str):
            raise InputError(f"{self._where} has the key {shown(value)}, which is not a string.")
        if has_surrogates(value):
            raise InputError(f"{self._where} has a lone surrogate in {shown(value)}.")
        self._characters += len(value)
        return str(value)

    def _check(self, schema: dict[str, Any], pointer: Pointer) -> None:
        """Raise InputError for a keyword whose value is not valid."""
        if "$id" in schema and pointer != ROOT:
            raise self.error(pointer, "$id is supported at the top only")
        for name, (expected, is_valid) in _KEYWORDS.items():
            if name in schema and not is_valid(schema[name]):
                raise self.error(pointer, f"{name} must be {expected}, not {shown(schema[name])}")


def child(pointer: Pointer, *tokens: str | int) -> Pointer:
    """Return the pointer of a part of the schema at a pointer."""
    escaped = (str(token).replace("~", "~0").replace("/", "~1") for token in tokens)
    return "/".join((pointer, *escaped))


def has_surrogates(text: str) -> bool:
    """Return whether a text has surrogates, which no UTF-8 has."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _means_nothing(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether a keyword that is not supported changes nothing as it stands there."""
    if name == "if":
        return "then" not in schema and "else" not in schema
    if name == "uniqueItems":
        return schema[name] is False
    if name.startswith("depend"):
        return not schema[name]
    return name.startswith(("unevaluated", "additional")) and schema[name] is True


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return (
        _is_number(value)
        and value == int(value)
        and (0 <= value <= MAX_COUNT or value >= UNREACHABLE)
    )


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(
        isinstance(name, str) and name in (*TYPES, "integer") for name in names
    )


_SCHEMAS = ("a list of schemas", _is_schemas)
_NUMBER = ("a number", _is_number)
_COUNT = (f"a whole number from 0 to {MAX_COUNT}", _is_count)
_KEYWORDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one or some of {', '.join(TYPES)} and integer", _is_type),
    "enum": ("a list", lambda value: isinstance(value, list)),
    "multipleOf": ("a number above zero", lambda value: _is_number(value) and value > 0),
    "required": ("a list of strings", _is_names),
    **dict.fromkeys(("$ref", "pattern", "format"), ("a string", _is_string)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties"), ("an object", _is_object)),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), ("a schema", _is_schema)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
}
