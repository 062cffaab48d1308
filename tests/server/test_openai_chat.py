"""OpenAI's Chat Completions API, against the `openai` package's types and client."""

import math
from contextlib import suppress
from typing import Any

import openai
import pytest
from helpers.anything import nested
from helpers.openai_client import JSON, PROMPT, Script, client, parsed_or_refused, refusal
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from webgemma.errors import InputError
from webgemma.replies import Usage
from webgemma.server.bodies import MAX_STOPS
from webgemma.server.openai_chat import ChatStream, answer, parse, timings
from webgemma.server.openai_common import DONE, IGNORED, MAX_CHOICES, REFUSED, sse
from webgemma.server.openai_structures import FIELDS as STRUCTURE_FIELDS
from webgemma.server.protocol import RequestError
from webgemma.settings import SETTINGS, resolve
from webgemma.text.chat import Chat

HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = "data:image/png;base64,iVBORw0KGgo="
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMES = {"id": "chatcmpl-7", "created": 1700000000, "model": "gemma4:e2b"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gemma4", "messages": HELLO} | fields


def serve(*scripts: Script, cached: int = 0) -> openai.OpenAI:
    """Return a client of a server whose model writes these replies."""
    scripts[0].cache(cached)

    def respond(given: Any) -> Any:
        request = parse(given)
        token_bytes = {k: v for script in scripts for k, v in script.texts.items()}.__getitem__
        if not request.stream:
            replies = [script.reply() for script in scripts]
            return answer(request, replies, **NAMES, token_bytes=token_bytes)
        stream = ChatStream(request, **NAMES, token_bytes=token_bytes)
        events = [*stream.begin()]
        for at in range(max(len(script.pieces) for script in scripts)):
            for index, script in enumerate(scripts):
                if at < len(script.pieces):
                    events += stream.piece(index, script.pieces[at])
        events += stream.end()
        for event in events:
            ChatCompletionChunk.model_validate(event, strict=True)
        return [*map(sse, events), DONE]

    return client(respond)


# Messages


def test_messages_of_all_roles_are_written_anew() -> None:
    request = parse(
        body(
            messages=[
                {"role": "developer", "content": "Be brief.", "name": "boss"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": IMAGE, "detail": "high"}},
                        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "reasoning_content": "Which city?",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "user", "content": "And now?"},
            ]
        )
    )
    call = {"name": "weather", "arguments": {"city": "Bern"}}
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": IMAGE}},
                {"type": "input_audio", "input_audio": {"data": "UklG"}},
            ],
        },
        {
            "role": "assistant",
            "content": "",
            "reasoning": "Which city?",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        {"role": "user", "content": "And now?"},
    ]
    assert "response:weather{value:" in Chat().render(request.messages)


def test_the_old_form_of_calls_is_read_in_a_conversation() -> None:
    old = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "3"},
    ]
    messages = parse(body(messages=HELLO + old)).messages
    assert messages[2] == {"role": "tool", "content": "3", "name": "f"}
    assert "response:f{" in Chat().render(messages)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,x"}, "path": "/etc/passwd"},
        {"type": "image_url", "image_url": {"url": "data:,x"}, "image": "/etc/passwd"},
        {"type": "input_audio", "input_audio": {"data": "AA=="}, "audio": "/etc/passwd"},
    ],
)
def test_no_path_of_a_file_reaches_the_engine(part: dict[str, Any]) -> None:
    message = {"role": "user", "content": [part], "images": ["/etc/passwd"]}
    assert "passwd" not in repr(parse(body(messages=[message])))


