"""Clients that leave, read slowly or stay while the server stops: the model is free at once."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.endless import Endless, endless_replies
from helpers.live_server import PATIENCE, Live, live_server, tiny_model, wait_until

from webgemma.server import listening
from webgemma.server.ahead import Ahead
from webgemma.server.protocol import RequestError

HELLO: Any = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**HELLO, "stream": True}


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Endless:
    return endless_replies(monkeypatch)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model(tmp_path_factory.mktemp("models"))) as server:
        yield server


def is_free(live: Live) -> bool:
    (loaded,) = live.registry.loaded()
    return loaded.users == 0 and live.registry.requests == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages"])
def test_a_client_that_leaves_a_stream_frees_the_model(
    live: Live, endless: Endless, path: str
) -> None:
    with live.http.stream("POST", path, json=STREAM | {"max_tokens": 9}) as response:
        assert response.status_code == 200
        next(response.iter_bytes())
    wait_until(lambda: endless.ended == 1 and is_free(live))
    written = endless.written
    assert live.http.get("/health").status_code == 200
    assert endless.written == written


def asked(body: Any) -> bytes:
    """Return a request, to be sent on a connection that ends when a test says so."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x.local\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def test_a_client_that_leaves_before_a_whole_answer(live: Live, endless: Endless) -> None:
    with live.connect() as connection:
        connection.sendall(asked(HELLO))
        wait_until(lambda: endless.written > 0)
    wait_until(lambda: endless.ended == 1 and is_free(live))


def test_the_model_itself_is_free_for_the_next(live: Live) -> None:
    """Not a stand-in for its replies."""
    with live.http.stream("POST", "/api/generate", json={"model": "small", "prompt": "x"}) as got:
        next(got.iter_lines())
    wait_until(lambda: is_free(live))
    assert live.post("/v1/chat/completions", {**HELLO, "max_tokens": 1}).status_code == 200


def test_a_client_that_leaves_the_queue(live: Live) -> None:
    """The model is held as another conversation holds it; those who wait may leave."""
    live.post("/api/generate", {"model": "small"})  # loads it
    (loaded,) = live.registry.loaded()
    assert loaded.engine is not None
    model = loaded.engine.model
    turn = model.worker.turns.wait(is_stream=True)
    try:
        with live.connect() as connection:
            connection.sendall(asked(HELLO))
            wait_until(lambda: loaded.users == 1)
        wait_until(lambda: is_free(live))
    finally:
        model.worker.turns.end(turn)
    assert live.post("/v1/chat/completions", {**HELLO, "max_tokens": 1}).status_code == 200


def test_a_client_that_does_not_read_frees_the_model(
    live: Live, endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for: its stream may be so far ahead, then the reply ends."""
    endless.seconds, endless.text = 0.0, "x" * (1 << 14)  # soon more than the system buffers
    monkeypatch.setattr(live.server._server._ahead, "_most", 50)
    with live.connect() as connection:
        connection.sendall(asked(STREAM))
        wait_until(lambda: endless.ended == 1)
        monkeypatch.undo()  # the model answers others while that client still has its connection
        assert live.post("/v1/chat/completions", {**HELLO, "max_tokens": 1}).status_code == 200
    wait_until(lambda: is_free(live))


def test_a_connection_that_is_not_read_is_cut(
    live: Live, endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the client holds it open; one that reads slowly gets everything."""
    monkeypatch.setattr(listening, "STALL_SECONDS", 1.0)
    endless.seconds, endless.text = 0.2, "x" * (8 << 20)
    connections = live.server._server.server_state.connections
    others = set(connections)
    with live.connect() as connection:
        connection.sendall(asked(STREAM))
        wait_until(lambda: endless.written > 0)
        assert connections - others
        wait_until(lambda: endless.ended == 1 and not connections - others)
    with live.connect() as connection:
        connection.sendall(asked(STREAM))
        nbytes = 0
        while nbytes < len(endless.text):
            time.sleep(0.05)
            received = connection.recv(1 << 18)
            assert received, "it was cut"
            nbytes += len(received)
    wait_until(lambda: is_free(live))


@pytest.mark.usefixtures("endless")
def test_a_server_that_stops_tells_its_clients(tmp_path: Path) -> None:
    texts, told = [], []

    def listen(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=PATIENCE)
        with client:
            try:
                for chunk in client.chat.completions.create(**STREAM):
                    texts.append(chunk.choices[0].delta.content)
            except openai.APIError as error:
                told.append(str(error))

    with live_server(tiny_model(tmp_path)) as live:
        thread = threading.Thread(target=listen, args=(live.url,))
        thread.start()
        wait_until(lambda: len(texts) > 3)
        live.server.stop()
        thread.join(PATIENCE)
    assert told == ["The server is stopping; send the request again later."]
    assert live.registry.running() == []


def test_a_server_that_stops_does_not_wait_for_a_client_that_does_not_read(
    tmp_path: Path, endless: Endless
) -> None:
    endless.text = "x" * (1 << 20)
    with live_server(tiny_model(tmp_path)) as live, live.connect() as connection:
        connection.sendall(asked(STREAM))
        wait_until(lambda: endless.written > 20)
        began = time.monotonic()
        live.server.stop()
        wait_until(lambda: endless.ended == 1 and not live.registry.running())
        assert time.monotonic() - began < 4  # 1.2 s of grace


# Streams that run ahead


def test_streams_run_ahead_and_end_as_they_should() -> None:
    async def numbers(count: int, fails: bool = False) -> AsyncGenerator[int, None]:
        for number in range(count):
            yield number
            await asyncio.sleep(0)
        if fails:
            raise ValueError("of the stream")

    async def main() -> None:
        ahead = Ahead(5)
        assert [n async for n in ahead.iterate(numbers(100))] == list(range(100))
        failing = ahead.iterate(numbers(3, fails=True))
        assert [await anext(failing) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="of the stream"):
            await anext(failing)
        slow = ahead.iterate(numbers(100))
        assert await anext(slow) == 0
        await asyncio.wait(ahead._writers)  # it was 5 ahead, and has ended
        assert [await anext(slow) for _ in range(5)] == [1, 2, 3, 4, 5]
        with pytest.raises(RequestError, match="too slowly"):
            await anext(slow)
        assert not ahead._writers

    asyncio.run(main())
