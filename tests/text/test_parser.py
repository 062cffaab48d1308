"""Replies are parsed into content, thinking and calls, however they are split into pieces."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from conftest import FIXTURES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from webgemma.errors import InputError
from webgemma.text.chat import Chat
from webgemma.text.parser import Reply, ReplyParser, ToolCall, parse_reply

CASES = [json.loads(line) for line in (FIXTURES / "text" / "parse.jsonl").read_text().splitlines()]
NOTE = {
    "name": "note",
    "parameters": {
        "properties": {
            "text": {"type": "string"},
            "tag": {"type": ["string", "null"]},
            "by": {"anyOf": [True, {"type": "integer"}, {"type": "String"}]},
            "count": {"type": "integer"},
        }
    },
}


def stream(pieces: Iterable[str], think: bool = False, tools: Any = None, **options: Any) -> Reply:
    """Return the sum of what a streaming parser returns."""
    parser = ReplyParser(think, tools, **options)
    replies = [parser.feed(piece) for piece in pieces]
    replies.append(parser.finish())
    return Reply(
        "".join(reply.content for reply in replies),
        "".join(reply.thinking for reply in replies),
        tuple(call for reply in replies for call in reply.tool_calls),
    )


def arguments(text: str, tools: Any = None) -> Any:
    """Return the parsed arguments of a call; None if the call is dropped."""
    calls = parse_reply(f"<|tool_call>call:note{text}<tool_call|>", tools=tools).tool_calls
    return calls[0].arguments if calls else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_reply_in_any_two_pieces_or_letter_by_letter(case: Mapping[str, Any]) -> None:
    output, think, tools = case["output"], case["think"], case["tools"]
    calls = tuple(ToolCall(**call) for call in case["tool_calls"])
    expected = Reply(case["content"], case["thinking"], calls)
    assert parse_reply(output, think, tools) == expected
    assert stream(output, think, tools) == expected
    for cut in range(len(output)):
        assert stream([output[:cut], output[cut:]], think, tools) == expected, cut


FRAGMENTS = st.sampled_from(
    [
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>'),
        *("thought\n", "thought", "call:note{", "text:", "count:", "}", "{", "[", "]", ",", ":"),
        *("'", '"', "\\", " ", "\n", "<", "|>", "word", "12", "true", "é"),
    ]
)


@settings(max_examples=400)
@given(
    st.lists(FRAGMENTS | st.text(max_size=3), max_size=30).map("".join),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.booleans(),
)
@example("<|channel>thought\nthought\nx<channel|>", [9, 1], True)
@example('<|tool_call>call:note{text:<|"|>a<|"|>}<tool_call|> <tool_', [1], False)
def test_any_text_in_any_pieces_gives_the_same_reply(
    text: str, lengths: list[int], think: bool
) -> None:
    pieces, start = [], 0
    while start < len(text):
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(text[start : start + length])
        start += length
    assert stream(pieces, think, [NOTE]) == parse_reply(text, think, [NOTE])


def test_feed_returns_what_is_certain() -> None:
    parser = ReplyParser(think=True)
    fed = ["Hel", "lo \n", "<|chan", "nel>tho", "ught\nWhy", " not?\n", "<channel|>", " \n", "Bye"]
    replies = [parser.feed(piece) for piece in fed]
    assert [reply.content for reply in replies] == ["Hel", "lo", "", "", "", "", "", "", "Bye"]
    assert [reply.thinking for reply in replies] == ["", "", "", "", "Why", " not?", "", "", ""]
    parser.feed(" <")
    assert parser.finish() == Reply(" <")
    assert parser.finish() == Reply()


def test_a_call_is_returned_at_its_end() -> None:
    parser = ReplyParser()
    assert parser.feed("<|tool_call>call:f{a:1}<tool_call") == Reply()
    assert parser.feed("|>") == Reply(tool_calls=(ToolCall("f", {"a": 1}),))


def test_a_thought_may_start_in_the_prompt() -> None:
    text = "thought\nhm <channel|> yes"
    assert stream([text], True, in_thought=True) == Reply("yes", "thought\nhm")
    assert stream([text], False, in_thought=True) == Reply("yes")


def test_a_thought_after_a_call() -> None:
    text = "<|tool_call>call:f{}<tool_call|><|channel>thought\nb<channel|>c"
    assert parse_reply(text, True) == Reply("c", "b", (ToolCall("f", {}),))


@pytest.mark.parametrize("tail", ["<", "<tool_call", "<|tool_resp", " \n"])
def test_an_incomplete_tag_after_a_call_is_dropped(tail: str) -> None:
    assert parse_reply(f"<|tool_call>call:f{{}}<tool_call|>{tail}").content == ""


def test_invalid_tools_and_text_raise_an_error() -> None:
    with pytest.raises(InputError, match=r"tools\[0\]\.name"):
        parse_reply("x", tools=[{}])
    with pytest.raises(InputError, match="The reply must be a string"):
        parse_reply(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a:9007199254740993,b:1.0}", {"a": 9007199254740993, "b": 1.0}),
        ("{a:123456789012345678901234567890}", {"a": 123456789012345678901234567890}),
        (f"{{a:{'9' * 5000}}}", None),
        ("{a:1e999}", None),
        ("{a:NaN}", None),
        ("{a:-Infinity}", None),
        ("{a:1,a:2}", {"a": 2}),
        ("{a:01}", None),
        ("{a : 1 , b : 2}", {"a": 1, "b": 2}),
        ("{content-type:1,$top:2,@id:3,a.b:4}", {"content-type": 1, "$top": 2, "@id": 3, "a.b": 4}),
        ('{<|"|>odd key<|"|>:1}', {"odd key": 1}),
        ('{a:"x,b:1"}', {"a": "x,b:1"}),
        ("{a:1}}", None),
        ("{a:1", None),
        ("[1]", None),
        (f"{{a:{'[' * 60}{']' * 60}}}", {"a": json.loads("[" * 60 + "]" * 60)}),
        (f"{{a:{'[' * 64}{']' * 64}}}", None),
        ('{a:<|"|>\ud800\x00<|"|>}', {"a": "\ud800\x00"}),
    ],
)
def test_arguments_are_parsed_or_rejected(text: str, expected: Any) -> None:
    assert arguments(text) == expected


def test_integers_stay_integers() -> None:
    assert [type(value) for value in arguments("{a:1,b:-0,c:1e2}").values()] == [int, int, float]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{text: tomorrow at 5 , count:2}", {"text": "tomorrow at 5", "count": 2}),
        ("{text:a, b and c,by:5 men}", {"text": "a, b and c", "by": "5 men"}),
        ("{text:true,tag:new}", {"text": True, "tag": "new"}),
        ('{count:1,tag:say "hi" {now}}', {"count": 1, "tag": 'say "hi" {now}'}),
        ("{text:'it',tag:x y}", {"text": "it", "tag": "x y"}),
        ("{count:many}", None),
        ("{other:many}", None),
        ("{count:1,text:", {"count": 1, "text": ""}),
    ],
)
def test_unquoted_strings_are_repaired_where_the_schema_has_strings(
    text: str, expected: Any
) -> None:
    assert arguments(text, [NOTE]) == expected


@pytest.mark.parametrize("text", ["call:{a:1}", "call: {a:1}", " call:f{}", "", "call:f"])
def test_calls_without_a_name_or_form_are_dropped(text: str) -> None:
    assert parse_reply(f"<|tool_call>{text}<tool_call|>ok") == Reply("ok")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]\w{0,6}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.from_regex(r"[a-z_]\w{0,6}", fullmatch=True), VALUES, max_size=4))
def test_a_call_in_a_prompt_is_parsed_back(given: dict[str, Any]) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    prompt = Chat().render([{"role": "assistant", "tool_calls": [call]}])
    written = prompt[prompt.index("<|tool_call>") :]
    assert parse_reply(written) == Reply(tool_calls=(ToolCall("f", given),))


MEGABYTE = 1_000_000
CALL = "<|tool_call>call:note{"


@pytest.mark.parametrize(
    "text",
    [
        "<" * MEGABYTE,
        " " * MEGABYTE + "x",
        "<|channel>" + "hm " * (MEGABYTE // 3),
        CALL + "text:" + "[" * MEGABYTE,
    ],
    ids=["tag starts", "spaces", "thought", "call"],
)
def test_letter_by_letter_takes_linear_time(text: str) -> None:
    parser = ReplyParser(True, [NOTE])
    start = time.process_time()
    for letter in text:
        parser.feed(letter)
    parser.finish()
    assert time.process_time() - start < 20  # seconds; a quadratic parser takes minutes


@pytest.mark.parametrize(
    "unit",
    [
        '"',
        '\\"',
        ":'",
        "'\\",
        ",",
        ", ",
        ": ",
        "{",
        "[",
        ",text:x",
        ",a:x",
        '<|"|>',
        " ",
        "a:{",
        "9",
    ],
)
@pytest.mark.parametrize("head", ["", "text:", 'text:<|"|>', "count:"])
def test_an_invalid_call_takes_linear_time(head: str, unit: str) -> None:
    start = time.process_time()
    parse_reply(CALL + head + unit * (100_000 // len(unit)), True, [NOTE])
    assert time.process_time() - start < 4
