"""LiteLLM against a live server, by each of its providers that this server can be.

It needs an older `openai` than the other tests, hence an environment of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.judges import PARTS, run
from helpers.live_server import live_server
from helpers.scripted import follow_script

from webgemma import Gemma

KEY = "a-key-of-the-tests"
CHAT = ("openai", "hosted_vllm", "anthropic", "ollama_chat")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Max", "Bella"]}, "tame": {"type": "boolean"}},
    "required": ["name", "tame"],
    "additionalProperties": False,
}
SCRIPT = {
    r"response:multiply\{.*\b42\b": "It is 42.",
    r"declaration:multiply\{.*6 times 7": "<|tool_call>call:multiply{a:6,b:7}<tool_call|>",
}


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What all calls gave."""
    with pytest.MonkeyPatch.context() as patch, live_server("-", keys=[KEY]) as live:
        follow_script(patch, SCRIPT)
        calls = Path(__file__).with_name("litellm_calls.py")
        said = run([PARTS["litellm"], calls, live.url, KEY], environment={})
        yield json.loads(said.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def text() -> str:
    """What the model says by itself."""
    with Gemma.load(device="cpu") as model:
        pieces = model.chat("Tell me a story about a dog.", temperature=0, max_tokens=20)
        return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("provider", CHAT)
def test_chat_streams_and_tools(found: Any, text: str, provider: str) -> None:
    got = found[provider]
    assert (got["text"], got["tokens"]) == (text, 20)
    assert "".join(got["chunks"]) == text
    assert len([chunk for chunk in got["chunks"] if chunk]) > 5
    assert got["calls"] == [["multiply", {"a": 6, "b": 7}]]
    assert got["answer"] == "It is 42."


@pytest.mark.parametrize("provider", [*CHAT, "ollama"])
def test_json_by_a_schema(found: Any, provider: str) -> None:
    jsonschema.validate(found[provider]["json"], SCHEMA)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_calls_that_must_be_made(found: Any, provider: str) -> None:
    assert set(found[provider]["forced"]) == {"multiply"}


def test_generate(found: Any) -> None:
    """`ollama/` writes the conversation as a text of its own."""
    got = found["ollama"]
    assert "".join(got["chunks"]) == got["text"] != ""


def test_responses(found: Any, text: str) -> None:
    assert found["responses"] == text


@pytest.mark.parametrize("provider", [*CHAT, "ollama"])
def test_errors(found: Any, provider: str) -> None:
    ((kind, sentence),) = found[provider]["errors"]
    assert "model 'other' not found" in sentence
    assert kind in ("NotFoundError", "APIConnectionError")
    assert "API key" in found["wrong key"][1]
