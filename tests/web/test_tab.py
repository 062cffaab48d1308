"""The page's Python without a browser: what it tells for what it is asked."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from webgemma import Gemma, InputError
from webgemma.gguf.sources import BytesSource
from webgemma.standin import standin_gguf
from webgemma.web.tab import Tab

DATA = standin_gguf()
GREEDY = json.dumps({"temperature": 0, "max_tokens": 5, "seed": None, "think": False})
HELLO = json.dumps([{"role": "user", "content": "Hello"}])


class Bytes(bytes):
    """As JavaScript hands them over."""

    def to_bytes(self, *_: Any, **__: Any) -> bytes:  # type: ignore[override]
        return bytes(self)


def reader(data: bytes) -> Callable[[int, int], Coroutine[Any, Any, Bytes]]:
    async def read(begin: int, end: int) -> Bytes:
        return Bytes(data[begin:end])

    return read


def told(ask: Callable[[Tab], Coroutine[Any, Any, None]]) -> list[dict[str, Any]]:
    """All that a tab tells the page while it is asked."""
    messages: list[dict[str, Any]] = []

    async def run() -> None:
        tab = Tab(lambda text: messages.append(json.loads(text)))
        await ask(tab)
        await tab.unload()

    asyncio.run(run())
    return messages


def test_a_file_is_loaded_and_replies() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load("mine.gguf", len(DATA), reader(DATA), None, "auto")
        await tab.chat(7, HELLO, GREEDY)

    messages = told(ask)
    loaded = next(m for m in messages if m["type"] == "loaded")
    assert (loaded["name"], loaded["nbytes"]) == ("mine.gguf", len(DATA))
    text = "".join(m["text"] for m in messages if m["type"] == "piece")
    with Gemma.load(None, "cpu") as model:
        pieces = model.chat(json.loads(HELLO), temperature=0, max_tokens=5)
        assert text == "".join(piece.text for piece in pieces)
    done = messages[-1]
    assert (done["type"], done["id"], done["tokens"]) == ("done", 7, 5)


def test_a_reply_is_stopped() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load("", 0, None, None, "auto")
        reply = asyncio.ensure_future(tab.chat(1, HELLO, GREEDY))
        await asyncio.sleep(0)
        tab.stop(1)
        await reply
        tab.stop(1)  # too late: nothing happens

    assert told(ask)[-1]["finish"] == "stopped"


@pytest.mark.parametrize(
    ("data", "nbytes", "sentence"),
    [
        (b"GIF89a" * 9, 54, "is not a GGUF file"),
        (DATA[:5000], len(DATA), "became shorter while it was read"),
    ],
)
def test_files_that_are_no_models(data: bytes, nbytes: int, sentence: str) -> None:
    message = told(lambda tab: tab.load("mine", nbytes, reader(data), None, "auto"))[-1]
    assert (message["type"], message["kind"]) == ("error", "file")
    assert sentence in message["sentence"]


def test_a_setting_that_cannot_be_fails_the_reply_only() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load("", 0, None, None, "auto")
        await tab.chat(1, HELLO, json.dumps({"temperature": -1}))
        await tab.chat(2, HELLO, GREEDY)

    messages = told(ask)
    errors = [m for m in messages if m["type"] == "error"]
    assert [m["id"] for m in errors] == [1]
    assert "temperature" in errors[0]["sentence"]
    assert messages[-1]["type"] == "done"


def test_without_a_model_there_is_no_reply() -> None:
    assert told(lambda tab: tab.chat(1, HELLO, GREEDY))[-1]["sentence"].startswith("There is no")


def test_a_source_is_a_model_natively_too() -> None:
    with Gemma.load(BytesSource(DATA, "bytes.gguf"), "cpu") as model:
        assert model.name == "bytes.gguf"
    for wrong in (5, [1], b"GGUF"):
        with pytest.raises(InputError, match="is no model: give an Ollama name"):
            Gemma.load(wrong)  # type: ignore[arg-type]
