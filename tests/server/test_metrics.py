"""What the server counts, for Prometheus and for people: `/metrics` and `/slots`."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.live_server import Live, live_server, tiny_model, wait_until
from helpers.pieces import cached_prompt, reply

from webgemma.api import Gemma
from webgemma.engine.cpu import CpuEngine
from webgemma.sampler import SampledToken
from webgemma.server.metrics import Metrics, Speed

SECRET = "xylophone"
HELLO: Any = {"model": "small", "messages": [{"role": "user", "content": SECRET}]}
ROW = re.compile(r"llamacpp:([a-z_]+) ([0-9.e+-]+)")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def numbers(text: str) -> dict[str, float]:
    """Return the numbers of Prometheus' text format, each with its help and type before it."""
    lines, found = text.splitlines(), {}
    for about, kind, value in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        row = ROW.fullmatch(value)
        assert row
        assert about.startswith(f"# HELP llamacpp:{row[1]} ")
        assert kind in [f"# TYPE llamacpp:{row[1]} {each}" for each in ("counter", "gauge")]
        found[row[1]] = float(row[2])
    return found


# Counting


def test_tokens_and_times_of_a_request() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    pieces = cached_prompt(reply("a", "b", "c"), 3)  # 7 tokens of the prompt, 4 of the reply
    with metrics.request() as count:
        clock.now += 2  # until the first token
        for piece in pieces:
            count(0, piece)
            assert metrics.writing == (not piece.finish)
            clock.now += 0.5
        clock.now += 1.5  # 2 after the last token of the first reply
        count(1, reply("x")[0])
        assert metrics.writing == 1
    assert metrics.writing == 0  # also of the reply that did not end
    found = numbers(metrics.prometheus(1, 2))
    assert found["prompt_tokens_total"] == (7 - 3) + 7
    assert found["prompt_tokens_cached_total"] == 3
    assert found["prompt_seconds_total"] == 2 + 2
    assert found["tokens_predicted_total"] == found["n_decode_total"] == 5
    assert found["tokens_predicted_seconds_total"] == 1.5
    assert found["n_tokens_max"] == 11
    assert found["predicted_tokens_seconds"] == 5 / 1.5
    assert found["prompt_tokens_seconds"] == 11 / 4
    assert found["n_busy_slots_per_decode"] == 1
    assert (found["requests_processing"], found["requests_deferred"]) == (1, 2)


def test_replies_beside_each_other() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    with metrics.request() as one, metrics.request() as two:
        for piece in reply("a", "b", finish=""):
            clock.now += 1
            one(0, piece)
            two(0, piece)
            two(1, piece)
    found = numbers(metrics.prometheus(0, 0))
    assert found["tokens_predicted_total"] == 6
    assert found["tokens_predicted_seconds_total"] == 3  # a second of each
    assert found["prompt_seconds_total"] == 3
    assert found["n_busy_slots_per_decode"] == (1 + 2 + 3 + 3 + 3 + 3) / 6


def test_speeds_are_of_the_last_seconds() -> None:
    clock = Clock()
    speed = Speed(clock)
    assert (speed.average(), speed.throughput()) == (0, 0)
    for _ in range(10):
        speed.add(20, 0.25)
        speed.add(20, 0.25)
        clock.now += 1
    assert (speed.average(), speed.throughput()) == (80, 40)
    clock.now += 3
    assert speed.throughput() == 40 * 2 / 5
    clock.now += 90
    assert (speed.average(), speed.throughput()) == (0, 0)


# Over HTTP


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model(tmp_path_factory.mktemp("models"))) as server:
        yield server


def test_requests_are_counted(live: Live) -> None:
    before = numbers(live.http.get("/metrics").text)
    answer = live.post("/v1/chat/completions", {**HELLO, "max_tokens": 5, "n": 2})
    usage = answer.json()["usage"]
    list(live.http.post("/api/chat", json={**HELLO, "options": {"num_predict": 3}}).iter_lines())
    got = live.http.get("/metrics")
    assert got.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    after = numbers(got.text)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["tokens_predicted_total"] == usage["completion_tokens"] + 3
    cached = grown["prompt_tokens_cached_total"]
    assert grown["prompt_tokens_total"] + cached == 3 * usage["prompt_tokens"]
    assert grown["prompt_seconds_total"] > 0
    assert after["predicted_tokens_seconds"] > 0
    assert after["requests_processing"] == after["requests_deferred"] == 0


def test_who_is_served_and_who_waits(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: Any) -> Any:
        while True:
            time.sleep(0.01)
            yield SampledToken(40, -1.0)

    monkeypatch.setattr(CpuEngine, "generate", endless)

    def counts() -> tuple[float, float]:
        found = numbers(live.http.get("/metrics").text)
        return found["requests_processing"], found["requests_deferred"]

    stream = {**HELLO, "stream": True}
    with live.http.stream("POST", "/v1/chat/completions", json=stream) as first:
        chunks = first.iter_bytes()  # kept: it would close the stream
        next(chunks)
        assert counts() == (1, 0)
        (slot,) = live.http.get("/slots").json()
        assert slot == {
            "id": 0, "model": "small", "n_ctx": 512, "speculative": False, "is_processing": True,
            "n_prompt_tokens": slot["n_prompt_tokens"],
        }  # fmt: skip
        assert live.http.get("/slots?fail_on_no_slot=1").status_code == 503
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(live.post, "/api/chat", {**HELLO, "options": {"num_predict": 2}})
            wait_until(lambda: counts() == (1, 1))  # this engine has one slot
            first.close()
            assert second.result().status_code == 200
    wait_until(lambda: counts() == (0, 0))
    assert live.http.get("/slots?fail_on_no_slot=1").json()[0]["is_processing"] is False


def test_slots_of_an_engine_that_has_them(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [SimpleNamespace(id=n, busy=n == 1, tokens=7 * n, context=256) for n in range(2)]
    live.post("/api/generate", {"model": "small"})
    monkeypatch.setattr(Gemma, "slots", slots)
    found = live.http.get("/slots").json()
    assert [slot["is_processing"] for slot in found] == [False, True]
    assert [slot["n_prompt_tokens"] for slot in found] == [0, 7]
    assert [slot["id"] for slot in found] == [0, 1]
    assert found[0]["n_ctx"] == 256


def test_nobodys_text_is_shown(live: Live) -> None:
    live.post("/v1/chat/completions", {**HELLO, "max_tokens": 5})
    for path in ("/metrics", "/slots", "/api/ps"):
        assert SECRET not in live.http.get(path).text
