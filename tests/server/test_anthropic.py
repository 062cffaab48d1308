"""Anthropic's API: what its own client sends is read, and what it gets it understands."""

import base64
import json
from dataclasses import replace
from itertools import count
from typing import Any

import anthropic as client
import httpx2
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from helpers.bodies import JSON, fields, outcome
from helpers.pieces import Thought, cached_prompt, reply, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from webgemma.replies import Piece
from webgemma.server import anthropic
from webgemma.server.protocol import Reply, Request, RequestError, Structure
from webgemma.text.chat import Chat
from webgemma.text.parser import ToolCall

PNG = b"\x89PNG\r\n\x1a\n"
BASE64 = base64.b64encode(PNG).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
USER = {"role": "user", "content": "Hi"}
BODY = {"model": "gemma4:e2b", "max_tokens": 32, "messages": [USER]}
WEATHER = ToolCall("weather", {"city": "Zürich", "days": [1, 2]})
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


class Served:
    """Anthropic's client at a server that gives one reply; keeps the requests it read."""

    def __init__(self, pieces: list[Piece], cached: int = 0) -> None:
        self.pieces = cached_prompt(pieces, cached)
        self.requests: list[Request] = []
        self.ids = (f"toolu_{n}" for n in count())
        self.client = client.Anthropic(
            api_key="x",
            base_url="http://test",
            max_retries=0,
            http_client=httpx2.Client(transport=httpx2.MockTransport(self.handle)),
        )

    def create(self, **more: Any) -> Message:
        return self.client.messages.create(**(BODY | more))

    def handle(self, sent: httpx2.Request) -> httpx2.Response:
        body = json.loads(sent.content)
        try:
            if sent.url.path == "/v1/messages/count_tokens":
                self.requests.append(anthropic.parse_count(body))
                return httpx2.Response(200, json=anthropic.count_answer(12))
            request = anthropic.parse(body)
        except RequestError as error:
            return httpx2.Response(error.status, json=anthropic.error(error))
        self.requests.append(request)
        if request.stream:
            frames = b"".join(anthropic.frame(event) for event in self.events(request))
            return httpx2.Response(200, content=frames)
        answer = anthropic.answer(
            request,
            [whole(self.pieces)],
            id="msg_1",
            call_ids=lambda: next(self.ids),
        )
        Message.model_validate(answer, strict=True)
        return httpx2.Response(200, json=answer)

    def events(self, request: Request) -> list[anthropic.Event]:
        stream = anthropic.Stream(request, id="msg_1", call_ids=lambda: next(self.ids))
        events = stream.begin(self.pieces[0].usage if self.pieces else None)
        for piece in self.pieces:
            events += stream.piece(0, piece)
        events += stream.end()
        for name, data in events:
            assert data["type"] == name
            if name != "ping":
                EVENT.validate_python(data, strict=True)
        return events


# Answers


def test_an_answer_as_a_whole():
    served = Served(reply(Thought("Hm."), "Hello", " you", WEATHER), cached=3)
    answer = served.create(tools=[TOOL], thinking=THINKING)
    thinking, text, use = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "Hello you")
    assert (use.type, use.id, use.name, use.input) == (
        *("tool_use", "toolu_0", "weather"),
        WEATHER.arguments,
    )
    assert (answer.id, answer.role, answer.model) == ("msg_1", "assistant", "gemma4:e2b")
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 3, 5)


