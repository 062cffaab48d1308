"""Tool declarations, calls and responses in the syntax of the prompt."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from webgemma.errors import InputError
from webgemma.text.inputs import (
    Call,
    Response,
    Tool,
    as_list,
    as_mapping,
    as_name,
    as_text,
    wrong_type,
)
from webgemma.text.markup import (
    CALL_CLOSE,
    CALL_OPEN,
    QUOTE,
    RESPONSE_CLOSE,
    RESPONSE_OPEN,
    TOOL_CLOSE,
    TOOL_OPEN,
    Part,
)
from webgemma.text.sizes import MAX_DEPTH

SCHEMA_KEYS = frozenset({"description", "type", "properties", "required", "nullable"})


def call_parts(call: Call, where: str) -> Iterator[Part]:
    """Yield a call of the model: `call:NAME{key:value,…}`."""
    yield CALL_OPEN
    yield f"call:{call.name}"
    yield from value_parts(call.arguments, where)
    yield CALL_CLOSE


def response_parts(response: Response) -> Iterator[Part]:
    """Yield the result of a tool: the members of a mapping or a single `value`; then its media."""
    result = response.value
    yield RESPONSE_OPEN
    yield f"response:{response.name}"
    yield from value_parts(
        result if isinstance(result, Mapping) else {"value": result}, response.where
    )
    yield RESPONSE_CLOSE
    yield from response.media


def value_parts(
    given: object, where: str, *, quote_keys: bool = False, depth: int = 0
) -> Iterator[Part]:
    """Yield a JSON value. Strings, and keys with `quote_keys`, are unescaped in quote tokens."""
    _check_depth(depth, where)
    if given is None:
        yield "null"
    elif isinstance(given, str):
        yield from _quoted(given)
    elif isinstance(given, bool):
        yield "true" if given else "false"
    elif isinstance(given, int | float):
        yield _number(given, where)
    elif isinstance(given, Mapping):
        members = (
            chain(
                _quoted(key) if quote_keys else [key],
                [":"],
                value_parts(item, where, quote_keys=quote_keys, depth=depth + 1),
            )
            for key, item in _sorted_items(given, where)
        )
        yield from _enclosed("{", members, "}")
    elif isinstance(given, list | tuple):
        items = (value_parts(item, where, quote_keys=quote_keys, depth=depth + 1) for item in given)
        yield from _enclosed("[", items, "]")
    else:
        raise wrong_type(given, f"A value in {where}", "a JSON value")


def declaration_parts(tool: Tool) -> Iterator[Part]:
    """Yield the declaration of a tool.

    As in the template, the brace that closes `parameters` is written only after a `type`.
    """
    function, where = tool.function, tool.where
    yield TOOL_OPEN
    yield f"declaration:{tool.name}{{description:"
    yield from _quoted(as_text(function.get("description"), f"{where}.description"))
    if function.get("parameters"):
        inside = f"{where}.parameters"
        parameters = as_mapping(function["parameters"], inside)
        yield ",parameters:{"
        if parameters.get("properties"):
            yield "properties:"
            yield from _properties(parameters["properties"], f"{inside}.properties")
            yield ","
        if parameters.get("required"):
            yield "required:"
            yield from _names(parameters["required"], f"{inside}.required")
            yield ","
        if kind := _type(parameters, inside):
            yield "type:"
            yield from _quoted(kind)
            yield "}"
    if function.get("response") is not None:
        yield from _response_schema(function["response"], f"{where}.response")
    yield "}"
    yield TOOL_CLOSE


def _response_schema(given: object, where: str) -> Iterator[Part]:
    schema = as_mapping(given, where)
    yield ",response:{"
    if schema.get("description"):
        yield "description:"
        yield from _quoted(as_text(schema["description"], f"{where}.description"))
        yield ","
    if _type(schema, where) == "OBJECT":
        yield "type:"
        yield from _quoted("OBJECT")
        yield "}"


def _properties(
    given: object, where: str, depth: int = 0, without: frozenset[str] = frozenset()
) -> Iterator[Part]:
    _check_depth(depth, where)
    named = _sorted_items(as_mapping(given, where), where)
    members = (
        [name, ":", *_property(schema, f"{where}.{name}", depth)]
        for name, schema in named
        if name not in without
    )
    yield from _enclosed("{", members, "}")


def _property(given: object, where: str, depth: int) -> Iterator[Part]:
    # JSON Schema also has bare true and false, as in `"additionalProperties": false`.
    schema = as_mapping(given, where) if isinstance(given, Mapping) else {}
    kind = _type(schema, where)
    fields: list[Iterable[Part]] = []
    if schema.get("description"):
        text = as_text(schema["description"], f"{where}.description")
        fields.append(["description:", *_quoted(text)])
    if kind == "STRING" and schema.get("enum"):
        fields.append(["enum:", *value_parts(schema["enum"], f"{where}.enum", quote_keys=True)])
    items = schema.get("items")
    if kind == "ARRAY" and isinstance(items, Mapping) and items:
        fields.append(["items:", *_items(items, f"{where}.items", depth + 1)])
    if schema.get("nullable"):
        fields.append(["nullable:true"])
    if kind == "OBJECT":
        if isinstance(schema.get("properties"), Mapping):
            inner = _properties(schema["properties"], f"{where}.properties", depth + 1)
        else:  # the template then reads the schema's other keys as properties
            inner = _properties(schema, where, depth + 1, without=SCHEMA_KEYS)
        fields.append(["properties:", *inner])
        if schema.get("required"):
            fields.append(["required:", *_names(schema["required"], f"{where}.required")])
    fields.append(["type:", *_quoted(kind)])
    yield from _enclosed("{", fields, "}")


def _items(schema: Mapping[str, Any], where: str, depth: int) -> Iterator[Part]:
    fields: list[Iterable[Part]] = []
    for key, item in _sorted_items(schema, where):
        inside = f"{where}.{key}"
        if item is None:
            continue
        if key == "properties":
            properties = item if isinstance(item, Mapping) else {}
            written: Iterable[Part] = _properties(properties, inside, depth + 1)
        elif key == "required":
            written = _names(item, inside)
        elif key == "type" and isinstance(item, str):
            written = _quoted(item.upper())
        elif key == "type":
            written = _names([kind.upper() for kind in _strings(item, inside)], inside)
        else:
            written = value_parts(item, inside, quote_keys=True, depth=depth + 1)
        fields.append([key, ":", *written])
    yield from _enclosed("{", fields, "}")


def _type(schema: Mapping[str, Any], where: str) -> str:
    """Return a schema's type in capitals; a union as a Python list, as the template prints it."""
    kind = schema.get("type")
    if isinstance(kind, list | tuple):
        return str(_strings(kind, f"{where}.type")).upper()
    return as_text(kind, f"{where}.type").upper()


