"""Replies that keep to a structure: schemas, types, patterns, choices and calls, by `Gemma`."""

import asyncio
import datetime
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from helpers.constrained import accepts, constraint_of, small_tokenizer
from helpers.scripted import follow_script

from webgemma import Gemma, InputError, Piece, parse_reply
from webgemma.constraints import native
from webgemma.constraints.specifications import specification
from webgemma.errors import MissingPackageError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "sounds": {"type": "array", "items": {"enum": ["moo", "miaow"]}, "maxItems": 2},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Oslo"]},
            "days": {"type": "integer", "maximum": 9},
        },
        "required": ["city"],
    },
}
CLOCK = {"name": "clock", "description": "Tell the time."}


@dataclass
class Animal:
    legs: int
    kind: Literal["cat", "cow"]
    tame: bool = True


@dataclass
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("it is odd")


class Toy(pydantic.BaseModel):
    name: Literal["ball", "mouse"]
    parts: "list[Toy]" = []
    made: datetime.date | None = None


@dataclass
class Shelf:
    best: Toy
    others: dict[str, Toy]


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def gemma(request: pytest.FixtureRequest) -> Iterator[Gemma]:
    with Gemma.load(device=request.param) as model:
        yield model


def said(pieces: Any) -> tuple[str, Piece]:
    listed = list(pieces)
    return "".join(piece.text for piece in listed), listed[-1]


def test_a_schema(gemma: Gemma) -> None:
    for seed in range(3):
        text, last = said(gemma.chat("A cat?", schema=SCHEMA, seed=seed, temperature=1.5))
        jsonschema.validate(json.loads(text), SCHEMA)
        assert last.value == json.loads(text)
        assert last.finish == "stop"


def test_a_dataclass(gemma: Gemma) -> None:
    text, last = said(gemma.chat("A cat?", schema=Animal, seed=1))
    assert isinstance(last.value, Animal)
    assert last.value.kind in json.loads(text)["kind"]
    assert isinstance(gemma.extract("A tame cow.", Animal), Animal)
    assert isinstance(asyncio.run(gemma.aextract("A wild cat.", Animal)), Animal)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (list[Toy], '[{"name": "ball"}]', [Toy(name="ball")]),
        (
            Shelf,
            '{"best": {"name": "ball", "parts": [{"name": "mouse", "made": "2024-02-29"}]}, '
            '"others": {"a": {"name": "mouse"}}}',
            Shelf(
                Toy(name="ball", parts=[Toy(name="mouse", made=datetime.date(2024, 2, 29))]),
                {"a": Toy(name="mouse")},
            ),
        ),
        (Toy | None, "null", None),
        (Even, '{"number": 4}', Even(4)),
        (set[str], '["a", "a"]', {"a"}),
    ],
)
def test_types_within_types(kind: Any, text: str, expected: Any) -> None:
    asked = specification(schema=kind)
    assert asked is not None
    tokenizer = small_tokenizer()
    compiler = native.LlguidanceCompiler(tokenizer, tokenizer.size)
    assert accepts(constraint_of(compiler, schema=kind), tokenizer.encode(text), tokenizer.eos)
    assert asked.parse(text) == expected


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        (Even, '{"number": 3}', "The reply is no Even: Even refuses it: it is odd."),
        (set[list[int]], "[[1]]", "The reply is no set[list[int]]: set refuses it: unhashable"),
        (list[Toy], '[{"name": "x"}]', "The reply is no list["),
    ],
)
def test_a_value_that_its_type_refuses(kind: Any, text: str, sentence: str) -> None:
    asked = specification(schema=kind)
    assert asked is not None
    with pytest.raises(InputError) as raised:
        asked.parse(text)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize("given", [[1], Toy(name="ball"), object(), 5, {1, 2}])
def test_what_is_no_schema(given: Any) -> None:
    with pytest.raises(InputError, match="cannot be JSON: use str"):
        specification(schema=given)


def test_what_is_extracted_is_an_instance_or_an_error(gemma: Gemma) -> None:
    @dataclass
    class Never:
        number: Literal[1]

        def __post_init__(self) -> None:
            raise ValueError("never")

    _, last = said(gemma.chat("One?", schema=Never, seed=1))
    assert (last.finish, last.value) == ("stop", None)
    with pytest.raises(InputError, match="Never refuses it: never"):
        gemma.extract("One.", Never)
    with pytest.raises(InputError, match="schema is missing"):
        gemma.extract("One.", None)


def test_choices_a_pattern_and_a_grammar(gemma: Gemma) -> None:
    choices = ["yes", "no", "no idea"]
    for seed in range(4):
        text, last = said(gemma.chat("Is it?", choices=choices, seed=seed, temperature=3.0))
        assert text in choices
        assert last.value == text
    text, _ = said(gemma.chat("When?", regex=r"\d{4}-\d{2}", seed=1))
    assert len(text) == 7
    text, _ = said(gemma.generate("So:", grammar='start: "a" | "b" start', seed=1, max_tokens=50))
    assert set(text) <= {"a", "b"}


def test_a_reply_that_is_cut_off_says_so(gemma: Gemma) -> None:
    text, last = said(gemma.chat("A cat?", schema=SCHEMA, seed=0, max_tokens=3))
    assert last.finish == "length"
    assert last.value is None
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    with pytest.raises(InputError, match="cut off"):
        gemma.extract("A cow.", Animal, max_tokens=2)


def test_a_stop_string_leaves_no_value(gemma: Gemma) -> None:
    text, last = said(gemma.chat("A cat?", schema=SCHEMA, seed=0, stop='"legs"'))
    assert '"legs"' not in text
    assert last.finish == "stop"
    assert last.value is None


