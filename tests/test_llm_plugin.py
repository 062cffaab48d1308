"""The plug-in in the real `llm`: its Python API, and its command line in a process of its own."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import llm
import numpy as np
import pydantic
import pytest
import soundfile
from helpers.scripted import follow_script
from helpers.store import CONFIG, add_model
from helpers.tiny import tiny_gguf
from helpers.tiny_encoders import TEXT, with_encoders
from PIL import Image

from webgemma import Gemma, InputError
from webgemma.llm_plugin import LOADED, REPORTED
from webgemma.settings import SETTINGS

CPU: Any = {"device": "cpu", "temperature": 0, "max_tokens": 12}
STORY = "Tell me a story about a dog."


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ollama's store with three models, one of another family, and a folder of `llm`'s own."""
    root, user = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("user")
    add_model(root, "gemma4:e2b", gguf=with_encoders())
    add_model(root, "small:latest", gguf=tiny_gguf(TEXT))
    add_model(root, "other:1b", gguf=b"GGUF", config=CONFIG | {"model_family": "llama"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLLAMA_MODELS", str(root))
        patch.setenv("LLM_USER_PATH", str(user))
        yield root
    LOADED.close()


@pytest.fixture(scope="module")
def story() -> str:
    """What the bundled model says by itself."""
    with Gemma.load(device="cpu") as model:
        return "".join(piece.text for piece in model.chat(STORY, temperature=0, max_tokens=12))


def command(*args: str, said: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "llm", *args],
        env={**os.environ, "NO_COLOR": "1"},
        input=said,
        capture_output=True,
        text=True,
        timeout=120,
    )


# The command line


def test_the_command_line(story: str) -> None:
    options = [part for name, value in CPU.items() for part in ("-o", name, str(value))]
    listed = command("models", "list", "-q", "webgemma").stdout
    names = [line.split(": ", 1)[1] for line in listed.splitlines()]
    assert names == [
        "webgemma",
        "webgemma/gemma4:e2b",
        "webgemma/small:latest (aliases: webgemma/small)",
    ]
    first = command("-m", "webgemma", STORY, *options)
    assert (first.stdout.strip(), first.stderr) == (story.strip(), "")
    # The conversation goes on from what `llm` has logged.
    second = command("-c", "What is its name?", *options)
    messages = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": first.stdout.removesuffix("\n")},
        {"role": "user", "content": "What is its name?"},
    ]
    with Gemma.load(device="cpu") as model:
        expected = "".join(p.text for p in model.chat(messages, temperature=0, max_tokens=12))
    assert second.stdout.strip() == expected.strip()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["-m", "webgemma", "x", "-o", "temperature", "-3"], "a number between 0 and 100"),
        (["-m", "webgemma", "x", "-o", "context", "99999999"], "is not possible"),
        (["-m", "webgemma/other:1b", "x"], "Unknown model"),
        (["-m", "webgemma", "x", "-o", "colour", "red"], "Extra inputs are not permitted"),
    ],
)
def test_errors_are_sentences(args: list[str], sentence: str) -> None:
    failed = command(*args)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: ")
    assert sentence in failed.stderr
    assert "Traceback" not in failed.stderr


# Python


def test_options_are_the_settings() -> None:
    fields = llm.get_model("webgemma").Options.model_fields
    assert set(fields) - {"device", "gpu", "context", "think"} == set(SETTINGS) - {*REPORTED}
    assert fields["top_k"].description == SETTINGS["top_k"].help
    with pytest.raises(pydantic.ValidationError, match="top_p is 2"):
        llm.get_model("webgemma").prompt("x", top_p=2)
    options = llm.get_model("webgemma").Options(stop='["a", "b"]', logit_bias='{"5": 1}', top_k="3")
    assert (options.stop, options.logit_bias, options.top_k) == (("a", "b"), {5: 1.0}, 3)


def test_a_conversation_streams_and_reports_usage(story: str) -> None:
    model = llm.get_model("webgemma")
    conversation = model.conversation()
    first = conversation.prompt(STORY, **CPU)
    pieces = list(first)
    assert len(pieces) > 3
    assert "".join(pieces) == story
    assert (first.usage().output, first.usage().input > 5) == (12, True)
    second = conversation.prompt("And then?", **CPU)
    assert second.usage().input > first.usage().input + 12
    stopped = model.prompt(STORY, **CPU, stop=story[5:9])
    assert stopped.text() == story[:5]
    with_system = model.prompt(STORY, system="Be brief.", **CPU)
    assert with_system.usage().input > first.usage().input


