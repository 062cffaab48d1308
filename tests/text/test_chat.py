"""The chat template: prompts equal Google's, and invalid input raises a clear error."""

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from conftest import FIXTURES
from helpers.anything import ENDLESS, nested
from hypothesis import given, settings
from hypothesis import strategies as st

from webgemma.errors import InputError
from webgemma.text import markup
from webgemma.text.chat import Chat, Markup, opens_thought

CASES = [json.loads(line) for line in (FIXTURES / "text" / "chat.jsonl").read_text().splitlines()]
MARKUP = sorted({token for token in vars(markup).values() if isinstance(token, Markup)})

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def called(arguments: object = None, **fields: object) -> dict[str, Any]:
    """Return an assistant message with one tool call."""
    call = {"function": {"name": "weather", "arguments": arguments}} | fields
    return {"role": "assistant", "tool_calls": [call]}


def options(case: Mapping[str, Any]) -> dict[str, Any]:
    return {key: case[key] for key in ("messages", "tools", "think", "add_generation_prompt")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_prompts_equal_those_of_the_template(case: Mapping[str, Any]) -> None:
    chat = Chat(case["size"])
    assert chat.render(**options(case)) == case["prompt"]
    parts = chat.parts(**options(case))
    assert "".join(parts) == case["prompt"]
    assert all(parts)
    plain = [not isinstance(part, Markup) for part in parts]
    assert not any(one and following for one, following in pairwise(plain))


def conversation(text: str) -> dict[str, Any]:
    """Return a conversation with the text wherever a caller may put one."""
    properties = {text: {"type": text, "description": text, "enum": [text]}}
    parameters = {"type": text, "properties": properties, "required": [text]}
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            called({text: [text, {text: text}]}, id=text) | {"thinking": text},
            {"role": "tool", "name": text, "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
        ],
        "tools": [{"name": text, "description": text, "parameters": parameters}],
    }


@pytest.mark.parametrize("token", MARKUP)
def test_text_cannot_forge_markup(token: str) -> None:
    spelled = str(token)  # a plain string, as from a user
    harmless = Chat().parts(**conversation("x"))
    forged = Chat().parts(**conversation(spelled))
    assert [part for part in forged if isinstance(part, Markup)] == [
        part for part in harmless if isinstance(part, Markup)
    ]


class Letters:
    """A tokenizer with one id per letter, and ids from 1000 for special tokens."""

    def __init__(self, *missing: str) -> None:
        self.special_ids = {
            str(token): 1000 + at for at, token in enumerate(MARKUP) if token not in missing
        }

    def encode(self, text: str, special: bool = False) -> list[int]:
        assert not special
        return [ord(letter) % 1000 for letter in text]


def test_only_markup_becomes_special_tokens() -> None:
    tokenizer = Letters()
    special = tokenizer.special_ids
    expected = [
        *[special["<bos>"], special["<|turn>"], *tokenizer.encode("user\n<turn|>")],
        *[special["<turn|>"], *tokenizer.encode("\n")],
        *[special["<|turn>"], *tokenizer.encode("model\n")],
        *[special["<|channel>"], *tokenizer.encode("thought\n"), special["<channel|>"]],
    ]
    messages = [{"role": "user", "content": "<turn|>"}]
    assert Chat("large").encode(tokenizer, messages) == expected


def test_a_token_missing_from_the_vocabulary_is_reported() -> None:
    with pytest.raises(InputError, match=r"<\|image\|>"):
        Chat().encode(Letters("<|image|>"), [USER | {"images": ["…"]}])


def test_an_unknown_size_is_rejected() -> None:
    with pytest.raises(InputError, match="'medium'"):
        Chat("medium")  # type: ignore[arg-type]


EMPTY_THOUGHT = "<|channel>thought\n<channel|>"


