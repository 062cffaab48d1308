"""Structured output over HTTP: every API's fields, what is refused, and that nobody is stalled."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from helpers.live_server import Live, live_server, wait_until
from helpers.openai_client import refusal
from helpers.scripted import follow_script

from webgemma import structured
from webgemma.constraints import native
from webgemma.server import openai_chat, openai_completions, openai_responses, structures
from webgemma.server.openai_structures import FIELDS, VLLM_REFUSED
from webgemma.server.protocol import Structure

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
OBJECT = {"type": "object"}
GRAMMAR = 'root ::= "a" | "(" root ")"'
HELLO: Any = [{"role": "user", "content": "Who?"}]
SLOW = {  # each of many patterns takes about a second
    "properties": {f"p{n}": {"pattern": "^(ab|c)*$", "minLength": 2000} for n in range(2000)},
}


# OpenAI's, vLLM's and llama.cpp's fields


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "kind", "value", "where"),
    [
        ({"response_format": named(SCHEMA, strict=True)}, "schema", SCHEMA,
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "schema", SCHEMA,
         "response_format.schema"),
        ({"response_format": {"type": "json_object"}}, "schema", OBJECT, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema", SCHEMA,
         "response_format.schema"),
        ({"response_format": {"type": "grammar", "grammar": GRAMMAR}}, "grammar", GRAMMAR,
         "response_format.grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, "schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "schema", SCHEMA,
         "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "schema", OBJECT,
         "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choices", ["a"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, "grammar", GRAMMAR,
         "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choices", ["a", "b"], "guided_choice"),
        ({"guided_grammar": GRAMMAR}, "grammar", GRAMMAR, "guided_grammar"),
        ({"json_schema": SCHEMA}, "schema", SCHEMA, "json_schema"),
        ({"json_schema": {}}, "schema", {}, "json_schema"),
        ({"grammar": GRAMMAR, "guided_regex": ""}, "grammar", GRAMMAR, "grammar"),
    ],
)  # fmt: skip
def test_fields(fields: dict[str, Any], kind: Any, value: Any, where: str) -> None:
    expected = Structure(kind, value, where)
    assert openai_chat.parse({"messages": HELLO, **fields}).structure == expected
    assert openai_completions.parse({"prompt": "x", **fields}).structure == expected
    if "response_format" in fields:
        format = {"name": "x", **fields["response_format"]}
        asked = openai_responses.parse({"text": {"format": format}})
        place = where.replace("response_format", "text.format")
        assert asked.structure == Structure(kind, value, place)
    else:
        assert openai_responses.parse({"input": "x", **fields}).structure == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "whitespace_pattern": None}},
        {"guided_regex": "", "guided_choice": [], "grammar": "", "guided_json": None},
    ],
)
def test_fields_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert openai_chat.parse({"messages": HELLO, **fields}).structure is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}},
         "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema.schema"),
        ({"response_format": named([])}, "response_format.json_schema.schema"),
        ({"response_format": named("{")}, "response_format.json_schema.schema"),
        ({"response_format": named({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": named({}, name=5)}, "response_format.json_schema.name"),
        ({"response_format": named({}, description=[])}, "response_format.json_schema.description"),
        ({"response_format": {"type": "grammar", "grammar": 5}}, "response_format.grammar"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        *(({"structured_outputs": {name: "x"}}, f"structured_outputs.{name}")
          for name in VLLM_REFUSED),
        *(({name: 5}, name) for name in FIELDS),
        *(({name: True}, name) for name, kind in FIELDS.items() if kind != "schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_choice": {"a": 1}}, "guided_choice"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "grammar": GRAMMAR}, "grammar"),
        ({"response_format": named({}), "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(openai_chat.parse, {"messages": HELLO, **fields})
    assert error.param == param
    assert refusal(openai_completions.parse, {"prompt": "x", **fields}).param == param


# A live server


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server("-") as server:
        yield server


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": HELLO, "seed": 1, **more}


def ollama(**more: Any) -> dict[str, Any]:
    options = {"seed": 1, "num_predict": more.pop("max_tokens", 200)}
    return {"model": "demo", "stream": False, "options": options, **more}


# Of each route: the body for a schema, the text of an answer, and why it ended.
Route = tuple[Callable[..., dict[str, Any]], Callable[[Any], str], Callable[[Any], str]]
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": (
        lambda schema, **more: chat(response_format=named(schema), **more),
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda answer: answer["choices"][0]["finish_reason"],
    ),
    "/v1/completions": (
        lambda schema, **more: {
            "model": "demo",
            "prompt": "Who?",
            "seed": 1,
            "max_tokens": 200,
            "response_format": named(schema),
            **more,
        },
        lambda answer: answer["choices"][0]["text"],
        lambda answer: answer["choices"][0]["finish_reason"],
    ),
    "/v1/responses": (
        lambda schema, **more: {
            "model": "demo",
            "input": "Who?",
            "seed": 1,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
            **more,
        },
        lambda answer: answer["output"][0]["content"][0]["text"],
        lambda answer: (answer["incomplete_details"] or {"reason": answer["status"]})["reason"],
    ),
    "/v1/messages": (
        lambda schema, **more: {
            "model": "demo",
            "messages": HELLO,
            "max_tokens": 200,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
            **more,
        },
        lambda answer: answer["content"][0]["text"],
        lambda answer: answer["stop_reason"],
    ),
    "/api/chat": (
        lambda schema, **more: ollama(messages=HELLO, format=schema, **more),
        lambda answer: answer["message"]["content"],
        lambda answer: answer["done_reason"],
    ),
    "/api/generate": (
        lambda schema, **more: ollama(prompt="Who?", format=schema, **more),
        lambda answer: answer["response"],
        lambda answer: answer["done_reason"],
    ),
}
ENDS = {
    "/v1/chat/completions": ("stop", "length"),
    "/v1/completions": ("stop", "length"),
    "/v1/responses": ("completed", "max_output_tokens"),
    "/v1/messages": ("end_turn", "max_tokens"),
    "/api/chat": ("stop", "length"),
    "/api/generate": ("stop", "length"),
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_schema(live: Live, path: str) -> None:
    body, text, end = ROUTES[path]
    answer = live.post(path, body(SCHEMA))
    assert answer.status_code == 200, answer.text
    jsonschema.validate(json.loads(text(answer.json())), {**SCHEMA, "additionalProperties": False})
    assert end(answer.json()) == ENDS[path][0]


@pytest.mark.parametrize("path", ROUTES)
def test_a_reply_that_is_cut_says_so(live: Live, path: str) -> None:
    body, text, end = ROUTES[path]
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = live.post(path, body(SCHEMA, **{name: 2})).json()
    assert end(answer) == ENDS[path][1]
    with pytest.raises(json.JSONDecodeError):
        json.loads(text(answer))


def sentence(path: str, answer: Any) -> str:
    error = answer.json()["error"]
    found: str = error if path.startswith("/api") else error["message"]
    assert found.endswith("."), found
    return found


PLACES = {
    "/v1/chat/completions": "response_format.json_schema.schema",
    "/v1/completions": "response_format.json_schema.schema",
    "/v1/responses": "text.format.schema",
    "/v1/messages": "output_config.format.schema",
    "/api/chat": "format",
    "/api/generate": "format",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"not": {}}}}, " at #/properties/a: not is not supported."),
        ({"type": "strin"}, " at #: type must be one or some of"),
        ({"enum": [{"a": n} for n in range(20_000)]}, " is too large: at most"),
        ({"type": "string", "pattern": "("}, " at #: "),
        ({"$ref": "#/$defs/x"}, "leads to nothing"),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, " at #/properties/a: "),
    ],
    ids=range(6),
)
def test_a_schema_that_cannot_be_is_refused_with_its_place(
    live: Live, path: str, schema: Any, problem: str, stream: bool
) -> None:
    answer = live.post(path, ROUTES[path][0](schema, stream=stream))
    assert answer.status_code == 400
    said = sentence(path, answer)
    assert said.startswith(PLACES[path])
    assert problem in said
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert answer.json()["error"]["param"] == PLACES[path]


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["left", "right"]}, ["left", "right"]),
        ({"structured_outputs": {"regex": "[ab]{3}"}},
         ["".join((a, b, c)) for a in "ab" for b in "ab" for c in "ab"]),
        ({"grammar": 'start: "x" | "y" "z"'}, ["x", "yz"]),
        ({"guided_grammar": 'root ::= one "!"\none ::= "x" | "y"'}, ["x!", "y!"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_choices_patterns_and_grammars(
    live: Live, path: str, fields: dict[str, Any], texts: list[str]
) -> None:
    for seed in range(3):
        body = {**chat(), "prompt": "x", "seed": seed, "temperature": 2.0, **fields}
        answer = live.post(path, body).json()
        assert ROUTES[path][1](answer) in texts
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"guided_regex": "("}, "guided_regex", "guided_regex cannot be used"),
        ({"guided_choice": [5]}, "guided_choice", "guided_choice has 5"),
        ({"guided_choice": ["x"] * 1001}, "guided_choice", "guided_choice has 1001 texts"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "is not empty"),
        ({"grammar": "start: ("}, "grammar", "grammar: The grammar cannot be used: "),
        ({"grammar": "x" * 70_000}, "grammar", "1 to 65536 characters"),
        ({"grammar": "root ::= ("}, "grammar", "grammar cannot be used: in line 1"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar",
         "no rule 'x'"),
        ({"guided_json": {"type": "array", "contains": {}}}, "guided_json", "contains"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(
    live: Live, fields: dict[str, Any], param: str, problem: str
) -> None:
    answer = live.post("/v1/chat/completions", chat(**fields))
    assert answer.status_code == 400
    said = sentence("/v1", answer)
    assert said.startswith(param)
    assert problem in said
    assert answer.json()["error"]["param"] == param


def test_nothing_is_loaded_for_what_cannot_be() -> None:
    with live_server("-") as server:
        assert server.post("/v1/chat/completions", chat(json_schema={"not": {}})).status_code == 400
        assert server.registry.loaded() == []


# Calls

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "object", "properties": {"city": {"not": {"type": "string"}}}}


def tools(path: str, schema: Any, **more: Any) -> list[dict[str, Any]]:
    """Return two tools as an API declares them."""
    if path == "/v1/messages":
        clock = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
        return [clock, {"name": "weather", "input_schema": schema, **more}]
    functions: list[dict[str, Any]] = [{"name": "clock"}]
    functions.append({"name": "weather", "parameters": schema, **more})
    if path == "/v1/responses":
        return [{"type": "web_search"}, *({"type": "function", **each} for each in functions)]
    return [{"type": "function", "function": each} for each in functions]


CHOICES: dict[str, tuple[Any, Any]] = {  # any tool, and one of them
    "/v1/chat/completions": ("required", {"type": "function", "function": {"name": "weather"}}),
    "/v1/responses": ("required", {"type": "function", "name": "weather"}),
    "/v1/messages": ({"type": "any"}, {"type": "tool", "name": "weather"}),
}


def calls(path: str, answer: Any) -> list[tuple[str, Any]]:
    if path == "/v1/messages":
        return [(block["name"], block["input"]) for block in answer["content"]]
    if path == "/v1/responses":
        return [(item["name"], json.loads(item["arguments"])) for item in answer["output"]]
    (choice,) = answer["choices"]
    assert choice["message"]["content"] is None
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]


def calling(path: str, choice: Any, **more: Any) -> dict[str, Any]:
    """Return a body that makes the model call, at most one tool."""
    body: dict[str, Any] = {"model": "demo", "tools": tools(path, WEATHER), "tool_choice": choice}
    if path == "/v1/messages":
        body["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
        body |= {"messages": HELLO, "max_tokens": 200, "temperature": 1.5}
    else:
        body |= {"input": "Sunny?", "messages": HELLO, "parallel_tool_calls": False, "seed": 3}
    return body | more


@pytest.mark.parametrize("path", CHOICES)
def test_a_call_that_must_be_made(live: Live, path: str) -> None:
    any_tool, one = CHOICES[path]
    for _ in range(3):
        ((name, arguments),) = calls(path, live.post(path, calling(path, any_tool)).json())
        assert (name, arguments) == ("clock", {}) or name == "weather"
        ((name, arguments),) = calls(path, live.post(path, calling(path, one)).json())
        assert name == "weather"
        jsonschema.validate(arguments, WEATHER)


def test_allowed_tools(live: Live) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"mode": "required", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    for seed in range(4):
        body = calling("/v1/chat/completions", choice, seed=seed)
        ((name, _),) = calls("/v1", live.post("/v1/chat/completions", body).json())
        assert name == "weather"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", "tools[1].function.parameters"),
        ("/v1/responses", "tools[2].parameters"),  # after one that is left out
        ("/v1/messages", "tools[1].input_schema"),
        ("/api/chat", "tools[1].function.parameters"),
    ],
)
def test_a_strict_tool_has_a_schema_that_can_be_kept(live: Live, path: str, place: str) -> None:
    body = ollama(messages=HELLO) if path == "/api/chat" else chat(input="x", max_tokens=3)
    strict = live.post(path, body | {"tools": tools(path, UNSUPPORTED, strict=True)})
    assert strict.status_code == 400
    assert sentence(path, strict).startswith(f"{place} at #/properties/city: not is not supported")
    if path in ("/v1/chat/completions", "/v1/responses"):
        assert strict.json()["error"]["param"] == place
    lenient = live.post(path, body | {"tools": tools(path, UNSUPPORTED)})
    assert lenient.status_code == 200, lenient.text


def test_a_name_that_no_call_can_have_is_refused(live: Live) -> None:
    tool = {"type": "function", "function": {"name": "a{b"}}
    answer = live.post("/v1/chat/completions", chat(tools=[tool]))
    assert answer.status_code == 400
    assert "tools[0].function.name is 'a{b'" in sentence("/v1", answer)


def test_a_schema_or_a_call(live: Live) -> None:
    body = calling("/v1/chat/completions", "auto", response_format=named(SCHEMA))
    for seed in range(3):
        message = live.post("/v1/chat/completions", body | {"seed": seed}).json()["choices"][0][
            "message"
        ]
        if message.get("tool_calls"):
            assert message["content"] is None
        else:
            jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_json_after_a_thought(live: Live) -> None:
    for seed in range(3):
        body = ollama(messages=HELLO, format=SCHEMA, think=True, max_tokens=400)
        body["options"]["seed"] = seed
        answer = live.post("/api/chat", body).json()
        if answer["done_reason"] == "stop":
            jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)


# What strangers send

WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, "", "x", "{", [], [None], [[]], {}, {"": 1}),
    *({"type": 5}, {"type": "json_schema"}, {"type": []}, {"schema": 5}, {"json_schema": []}),
    *({"name": {}}, {"properties": 5}, {"$ref": "http://127.0.0.1/x"}, {"enum": []}, "\ud800"),
    *({"type": "json_schema", "json_schema": {"schema": {"a\ud800": "b"}}}, ["a", 5], "(" * 500),
    *({"items": {"$ref": "#"}}, {"allOf": [{"$ref": "#"}]}, {"const": float(10**300)}),
]
PLACES_OF_FIELDS: list[tuple[str, str]] = [
    *(
        (path, name)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
        for name in (*FIELDS, "response_format", "structured_outputs", "text", "text.format")
    ),
    *(
        ("/v1/chat/completions", f"structured_outputs.{name}")
        for name in ("json", "regex", "choice", "grammar", "json_object", *VLLM_REFUSED)
    ),
    *(
        ("/v1/chat/completions", f"response_format.{name}")
        for name in ("json_schema", "json_schema.schema", "json_schema.strict", "schema")
    ),
    *(("/v1/messages", name) for name in ("output_config", "output_config.format")),
    *(("/v1/messages", f"output_format{name}") for name in ("", ".schema", ".type")),
    *((path, "format") for path in ("/api/chat", "/api/generate")),
    *((path, "tool_choice") for path in CHOICES),
    *((path, "parallel_tool_calls") for path in CHOICES),
]


def placed(name: str, value: Any) -> dict[str, Any]:
    """Return an object in which a value is at a path."""
    first, _, rest = name.partition(".")
    inner = placed(rest, value) if rest else value
    head = {"type": "json_schema"} if first in ("response_format", "output_format") else {}
    return {first: head | inner if isinstance(inner, dict) else inner}


@pytest.mark.parametrize(("path", "name"), PLACES_OF_FIELDS)
def test_any_value_is_served_or_refused_with_a_sentence(live: Live, path: str, name: str) -> None:
    for value in WRONG:
        body = {"model": "demo", "messages": HELLO, "input": "x", "prompt": "x", "max_tokens": 1}
        body |= {"stream": False, "options": {"num_predict": 1}, "max_output_tokens": 1}
        if name != "tool_choice":
            body["tools"] = tools(path, WEATHER)
        content = json.dumps(body | placed(name, value))
        answer = live.http.post(path, content=content)
        assert answer.status_code in (200, 400), (value, answer.text)
        if answer.status_code == 400:
            assert len(sentence(path, answer)) < 2000


# What takes long


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with live_server("-") as server:
        for path, (body, *_) in ROUTES.items():
            answer = server.post(path, body(SCHEMA))
            assert answer.status_code == 501
            assert 'pip install "webgemma[json]"' in sentence(path, answer)
        answer = server.post("/v1/chat/completions", chat(grammar='start: "a"'))
        assert answer.status_code == 501
        assert server.post("/v1/chat/completions", chat(max_tokens=1)).status_code == 200
        may_call = chat(max_tokens=3, tools=tools("/v1/chat/completions", WEATHER))
        assert server.post("/v1/chat/completions", may_call).status_code == 200


def test_one_call_where_no_constraint_sees_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    call = "<|tool_call>call:clock{}<tool_call|>"
    follow_script(monkeypatch, {"Who": call + call + call})
    with live_server("-") as server:
        for parallel, count in ((True, 3), (False, 1)):
            body = chat(tools=tools("/v1", WEATHER), parallel_tool_calls=parallel)
            for stream in (False, True):
                answer = server.post("/v1/chat/completions", body | {"stream": stream})
                assert answer.text.count('"clock"') == count
                assert '"tool_calls"' in answer.text


def test_what_takes_long_to_check_is_refused_and_stalls_nobody(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "CHECK_SECONDS", 1.0)
    longest = 0.0
    with ThreadPoolExecutor(6) as pool:
        slow = [
            pool.submit(live.post, "/v1/chat/completions", chat(json_schema=SLOW)) for _ in range(3)
        ]
        strict = tools("/v1", SLOW, strict=True)
        slow.append(pool.submit(live.post, "/v1/chat/completions", chat(tools=strict)))
        while not all(each.done() for each in slow):
            began = time.monotonic()
            answer = live.post("/v1/chat/completions", chat(max_tokens=1, guided_choice=["a"]))
            assert answer.status_code == 200
            longest = max(longest, time.monotonic() - began)
    for each, place in zip(slow, ["json_schema"] * 3 + ["tools"], strict=True):
        assert each.result().status_code == 400
        assert f"{place} takes more than 1 seconds" in sentence("/v1", each.result())
        assert each.result().json()["error"]["param"] == place
    assert longest < 15


def test_tools_that_take_long_to_compile_are_refused(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "COMPILE_SECONDS", 1.0)
    answer = live.post("/v1/chat/completions", chat(tools=tools("/v1", SLOW)))
    assert answer.status_code == 400
    assert "takes more than 1 seconds to compile" in sentence("/v1", answer)
    assert live.post("/v1/chat/completions", chat(max_tokens=1)).status_code == 200


def test_streams_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with slots, for replies that are written and for those that begin."""
    held, begun, deep = threading.Event(), threading.Event(), native._with_deep_stacks

    def hold(*functions: Any) -> Any:
        begun.set()
        assert held.wait(60)
        return deep(*functions)

    with (
        live_server("-", device="gpu", slots=3, context=512) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.post("/v1/chat/completions", chat(max_tokens=1))
        with server.http.stream(
            "POST", "/v1/chat/completions", json=chat(max_tokens=150, stream=True, temperature=0)
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            monkeypatch.setattr(native, "_with_deep_stacks", hold)
            try:
                body = chat(guided_choice=["one", "two"])
                hard = pool.submit(server.post, "/v1/chat/completions", body)
                wait_until(begun.is_set)
                assert server.post("/v1/chat/completions", chat(max_tokens=5)).status_code == 200
                assert "[DONE]" in list(lines)[-2]
                assert not hard.done()
            finally:
                held.set()
        assert ROUTES["/v1/chat/completions"][1](hard.result().json()) in ("one", "two")