def test_one_model_stays_loaded() -> None:
    llm.get_model("webgemma").prompt("a", **CPU).text()
    loaded = LOADED._model
    llm.get_model("webgemma").prompt("b", **CPU).text()
    assert LOADED._model is loaded
    llm.get_model("webgemma/small").prompt("b", **CPU).text()
    assert LOADED._model is not loaded


def test_asynchronous_calls(story: str) -> None:
    async def main() -> str:
        response = llm.get_async_model("webgemma").prompt(STORY, **CPU)
        text = "".join([piece async for piece in response])
        assert (await response.usage()).output == 12
        return text

    assert asyncio.run(main()) == story


def test_attachments_go_to_the_encoders() -> None:
    model = llm.get_model("webgemma/gemma4:e2b")
    assert {"image/png", "audio/wav"} <= set(model.attachment_types)
    picture, sound = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (24, 24), "red").save(picture, "PNG")
    soundfile.write(sound, np.zeros(1700, np.float32), 16_000, format="WAV")
    plain = model.prompt("what is it", **CPU).usage().input
    for file in (picture, sound):
        attachment = llm.Attachment(content=file.getvalue())
        asked = model.prompt("what is it", attachments=[attachment], **CPU)
        assert asked.usage().input > plain + 1, attachment.resolve_type()
    with pytest.raises(ValueError, match="does not support attachments"):
        llm.get_model("webgemma").prompt("x", attachments=[attachment])


def test_tools_are_called_and_their_results_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain: a call, `llm` runs the function, and the reply follows its result."""
    script = {
        r"response:add\{.*\b12\b": "It is 12.",
        r"declaration:add\{.*Adds": "<|tool_call>call:add{a:5,b:7}<tool_call|>",
    }
    follow_script(monkeypatch, script)

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    chain = llm.get_model("webgemma").chain(
        "What is 5 + 7?", tools=[add], options={"device": "cpu"}
    )
    assert chain.text() == "It is 12."
    asked, answered = chain._responses
    (call,) = asked.tool_calls()
    assert (call.name, call.arguments) == ("add", {"a": 5, "b": 7})
    assert answered.usage().input > asked.usage().input


class Dog(pydantic.BaseModel):
    """A dog."""

    name: Literal["Max", "Bella"]
    age: int = pydantic.Field(ge=0, le=20)


def test_schemas() -> None:
    model = llm.get_model("webgemma")
    for seed in range(3):
        response = model.prompt("A dog?", schema=Dog, device="cpu", seed=seed, temperature=1.5)
        assert Dog.model_validate_json(response.text())
    with pytest.raises(InputError, match="The schema at #: not is not supported"):
        model.prompt("A dog?", schema={"not": {}}, device="cpu").text()

    async def main() -> str:
        asked = llm.get_async_model("webgemma").prompt("A dog?", schema=Dog, device="cpu")
        return await asked.text()

    assert Dog.model_validate_json(asyncio.run(main()))


def test_schemas_of_the_command_line() -> None:
    options = ("-o", "device", "cpu", "-o", "seed", "1")
    given = json.dumps(Dog.model_json_schema())
    asked = command("-m", "webgemma", "A dog?", "--schema", given, *options)
    assert Dog.model_validate_json(asked.stdout), asked.stderr
    # `llm`'s short form; what it does not name is not written.
    short = command("-m", "webgemma", "A dog?", "--schema", "tame bool, age int", *options)
    assert set(json.loads(short.stdout)) == {"tame", "age"}, short.stderr
    failed = command("-m", "webgemma", "A dog?", "--schema", '{"not": {}}', *options)
    assert failed.returncode == 1
    assert failed.stderr == "Error: The schema at #: not is not supported.\n"


def test_tools_that_the_model_calls_itself() -> None:
    """What it calls is what was offered, with arguments that fit, whatever it likes."""
    options = ("-o", "device", "cpu", "-o", "max_tokens", "40", "-o", "temperature", "0")
    code = 'def add(a: int, b: int) -> int:\n    "Add."\n    return a + b'
    answered = command("-m", "webgemma", "What is 5 + 7?", "--functions", code, *options)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip()


def test_thinking_is_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    follow_script(monkeypatch, {r"<\|think\|>": "<|channel>thought\nhm<channel|>Yes."})
    response = llm.get_model("webgemma").prompt("Well?", think=True, device="cpu")
    events = [(event.type, event.chunk) for event in response.stream_events()]
    assert "".join(text for kind, text in events if kind == "reasoning").strip() == "hm"
    assert response.text() == "Yes."
    assert llm.get_model("webgemma").prompt("Well?", **CPU).text() != "Yes."


def test_a_store_that_cannot_be_read_leaves_the_bundled_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "manifests").write_text("no folder")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    assert llm.get_model("webgemma").model_id == "webgemma"
