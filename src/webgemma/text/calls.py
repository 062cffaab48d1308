"""Parser of a tool call in the model's reply, `call:NAME{key:value,…}`, with repairs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from webgemma.text.markup import QUOTE
from webgemma.text.sizes import MAX_DEPTH

PREFIX = "call:"

# No pattern backtracks over what it has matched, so that every pass is linear.
_JSON_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*"?'  # an unclosed one extends to the end
_QUOTED = r'<\|"\|>.*?(?:<\|"\|>|\Z)'
_KEY = r"[\w$@.-]++"  # the template writes all keys without quotes

_BARE_KEY = re.compile(rf"{_JSON_STRING}|([{{,]\s*+)({_KEY})(?=\s*+:)", re.DOTALL)
_BRACKET = re.compile(rf"{_JSON_STRING}|([\[{{])|([\]}}])", re.DOTALL)
_APOSTROPHES = re.compile(
    rf"{_QUOTED}|{_JSON_STRING}|(:\s*+)'([^'\\]*+(?:\\.[^'\\]*+)*)'(?:<\|\"\|>)?", re.DOTALL
)
_NAMED_VALUE = re.compile(rf"{_QUOTED}|{_JSON_STRING}|[{{,]\s*+({_KEY})\s*+:\s*+", re.DOTALL)
_NEXT_KEY = re.compile(rf",\s*+({_KEY})\s*+:")
_VALUE_START = re.compile(
    r"""<\|"\|>|["'{\[]|(?:true|false|null|-?\d[\d.eE+-]*+)\s*+(?:[,}\]]|\Z)"""
)

Schemas = Mapping[str, Mapping[str, Any]]  # the properties of each declared function


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call requested by the model."""

    name: str
    arguments: dict[str, Any]


def parse_call(text: str, schemas: Schemas) -> ToolCall | None:
    """Return the call between two call tags, repaired if necessary; None if it is not valid."""
    head, brace, rest = text.removeprefix(PREFIX).partition("{")
    name = head.strip()
    if not (text.startswith(PREFIX) and brace and name):
        return None
    arguments = _decode(brace + rest)
    if arguments is None:
        arguments = _repair(brace + rest, schemas.get(name, {}))
    return None if arguments is None else ToolCall(name, arguments)


def _repair(text: str, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments after repairing the model's usual mistakes, or None.

    A closing brace is added only if something else was repaired too: a missing brace alone rather
    means that the reply was cut off, and a number before it may be incomplete.
    """
    repaired = _close_string(_quote_apostrophes(text))
    if repaired != text:
        arguments = _decode(_close_brace(repaired))
        if arguments is not None:
            return arguments
    quoted = _quote_bare_strings(text, properties)
    if quoted == text:
        return None
    return _decode(_close_brace(_close_string(_quote_apostrophes(quoted))))


def _decode(text: str) -> dict[str, Any] | None:
    """Parse arguments as JSON, after writing strings and keys in JSON's quotes; None if invalid."""
    fields = text.split(QUOTE)  # those at odd indices are strings
    if len(fields) % 2 == 0:  # an odd number of quotes
        return None
    for at, field in enumerate(fields):
        fields[at] = json.dumps(field) if at % 2 else _BARE_KEY.sub(_quote_key, field)
    as_json = "".join(fields)
    if _too_deep(as_json):
        return None
    try:
        decoded = json.loads(as_json, parse_float=_finite, parse_constant=_reject)
    except (ValueError, RecursionError):  # integers of thousands of digits are a ValueError too
        return None
    return decoded if isinstance(decoded, dict) else None


def _quote_key(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f'{match[1]}"{match[2]}"'


def _too_deep(as_json: str) -> bool:
    """Return whether brackets nest too deep for a recursive decoder."""
    depth = 0
    for match in _BRACKET.finditer(as_json):
        if match[1]:
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif match[2]:
            depth -= 1
    return False


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is too large")
    return number


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _quote_apostrophes(text: str) -> str:
    """Turn values in apostrophes into strings and drop a stray quote token after one."""

    def quote(match: re.Match[str]) -> str:
        return match[0] if match[2] is None else f"{match[1]}{QUOTE}{match[2]}{QUOTE}"

    return _APOSTROPHES.sub(quote, text)


def _close_string(text: str) -> str:
    """Add the missing one of an odd number of quotes at the end, before a final bracket."""
    if text.count(QUOTE) % 2 == 0:
        return text
    body = text.rstrip()
    end = len(body) - body.endswith(("}", "]"))
    return text[:end] + QUOTE + text[end:]


def _close_brace(text: str) -> str:
    body = text.rstrip()
    return body if body.endswith("}") else body + "}"


def _quote_bare_strings(text: str, properties: Mapping[str, Any]) -> str:
    """Turn unquoted values into strings where the schema declares a string.

    Such a value extends to the next key of the schema, or to the end.
    """
    written: list[str] = []
    start = 0
    while match := _NAMED_VALUE.search(text, start):
        written.append(text[start : match.end()])
        start = match.end()
        if _takes_string(properties.get(match[1])) and not _VALUE_START.match(text, start):
            end = _bare_end(text, start, properties)
            written += (QUOTE, text[start:end].rstrip(), QUOTE)
            start = end
    return "".join(written) + text[start:]


def _bare_end(text: str, start: int, properties: Mapping[str, Any]) -> int:
    for match in _NEXT_KEY.finditer(text, start):
        if match[1] in properties:
            return match.start()
    return max(start, len(text.rstrip().removesuffix("}")))


def _takes_string(schema: object) -> bool:
    """Return whether a property may be a string: its type, one of its types, or in its anyOf."""
    if not isinstance(schema, Mapping):
        return False
    choices = schema.get("anyOf")
    kinds = [schema.get("type")]
    if isinstance(choices, list | tuple):
        kinds += [choice.get("type") for choice in choices if isinstance(choice, Mapping)]
    return any(
        isinstance(name, str) and name.lower() == "string"
        for kind in kinds
        for name in (kind if isinstance(kind, list | tuple) else [kind])
    )
