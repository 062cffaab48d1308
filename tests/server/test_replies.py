"""Requests of both APIs, served by a tiny model: every field of a Request is one that it takes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.tiny import SMALL, tiny_gguf

from webgemma import Gemma
from webgemma.replies import Piece
from webgemma.server import anthropic, ollama
from webgemma.server.protocol import Request

MESSAGES = [
    {"role": "user", "content": "in the end"},
    {"role": "assistant", "content": "the"},
    {"role": "user", "content": "then?"},
]
OPTIONS = {"temperature": 0, "repeat_penalty": 1.5, "top_k": 30, "min_p": 0.1, "typical_p": 0.9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gemma]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    with Gemma.load(path, "cpu") as loaded:
        yield loaded


def pieces(model: Gemma, request: Request) -> list[Piece]:
    """Return the reply as a server asks for it."""
    settings: Any = request.settings
    if request.prompts:
        return list(model.generate(request.prompts[0], special=request.special, **settings))
    return list(
        model.chat(
            request.messages,
            tools=request.tools,
            think=bool(request.think),
            continue_last=request.continue_last,
            overflow=request.overflow,
            **settings,
        )
    )


def lines(request: Request, route: Any, given: list[Piece]) -> list[dict[str, Any]]:
    stream = ollama.Stream(request, route, created=0)
    events = [event for piece in given for event in stream.piece(0, piece)]
    return events + stream.end(ollama.Durations(1))


def test_a_chat_over_ollamas_api(model):
    options = OPTIONS | {"num_predict": 6, "seed": -1, "stop": []}
    request = ollama.parse_chat({"model": "m", "messages": MESSAGES, "options": options})
    told = lines(request, "chat", pieces(model, request))
    expected = list(
        model.chat(
            MESSAGES,
            max_tokens=6,
            temperature=0,
            repetition_penalty=1.5,
            top_k=30,
            min_p=0.1,
            typical_p=0.9,
        )
    )
    assert "".join(each["message"]["content"] for each in told) == "".join(
        piece.text for piece in expected
    )
    assert told[-1]["eval_count"] == len(expected) == 6
    assert told[-1]["prompt_eval_count"] == expected[-1].usage.prompt


def test_a_raw_prompt_over_ollamas_api(model):
    body = {"model": "m", "prompt": "<|turn>user\nin", "raw": True}
    request = ollama.parse_generate(body | {"options": {"temperature": 0, "num_predict": 3}})
    told = lines(request, "generate", pieces(model, request))
    ids = model.tokenizer.encode("<|turn>user\nin", special=True)
    assert told[-1]["prompt_eval_count"] == len(ids) + 1  # <bos>
    assert told[-1]["eval_count"] == 3


@pytest.mark.parametrize("read", [lambda text: text, lambda text: [{"type": "text", "text": text}]])
def test_a_chat_over_anthropics_api(model: Gemma, read: Callable[[str], Any]):
    messages = [{**message, "content": read(message["content"])} for message in MESSAGES]
    body = {"model": "m", "max_tokens": 6, "messages": messages, "temperature": 0, "top_k": 30}
    request = anthropic.parse(body | {"system": read("the inner")})
    stream = anthropic.Stream(request, id="m", call_ids=lambda: "t")
    events = [event for piece in pieces(model, request) for event in stream.piece(0, piece)]
    text = "".join(data["delta"].get("text", "") for _, data in events if "delta" in data)
    conversation = [{"role": "system", "content": "the inner"}, *MESSAGES]
    expected = list(model.chat(conversation, max_tokens=6, temperature=0, top_k=30))
    assert text == "".join(piece.text for piece in expected)
    [delta] = [data for name, data in stream.end() if name == "message_delta"]
    assert delta["delta"]["stop_reason"] == "max_tokens"
    assert delta["usage"]["output_tokens"] == len(expected)
    assert delta["usage"]["input_tokens"] == expected[-1].usage.prompt


def test_both_apis_continue_an_assistants_message(model):
    messages = [*MESSAGES, {"role": "assistant", "content": "the inn"}]
    asked = {"model": "m", "messages": messages, "options": {"temperature": 0, "num_predict": 4}}
    over_ollama = pieces(model, ollama.parse_chat(asked))
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
    over_anthropic = pieces(model, anthropic.parse(body))
    expected = model.chat(messages, max_tokens=4, temperature=0, continue_last=True)
    ids = [piece.token for piece in expected]
    assert [piece.token for piece in over_ollama] == ids
    assert [piece.token for piece in over_anthropic] == ids