@pytest.mark.parametrize(
    "url",
    ["http://a.example/x.png", "https://a.example/x.png", "file:///etc/passwd", "/x", "data:"],
)
def test_nothing_is_fetched(url: str) -> None:
    for kind in ("image_url", "video_url"):
        part = {"type": kind, kind: {"url": url}}
        error = refusal(parse, body(messages=[{"role": "user", "content": [part]}]))
        assert "nothing is fetched" in str(error)
        assert (error.param or "").startswith("messages[0].content[0].")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hello", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "poem"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0]"),
        (
            [{"role": "system", "content": [{"type": "image_url", "image_url": IMAGE}]}],
            "messages[0].content[0]",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}],
            "messages[0].content[0].input_audio",
        ),
        ([{"role": "assistant", "content": "", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            "messages[0].tool_calls[0].type",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "tool_call_id": "a", "content": "x"}], "messages[0]"),
        (
            [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ],
            "messages[1]",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(messages: Any, param: str) -> None:
    error = refusal(parse, body(messages=messages))
    assert error.param == param


# Settings


def test_settings_have_their_own_names() -> None:
    request = parse(
        body(
            max_tokens=10,
            max_completion_tokens=20,
            temperature=0,
            top_p=0.5,
            presence_penalty=1,
            frequency_penalty=0.5,
            seed=-1,
            stop=["a", "b"],
            logit_bias={"12": -100, "foo": 0},
            top_k=-1,
            min_p=0.1,
            typical_p=0.9,
            repeat_penalty=1.5,
            repeat_last_n=32,
            speculate="lookup",
            max_drafts=3,
        )
    )
    assert request.settings == {
        "max_tokens": 20,
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "seed": 2**64 - 1,
        "stop": ("a", "b"),
        "logit_bias": {12: -100.0},
        "top_k": 0,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.5,
        "recent": 32,
        "speculate": "lookup",
        "max_drafts": 3,
    }
    resolve(request.settings)  # type: ignore[arg-type]


def test_nulls_are_defaults() -> None:
    names = ["max_tokens", "temperature", "seed", "stop", "n", "logit_bias", "tools", "stream"]
    names += ["tool_choice", "logprobs", "top_logprobs", "stream_options", "response_format"]
    names += [*STRUCTURE_FIELDS, "structured_outputs"]
    names += ["parallel_tool_calls", "reasoning_effort", "think", "top_k", "functions", "model"]
    request = parse(body(**dict.fromkeys(names)))
    assert request.settings == {}
    assert (request.choices, request.stream, request.think, request.model) == (1, False, None, "")
    assert (request.tool_choice, request.parallel, request.structure) == ("auto", True, None)


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1, -9007199254740991])
def test_any_seed_is_one_of_the_engines(seed: int) -> None:
    resolve(parse(body(seed=seed)).settings)  # type: ignore[arg-type]


def test_no_limit_is_spelled_minus_one() -> None:
    assert parse(body(max_tokens=-1)).settings["max_tokens"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": "x"}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": "all"}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"foo": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": False}}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"think": 1}, "think"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"model": 5}, "model"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"repeat_penalty": "x"}, "repeat_penalty"),
        ({"top_k": []}, "top_k"),
        ({"speculate": "always"}, "speculate"),
        ({"max_drafts": "x"}, "max_drafts"),
        *(({name: "x"}, name) for name in REFUSED),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(parse, body(**fields))
    assert error.param == param


def test_all_settings_of_the_page_are_read() -> None:
    on_page = [name for name, setting in SETTINGS.items() if setting.on_page]
    given = dict.fromkeys(on_page, 1)
    assert parse(body(**given)).settings == given
    assert parse(body(**dict.fromkeys(on_page))).settings == {}


def test_a_last_message_is_continued_in_vllms_words() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Once", "reasoning": "A story."}]
    assert parse(body(messages=begun, continue_final_message=True)).continue_last
    assert not parse(body(messages=begun)).continue_last
    calls = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "time"}}]}]
    for messages in (HELLO, [*HELLO, *calls]):
        with pytest.raises(RequestError, match="no text of the assistant's"):
            parse(body(messages=messages, continue_final_message=True))


def test_what_a_stream_says_beyond_openais_is_wanted_or_not() -> None:
    request = parse(body(stream=True, progress=True, timings_per_token=True, watch=True))
    assert request.progress
    assert request.own["timings"]
    assert request.settings == {"watch": True}
    plain = parse(body(progress=True, timings_per_token=True))  # which is no stream
    assert not plain.progress
    assert not plain.own["timings"]
    for name in ("progress", "timings_per_token", "watch", "continue_final_message"):
        with pytest.raises(RequestError, match=f"{name} is 'yes'; it must be true or false"):
            parse(body(**{name: "yes"}))


