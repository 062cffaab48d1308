"""Structured output by the real clients, against a live server with the bundled model."""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import anthropic
import httpx2
import ollama
import openai
import pytest
from helpers.live_server import PATIENCE, Live, live_server
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "Tell me about the dog."}]


class Mood(Enum):
    """How somebody feels."""

    GLAD = "glad"
    SAD = "sad"


class Toy(BaseModel):
    """Something to play with."""

    kind: Literal["ball", "stick"]
    broken: bool


class Dog(BaseModel):
    """A dog."""

    name: Literal["Max", "Bella", "Ruby"]
    age: int = Field(ge=0, le=20)
    mood: Mood
    toys: list[Toy] = Field(max_length=2)
    owner: Literal["Ann", "Bob"] | None


class Box(BaseModel):
    """What holds a toy; Anthropic's client leaves limits out of schemas."""

    toy: Toy
    mood: Mood
    owner: Literal["Ann", "Bob"] | None


class Feed(BaseModel):
    """Feed a dog."""

    food: Literal["meat", "bread"]
    grams: int = Field(ge=1, le=500)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server("-") as server:
        yield server


# OpenAI


@pytest.fixture(scope="module")
def to_openai(live: Live) -> Iterator[openai.OpenAI]:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE)
    with client:
        yield client


def test_openai_parses_chats(to_openai: openai.OpenAI) -> None:
    for seed in range(3):
        done = to_openai.chat.completions.parse(
            model="demo", messages=QUESTION, response_format=Dog, seed=seed, temperature=1.5
        )
        assert isinstance(done.choices[0].message.parsed, Dog)
        assert done.choices[0].finish_reason == "stop"


def test_openai_streams_what_it_parses(to_openai: openai.OpenAI) -> None:
    with to_openai.chat.completions.stream(
        model="demo", messages=QUESTION, response_format=Dog, seed=1
    ) as stream:
        parts = [event.parsed for event in stream if event.type == "content.delta"]
        done = stream.get_final_completion()
    assert isinstance(done.choices[0].message.parsed, Dog)
    assert len(parts) > 5


def test_openai_parses_responses(to_openai: openai.OpenAI) -> None:
    done = to_openai.responses.parse(model="demo", input="A dog?", text_format=Dog)
    assert isinstance(done.output_parsed, Dog)
    assert done.text is not None
    assert done.text.format is not None
    assert done.text.format.type == "json_schema"
    with to_openai.responses.stream(model="demo", input="A dog?", text_format=Dog) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Dog)


def test_openai_says_when_a_reply_is_cut(to_openai: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        to_openai.chat.completions.parse(
            model="demo", messages=QUESTION, response_format=Dog, max_tokens=3
        )


@pytest.mark.parametrize("choice", ["required", "named"])
def test_openai_strict_functions(to_openai: openai.OpenAI, choice: str) -> None:
    tools = [openai.pydantic_function_tool(Feed), openai.pydantic_function_tool(Toy)]
    named: Any = {"type": "function", "function": {"name": "Feed"}}
    for seed in range(3):
        done = to_openai.chat.completions.parse(
            model="demo",
            messages=QUESTION,
            tools=tools,
            tool_choice=named if choice == "named" else "required",
            parallel_tool_calls=False,
            seed=seed,
        )
        (call,) = done.choices[0].message.tool_calls or ()
        assert done.choices[0].finish_reason == "tool_calls"
        kind = Feed if call.function.name == "Feed" else Toy
        assert isinstance(call.function.parsed_arguments, kind)
        assert choice == "required" or kind is Feed


def test_openai_strict_functions_of_responses(to_openai: openai.OpenAI) -> None:
    done = to_openai.responses.parse(
        model="demo",
        input="Feed it.",
        tools=[openai.pydantic_function_tool(Feed)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = done.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Feed)


def test_openai_modes_of_json_and_of_other_servers(to_openai: openai.OpenAI) -> None:
    create: Any = to_openai.chat.completions.create
    asked: Any = {"model": "demo", "messages": QUESTION, "seed": 1, "max_tokens": 400}
    for body, check in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[0-9]{4}"}, lambda text: len(text) == 4 and text.isdecimal()),
        ({"guided_json": Toy.model_json_schema()}, Toy.model_validate_json),
        ({"json_schema": Toy.model_json_schema()}, Toy.model_validate_json),
        (
            {"grammar": 'root ::= "(" in ")"\nin ::= "(x)" | "x"'},
            lambda text: text.strip("()") == "x",
        ),
    ):
        assert check(create(**asked, extra_body=body).choices[0].message.content)
    done = create(**asked, response_format={"type": "json_object"})
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content), dict)
    with pytest.raises(openai.BadRequestError, match=r"#/properties/a: not") as refused:
        create(**asked, extra_body={"json_schema": {"properties": {"a": {"not": {}}}}})
    assert refused.value.param == "json_schema"


