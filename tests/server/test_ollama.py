"""Ollama's API for text: what its own client sends is read, and what it gets it understands."""

import base64
import json
import math
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import ollama as client
import pytest
from helpers.bodies import JSON, fields, outcome
from helpers.pieces import END, Thought, reply, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from webgemma.replies import Piece
from webgemma.server import ollama
from webgemma.server.protocol import Request, RequestError, Structure
from webgemma.text.chat import Chat
from webgemma.text.parser import ToolCall

CREATED = 1_700_000_000.5
DURATIONS = ollama.Durations(total=9, load=1, prompt=3, reply=5)
PNG = b"\x89PNG\r\n\x1a\n"
USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "gemma4:e2b", "messages": [USER]}
GENERATE = {"model": "gemma4:e2b", "prompt": "Hi"}
WEATHER = ToolCall("weather", {"city": "Zürich", "days": 2})
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def token_bytes(token: int) -> bytes:
    return b"" if token == END else f"<{token}>".encode()


class Served:
    """Ollama's client at a server that gives one reply; keeps the requests it read."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.requests: list[Request] = []
        self.ids = (f"call_{n}" for n in count())
        self.client = client.Client("http://test", transport=httpx.MockTransport(self.handle))

    def call_ids(self) -> str:
        return next(self.ids)

    def handle(self, sent: httpx.Request) -> httpx.Response:
        is_chat = sent.url.path == "/api/chat"
        try:
            body = json.loads(sent.content)
            request = ollama.parse_chat(body) if is_chat else ollama.parse_generate(body)
        except RequestError as error:
            return httpx.Response(error.status, json=ollama.error(error))
        self.requests.append(request)
        if request.stream:
            return httpx.Response(200, content=self.stream(request, is_chat))
        given: dict[str, Any] = {"created": CREATED, "durations": DURATIONS}
        if request.own["task"] != "reply":
            answer = ollama.loaded(request, created=CREATED, chat=is_chat)
        elif is_chat:
            given |= {"call_ids": self.call_ids, "token_bytes": token_bytes}
            answer = ollama.chat_answer(request, [whole(self.pieces)], **given)
        else:
            given |= {"context": [2, 10, 11], "token_bytes": token_bytes}
            answer = ollama.generate_answer(request, [whole(self.pieces)], **given)
        return httpx.Response(200, content=ollama.line(answer))

    def stream(self, request: Request, is_chat: bool) -> bytes:
        stream = ollama.Stream(
            request,
            "chat" if is_chat else "generate",
            created=CREATED,
            call_ids=self.call_ids,
            token_bytes=token_bytes,
        )
        events = stream.begin()
        for piece in self.pieces:
            events += stream.piece(0, piece)
        events += stream.end(DURATIONS, context=[] if is_chat else [2, 10, 11])
        return b"".join(ollama.line(event) for event in events)


# Answers


def test_a_chat_is_answered_as_a_whole():
    served = Served(reply(Thought("Hm."), "Hello", " you", WEATHER))
    answer = served.client.chat("gemma4:e2b", [USER], tools=[TOOL], think=True)
    assert answer.message.content == "Hello you"
    assert answer.message.thinking == "Hm."
    assert [call.function.name for call in answer.message.tool_calls] == ["weather"]
    assert answer.message.tool_calls[0].function.arguments == WEATHER.arguments
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "gemma4:e2b")
    assert answer.created_at == "2023-11-14T22:13:20.500000Z"
    assert (answer.prompt_eval_count, answer.eval_count) == (7, 5)
    durations = (answer.total_duration, answer.load_duration)
    assert (*durations, answer.prompt_eval_duration, answer.eval_duration) == (9, 1, 3, 5)
    assert served.requests[0].think is True
    assert served.requests[0].stream is False


def test_a_streamed_chat_gives_the_same():
    served = Served(reply(Thought("H"), Thought("m."), "Hello", " you", WEATHER, WEATHER))
    chunks = list(served.client.chat("gemma4:e2b", [USER], tools=[TOOL], think=True, stream=True))
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == "Hm."
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Hello you"
    calls = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [WEATHER.arguments] * 2
    assert [chunk.done for chunk in chunks] == [False] * 6 + [True]
    last = chunks[-1]
    assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("stop", 7, 7)
    assert last.total_duration == 9
    assert {chunk.created_at for chunk in chunks} == {"2023-11-14T22:13:20.500000Z"}


def test_each_call_has_an_id_and_an_index():
    lines = Served(reply(WEATHER, WEATHER)).stream(ollama.parse_chat(CHAT), is_chat=True)
    calls = [json.loads(line)["message"].get("tool_calls") for line in lines.splitlines()[:2]]
    assert [call[0]["id"] for call in calls] == ["call_0", "call_1"]
    assert [call[0]["function"]["index"] for call in calls] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_generate_is_answered(stream):
    served = Served(reply("Hello", " you", finish="length"))
    answers = served.client.generate("gemma4:e2b", "Hi", stream=stream)
    chunks = list(answers) if stream else [answers]
    assert "".join(chunk.response for chunk in chunks) == "Hello you"
    assert chunks[-1].done_reason == "length"
    assert chunks[-1].context == [2, 10, 11]
    assert (chunks[-1].prompt_eval_count, chunks[-1].eval_count) == (7, 2)
    assert all(chunk.context is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_text_but_not_of_special_tokens(stream):
    served = Served(reply("Hello", " you", tops=2))
    answers = served.client.chat("gemma4:e2b", [USER], logprobs=True, top_logprobs=2, stream=stream)
    chunks = list(answers) if stream else [answers]
    entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert [entry.token for entry in entries] == ["<10>", "<11>"]
    assert [top.token for top in entries[0].top_logprobs] == ["<10>", "<11>"]
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    assert served.requests[0].settings["top_logprobs"] == 2
    raw = json.loads(served.stream(served.requests[0], True).splitlines()[0])
    assert raw["logprobs"][0]["bytes"] == list(b"<10>")


def test_an_impossible_token_has_a_number_that_json_can_hold():
    request = ollama.parse_chat(CHAT | {"logprobs": True})
    stream = ollama.Stream(request, "chat", created=0)
    [line] = stream.piece(0, Piece(3, "x", -math.inf))
    assert line["logprobs"] == [{"token": "x", "logprob": -9999.0, "bytes": [120]}]


@pytest.mark.parametrize("odd", ["\x85", "\u2028", "\u2029", "\n", "\x1c", "\x0b", "ü😀"])
def test_a_line_is_a_line_to_every_client(odd):
    served = Served(reply(f"a{odd}b"))
    chunks = list(served.client.chat("gemma4:e2b", [USER], stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == f"a{odd}b"


def test_half_a_character_in_an_argument_does_not_end_a_stream():
    served = Served(reply(ToolCall("f", {"a": "\ud800"})))
    chunks = list(served.client.chat("gemma4:e2b", [USER], stream=True))
    assert chunks[0].message.tool_calls[0].function.arguments == {"a": "?"}


def test_a_reply_without_a_token_had_no_room():
    answer = Served([]).client.generate("gemma4:e2b", "Hi", options={"num_predict": 0})
    assert (answer.response, answer.done_reason, answer.eval_count) == ("", "length", 0)


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ("json", {"type": "object"}),
        ({"type": "array"}, {"type": "array"}),
        ({}, {}),
        ("", None),
        (None, None),
    ],
)
def test_json_by_a_format(given: Any, schema: Any) -> None:
    expected = None if schema is None else Structure("schema", schema, "format")
    assert ollama.parse_chat(CHAT | {"format": given}).structure == expected
    assert ollama.parse_generate(GENERATE | {"format": given}).structure == expected
    raw = ollama.parse_generate(GENERATE | {"format": given, "raw": True})
    assert (raw.structure, raw.prompts) == (expected, ["Hi"])


def test_an_error_is_a_sentence_to_the_client():
    served = Served([])
    with pytest.raises(client.ResponseError, match="keep_alive is 'soon'") as caught:
        served.client.chat("gemma4:e2b", [USER], keep_alive="soon")
    assert caught.value.status_code == 400


def test_an_error_ends_a_stream():
    def handle(_: httpx.Request) -> httpx.Response:
        stream = ollama.Stream(ollama.parse_chat(CHAT), "chat", created=0)
        events = [*stream.piece(0, reply("Hel")[0]), stream.error(RequestError("Lost.", 500))]
        return httpx.Response(200, content=b"".join(map(ollama.line, events)))

    asked = client.Client("http://test", transport=httpx.MockTransport(handle))
    chunks = asked.chat("gemma4:e2b", [USER], stream=True)
    assert next(chunks).message.content == "Hel"
    with pytest.raises(client.ResponseError, match=r"Lost\."):
        next(chunks)


# Loading and unloading


@pytest.mark.parametrize(
    ("keep_alive", "task"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")]
)
def test_an_empty_prompt_loads_or_unloads(keep_alive, task):
    served = Served([])
    chat = served.client.chat("gemma4:e2b", [], keep_alive=keep_alive)
    generate = served.client.generate("gemma4:e2b", keep_alive=keep_alive)
    assert [answer.done_reason for answer in (chat, generate)] == [task] * 2
    assert (chat.message.content, generate.response) == ("", "")
    assert [request.messages for request in served.requests] == [[], []]


def test_a_model_may_be_unloaded_after_a_reply():
    request = ollama.parse_chat(CHAT | {"keep_alive": 0})
    assert (request.own["task"], request.own["keep_alive"]) == ("reply", 0)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *((300, 300), (1.5, 1.5), (0, 0), (-1, math.inf), ("5m", 300), ("1h30m", 5400)),
        *(("-1", math.inf), ("-1m", math.inf), ("0", 0), ("10", 10), ("1.5h", 5400)),
        *(("300ms", 0.3), ("24h0m0s", 86400), (None, None)),
    ],
)
def test_how_long_a_model_stays(written, seconds):
    kept = ollama.parse_chat(CHAT | {"keep_alive": written}).own["keep_alive"]
    assert kept == (None if seconds is None else pytest.approx(seconds))


# Requests


def test_streaming_is_the_default():
    assert ollama.parse_chat(CHAT).stream
    assert ollama.parse_generate(GENERATE).stream
    assert not ollama.parse_chat(CHAT | {"stream": False}).stream


def test_the_old_key_of_the_model():
    assert ollama.parse_chat({"name": "gemma4", "messages": [USER]}).model == "gemma4"
    assert ollama.parse_name({"name": "a", "model": "b"}) == "b"


def test_options_become_settings():
    options = {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repeat_penalty": 1.1,
        "repeat_last_n": 32,
        "presence_penalty": 0.2,
        "seed": 7,
        "frequency_penalty": 0.3,
        "stop": ["\n", "User:"],
        "num_predict": 10,
        "num_ctx": 4096,
        "speculate": "off",
        "max_drafts": 9,
        "num_gpu": 99,
        "mirostat": 2,
        "no_such_option": "?",
    }
    request = ollama.parse_chat(CHAT | {"options": options})
    assert request.settings == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repetition_penalty": 1.1,
        "recent": 32,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": ("\n", "User:"),
        "max_tokens": 10,
        "speculate": "off",
        "max_drafts": 8,
    }
    assert request.own["num_ctx"] == 4096


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": -2}, {"max_tokens": None}),
        ({"seed": -1}, {"seed": None}),
        ({"top_k": 40.0, "top_p": 2}, {"top_k": 40, "top_p": 1}),
        ({"repeat_last_n": -1}, {"recent": -1}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"temperature": None}, {}),
        ({}, {}),
    ],
)
def test_options_as_ollama_reads_them(options, expected):
    assert ollama.parse_generate(GENERATE | {"options": options}).settings == expected


@pytest.mark.parametrize(
    ("think", "expected"), [(None, None), (True, True), (False, False), ("high", True)]
)
def test_thinking(think, expected):
    assert ollama.parse_chat(CHAT | {"think": think}).think is expected


def test_empty_lists_of_tools_and_images_say_nothing():
    message = USER | {"images": []}
    request = ollama.parse_chat({"model": "m", "messages": [message], "tools": [], "options": {}})
    assert request.messages == [USER]
    assert request.tools == []


def test_images_are_bytes_so_that_no_text_is_a_path():
    sent = base64.b64encode(PNG).decode()
    request = ollama.parse_chat(
        {"model": "m", "messages": [USER | {"images": [sent, f"data:image/png;base64,{sent}"]}]}
    )
    assert request.messages[0]["images"] == [PNG, PNG]
    generate = ollama.parse_generate(GENERATE | {"images": [sent]})
    assert generate.messages == [USER | {"images": [PNG]}]
    path = ollama.parse_generate(GENERATE | {"images": ["/etc/passwd"]})  # it is base64, too
    assert path.messages[0]["images"] == [base64.b64decode("/etc/passwd=")]


def test_a_conversation_with_tools_reaches_the_template():
    served = Served(reply("Sunny."))
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "I look.",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "content": "12 degrees", "tool_name": "weather"},
    ]
    served.client.chat("gemma4:e2b", messages, tools=[TOOL])
    request = served.requests[0]
    prompt = Chat().render(request.messages, request.tools)
    for part in ("Be brief.", "declaration:weather", "I look.", "call:weather{city", "12 degrees"):
        assert part in prompt
    assert prompt.index("call:weather") < prompt.index("response:weather")
    assert not request.continue_last


def test_an_assistants_last_message_is_continued():
    messages = [USER, {"role": "assistant", "content": "The best is"}]
    assert ollama.parse_chat({"model": "m", "messages": messages}).continue_last


def test_generate_with_a_system_message_and_an_earlier_context():
    request = ollama.parse_generate(GENERATE | {"system": "Be brief.", "context": [2, 5]})
    assert request.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert request.own["context"] == [2, 5]


def test_a_raw_prompt_is_read_as_it_is():
    request = ollama.parse_generate(GENERATE | {"raw": True, "prompt": "<|turn>user\nHi"})
    assert (request.prompts, request.messages) == (["<|turn>user\nHi"], ())
    assert request.special
    answer = ollama.generate_answer(
        request, [whole(reply("x"))], created=0, durations=DURATIONS, context=[1]
    )
    assert "context" not in answer


def test_a_conversation_that_must_not_be_cut():
    assert ollama.parse_chat(CHAT).overflow == "drop"
    assert ollama.parse_chat(CHAT | {"truncate": False}).overflow == "error"


def wrong(change: dict[str, Any], param: str | None, sentence: str) -> Any:
    return pytest.param(change, param, sentence, id=sentence[:40])


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER | fields]}


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        wrong({"model": None}, "model", "model is missing"),
        wrong({"model": ""}, "model", "model is ''"),
        wrong({"stream": "yes"}, "stream", "stream is 'yes'; it must be true or false."),
        wrong({"messages": "Hi"}, "messages", "messages is 'Hi'; it must be a list."),
        wrong({"messages": ["Hi"]}, "messages[0]", "messages[0] must be a JSON object"),
        wrong(message(role="robot"), "messages[0].role", "must be one of system, user"),
        wrong(message(content=["Hi"]), "messages[0].content", "it must be a string."),
        wrong(message(images="x"), "messages[0].images", "it must be a list."),
        wrong(message(images=["%%%"]), "messages[0].images[0]", "is not base64"),
        wrong(message(images=["http://a/b.png"]), "messages[0].images[0]", "nothing is fetched"),
        wrong(message(images=["file:///a"]), "messages[0].images[0]", "nothing is fetched"),
        wrong(message(images=[7]), "messages[0].images[0]", "must be base64 text"),
        wrong({"messages": [CALL]}, None, "messages[0].tool_calls[0].function.arguments"),
        wrong({"tools": [{}]}, None, "tools[0].name must be a string"),
        wrong({"tools": [{"function": None}]}, None, "tools[0].function must be"),
        wrong({"think": "loud"}, "think", "think is 'loud'; it must be true, false, or one of"),
        wrong(
            {"format": "yaml"}, "format", "format is 'yaml'; it must be \"json\" or a JSON schema"
        ),
        wrong({"format": ["json"]}, "format", "or a JSON schema."),
        wrong({"format": True}, "format", "or a JSON schema."),
        wrong({"keep_alive": "soon"}, "keep_alive", 'a text such as "5m"'),
        wrong({"keep_alive": True}, "keep_alive", "keep_alive is True"),
        wrong({"options": []}, "options", "options must be a JSON object, not a list."),
        wrong({"options": {"top_k": "9"}}, "options.top_k", "options.top_k is '9'; it must be"),
        wrong({"options": {"num_predict": "x"}}, "options.num_predict", "options.num_predict is"),
        wrong({"options": {"stop": [""]}}, "options.stop", "at least one character"),
        wrong({"options": {"num_ctx": "big"}}, "options.num_ctx", "options.num_ctx is 'big'"),
        wrong({"options": {"frequency_penalty": "x"}}, "options.frequency_penalty", "it must be"),
        wrong({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        wrong({"logprobs": 1}, "logprobs", "must be true or false"),
    ],
)
def test_a_wrong_chat_is_refused_with_a_sentence(change, param, sentence):
    with pytest.raises(RequestError) as caught:
        ollama.parse_chat(CHAT | change)
    assert sentence in str(caught.value)
    assert caught.value.status == 400
    if param:
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        wrong({"prompt": 5}, "prompt", "prompt is 5; it must be a string."),
        wrong({"suffix": "end"}, "suffix", "cannot fill in the middle"),
        wrong({"template": "{{ .Prompt }}"}, "template", "template is not supported"),
        wrong({"context": "2"}, "context", "it must be a list"),
        wrong({"context": [1, -2]}, "context", "token ids of an earlier answer"),
        wrong({"context": [True]}, "context", "token ids of an earlier answer"),
        wrong({"raw": True, "system": "x"}, "raw", "have no place"),
        wrong({"raw": True, "context": [1]}, "raw", "have no place"),
    ],
)
def test_a_wrong_generate_is_refused_with_a_sentence(change, param, sentence):
    with pytest.raises(RequestError) as caught:
        ollama.parse_generate(GENERATE | change)
    assert sentence in str(caught.value)
    assert caught.value.param == param


MESSAGES = st.lists(
    fields("role content thinking images tool_calls tool_name tool_call_id name")
    | fields("content images tool_calls").map(lambda more: {"role": "assistant"} | more),
    max_size=3,
)
BODIES = (
    JSON
    | fields("model name messages prompt system tools options think format keep_alive stream raw")
    | st.builds(
        lambda more, messages: {"model": "m", "messages": messages} | more,
        fields("tools options think keep_alive logprobs top_logprobs truncate prompt images raw"),
        MESSAGES,
    )
    | st.builds(
        lambda more: {"model": "m", "prompt": "x", "messages": [USER], "options": more},
        fields(" ".join([*ollama.OPTIONS, "num_ctx"])),
    )
)


@pytest.mark.parametrize("parse", [ollama.parse_chat, ollama.parse_generate])
@given(body=BODIES)
@settings(max_examples=300, deadline=None)
def test_any_body_is_a_request_or_a_sentence(parse: Callable[[object], Request], body: Any):
    result = outcome(parse, body)
    if isinstance(result, Request):
        assert result.model
    else:
        assert result.endswith(".")
        assert len(result) < 2000


def test_nesting_without_end_is_refused():
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    calls = [{"function": {"name": "f", "arguments": deep}}]
    with pytest.raises(RequestError, match="nested"):
        ollama.parse_chat(CHAT | {"messages": [{"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(RequestError, match="nested"):
        ollama.parse_chat(CHAT | {"tools": [{"function": {"name": "f", "parameters": deep}}]})


@pytest.mark.parametrize("named", [{}, {"tool_call_id": "x2"}])
def test_results_without_a_name_are_in_the_order_of_the_calls(named: dict[str, str]) -> None:
    """LiteLLM leaves the ids of calls out, but not those of results."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "content": str(at), **named} for at in range(3)]
    results[0]["tool_name"] = "g"
    user = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    request = ollama.parse_chat({"model": "m", "messages": [user, said, *results]})
    assert [message["tool_name"] for message in request.messages[2:]] == ["g", "f", "f"]
    alone = ollama.parse_chat({"model": "m", "messages": [user, results[1]]})
    assert alone.messages[-1]["tool_name"] == ""