def test_tokens_and_times_are_in_llama_cpps_words() -> None:
    written = timings(Usage(10, 5, 512, left_out=2, cached=7), 0.5, 2.0)
    assert written == {
        "cache_n": 7,
        "prompt_n": 3,
        "prompt_ms": 500.0,
        "prompt_per_second": 6.0,
        "predicted_n": 5,
        "predicted_ms": 2000.0,
        "predicted_per_second": 2.0,
        "n_ctx": 512,
        "left_out": 2,
    }
    assert timings(Usage(1, 1, 512), 0.0, 0.0)["predicted_per_second"] == 0
    speculated = timings(Usage(10, 5, 512, 2, 7, drafted=6, accepted=4), 0.5, 2.0)
    assert speculated == written | {"draft_n": 6, "draft_n_accepted": 4}


@pytest.mark.parametrize("name", sorted(IGNORED.keys() - {"best_of", "functions"}))
def test_ignored_fields_change_nothing(name: str) -> None:
    assert parse(body(**{name: {"any": ["thing"]}})) == parse(body())


@pytest.mark.parametrize("given", [None, 5, "x", [], [{}], {1: 2}])
def test_a_body_is_an_object(given: Any) -> None:
    assert "JSON object" in str(refusal(parse, given))


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "high", "think": False}, False),
        ({"think": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_has_several_names(fields: dict[str, Any], think: bool | None) -> None:
    assert parse(body(**fields)).think is think


def test_everything_at_once_is_accepted() -> None:
    """What openai-python's own tests send together has to be answered."""
    served = serve(Script().text("Hi").stop())
    done = served.chat.completions.create(
        messages=[{"role": "developer", "content": "string", "name": "name"}],
        model="gpt-4o",
        audio={"format": "wav", "voice": "alloy"},
        frequency_penalty=-2,
        function_call="none",
        functions=[{"name": "name", "parameters": {"foo": "bar"}}],
        logit_bias={"foo": 0},
        logprobs=True,
        max_completion_tokens=0,
        max_tokens=0,
        metadata={"foo": "string"},
        modalities=["text", "audio"],
        n=1,
        parallel_tool_calls=True,
        prediction={"content": "string", "type": "content"},
        presence_penalty=-2,
        prompt_cache_key="key",
        reasoning_effort="none",
        response_format={"type": "text"},
        safety_identifier="id",
        seed=-9007199254740991,
        service_tier="auto",
        stop="\n",
        store=True,
        stream=False,
        stream_options={"include_usage": True, "include_obfuscation": True},
        temperature=1,
        tool_choice="none",
        tools=[{"type": "function", "function": {"name": "a", "parameters": {"foo": "bar"}}}] * 3,
        top_logprobs=0,
        top_p=1,
        user="user-1234",
        verbosity="low",
        web_search_options={"search_context_size": "low"},
    )
    assert done.choices[0].message.content == "Hi"


# Tools


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["weather", "time"]),
        ("auto", "auto", ["weather", "time"]),
        ("none", "none", ["weather", "time"]),
        ("required", "required", ["weather", "time"]),
        ({"type": "function", "function": {"name": "time"}}, "time", ["weather", "time"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
            "required",
            ["time"],
        ),
    ],
)
def test_tool_choice(choice: Any, expected: str, names: list[str]) -> None:
    request = parse(body(tools=[WEATHER, TIME], tool_choice=choice))
    assert request.tool_choice == expected
    assert [tool["function"]["name"] for tool in request.tools] == names
    assert "declaration:time" in Chat().render(request.messages, request.tools)
    assert request.tool_places == {
        "weather": "tools[0].function.parameters",
        "time": "tools[1].function.parameters",
    }
    assert request.tools[0]["function"].get("strict") is (True if "weather" in names else None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [{"function": {"name": "none"}}],
                "tool_choice": {"type": "function", "function": {"name": "none"}},
            },
            "tool_choice.function.name",
        ),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        (
            {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_wrong_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(parse, body(**fields))
    assert error.param == param


# Answers


def test_a_whole_answer_is_the_clients() -> None:
    script = Script().think("Hm", ".").text("Hel", "lo").stop()
    done = serve(script, cached=5).chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
    assert isinstance(done, ChatCompletion)
    assert (done.id, done.created, done.model) == ("chatcmpl-7", 1700000000, "gemma4:e2b")
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello", "stop")
    assert choice.message.tool_calls is None
    extra = choice.message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == "Hm."
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (PROMPT, 7)
    assert done.usage.total_tokens == PROMPT + 7
    assert done.usage.prompt_tokens_details.cached_tokens == 5  # type: ignore[union-attr]
    # <|channel> Hm . — <channel|> counts with what follows it
    assert done.usage.completion_tokens_details.reasoning_tokens == 3  # type: ignore[union-attr]


def test_tool_calls_are_the_clients() -> None:
    script = Script().call("weather", city="Zürich").call("time").stop()
    done = serve(script).chat.completions.create(model="m", messages=HELLO, tools=[WEATHER, TIME])  # type: ignore[arg-type,list-item]
    choice = done.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = choice.message.tool_calls or []
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
        ("call_7_0_0", "weather", '{"city": "Zürich"}'),
        ("call_7_0_1", "time", "{}"),
    ]


def test_a_stream_gives_the_client_the_same_answer() -> None:
    def scripts() -> list[Script]:
        return [
            Script()
            .think("Hm")
            .text("One", " two")
            .call("weather", city="Bern")
            .call("time")
            .stop(),
            Script().text("Cut").length(),
        ]

    settings = {"model": "m", "messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = serve(*scripts(), cached=3).chat.completions.create(**settings)  # type: ignore[call-overload]
    with serve(*scripts(), cached=3).chat.completions.stream(
        **settings, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    assert streamed.usage == whole.usage
    assert streamed.usage.prompt_tokens == PROMPT
    for got, expected in zip(streamed.choices, whole.choices, strict=True):
        assert got.finish_reason == expected.finish_reason
        assert got.message.content == expected.message.content
        assert got.logprobs.content == expected.logprobs.content
        assert [call.function.arguments for call in got.message.tool_calls or ()] == [
            call.function.arguments for call in expected.message.tool_calls or ()
        ]
        assert [call.id for call in got.message.tool_calls or ()] == [
            call.id for call in expected.message.tool_calls or ()
        ]
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "length"]


def test_the_chunks_of_a_stream() -> None:
    request = parse(body(stream=True, stream_options={"include_usage": True}))
    stream = ChatStream(request, **NAMES)
    events = [*stream.begin()]
    for piece in Script().think("Hm").text("Hi").call("time").stop().cache(2).pieces:
        events += stream.piece(0, piece)
    events += stream.end()
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "Hm", "reasoning_content": "Hm"},
        {"content": "Hi"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_7_0_0",
                    "type": "function",
                    "function": {"name": "time", "arguments": "{}"},
                }
            ]
        },
        {},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None, None, None, None, "tool_calls"]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert events[-1]["usage"]["completion_tokens"] == 8