# Ollama


def test_ollama_formats(live: Live) -> None:
    client = ollama.Client(host=live.url, timeout=PATIENCE)
    schema, options = Dog.model_json_schema(), {"seed": 2, "temperature": 1.5}
    done = client.chat("demo", QUESTION, format=schema, options=options)
    assert Dog.model_validate_json(done.message.content or "")
    parts = client.chat("demo", QUESTION, format=schema, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == done.message.content
    for raw in (False, True):
        said = client.generate("demo", "A dog?", format=schema, options=options, raw=raw)
        assert Dog.model_validate_json(said.response)
    cut = client.generate("demo", "A dog?", format=schema, options={"num_predict": 2})
    assert cut.done_reason == "length"
    with pytest.raises(ollama.ResponseError, match="format at #: not is not supported") as refused:
        client.chat("demo", QUESTION, format={"not": {}})
    assert refused.value.status_code == 400
    client._client.close()


# Anthropic


@pytest.fixture(scope="module")
def to_anthropic(live: Live) -> Iterator[anthropic.Anthropic]:
    client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0, timeout=PATIENCE)
    with client:
        yield client


def test_anthropic_parses(to_anthropic: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "messages": QUESTION, "max_tokens": 400}
    done = to_anthropic.messages.parse(**asked, output_format=Box)
    assert isinstance(done.parsed_output, Box)
    assert done.stop_reason == "end_turn"
    with to_anthropic.messages.stream(**asked, output_format=Box) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Box)
    old = {"output_format": {"type": "json_schema", "schema": Toy.model_json_schema()}}
    answer = to_anthropic.messages.create(**asked, extra_body=old)
    assert answer.content[0].type == "text"
    assert Toy.model_validate_json(answer.content[0].text)


def test_anthropic_calls(to_anthropic: anthropic.Anthropic) -> None:
    tools: Any = [
        {"name": kind.__name__, "input_schema": kind.model_json_schema(), "strict": True}
        for kind in (Feed, Toy)
    ]
    asked: Any = {"model": "demo", "messages": QUESTION, "max_tokens": 400, "tools": tools}
    for choice in ({"type": "any"}, {"type": "tool", "name": "Feed"}):
        one: Any = {**choice, "disable_parallel_tool_use": True}
        done = to_anthropic.messages.create(**asked, tool_choice=one)
        (block,) = done.content
        assert done.stop_reason == "tool_use"
        assert block.type == "tool_use"
        (Feed if block.name == "Feed" else Toy).model_validate(block.input)
    asked["tools"] = [{"name": "f", "input_schema": {"not": {}}, "strict": True}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema at #: not"):
        to_anthropic.messages.create(**asked)


# LangChain


@tool
def feed(food: Literal["meat", "bread"]) -> str:
    """Feed the dog."""
    return food


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain(live: Live, method: Any, responses: bool) -> None:
    with httpx2.Client() as http:  # LangChain would leave its own open
        settings: Any = {"base_url": f"{live.url}/v1", "api_key": "x", "max_retries": 0}
        settings |= {"http_client": http, "timeout": PATIENCE, "use_responses_api": responses}
        model = ChatOpenAI(model="demo", **settings)
        for strict in (None, True):
            asked: Any = model.with_structured_output(Dog, method=method, strict=strict)
            assert isinstance(asked.invoke("A dog?"), Dog)
        plain: Any = model.with_structured_output(Toy.model_json_schema(), method=method)
        assert Toy.model_validate(plain.invoke("A toy?"))
        forced = model.bind_tools([feed], tool_choice="feed", parallel_tool_calls=False)
        (call,) = forced.invoke("It is hungry.").tool_calls
        assert call["args"]["food"] in ("meat", "bread")


def test_langchain_json_mode(live: Live) -> None:
    with httpx2.Client() as http:
        settings: Any = {"base_url": f"{live.url}/v1", "api_key": "x", "http_client": http}
        model = ChatOpenAI(model="demo", max_tokens=500, seed=2, temperature=1, **settings)
        asked: Any = model.with_structured_output(None, method="json_mode", include_raw=True)
        answer = asked.invoke("A dog, as JSON?")
        assert answer["raw"].content.lstrip().startswith("{")