def test_a_stream_gives_the_same():
    pieces = reply(Thought("H"), Thought("m."), "Hello", " you", WEATHER, WEATHER)
    served = Served(pieces, cached=3)
    with served.client.messages.stream(
        **BODY, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        assert "".join(stream.text_stream) == "Hello you"
        streamed = stream.get_final_message()
    answer = served.create(tools=[TOOL], thinking=THINKING)
    different = {block.id: block for block in answer.content if block.type == "tool_use"}
    assert list(different) == ["toolu_2", "toolu_3"]  # the ids go on
    for block in streamed.content:
        if block.type == "tool_use":
            block.id = f"toolu_{int(block.id[-1]) + 2}"
    assert [b.to_dict() for b in streamed.content] == [b.to_dict() for b in answer.content]
    assert streamed.stop_reason == answer.stop_reason == "tool_use"
    assert streamed.usage.to_dict() == answer.usage.to_dict()


def test_the_events_of_a_stream_come_in_order():
    served = Served(reply(Thought("Hm."), "Hi", WEATHER))
    request = anthropic.parse(BODY | {"thinking": THINKING, "tools": [TOOL]})
    events = served.events(request)
    assert [name for name, _ in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        *("message_delta", "message_stop"),
    ]
    blocks = [data for name, data in events if name.startswith("content_block")]
    assert [data["index"] for data in blocks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    kinds = [data["delta"]["type"] for data in blocks if "delta" in data]
    assert kinds == ["thinking_delta", "text_delta", "input_json_delta"]
    start = events[0][1]["message"]
    assert (start["usage"]["input_tokens"], start["stop_reason"], start["content"]) == (7, None, [])


def test_text_after_a_call_is_a_block_of_its_own():
    served = Served(reply("One", WEATHER, "two"))
    with served.client.messages.stream(**BODY, tools=[TOOL]) as stream:
        content = stream.get_final_message().content
    assert [block.type for block in content] == ["text", "tool_use", "text"]


def test_thoughts_are_not_shown_unless_requested():
    for thinking in ({"type": "disabled"}, THINKING | {"display": "omitted"}, None):
        served = Served(reply(Thought("Hm."), "Hi"))
        given: dict[str, Any] = {"thinking": thinking} if thinking else {}
        assert [block.type for block in served.create(**given).content] == ["text"]
        with served.client.messages.stream(**BODY, **given) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pieces", "max_tokens", "stop", "reason"),
    [
        (reply("Hi"), 32, None, "end_turn"),
        (reply("Hi"), 32, "END", "stop_sequence"),
        (reply("Hi", finish="length"), 1, None, "max_tokens"),
        (reply("Hi", finish="length"), 32, None, "model_context_window_exceeded"),
        (reply("Hi", WEATHER), 32, None, "tool_use"),
        ([], 0, None, "max_tokens"),
    ],
)
def test_why_a_reply_ended(pieces, max_tokens, stop, reason, stream):
    if stop:
        pieces = [*pieces[:-1], replace(pieces[-1], stop=stop)]
    served = Served(pieces)
    given = BODY | {"max_tokens": max_tokens}
    if stream:
        with served.client.messages.stream(**given) as events:
            answer = events.get_final_message()
    else:
        answer = served.client.messages.create(**given)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)


@pytest.mark.parametrize("odd", ["\x85", "\u2028", "\n\n", "\r", "ü😀", "data: x\n\nevent: y"])
def test_a_text_cannot_break_a_stream(odd):
    served = Served(reply(f"a{odd}b", ToolCall("f", {"a": odd})))
    with served.client.messages.stream(**BODY) as stream:
        text, use = stream.get_final_message().content
    assert text.text == f"a{odd}b"
    assert use.input == {"a": odd}


def test_tokens_are_counted():
    served = Served([])
    counted = served.client.messages.count_tokens(model="m", messages=[USER], tools=[TOOL])
    assert counted == MessageTokensCount(input_tokens=12)
    assert served.requests[0].tools[0]["function"]["name"] == "weather"


def test_counting_ignores_what_only_a_reply_would_honour():
    form = {"format": {"type": "json_object"}}
    body = {"model": "m", "messages": [USER], "output_config": form}
    assert anthropic.parse_count(body).messages
    with pytest.raises(RequestError):
        anthropic.parse({**body, "max_tokens": 5})


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", client.BadRequestError),
        (401, "authentication_error", client.AuthenticationError),
        (404, "not_found_error", client.NotFoundError),
        (413, "request_too_large", client.RequestTooLargeError),
        (422, "invalid_request_error", client.UnprocessableEntityError),
        (500, "api_error", client.InternalServerError),
        (503, "overloaded_error", client.ServiceUnavailableError),
    ],
)
def test_errors_are_those_of_the_client(status, kind, raised):
    def handle(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, json=anthropic.error(RequestError("No.", status)))

    asked = client.Anthropic(
        api_key="x",
        base_url="http://test",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(handle)),
    )
    with pytest.raises(raised) as caught:
        asked.messages.create(**BODY)
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_an_error_ends_a_stream():
    served = Served([])
    stream = anthropic.Stream(anthropic.parse(BODY), id="m", call_ids=lambda: "t")
    events = [*stream.begin(), *stream.piece(0, reply("Hel")[0])]
    events.append(stream.error(RequestError("The GPU was lost.", 500)))
    frames = b"".join(map(anthropic.frame, events))
    served.handle = lambda _: httpx2.Response(200, content=frames)  # type: ignore[method-assign]
    served.client = served.client.with_options(
        http_client=httpx2.Client(transport=httpx2.MockTransport(served.handle))
    )
    with (
        pytest.raises(client.APIStatusError, match=r"The GPU was lost\."),
        served.client.messages.stream(**BODY) as read,
    ):
        read.get_final_message()