def test_without_include_usage_no_chunk_has_it() -> None:
    stream = ChatStream(parse(body(stream=True)), **NAMES)
    events = [*stream.begin(), *stream.piece(0, Script().text("x").length().pieces[0])]
    assert not any("usage" in event for event in [*events, *stream.end()])


def test_no_tokens_at_all_end_by_length() -> None:
    request = parse(body(max_tokens=0, stream_options={"include_usage": True}))
    stream = ChatStream(request, **NAMES)
    events = [*stream.begin(), *stream.end()]
    assert [event["choices"][0]["finish_reason"] for event in events[:2]] == [None, "length"]
    done = ChatCompletion.model_validate(answer(request, [Script().reply()], **NAMES))
    assert (done.choices[0].finish_reason, done.choices[0].message.content) == ("length", "")


def test_logprobs_are_those_of_the_text() -> None:
    script = Script().think("Hm").text("H").halves("é").call("time").text("!").stop(text=" ")
    done = serve(script).chat.completions.create(
        model="m",
        messages=HELLO,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=2,
    )
    tokens = done.choices[0].logprobs.content or []  # type: ignore[union-attr]
    assert b"".join(bytes(token.bytes or ()) for token in tokens) == "Hé!".encode()
    assert [token.token for token in tokens] == ["H", "\ufffd", "\ufffd", "!"]
    assert tokens[0].logprob == -3.5  # its own, after three tokens of thinking
    first, second = tokens[0].top_logprobs
    assert (first.token, first.logprob) == ("H", -0.5)
    assert (second.token, second.logprob, bytes(second.bytes or ())) == (
        "<turn|>",
        -9999.0,
        b"<turn|>",
    )