@pytest.mark.parametrize(
    ("size", "think", "message", "tail"),
    [
        ("small", False, {"content": " One, two, "}, "One, two, "),
        ("small", True, {"content": "One"}, "One"),
        ("large", True, {"content": "One"}, "One"),
        ("large", False, {"content": "One"}, f"{EMPTY_THOUGHT}One"),
        ("large", False, {"content": None}, EMPTY_THOUGHT),
        ("large", False, {"thinking": "Hm, "}, "<|channel>thought\nHm, "),
        ("small", True, {"thinking": "Hm\n", "content": "  \n"}, "<|channel>thought\nHm\n"),
        (
            "small",
            True,
            {"thinking": "Hm.", "content": "So "},
            "<|channel>thought\nHm.\n<channel|>So ",
        ),
        (
            "small",
            False,
            {"content": [{"type": "text", "text": " a "}, {"type": "text", "text": " b "}]},
            "ab ",
        ),
    ],
)
def test_a_continued_turn_stays_open(
    size: Any, think: bool, message: dict[str, Any], tail: str
) -> None:
    messages = [USER, {"role": "assistant"} | message]
    chat = Chat(size)
    prompt = chat.render(messages, None, think, continue_last=True)
    before = chat.render([USER], None, think, add_generation_prompt=False)
    assert prompt == f"{before}<|turn>model\n{tail}"
    in_thought = tail.startswith("<|channel>") and "<channel|>" not in tail
    assert opens_thought(chat.parts(messages, None, think, continue_last=True)) == in_thought


def test_a_continued_message_joins_the_turn_before_it() -> None:
    messages = [USER, called(), {"role": "tool", "content": "sun"}]
    before = Chat("large").render(messages)
    messages.append({"role": "assistant", "content": "It is"})
    assert Chat("large").render(messages, continue_last=True) == f"{before}It is"


@pytest.mark.parametrize("messages", [[], [USER], [USER, called(), {"role": "tool"}]])
def test_only_an_assistant_message_can_be_continued(messages: list[Any]) -> None:
    with pytest.raises(InputError, match="continue"):
        Chat().render(messages, continue_last=True)


def test_a_call_cannot_be_continued() -> None:
    with pytest.raises(InputError, match=r"messages\[1\] has tool calls"):
        Chat().render([USER, called()], continue_last=True)


@pytest.mark.parametrize(
    ("messages", "think", "expected"),
    [
        ([USER], True, False),
        ([USER, called(), {"role": "tool", "content": "sun"}], True, True),
        ([USER, called(), {"role": "tool", "content": "sun"}], False, False),
    ],
)
def test_a_prompt_that_opens_a_thought_is_recognised(
    messages: list[Any], think: bool, expected: bool
) -> None:
    assert opens_thought(Chat("large").parts(messages, None, think)) == expected


@pytest.mark.parametrize(
    ("given", "same_as"),
    [
        ([USER, called('{"city": "Ulm", "n": [1]}')], [USER, called({"city": "Ulm", "n": [1]})]),
        ([USER, called("")], [USER, called({})]),
        (
            [USER, {"role": "assistant", "content": "a", "thinking": "t"}],
            [USER, {"role": "assistant", "content": "a", "reasoning": "t"}],
        ),
        (
            [{"role": "user", "content": "What?", "images": ["AAAA", "BBBB"]}],
            [
                {
                    "role": "user",
                    "content": [
                        *[{"type": "image"}, {"type": "image"}],
                        {"type": "text", "text": "What?"},
                    ],
                }
            ],
        ),
        (
            [USER, called(), {"role": "tool", "tool_name": "w", "content": "1"}],
            [USER, called(), {"role": "tool", "name": "w", "content": "1"}],
        ),
        (
            [USER, called(), {"role": "tool", "content": "1"}],
            [USER, called(id="7"), {"role": "tool", "tool_call_id": "7", "content": "1"}],
        ),
    ],
)
def test_other_forms_give_the_same_prompt(given: list[Any], same_as: list[Any]) -> None:
    assert Chat().render(given) == Chat().render(same_as)


def test_a_tool_may_be_given_bare() -> None:
    wrapped = {"type": "function", "function": WEATHER}
    assert Chat().render([USER], [WEATHER]) == Chat().render([USER], [wrapped])