# Requests


def test_settings():
    request = anthropic.parse(
        BODY
        | {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "stop_sequences": ["END", "\n"]}
        | {"metadata": {"user_id": "u"}, "service_tier": "auto", "unknown": 1}
    )
    assert request.settings == {
        "max_tokens": 32,
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.8,
        "stop": ("END", "\n"),
    }
    assert (request.stream, request.think, request.tool_choice) == (False, False, "auto")


@pytest.mark.parametrize(
    ("thinking", "think"),
    [(THINKING, True), ({"type": "adaptive"}, True), ({"type": "disabled"}, False), (None, False)],
)
def test_thinking(thinking, think):
    assert anthropic.parse(BODY | {"thinking": thinking}).think is think


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, "weather"),
    ],
)
def test_the_choice_of_a_tool(choice, expected):
    request = anthropic.parse(BODY | {"tools": [TOOL], "tool_choice": choice})
    assert (request.tool_choice, request.parallel) == (expected, True)
    one = {**choice, "disable_parallel_tool_use": True}
    assert not anthropic.parse(BODY | {"tools": [TOOL], "tool_choice": one}).parallel


def test_strict_tools():
    (tool,) = anthropic.parse(BODY | {"tools": [TOOL | {"strict": True}]}).tools
    assert tool["function"]["strict"] is True
    (tool,) = anthropic.parse(BODY | {"tools": [TOOL | {"strict": False}]}).tools
    assert "strict" not in tool["function"]


@pytest.mark.parametrize("old", [False, True])
def test_json_by_a_schema(old: bool) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    given = {"output_format": form} if old else {"output_config": {"format": form, "effort": "low"}}
    place = "output_format.schema" if old else "output_config.format.schema"
    assert anthropic.parse(BODY | given).structure == Structure("schema", form["schema"], place)
    assert anthropic.parse(BODY | {"output_config": {"effort": "low"}}).structure is None


@pytest.mark.parametrize(
    "system",
    ["Be brief.\nBe kind.", [{"type": "text", "text": t} for t in ("Be brief.", "Be kind.")]],
)
def test_a_system_prompt_in_both_forms(system):
    request = anthropic.parse(BODY | {"system": system})
    assert request.messages[0] == {"role": "system", "content": "Be brief.\nBe kind."}


def test_a_conversation_with_tools_reaches_the_template():
    served = Served(reply("Sunny."))
    messages: list[Any] = [
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "Weather here?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "s"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Basel"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "12 degrees"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no such city"}, IMAGE],
                },
            ],
        },
    ]
    served.create(messages=messages, tools=[TOOL], system="Be brief.")
    request = served.requests[0]
    user, assistant, first, second = request.messages[1:]
    assert user["content"][0] == {"type": "image", "image": PNG}
    assert [call["id"] for call in assistant["tool_calls"]] == ["t1", "t2"]
    assert first == {"role": "tool", "tool_call_id": "t1", "content": "12 degrees"}
    assert second["content"] == {"error": "no such city"}
    assert second["images"] == [PNG]
    prompt = Chat().render(request.messages, request.tools)
    for part in ("Be brief.", "declaration:weather", "I look.", "Wait.", "12 degrees", "error"):
        assert part in prompt
    assert prompt.count("call:weather{city") == 2
    assert prompt.count("response:weather") == 2


def test_text_after_results_is_a_users_turn():
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t"},
                {"type": "text", "text": "Go on"},
            ],
        },
    ]
    request = anthropic.parse(BODY | {"messages": messages})
    assert [message["role"] for message in request.messages] == [
        *("user", "assistant", "tool", "user")
    ]


