"""Requests side by side on the slots of one model: their answers are the same as alone."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.live_server import PATIENCE, Live, live_server, tiny_model, wait_until

from webgemma.server import answers, listening
from webgemma.server.engine import Engine
from webgemma.server.protocol import Request

CHAT: Any = {"model": "small", "messages": [{"role": "user", "content": "in the end"}]}
TEXT: Any = {"model": "small", "prompt": "in the end", "max_tokens": 8, "temperature": 1.2}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tiny_model(tmp_path_factory.mktemp("models"))
    with live_server(path, device="gpu", slots=4, context=512) as server:
        yield server


def texts(answer: Any) -> list[str]:
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [each["message"]["content"] if "message" in each else each["text"] for each in choices]


def counts(live: Live) -> tuple[float, float]:
    found = dict(re.findall(r"^llamacpp:(\w+) (\S+)$", live.http.get("/metrics").text, re.M))
    return float(found["requests_processing"]), float(found["requests_deferred"])


def busy(live: Live) -> list[bool]:
    return [slot["is_processing"] for slot in live.http.get("/slots").json()]


def test_four_replies_are_those_of_four_requests(live: Live) -> None:
    body = {**CHAT, "max_tokens": 8, "temperature": 1.2}
    alone = [texts(live.post("/v1/chat/completions", {**body, "seed": 5 + n}))[0] for n in range(4)]
    assert len(set(alone)) == 4
    together = live.post("/v1/chat/completions", {**body, "seed": 5, "n": 4})
    assert texts(together) == alone
    assert together.json()["usage"]["completion_tokens"] == 32
    assert texts(live.post("/v1/chat/completions", {**body, "seed": 5, "n": 6}))[:4] == alone


def test_replies_to_one_prompt_read_it_once(live: Live) -> None:
    body = {**TEXT, "prompt": "inner hint " * 12, "n": 4, "seed": 5}
    before = live.http.get("/metrics").text
    answer = live.post("/v1/completions", body)
    after = live.http.get("/metrics").text
    prompt = answer.json()["usage"]["prompt_tokens"]
    row = re.compile(r"^llamacpp:prompt_tokens(_cached)?_total (\d+)$", re.M)
    read, cached = (
        int(new[2]) - int(old[2])
        for old, new in zip(row.finditer(before), row.finditer(after), strict=True)
    )
    assert read + cached == 4 * prompt
    assert read <= prompt + 3  # the last token is read by each


def test_prompts_of_one_request(live: Live) -> None:
    prompts = ["in the end", "then", "hint", "here and there", "thin", "inner"]
    alone = [texts(live.post("/v1/completions", {**TEXT, "prompt": p, "seed": 3})) for p in prompts]
    together = live.post("/v1/completions", {**TEXT, "prompt": prompts, "seed": 3})
    assert texts(together) == [text for (text,) in alone]
    wrong = [*prompts[:3], "in " * 4000, *prompts[3:]]  # the error of one ends the request
    answer = live.post("/v1/completions", {**TEXT, "prompt": wrong, "seed": 3})
    assert answer.status_code == 400
    assert "the context holds 512" in answer.json()["error"]["message"]
    wait_until(lambda: not any(busy(live)))


def test_pieces_come_as_they_are_written(live: Live) -> None:
    alone = live.post("/v1/completions", {**TEXT, "n": 3, "seed": 3, "max_tokens": 30})
    body = {**TEXT, "n": 3, "seed": 3, "max_tokens": 30, "stream": True}
    lines = live.post("/v1/completions", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [choice for event in events for choice in event["choices"]]
    indices = [piece["index"] for piece in pieces]
    assert indices.index(2) < len(indices) - 1 - indices[::-1].index(0)  # not one after another
    joined = ["".join(p["text"] for p in pieces if p["index"] == n) for n in range(3)]
    assert joined == texts(alone)


def test_clients_are_served_side_by_side(live: Live) -> None:
    bodies = [{**CHAT, "seed": n, "max_tokens": 6 + n, "temperature": 1.1} for n in range(10)]

    def ask(body: Any) -> list[str]:
        return texts(live.post("/v1/chat/completions", body))

    alone = list(map(ask, bodies))
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, bodies)) == alone


def endless(live: Live) -> dict[str, Any]:
    """Return settings with which no reply ends by itself."""
    engine = live.registry.loaded()[0].engine
    assert engine is not None
    return {"logit_bias": {str(token): -100 for token in engine.model.tokenizer.ends}}


class Held:
    """Streams that stay unread for as long as they are open."""

    def __init__(self, live: Live, count: int, **more: Any) -> None:
        body = {**CHAT, "stream": True, **endless(live), **more}
        self.live = live
        self.opened = [
            live.http.stream("POST", "/v1/chat/completions", json=body) for _ in range(count)
        ]
        self.streams = [each.__enter__() for each in self.opened]

    def close(self) -> None:
        for each in self.opened:
            each.__exit__(None, None, None)


def test_the_numbers_are_true_and_who_leaves_frees_a_slot(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = live.registry.loaded()[0].engine
    assert engine is not None
    slow = engine.model.gpu_engine("A test")._session.batch
    step = slow._take_step

    async def slowly() -> None:
        time.sleep(0.02)
        await step()

    monkeypatch.setattr(slow, "_take_step", slowly)
    wait_until(lambda: counts(live) == (0, 0))
    three, two = Held(live, 3), None
    try:
        wait_until(lambda: counts(live) == (3, 0))
        wait_until(lambda: sorted(busy(live)) == [False, True, True, True])
        assert live.http.get("/slots?fail_on_no_slot=1").status_code == 200
        with ThreadPoolExecutor(2) as pool:
            body = {**CHAT, **endless(live), "n": 3, "max_tokens": 40}
            two = pool.submit(live.post, "/v1/chat/completions", body)
            wait_until(lambda: busy(live) == [True] * 4)
            assert counts(live) == (4, 0)
            assert live.http.get("/slots?fail_on_no_slot=1").status_code == 503
            last = pool.submit(live.post, "/v1/chat/completions", {**CHAT, "max_tokens": 3})
            wait_until(lambda: counts(live) == (4, 1))
            three.close()  # two of the slots go to the replies that wait, one to the last request
            assert last.result().status_code == 200
            assert len(texts(two.result())) == 3
    finally:
        three.close()
    wait_until(lambda: counts(live) == (0, 0) and not any(busy(live)))


def test_who_reads_slowly_stops_nobody(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are written ahead of clients that leave their connections full, and not lost."""
    monkeypatch.setattr(answers, "SEND_SECONDS", 600.0)
    monkeypatch.setattr(listening, "STALL_SECONDS", 600.0)
    engine = live.registry.loaded()[0].engine
    assert engine is not None
    # A slot each; as text with all of these log-probabilities it is more than what is buffered.
    special = engine.model.tokenizer.special_ids.values()
    more: Any = {"max_tokens": 150, "logprobs": True, "top_logprobs": 20, "stream": True}
    more["logit_bias"] = {str(token): -100 for token in special}
    data = json.dumps({**CHAT, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x.local\r\nContent-Length: {len(data)}"
    connections = live.server._server.server_state.connections
    with ExitStack() as opened:
        for listener in live.server._sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        clients = [opened.enter_context(socket.socket()) for _ in range(4)]
        for client in clients:
            client.settimeout(PATIENCE)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(("127.0.0.1", live.port))
            client.sendall(head.encode() + b"\r\n\r\n" + data)

        def full() -> int:
            return sum(bool(each.flow and each.flow.write_paused) for each in list(connections))

        wait_until(lambda: full() == 4)
        wait_until(lambda: not any(busy(live)) and counts(live) == (0, 0))
        assert live.post("/v1/chat/completions", {**CHAT, "max_tokens": 3}).status_code == 200
        assert full() == 4
        for client in clients:
            received = b""
            while b"data: [DONE]" not in received:
                part = client.recv(1 << 16)
                assert part, "it was cut"
                received += part
            assert received.count(b'"logprobs": {') > 100
            assert b'"finish_reason": "length"' in received


def test_a_client_that_leaves_ends_all_its_replies(live: Live) -> None:
    engine = live.registry.loaded()[0].engine
    assert engine is not None
    request = Request("small", {"max_tokens": 400, "seed": 1}, prompts=["in", "the"], choices=3)

    async def main() -> None:
        own = Engine(engine.model)
        replies = own.replies(request)
        assert (await anext(replies))[0] in range(6)
        assert own.waiting == 0
        while sum(slot.busy for slot in engine.model.slots) < 4:
            await anext(replies)
        await replies.aclose()
        assert not any(slot.busy for slot in engine.model.slots)
        reading = asyncio.create_task(anext(own.replies(request)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert not own._requests

    asyncio.run(main())
