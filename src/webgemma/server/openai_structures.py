"""How clients of OpenAI, vLLM and llama.cpp ask for JSON, patterns, choices and grammars."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from webgemma.constraints.specifications import ANY_OBJECT
from webgemma.server.openai_common import checked, chosen, flag
from webgemma.server.protocol import RequestError, Structure, StructureKind
from webgemma.text import inputs
from webgemma.values import shown

FORMATS = ("text", "json_object", "json_schema", "grammar")

# Fields of a body and of vLLM's structured_outputs.
FIELDS: Mapping[str, StructureKind] = {
    "guided_json": "schema",  # vLLM's, before structured_outputs
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "json_schema": "schema",  # llama.cpp's
    "grammar": "grammar",
}
VLLM_FIELDS: Mapping[str, StructureKind] = {
    "json": "schema",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
}
VLLM_REFUSED = {
    "disable_additional_properties": "say additionalProperties in the schema",
    "disable_any_whitespace": "blanks between the parts of JSON are the model's choice",
    "structural_tag": "only a whole reply can keep to a structure",
    "whitespace_pattern": "blanks between the parts of JSON are the model's choice",
}


def read_structure(
    body: Mapping[str, Any], format: Any, where: str = "response_format"
) -> Structure | None:
    """Return what the reply has to be; `format` is OpenAI's own field for it, at this place."""
    found = [*_of_format(format, where), *_of_vllm(body.get("structured_outputs"))]
    for name, kind in FIELDS.items():
        found += _of_field(body.get(name), name, kind)
    if len(found) > 1:
        first, second = found[0].where, found[1].where
        raise RequestError(
            f"{first} and {second} both say what the reply has to be: send one of them.",
            param=second,
        )
    return found[0] if found else None


def _of_format(given: Any, where: str) -> Iterator[Structure]:
    if given is None:
        return
    format = checked(inputs.as_mapping, given, where)
    kind = chosen(format.get("type"), f"{where}.type", FORMATS)
    if kind == "grammar":
        yield from _of_field(format.get("grammar"), f"{where}.grammar", "grammar")
        return
    if kind == "json_schema" and "json_schema" in format:  # Chat Completions has one level more
        where = f"{where}.json_schema"
        format = checked(inputs.as_mapping, format["json_schema"], where)
    for name in ("name", "description"):
        checked(inputs.as_text, format.get(name), f"{where}.{name}")
    flag(format.get("strict"), f"{where}.strict")
    place = f"{where}.schema"
    if format.get("schema") is not None and kind != "text":  # llama.cpp has one for json_object
        yield Structure("schema", _schema(format["schema"], place), place)
    elif kind == "json_schema":
        raise RequestError(f"{place} is missing; it must be a JSON schema.", param=place)
    elif kind == "json_object":
        yield Structure("schema", ANY_OBJECT, where)


def _of_vllm(given: Any) -> Iterator[Structure]:
    where = "structured_outputs"
    if given is None:
        return
    options = checked(inputs.as_mapping, given, where)
    for name, why in VLLM_REFUSED.items():
        if options.get(name):
            place = f"{where}.{name}"
            raise RequestError(f"{place} cannot be used here: {why}.", param=place)
    if flag(options.get("json_object"), f"{where}.json_object"):
        yield Structure("schema", ANY_OBJECT, f"{where}.json_object")
    for name, kind in VLLM_FIELDS.items():
        yield from _of_field(options.get(name), f"{where}.{name}", kind)


def _of_field(given: Any, where: str, kind: StructureKind) -> Iterator[Structure]:
    """Yield what a field asks for; clients send empty ones for nothing."""
    if given is None or given == "" or given == []:
        return
    if kind == "schema":
        yield Structure(kind, _schema(given, where), where)
        return
    if not isinstance(given, list if kind == "choices" else str):
        expected = "a list of texts" if kind == "choices" else "a text"
        raise RequestError(f"{where} is {shown(given)}; it must be {expected}.", param=where)
    yield Structure(kind, given, where)


def _schema(given: Any, where: str) -> Mapping[str, Any] | bool:
    """Return a schema, which may be given as its JSON text."""
    schema = given
    if isinstance(given, str):
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError):
            raise RequestError(f"{where} is a text that is not JSON.", param=where) from None
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"{where} is {shown(given)}; it must be a JSON schema, which is an object.",
            param=where,
        )
    return schema
