"""OpenAI's Responses API, against the `openai` package's types and client."""

from contextlib import suppress
from typing import Any

import openai
import pytest
from helpers.openai_client import JSON, PROMPT, Script, client, parsed_or_refused, refusal
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from webgemma.errors import InputError
from webgemma.server.openai_common import sse
from webgemma.server.openai_responses import LEFT_OUT, REFUSED, ResponseStream, answer, parse
from webgemma.server.openai_structures import FIELDS as STRUCTURE_FIELDS
from webgemma.server.protocol import RequestError
from webgemma.settings import resolve
from webgemma.text.chat import Chat

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
IMAGE = "data:image/png;base64,iVBORw0KGgo="
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TIME = {"type": "function", "name": "time", "parameters": {}, "strict": False}
NAMES = {"id": "resp_7", "created": 1700000000, "model": "gemma4:e2b"}


def events_of(request: Any, script: Script) -> list[dict[str, Any]]:
    stream = ResponseStream(request, **NAMES, token_bytes=script.token_bytes)
    events = [*stream.begin()]
    for piece in script.pieces:
        events += stream.piece(0, piece)
    events += stream.end(completed=1700000001)
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def serve(script: Script, cached: int = 0) -> openai.OpenAI:
    """Return a client of a server whose model writes this reply."""
    script.cache(cached)

    def respond(given: Any) -> Any:
        request = parse(given)
        if request.stream:
            return [sse(event, event["type"]) for event in events_of(request, script)]
        return answer(
            request,
            [script.reply()],
            **NAMES,
            token_bytes=script.token_bytes,
            completed=1700000001,
        )

    return client(respond)


# Input


def test_a_text_is_a_users_message() -> None:
    request = parse({"input": "Hello", "instructions": "Be brief."})
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert parse({}).messages == [{"role": "user", "content": ""}]


def test_items_are_messages() -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look"},
                {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Where?"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city":"B"}'},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": ""},
        {"type": "function_call_output", "call_id": "b", "output": "noon"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"role": "assistant", "content": "Rain."},
    ]
    request = parse({"input": given})
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image_url", "image_url": {"url": IMAGE}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Where?",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "B"}},
                },
                {"id": "b", "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Rain."},
    ]
    written = Chat().render(request.messages)
    assert written.index("response:time{") < written.index("response:weather{")


def test_calls_one_after_another_are_two_messages() -> None:
    calls = [
        {"type": "function_call", "call_id": "a", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "one"},
    ]
    roles = [message["role"] for message in parse({"input": calls}).messages]
    assert roles == ["assistant", "tool"] * 2