def _strings(given: object, where: str) -> list[str]:
    return [as_name(item, f"{where}[{at}]") for at, item in enumerate(as_list(given, where))]


def _names(given: object, where: str) -> Iterator[Part]:
    yield from _enclosed("[", map(_quoted, _strings(given, where)), "]")


def _number(given: float, where: str) -> str:
    try:
        return str(given)
    except ValueError:  # Python does not print integers of thousands of digits
        raise InputError(f"{where} has a number with too many digits.") from None


def _check_depth(depth: int, where: str) -> None:
    if depth > MAX_DEPTH:
        path = where if len(where) <= 80 else where[:80] + "…"
        raise InputError(f"{path} is nested more than {MAX_DEPTH} levels deep.")


def _quoted(text: str) -> list[Part]:
    """Return a string between quote tokens."""
    return [QUOTE, text, QUOTE]


def _sorted_items(given: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    """Return the items of a mapping in the template's order: by name, ignoring case."""
    return sorted(as_mapping(given, where).items(), key=lambda member: member[0].lower())


def _enclosed(left: str, members: Iterable[Iterable[Part]], right: str) -> Iterator[Part]:
    """Yield the members, separated by commas, between brackets."""
    yield left
    for index, member in enumerate(members):
        if index:
            yield ","
        yield from member
    yield right