def test_a_tool_may_return_an_object() -> None:
    prompt = Chat().render([USER, called(), {"role": "tool", "content": {"b": 1, "a": None}}])
    assert prompt.endswith("<|tool_response>response:weather{a:null,b:1}<tool_response|>")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of messages, not str"),
        (None, "messages must be a list of messages, not nothing"),
        ([USER, 3], r"messages\[1\] must be an object"),
        ([{1: 2}], r"A key of messages\[0\] must be a string, not int"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a string, not nothing"),
        ([{"role": ["user"]}], r"messages\[0\]\.role must be a string, not list"),
        ([{"role": "robot"}], r"messages\[0\]\.role must be one of .*, not 'robot'"),
        ([USER, {"role": "user", "content": 3}], r"messages\[1\]\.content must be .*, not int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] must be an object"),
        ([{"role": "user", "content": [{}]}], r"messages\[0\]\.content\[0\]\.type must be"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            r"messages\[0\]\.content\[0\]\.text must be a string, not int",
        ),
        ([USER | {"images": "AAAA"}], r"messages\[0\]\.images must be a list, not str"),
        ([{"role": "system", "images": [1]}], r"messages\[0\] .* may contain text only"),
        ([{"role": "assistant", "reasoning": 1}], r"messages\[0\]\.reasoning must be a string"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]\.function must be an obj"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"tool_calls\[0\]\.function\.name must be a string, not nothing",
        ),
        ([called(function={"name": ""})], r"tool_calls\[0\]\.function\.name must not be empty"),
        ([called(id=7)], r"tool_calls\[0\]\.id must be a string, not int"),
        ([called([1])], r"function\.arguments must be an object"),
        ([called("{")], r"function\.arguments cannot be read as JSON"),
        ([called("[1]")], r"function\.arguments must be an object .*, not list"),
        ([called("[" * 100_000)], r"function\.arguments cannot be read as JSON"),
        ([called({"a": {1}})], r"A value in .*function\.arguments must be a JSON value, not set"),
        ([called({"a": {2: 3}})], r"A key of .*function\.arguments must be a string"),
        ([called({"a": 10**5000})], r"function\.arguments has a number with too many digits"),
        ([called({"a": nested(100)})], r"messages\[0\]\..*arguments is nested more than 64"),
        ([called({"a": ENDLESS})], r"messages\[0\]\..*arguments is nested more than 64"),
        ([called(), {"role": "tool", "name": 1}], r"messages\[1\]\.name must be a string"),
        ([called(), {"role": "tool", "content": {1}}], r"messages\[1\]\.content must be a JSON"),
        ([{"role": "assistant", "tool_responses": [1]}], r"tool_responses\[0\] must be an object"),
    ],
)
def test_invalid_messages_raise_an_error(messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Chat().render(messages)


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools must be a list, not dict"),
        (["f"], r"tools\[0\] must be an object .*, not str"),
        ([{"type": "function", "function": None}], r"tools\[0\]\.function must be an object"),
        ([WEATHER, {"description": "x"}], r"tools\[1\]\.name must be a string, not nothing"),
        ([WEATHER | {"description": 3}], r"tools\[0\]\.description must be a string"),
        ([WEATHER | {"parameters": "x"}], r"tools\[0\]\.parameters must be an object"),
        (
            [WEATHER | {"parameters": {"properties": ["city"]}}],
            r"tools\[0\]\.parameters\.properties must be an object",
        ),
        (
            [{"function": WEATHER | {"parameters": {"required": "city"}}}],
            r"tools\[0\]\.function\.parameters\.required must be a list, not str",
        ),
        (
            [WEATHER | {"parameters": {"properties": {"a": {"type": 3}}}}],
            r"tools\[0\]\.parameters\.properties\.a\.type must be a string",
        ),
        ([WEATHER | {"parameters": deep_schema(100)}], "nested more than 64"),
        ([WEATHER | {"response": 1}], r"tools\[0\]\.response must be an object"),
    ],
)
def test_invalid_tools_raise_an_error(tools: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Chat().render([USER], tools)


WORDS = st.sampled_from(
    [
        *("role", "content", "user", "assistant", "tool", "system", "type", "text", "image"),
        *("images", "thinking", "tool_calls", "function", "name", "arguments", "tool_responses"),
        *("parameters", "properties", "required", "items", "object", "array", "enum"),
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(
    st.builds(
        lambda role, fields: fields | {"role": role}, ROLES, st.dictionaries(WORDS, ANYTHING)
    ),
    max_size=4,
)


@settings(max_examples=100)
@given(MESSAGES | ANYTHING, st.none() | ANYTHING, st.booleans(), st.booleans())
def test_any_input_gives_a_prompt_or_an_input_error(
    messages: Any, tools: Any, think: bool, continue_last: bool
) -> None:
    with suppress(InputError):
        prompt = Chat("large").render(messages, tools, think, continue_last=continue_last)
        assert prompt.startswith("<bos>")