def test_a_result_may_come_after_text_and_other_calls() -> None:
    def think(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    def call(identity: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": identity, "name": "time", "arguments": "{}"}

    text = {"role": "assistant", "content": "Wait."}
    given = [think("One"), call("a"), think("Two"), call("b"), text]
    given += [{"type": "function_call_output", "call_id": id, "output": "noon"} for id in "ab"]
    message, *results = parse({"input": given}).messages
    assert (message["content"], message["reasoning"]) == ("Wait.", "One\nTwo")
    assert [each["id"] for each in message["tool_calls"]] == ["a", "b"]
    assert [result["role"] for result in results] == ["tool", "tool"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": []}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"text": "x"}, "text"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{**TIME, "strict": "no"}]}, "tools[0].strict"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": 5}}, "reasoning.summary"),
        ({"truncation": "some"}, "truncation"),
        ({"include": "all"}, "include"),
        ({"include": [5]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "other", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(parse, {"input": "Hello"} | fields).param == param


def test_what_is_stored_elsewhere_is_refused_with_what_to_do() -> None:
    for name in REFUSED:
        error = refusal(parse, {"input": "Hello", name: "x"})
        assert "stored" in str(error)
        assert parse({"input": "Hello", name: None}).messages


def test_settings_and_thinking() -> None:
    request = parse(
        {
            "input": "Hello",
            "max_output_tokens": 16,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_logprobs": 2,
            "top_k": 5,
            "reasoning": {"effort": "low", "summary": "auto"},
            "store": True,
            "metadata": {"a": "b"},
            "truncation": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
        }
    )
    assert request.settings == {
        "max_tokens": 16,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_logprobs": 2,
        "top_k": 5,
    }
    assert request.think
    assert request.logprobs
    assert parse({"include": ["message.output_text.logprobs"]}).logprobs
    assert not parse({"include": ["reasoning.encrypted_content"]}).logprobs
    assert parse({"reasoning": {"effort": "none"}}).think is False
    assert parse({"reasoning": {"effort": "high"}, "think": False}).think is False
    assert parse({}).think is None


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["weather", "time"]),
        ("required", "required", ["weather", "time"]),
        ({"type": "function", "name": "time"}, "time", ["weather", "time"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [TIME]}, "auto", ["time"]),
    ],
)
def test_tools(choice: Any, expected: str, names: list[str]) -> None:
    hosted = [{"type": kind} for kind in LEFT_OUT]
    request = parse({"input": "x", "tools": [*hosted, WEATHER, TIME], "tool_choice": choice})
    assert request.tool_choice == expected
    assert [tool["function"]["name"] for tool in request.tools] == names
    assert "declaration:time" in Chat().render(request.messages, request.tools)
    assert request.tool_places["time"] == f"tools[{len(LEFT_OUT) + 1}].parameters"
    Response.model_validate(answer(request, [Script().stop().reply()], **NAMES), strict=True)


def test_functions_in_a_namespace_are_called_with_it() -> None:
    """Codex has such tools, whose calls it knows only by both names."""
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": [TIME]}
    body = {"input": "x", "tools": [WEATHER, space]}
    request = parse(body)
    assert [tool["function"]["name"] for tool in request.tools] == ["weather", "time"]
    script = Script().call("weather", city="Rome").call("time").stop()
    whole = answer(request, [script.reply()], **NAMES)
    calls = Response.model_validate(whole, strict=True).output
    assert [getattr(call, "namespace", "") for call in calls] == [None, "agents"]
    last = events_of(request, script)[-1]["response"]["output"]
    assert [item.get("namespace") for item in last] == [None, "agents"]
    assert parse({"input": [whole["output"][1]]}).messages[0]["tool_calls"]
    for wrong, param in (
        ({**space, "tools": [space]}, "tools[0].tools[0].type"),
        ({**space, "tools": 5}, "tools[0].tools"),
        ({**space, "name": 5}, "tools[0].name"),
    ):
        assert refusal(parse, {"input": "x", "tools": [wrong]}).param == param


# Answers


def test_a_whole_answer_is_the_clients() -> None:
    script = Script().think("Hm", ".").text("Hel", "lo").stop()
    done = serve(script, cached=5).responses.create(
        model="m", input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert (done.id, done.created_at, done.model) == ("resp_7", 1700000000, "gemma4:e2b")
    assert (done.status, done.output_text, done.error) == ("completed", "Hello", None)
    assert (done.instructions, done.metadata) == ("Be brief.", {"a": "b"})
    assert (done.temperature, done.top_p, done.completed_at) == (0.5, 0.95, 1700000001)
    reasoning, message = done.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.summary] == ["Hm."]
    assert (message.type, message.status, message.id) == ("message", "completed", "msg_7_1")  # type: ignore[union-attr]
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (PROMPT, 7)
    assert done.usage.total_tokens == PROMPT + 7
    assert done.usage.input_tokens_details.cached_tokens == 5
    assert done.usage.output_tokens_details.reasoning_tokens == 3