def test_an_assistants_last_message_is_continued():
    messages = [USER, {"role": "assistant", "content": "The best is ("}]
    assert anthropic.parse(BODY | {"messages": messages}).continue_last
    assert not anthropic.parse(BODY).continue_last


def test_a_document_of_plain_text():
    document = {"type": "document", "source": {"type": "text", "data": "Once."}}
    request = anthropic.parse(BODY | {"messages": [{"role": "user", "content": [document]}]})
    assert request.messages[0]["content"] == [{"type": "text", "text": "Once."}]


def wrong(change: dict[str, Any], param: str, sentence: str) -> Any:
    return pytest.param(change, param, sentence, id=f"{param}: {sentence[:30]}")


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def source(**fields: Any) -> dict[str, Any]:
    return content({"type": "image", "source": fields})


BLOCK = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        wrong({"model": None}, "model", "model is missing"),
        wrong({"max_tokens": None}, "max_tokens", "max_tokens is missing; it must be a whole"),
        wrong({"max_tokens": -1}, "max_tokens", "at least 0"),
        wrong({"max_tokens": "9"}, "max_tokens", "max_tokens is '9'"),
        wrong({"messages": None}, "messages", "messages is missing"),
        wrong({"messages": []}, "messages", "at least one message"),
        wrong({"messages": [5]}, "messages[0]", "must be a JSON object, not a number"),
        wrong({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        wrong({"messages": [USER | {"role": "tool"}]}, "messages[0].role", "one of user"),
        wrong(content({"type": "video"}), f"{BLOCK}.type", "one of text, image"),
        wrong(content({"type": "text"}), f"{BLOCK}.text", "is missing"),
        wrong(source(type="url", url="http://a/b"), f"{BLOCK}.source.type", "nothing is fetched"),
        wrong(source(type="file", file_id="f"), f"{BLOCK}.source.type", "nothing is fetched"),
        wrong(source(type="base64", data="%"), f"{BLOCK}.source.data", "is not base64"),
        wrong(source(type="base64"), f"{BLOCK}.source.data", "must be base64 text, not null"),
        wrong(
            content({"type": "document", "source": {"type": "base64", "data": "x"}}),
            f"{BLOCK}.source.type",
            "plain text only",
        ),
        wrong(
            content({"type": "tool_result", "tool_use_id": "t9"}),
            f"{BLOCK}.tool_use_id",
            "in the message before",
        ),
        wrong(
            content({"type": "tool_use", "id": "t", "name": "f", "input": []}, role="assistant"),
            f"{BLOCK}.input",
            "must be a JSON object",
        ),
        wrong(content({"type": "server_tool_use"}, role="assistant"), f"{BLOCK}.type", "one of"),
        wrong(content(IMAGE, role="system"), f"{BLOCK}.type", "one of text"),
        wrong({"system": 5}, "system", "must be a string"),
        wrong({"system": [{"type": "image"}]}, "system[0].type", "one of text"),
        wrong({"tools": {}}, "tools", "must be a list"),
        wrong({"tools": [{"name": "f"}]}, "tools[0].input_schema", "a JSON schema"),
        wrong({"tools": [TOOL | {"name": ""}]}, "tools[0].name", "at least one character"),
        wrong({"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0].type", "client runs"),
        wrong({"tool_choice": {"type": "any"}}, "tool_choice.type", "there are no tools"),
        wrong({"tool_choice": {"type": "some"}}, "tool_choice.type", "one of auto, any"),
        wrong(
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice.name",
            "the name of a tool: weather",
        ),
        wrong({"stop_sequences": "END"}, "stop_sequences", "must be a list"),
        wrong({"stop_sequences": [1]}, "stop_sequences", "at least one character"),
        wrong({"temperature": "hot"}, "temperature", "temperature is 'hot'; it must be a number"),
        wrong({"top_p": 2}, "top_p", "between 0 and 1"),
        wrong({"top_k": 1.5}, "top_k", "a whole number"),
        wrong({"stream": 1}, "stream", "true or false"),
        wrong({"thinking": {"type": "deep"}}, "thinking.type", "one of enabled"),
        wrong({"thinking": True}, "thinking", "must be a JSON object"),
        wrong({"output_config": {"format": {}}}, "output_config.format.type", "is missing"),
        wrong({"output_config": {"format": 5}}, "output_config.format", "must be a JSON object"),
        wrong({"output_config": 5}, "output_config", "must be a JSON object"),
        wrong({"output_format": {"type": "text"}}, "output_format.type", "one of json_schema"),
        wrong({"output_format": {"type": "json_schema"}}, "output_format.schema", "a JSON schema"),
        wrong(
            {"output_format": {"type": "json_schema", "schema": []}},
            "output_format.schema",
            "must be a JSON object",
        ),
        wrong(
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "messages": [USER, {"role": "assistant", "content": "{"}],
            },
            "output_format.schema",
            "cannot continue the assistant's last message",
        ),
        wrong({"tools": [TOOL | {"strict": 1}]}, "tools[0].strict", "true or false"),
        wrong(
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
            "true or false",
        ),
        wrong(
            {"tools": [TOOL | {"name": "none"}], "tool_choice": {"type": "tool", "name": "none"}},
            "tool_choice.name",
            "rename the tool",
        ),
        wrong({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        wrong({"container": "c"}, "container", "runs no code"),
    ],
)
def test_a_wrong_body_is_refused_with_a_sentence(change, param, sentence):
    with pytest.raises(RequestError) as caught:
        anthropic.parse(BODY | change)
    assert sentence in str(caught.value)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_a_result_must_follow_its_call():
    """The template would leave it out, and the model would not know."""
    messages = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]},
        {"role": "user", "content": "Wait"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ]
    with pytest.raises(RequestError, match="in the message before"):
        anthropic.parse(BODY | {"messages": messages})


