"""LangChain and `llm`'s own OpenAI client against a live server, as their users call them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from helpers.live_server import PATIENCE, Live, live_server
from helpers.scripted import follow_script
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

KEY = "a-key-of-the-tests"
CALL = "<|tool_call>call:multiply{a:6,b:7}<tool_call|>"
SCRIPT = {  # what a larger model would do
    r"response:multiply\{.*\b42\b": "It is 42.",
    r"declaration:multiply\{.*declaration:lookup\{.*6 times 7": CALL + CALL.replace("7", "8"),
    r"declaration:multiply\{.*6 times 7": CALL,
}
STORY = "Tell me a story about a dog."


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch, live_server("-", keys=[KEY]) as server:
        follow_script(patch, SCRIPT)
        for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
            patch.setenv(name, "false")  # nothing is sent elsewhere
        yield server


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client() as client:  # LangChain would leave its own open
        yield client


@pytest.fixture
def chat(live: Live, http: httpx2.Client) -> Any:
    """Return a function that makes LangChain's model of the server."""

    def make(**options: Any) -> ChatOpenAI:
        settings: Any = {"model": "demo", "temperature": 0, "max_tokens": 20, "max_retries": 0}
        settings |= {"base_url": f"{live.url}/v1", "api_key": KEY, "timeout": PATIENCE}
        return ChatOpenAI(**settings | {"http_client": http} | options)

    return make


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool
def lookup(word: str) -> str:
    """Look a word up."""
    return word


# LangChain


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_chats_and_streams(chat: Any, responses: bool) -> None:
    model = chat(use_responses_api=responses)
    whole = model.invoke([SystemMessage("Be brief."), HumanMessage(STORY)])
    assert whole.text
    assert whole.usage_metadata is not None
    assert 0 < whole.usage_metadata["output_tokens"] <= 20
    chunks = list(model.stream([SystemMessage("Be brief."), HumanMessage(STORY)]))
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == whole.text

    async def together() -> list[Any]:
        async with httpx2.AsyncClient() as client:
            options: Any = {"http_async_client": client, "use_responses_api": responses}
            return await chat(**options).abatch([STORY] * 3)

    texts = {reply.text for reply in asyncio.run(together())}
    assert len(texts) == 1


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_tools(chat: Any, responses: bool) -> None:
    model = chat(use_responses_api=responses, max_tokens=200).bind_tools([multiply])
    question = HumanMessage("What is 6 times 7?")
    asked = model.invoke([question])
    assert isinstance(asked, AIMessage)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("multiply", {"a": 6, "b": 7})
    result = multiply.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([question, asked, result]).text == "It is 42."
    gathered: Any = None
    for chunk in model.stream([question]):
        gathered = chunk if gathered is None else gathered + chunk
    assert [(c["name"], c["args"]) for c in gathered.tool_calls] == [(call["name"], call["args"])]


def test_langchain_parallel_calls(chat: Any) -> None:
    model = chat(max_tokens=200)
    two = model.bind_tools([multiply, lookup]).invoke("What is 6 times 7?")
    assert [call["args"]["b"] for call in two.tool_calls] == [7, 8]
    one = model.bind_tools([multiply, lookup], parallel_tool_calls=False)
    assert len(one.invoke("What is 6 times 7?").tool_calls) == 1


def test_langchain_errors(chat: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' not found"):
        chat(model="other").invoke("x")
    with pytest.raises(openai.AuthenticationError):
        chat(api_key="wrong").invoke("x")
    with pytest.raises(openai.BadRequestError, match="temperature is 200"):
        chat(temperature=200).invoke("x")


# `llm` as a client, by the file in which its users list such servers


def test_llm_as_a_client(live: Live, tmp_path: Path) -> None:
    entry = {"model_id": "served", "model_name": "demo", "api_base": f"{live.url}/v1"}
    entry |= {"api_key_name": "served", "supports_tools": True}
    # YAML holds JSON.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    (tmp_path / "keys.json").write_text(json.dumps({"served": KEY}))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}

    def command(*args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "llm", *args, "--no-log"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    options = ("-o", "temperature", "0", "-o", "max_tokens", "20")
    streamed = command("-m", "served", STORY, *options)
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout.strip()
    assert command("-m", "served", STORY, *options, "--no-stream").stdout == streamed.stdout
    code = 'def multiply(a: int, b: int) -> int:\n    "Multiply two numbers."\n    return a * b'
    tools = command("-m", "served", "What is 6 times 7?", "--functions", code)
    assert tools.stdout.strip() == "It is 42."
    failed = command("-m", "served", "x", "-o", "temperature", "1.5", "-o", "seed", "1.5")
    assert failed.returncode == 1