def test_an_answer_can_be_sent_back() -> None:
    script = Script().think("Hm").text("I look.").call("weather", city="Bern").stop()
    done = serve(script).responses.create(model="m", input="Hi", tools=[WEATHER])  # type: ignore[list-item]
    call = done.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}  # type: ignore[union-attr]
    again = [item.model_dump() for item in done.output]
    messages = parse({"input": [{"role": "user", "content": "Hi"}, *again, result]}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning"] == "Hm"
    assert messages[1]["content"] == "I look."
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


@pytest.mark.parametrize(
    "script",
    [
        lambda: Script().text("a", "b").stop(),
        lambda: Script().think("Hm").text("a").call("weather", city="Zürich").call("time").stop(),
        lambda: Script().call("time").stop(),
        lambda: Script().think("Hm").length(),
        lambda: Script().text("cut").length(),
        lambda: Script().stop(),
        lambda: Script(),
    ],
)
def test_a_stream_gives_the_client_the_same_answer(script: Any) -> None:
    settings: Any = {"model": "m", "input": "Hi", "top_logprobs": 2, "tools": [WEATHER, TIME]}
    written = script()
    whole = serve(written, cached=3).responses.create(**settings)
    with serve(written, cached=3).responses.stream(**settings) as stream:
        final = None
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
    assert final is not None
    expected = whole.model_dump()
    got = {name: value for name, value in final.model_dump().items() if name in expected}
    for item in got["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    assert got == expected


def test_the_order_of_events() -> None:
    script = Script().think("Hm", ".").text("Hi", "!").call("time", zone="UTC").stop()
    events = events_of(parse({"input": "Hi", "stream": True}), script)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1, 2}
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress"
    finished = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert events[-1]["response"]["output"] == finished
    assert finished[2]["arguments"] == '{"zone": "UTC"}'


def test_what_was_cut_is_incomplete() -> None:
    events = events_of(parse({"input": "Hi"}), Script().text("a").length())
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (last["status"], last["output"][0]["status"]) == ("incomplete", "incomplete")
    assert last["completed_at"] is None


# Errors


def test_the_client_raises_what_is_wrong() -> None:
    served = serve(Script().stop())
    with pytest.raises(openai.BadRequestError, match="nothing is stored") as caught:
        served.responses.create(model="m", input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_an_error_in_a_stream_is_two_events() -> None:
    stream = ResponseStream(parse({"stream": True}), **NAMES)
    events = [*stream.begin(), *stream.error(RequestError("The GPU was lost.", 500))]
    for event in events:
        EVENT.validate_python(event, strict=True)
    served = client(lambda _: [sse(event, event["type"]) for event in events])
    seen = [*served.responses.create(model="m", input="Hi", stream=True)]
    assert [event.type for event in seen][2:] == ["error", "response.failed"]
    failed = seen[-1].response.error  # type: ignore[union-attr]
    assert failed is not None
    assert (failed.code, failed.message) == ("server_error", "The GPU was lost.")


# Any JSON at all

FIELDS = [
    *("model", "input", "instructions", "tools", "tool_choice", "reasoning", "text", "include"),
    *("max_output_tokens", "metadata", "truncation", "stream", "store", "top_logprobs"),
    *("parallel_tool_calls", "previous_response_id", "temperature", "stop", "prompt"),
    *("structured_outputs", *STRUCTURE_FIELDS),
]
KINDS = ["message", "reasoning", "function_call", "function_call_output", "item_reference"]
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS) | JSON,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": JSON,
        "summary": JSON,
        "call_id": st.just("a") | JSON,
        "name": st.just("f") | JSON,
        "arguments": st.just("{}") | JSON,
        "output": JSON,
    },
)
BODY = JSON | st.builds(
    lambda items, fields: {"input": items} | fields,
    st.lists(ITEM, max_size=4) | st.text(max_size=3),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)


@given(BODY)
def test_any_json_is_a_request_or_refused(given: Any) -> None:
    request = parsed_or_refused(parse, given)
    if request:
        resolve(request.settings)  # type: ignore[arg-type]
        with suppress(InputError):  # such as a schema that no template can write
            Chat().render(request.messages, request.tools)
        Response.model_validate(answer(request, [Script().stop().reply()], **NAMES))