KINDS = "text image document tool_use tool_result thinking redacted_thinking other"
BLOCKS = st.builds(
    lambda kind, more: {"type": kind} | more,
    st.sampled_from(KINDS.split()),
    fields("text source tool_use_id content id name input thinking is_error")
    | fields("source", fields("type data media_type")),
)
MESSAGES = st.lists(
    st.builds(
        lambda role, blocks: {"role": role, "content": blocks},
        st.sampled_from(["user", "assistant", "system"]),
        st.lists(BLOCKS, max_size=3) | JSON,
    ),
    max_size=3,
)
BODIES = (
    JSON
    | fields("model messages max_tokens system tools tool_choice thinking stream output_config")
    | st.builds(
        lambda format, choice: BODY | {"output_config": {"format": format}, "tool_choice": choice},
        fields("type schema") | st.just({"type": "json_schema", "schema": {}}) | JSON,
        fields("type name disable_parallel_tool_use"),
    )
    | st.builds(lambda messages: BODY | {"messages": messages}, MESSAGES)
    | st.builds(
        lambda more: BODY | more,
        fields("temperature top_k top_p stop_sequences tools tool_choice thinking system metadata"),
    )
)


@pytest.mark.parametrize("parse", [anthropic.parse, anthropic.parse_count])
@given(body=BODIES)
@settings(max_examples=300, deadline=None)
def test_any_body_is_a_request_or_a_sentence(parse, body):
    result = outcome(parse, body)
    if isinstance(result, Request):
        assert result.messages
    else:
        assert result.endswith(".")
        assert len(result) < 2000


TEXTS = st.sampled_from(["a", " b", "\n"])
PARTS = st.lists(TEXTS | TEXTS.map(Thought) | st.just(WEATHER), max_size=8)


@given(parts=PARTS, finish=st.sampled_from(["stop", "length"]))
@settings(max_examples=60, deadline=None)
def test_any_reply_streams_to_what_it_is(parts, finish):
    request = anthropic.parse(BODY | {"thinking": THINKING, "tools": [TOOL]})
    pieces = reply(*parts, finish=finish)
    served = Served(pieces)
    text, thinking, calls = "", "", []
    is_open: int | None = None
    for name, data in served.events(request):
        if name == "content_block_start":
            assert is_open is None
            is_open = data["index"]
        elif name == "content_block_delta":
            assert is_open == data["index"]
            text += data["delta"].get("text", "")
            thinking += data["delta"].get("thinking", "")
            if "partial_json" in data["delta"]:
                calls.append(json.loads(data["delta"]["partial_json"]))
        elif name == "content_block_stop":
            assert is_open == data["index"]
            is_open = None
    assert is_open is None
    expected: Reply = whole(pieces)
    assert (text, thinking) == (expected.text, expected.thinking)
    assert calls == [call.arguments for call in expected.tool_calls]
