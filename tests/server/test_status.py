"""The status page: what it is served with, and the numbers that it shows."""

import re
from collections.abc import Iterator

import pytest
from helpers.live_server import Live, live_server, tiny_model

from webgemma.server.status import PAGE_PATH, page_policy

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    models = [tiny_model(folder, name) for name in ("one", "two")]
    with live_server(*models, keys=[KEY], max_loaded=2) as server:
        yield server


def test_the_page_asks_for_a_key_and_its_numbers_need_one(live: Live) -> None:
    page = live.http.get("/status")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert live.http.get("/status.json").status_code == 401
    assert live.http.get(f"/status.json?key={KEY}").status_code == 401
    assert live.http.get("/status/").status_code == 401
    numbers = live.http.get("/status.json", headers={"x-api-key": KEY})
    assert numbers.status_code == 200
    assert numbers.headers["cache-control"] == "no-store"
    for path in ("/metrics", "/slots"):
        assert live.http.get(path).status_code == 401


def test_the_page_runs_its_own_script_alone(live: Live) -> None:
    page = live.http.get("/status")
    policy = dict(
        rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[name])
    assert policy["script-src"] != policy["style-src"]
    assert page.text == PAGE_PATH.read_text("utf-8")
    assert not re.search(r"https?:|src=|style=|\son\w+=|innerHTML|eval\(", page.text)
    assert page_policy(page.text + "<script>alert(1)</script>") != page_policy(page.text)


def test_the_numbers(live: Live) -> None:
    live.http.headers["Authorization"] = f"Bearer {KEY}"
    messages = [{"role": "user", "content": "hello"}]
    usage = live.post(
        "/v1/chat/completions", {"model": "one", "messages": messages, "max_tokens": 4}
    ).json()["usage"]
    live.post("/api/generate", {"model": "two", "keep_alive": -1})
    status = live.http.get("/status.json").json()
    two, one = status["models"]
    assert (one["name"], two["name"]) == ("one", "two")
    assert 200 < one["leaves"] <= 300
    assert two["leaves"] is None
    (slot,) = one["slots"]
    assert (slot["busy"], slot["context"]) == (False, 512)
    # A step under way when the reply ended may have written more: with drafts, up to eight.
    assert 0 <= slot["tokens"] - (usage["total_tokens"] - 1) <= 8
    assert (one["context"], one["requests"]) == (512, 0)
    assert status["loading"] == []
    assert status["requests"] == {"processing": 0, "deferred": 0}
    assert status["reply"]["tokens"] == usage["completion_tokens"] == 4
    assert status["prompt"]["tokens"] == usage["prompt_tokens"]
    assert status["seconds"] > 0