def test_several_side_by_side(gemma: Gemma) -> None:
    async def all_of_them() -> list[tuple[str, Piece]]:
        async def one(**options: Any) -> tuple[str, Piece]:
            return said([piece async for piece in gemma.achat("A cat?", seed=2, **options)])

        return await asyncio.gather(
            one(schema=SCHEMA), one(choices=["a", "b"]), one(max_tokens=9), one(schema=Animal)
        )

    (text, _), (letter, _), _, (_, animal) = asyncio.run(all_of_them())
    jsonschema.validate(json.loads(text), SCHEMA)
    assert letter in ("a", "b")
    assert isinstance(animal.value, Animal)
    alone, _ = said(gemma.chat("A cat?", seed=2, schema=SCHEMA))
    assert alone == text


def test_a_hard_grammar_stalls_nobody(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies beside it go on while it is compiled; the CPU, which has one slot, does the rest."""
    held, begun, deep = threading.Event(), threading.Event(), native._with_deep_stacks

    def hold(*functions: Any) -> Any:
        begun.set()
        assert held.wait(30)
        return deep(*functions)

    async def reply(**options: Any) -> str:
        return said([p async for p in gemma.achat("A cat?", seed=1, max_tokens=5, **options)])[0]

    async def main() -> None:
        monkeypatch.setattr(native, "_with_deep_stacks", hold)
        hard = asyncio.create_task(reply(choices=["very", "hard"]))
        await asyncio.to_thread(begun.wait, 30)
        async with asyncio.timeout(30):
            assert await gemma.acount_tokens("A cat?") > 3
            if len(gemma.slots) > 1:
                assert await reply()
        assert not hard.done()
        held.set()
        assert await hard in ("very", "hard")

    asyncio.run(main())


def test_an_error_of_a_batch_is_each_prompts_own(gemma: Gemma) -> None:
    replies = dict(gemma.batch(["A cat?", "A cow?"], schema={"not": {}}))
    assert [str(error) for error in replies.values()] == [
        "The schema at #: not is not supported."
    ] * 2


def test_a_batch(gemma: Gemma) -> None:
    replies = dict(gemma.batch(["A cat?", "A cow?"], schema=Animal, seed=1))
    assert [reply.pieces[-1].value.legs for reply in replies.values()]  # type: ignore[union-attr]


def test_a_thought_is_free(gemma: Gemma) -> None:
    pieces = list(gemma.chat("Think.", schema=Animal, think=True, seed=3, max_tokens=400))
    if pieces[-1].finish == "stop":
        assert isinstance(pieces[-1].value, Animal)


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_calls_that_must_be_made(gemma: Gemma, choice: str) -> None:
    tools = [WEATHER, CLOCK]
    for seed in range(4):
        pieces = list(
            gemma.chat(
                "Sunny?", tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed
            )
        )
        (call,) = [call for piece in pieces for call in piece.tool_calls]
        assert pieces[-1].finish == "stop"
        if choice == "weather" or call.name == "weather":
            jsonschema.validate(call.arguments, WEATHER["parameters"])
        else:
            assert (call.name, call.arguments) == ("clock", {})


def test_no_call_where_none_may_be_made(gemma: Gemma) -> None:
    text, _ = said(gemma.chat("Hi", tools=[CLOCK], tool_choice="none", temperature=0))
    assert text == said(gemma.chat("Hi", temperature=0))[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"schema": {"type": "strin"}}, "strin"),
        ({"schema": {"not": {"type": "string"}}}, "not"),
        ({"schema": SCHEMA, "regex": "a"}, "Only one of"),
        ({"regex": "("}, "regex cannot be used"),
        ({"regex": 5}, "regex"),
        ({"grammar": "start: ("}, "grammar cannot be used"),
        ({"choices": []}, "choices"),
        ({"choices": "ab"}, "choices"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [CLOCK], "tool_choice": "watch"}, "'watch'"),
        ({"tools": [CLOCK], "tool_choice": 3}, "tool_choice"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"confirm": 5}, "confirm"),
        ({"tools": [{**WEATHER, "strict": True, "parameters": {"not": {}}}]}, "not"),
    ],
)
def test_what_cannot_be_kept_gets_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with Gemma.load(device="cpu") as model, pytest.raises(InputError, match=sentence):
        list(model.chat("Hi", max_tokens=3, **options))


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs it says so; tools that may be called work as well as the model calls them."""

    def missing(_: object) -> None:
        raise MissingPackageError(native.MISSING)

    monkeypatch.setattr(native.LlguidanceCompiler, "_tokenizer", missing)
    follow_script(monkeypatch, {"Rome": "<|tool_call>call:clock{}<tool_call|>"})
    with Gemma.load(device="cpu") as model:
        pieces = list(model.chat("Rome?", tools=[CLOCK]))
        assert [call.name for piece in pieces for call in piece.tool_calls] == ["clock"]
        with pytest.raises(MissingPackageError, match=r"webgemma\[json\]"):
            list(model.chat("Hi", choices=["a"]))
        with pytest.raises(MissingPackageError):
            list(model.chat("Hi", tools=[CLOCK], tool_choice="required"))


def test_what_a_call_says_is_what_the_parser_reads(gemma: Gemma) -> None:
    pieces = list(gemma.chat("Sunny?", tools=[WEATHER], tool_choice="required", seed=5))
    calls = tuple(call for piece in pieces for call in piece.tool_calls)
    ids = [piece.token for piece in pieces]
    assert parse_reply(gemma.tokenizer.decode(ids), tools=[WEATHER]).tool_calls == calls
