"""What a stream of chat completions says beyond OpenAI's: what it waits for, tokens, canvases."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import Live, live_server, tiny_model, wait_until

from webgemma.api import Gemma
from webgemma.denoising import Canvas
from webgemma.replies import Piece, Usage
from webgemma.server import answers, registry
from webgemma.server.engine import Engine

HELLO: Any = [{"role": "user", "content": "hello"}]
SETTINGS = {"max_tokens": 3, "temperature": 0}
BODY = {"model": "small", "messages": HELLO, "stream": True, "progress": True, **SETTINGS}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STAGE_SECONDS", 0.01)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with live_server(tiny_model(tmp_path)) as server:
        yield server


@contextmanager
def asking(live: Live, **more: Any) -> Iterator[Iterator[Any]]:
    """Ask for a stream; the value iterates over its events."""
    with live.http.stream("POST", "/v1/chat/completions", json=BODY | more) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        yield (json.loads(line) for line in lines if line != "[DONE]")


def stages(events: Any) -> list[str]:
    """Return the names of all stages, each once."""
    return list(dict.fromkeys(e["progress"]["stage"] for e in events if "progress" in e))


def next_stage(events: Iterator[Any], name: str) -> Any:
    """Return the next stage of this name; it must come."""
    found = (event["progress"] for event in events if "progress" in event)
    return next(progress for progress in found if progress["stage"] == name)


class Held:
    """Holds what is awaited until it is released, also from another thread."""

    def __init__(self) -> None:
        self.released = threading.Event()

    async def wait(self) -> None:
        await asyncio.to_thread(self.released.wait, 30)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Loading that ends when it is released."""
    held, load = Held(), Gemma.aload

    async def aload(*args: Any, **options: Any) -> Gemma:
        await held.wait()
        return await load(*args, **options)

    monkeypatch.setattr(Gemma, "aload", aload)
    yield held
    held.released.set()


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Replies of one token, which comes when it is released."""
    held, reply = Held(), Engine._reply

    async def held_reply(self: Engine, *args: Any) -> AsyncGenerator[Piece, None]:
        async for piece in reply(self, *args):
            await held.wait()
            yield piece

    monkeypatch.setattr(Engine, "_reply", held_reply)
    yield held
    held.released.set()


def test_a_model_that_is_loaded_on_demand_is_said_to_be(live: Live, loading: Held) -> None:
    with asking(live) as events:
        next_stage(events, "loading")
        loading.released.set()
        rest = list(events)
    assert "loading" not in stages(rest)
    texts = [event["choices"][0]["delta"].get("content") for event in rest if event["choices"]]
    assert "".join(filter(None, texts))


def test_who_waits_for_a_slot_is_told(live: Live, writing: Held) -> None:
    """The CPU has one."""
    with asking(live) as first:
        next_stage(first, "reading")
        with asking(live) as second:
            next_stage(second, "queued")
            assert live.http.get("/status.json").json()["requests"]["deferred"] == 1
            writing.released.set()
            assert stages(first) == []
            assert "queued" not in stages(second)


def test_encoding_is_counted(live: Live, writing: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Gemma.achat

    def achat(self: Gemma, *args: Any, progress: Any, **more: Any) -> Any:
        progress(3, 8)
        return chat(self, *args, **more)

    monkeypatch.setattr(Gemma, "achat", achat)
    with asking(live) as events:
        assert next_stage(events, "encoding") == {"stage": "encoding", "done": 3, "total": 8}
        writing.released.set()
        list(events)


def test_without_progress_a_stream_is_as_openai_has_it(live: Live, loading: Held) -> None:
    threading.Timer(0.2, loading.released.set).start()
    with asking(live, progress=False) as events:
        for event in events:
            assert set(event) == {"id", "object", "created", "model", "choices"}


def test_an_error_has_its_status_until_something_was_said(
    live: Live, loading: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "MAX_REQUESTS", 0)
        answer = live.post("/v1/chat/completions", BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "queue is full" in answer.json()["error"]["message"]
    with asking(live) as events:
        next_stage(events, "loading")

        def fail(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(Engine, "__init__", fail)
        loading.released.set()
        last = list(events)[-1]
    assert last["error"]["message"] == "There is not enough memory for this request."
    wait_until(lambda: live.registry.requests == 0)


def test_a_client_that_leaves_while_it_waits(live: Live, loading: Held) -> None:
    with asking(live) as events:
        next_stage(events, "loading")
    wait_until(lambda: live.registry.requests == 0)
    loading.released.set()
    assert live.post("/v1/chat/completions", BODY | {"stream": False}).status_code == 200


def test_tokens_and_times_come_with_every_piece(live: Live) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    long = [*messages * 100, {"role": "user", "content": "well"}]
    with asking(live, messages=long, timings_per_token=True, max_tokens=4) as events:
        pieces = [event for event in events if "timings" in event]
    timings = [piece["timings"] for piece in pieces]
    last = timings[-1]
    counts = [each["predicted_n"] for each in timings]
    assert counts == sorted(counts)
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["predicted_n"], last["n_ctx"]) == (4, 512)
    assert 0 < last["prompt_n"] + last["cache_n"] <= 508
    assert last["left_out"] % 2 == 0
    assert 0 < last["left_out"] < len(long)
    assert last["predicted_per_second"] == pytest.approx(3 / last["predicted_ms"] * 1000)
    assert last["prompt_per_second"] == pytest.approx(last["prompt_n"] / last["prompt_ms"] * 1000)


def test_a_canvas_is_shown_step_by_step(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = Canvas(0, 1, (70, 71), (True, False), (70, 71), (-1.0, -1.0), 0.5, False)

    async def reply(*_: Any) -> AsyncGenerator[Piece, None]:
        yield Piece(-1, "", 0.0, canvas=canvas, usage=Usage(5, 0, 512))
        yield Piece(70, "a", -1.0, usage=Usage(5, 1, 512), finish="stop")

    monkeypatch.setattr(Engine, "_reply", reply)
    with asking(live, watch=True) as events:
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    (shown,) = [delta["canvas"] for delta in deltas if "canvas" in delta]
    runs = shown.pop("runs")
    assert [accepted for _, accepted in runs] == [True, False]
    assert shown == {"number": 1, "step": 1, "accepted": 1, "size": 2}
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["a"]
