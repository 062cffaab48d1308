"""Schemas with texts that `jsonschema` and `ajv` judged: the same judgement by the masks."""

import random
from typing import Any

import pytest
from conftest import needs_shared
from helpers.constrained import (
    Cutter,
    accepts,
    constraint_of,
    lines,
    real_tokenizer,
    small_tokenizer,
)

from webgemma.constraints.compiling import Compiler
from webgemma.constraints.native import LlguidanceCompiler
from webgemma.constraints.specifications import Json
from webgemma.errors import InputError
from webgemma.text.tokenizer import Tokenizer

CASES = {case["name"]: case for case in lines("schemas.jsonl")}
REFUSED = {
    "array-unique": "at #: uniqueItems is not supported",
    "invoice": "at #/$defs/money: multipleOf 0.01 is not supported",
}
CUTS = 4  # of each text, at random


def check(compiler: Compiler, tokenizer: Tokenizer, cutter: Cutter, case: dict[str, Any]) -> None:
    constraint = constraint_of(compiler, schema=case["schema"])
    rng = random.Random(case["name"])
    for example in case["valid"] + case["invalid"]:
        text = example["text"]
        found = accepts(constraint, tokenizer.encode(text), tokenizer.eos)
        if not example.get("reordered"):
            assert found == ("why" not in example), text
        for _ in range(CUTS):
            assert accepts(constraint, cutter.cut(text, rng), tokenizer.eos) == found, text


@pytest.fixture(scope="module")
def cutter() -> Cutter:
    return Cutter(small_tokenizer())


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_valid_texts_are_accepted_and_no_others(
    compiler: Compiler, cutter: Cutter, name: str
) -> None:
    check(compiler, small_tokenizer(), cutter, CASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(compiler: Compiler, name: str) -> None:
    with pytest.raises(InputError) as raised:
        constraint_of(compiler, schema=CASES[name]["schema"])
    assert REFUSED[name] in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "#"}, "at #: it refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}}, "at #: it refers to"),
        ({"enum": []}, "at #: its keywords together allow no value"),
        (False, "at #: its keywords together allow no value"),
        (
            {
                "type": "array",
                "items": {"allOf": [{"type": "string"}, {"type": "null"}]},
                "minItems": 1,
            },
            "at #/items: its keywords together allow no value",
        ),
        (
            {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
            "at #/properties/a: its keywords together allow no value",
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "none that nests at most 32 levels",
        ),
        ({"type": "number", "minimum": 1e308}, "at #: no number within its bounds can be written"),
        ({"type": "number", "maximum": -1e308}, "at #: no number within its bounds"),
        ({"type": "integer", "exclusiveMaximum": -1e300}, "at #: its keywords together allow no"),
    ],
)
def test_a_schema_without_values_is_refused_with_its_place(schema: Any, problem: str) -> None:
    with pytest.raises(InputError) as raised:
        Json(schema).grammar()
    assert problem in str(raised.value)


def test_thousands_of_choices(compiler: Compiler) -> None:
    constraint = constraint_of(compiler, schema={"enum": [*range(3000), *map(str, range(300))]})
    tokenizer = small_tokenizer()
    for text, is_allowed in (("2999", True), ('"299"', True), ("3000", False), ('"300"', False)):
        assert accepts(constraint, tokenizer.encode(text), tokenizer.eos) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (" {} ", True),
        ("\t{}\t\t", True),
        ("{}\n", True),
        ("{}\r\n", True),
        ("\n{}", False),
        ("   {}", False),
        ("{}\n\n", False),
        ("{}\n ", False),
    ],
)
def test_white_space_around_json(compiler: Compiler, text: str, is_allowed: bool) -> None:
    tokenizer = small_tokenizer()
    constraint = constraint_of(compiler, schema={"type": "object"})
    assert accepts(constraint, tokenizer.encode(text), tokenizer.eos) == is_allowed


@needs_shared
def test_with_gemmas_own_vocabulary() -> None:
    tokenizer = real_tokenizer()
    compiler, cutter = LlguidanceCompiler(tokenizer, tokenizer.size), Cutter(tokenizer)
    for name, case in CASES.items():
        if name not in REFUSED:
            check(compiler, tokenizer, cutter, case)