def test_logprobs_are_absent_unless_wanted() -> None:
    done = serve(Script().text("H").stop()).chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
    assert done.choices[0].logprobs is None


# Errors


def test_the_client_raises_what_is_wrong() -> None:
    served = serve(Script().text("x").stop())
    with pytest.raises(openai.BadRequestError, match="temperature is 'hot'") as caught:
        served.chat.completions.create(model="m", messages=HELLO, temperature="hot")  # type: ignore[call-overload]
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_the_client_raises_an_error_in_a_stream() -> None:
    stream = ChatStream(parse(body(stream=True)), **NAMES)
    events = [*stream.begin(), *stream.error(RequestError("The GPU was lost.", 500))]
    served = client(lambda _: [*map(sse, events), DONE])
    chunks = served.chat.completions.create(model="m", messages=HELLO, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match=r"The GPU was lost\."):
        list(chunks)


# Any JSON at all

FIELDS = [
    *("model", "messages", "temperature", "top_p", "seed", "n", "stop", "max_tokens", "stream"),
    *("max_completion_tokens", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("parallel_tool_calls", "response_format", "stream_options", "reasoning_effort", "think"),
    *("modalities", "functions", "function_call", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "typical_p", "repeat_penalty", "chat_template_kwargs", "best_of"),
    *("speculate", "max_drafts"),
    *("structured_outputs", *STRUCTURE_FIELDS),
]
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "function"]) | JSON,
        "content": JSON
        | st.lists(
            st.fixed_dictionaries(
                {"type": st.sampled_from(["text", "image_url", "input_audio", "file"]) | JSON},
                optional={"text": JSON, "image_url": JSON, "input_audio": JSON},
            ),
            max_size=2,
        ),
        "name": JSON,
        "tool_call_id": JSON,
        "tool_calls": JSON
        | st.lists(st.fixed_dictionaries({"id": JSON, "function": JSON}), max_size=2),
        "reasoning": JSON,
        "function_call": JSON,
    },
)
BODY = JSON | st.builds(
    lambda messages, fields: {"messages": messages} | fields,
    st.lists(MESSAGE, max_size=3) | st.just(HELLO),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)


@pytest.mark.parametrize("name", FIELDS)
def test_odd_values_are_refused_or_ignored(name: str) -> None:
    for value in (nested(10_000), 10**5000, "x" * 10**6, "\ud800", math.nan, math.inf):
        parsed_or_refused(parse, body(**{name: value}))
        parsed_or_refused(parse, body(**{name: [value]}))
        parsed_or_refused(parse, body(**{name: {"type": value, "1": value}}))
        function = {"name": "f", "parameters": {name: value}}
        parsed_or_refused(parse, body(tools=[{"type": "function", "function": function}]))


@given(BODY)
def test_any_json_is_a_request_or_refused(given: Any) -> None:
    request = parsed_or_refused(parse, given)
    if request:
        resolve(request.settings)  # type: ignore[arg-type]
        with suppress(InputError):  # such as a schema that no template can write
            Chat().render(request.messages, request.tools)
