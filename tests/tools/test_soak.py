"""The soak in small, against a server of its own; and that it sees what is wrong."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
HELD = {"gpu_nbytes": 5, "rss_nbytes": 2**28, "descriptors": 9, "threads": 3, "tasks": 2}


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    import soak

    yield soak
    for name in ("soak", "live"):
        sys.modules.pop(name, None)


def test_sixty_requests() -> None:
    command = [sys.executable, BENCH / "soak.py", "--requests", "60", "--clients", "12"]
    options = ["--device", "cpu", "--seconds", "120", "--json"]
    finished = subprocess.run(
        [*command, *options], capture_output=True, text=True, encoding="utf-8", timeout=180
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found["wrong"] == []
    assert sum(found["kinds"].values()) == 60
    assert len(found["kinds"]) == 7


def test_the_plan_has_every_kind_and_is_that_of_its_seed(soak: Any) -> None:
    jobs = list(soak.plan("m", 2000, random.Random(1)))
    assert jobs == list(soak.plan("m", 2000, random.Random(1)))
    paths = {job.path for job in jobs if job.prompt}
    assert len(paths) == len(soak.APIS)
    for path in paths:
        assert {job.body["stream"] for job in jobs if job.prompt and job.path == path} == {
            True,
            False,
        }
    assert any(job.leave == 0.0 for job in jobs)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("", ""),
        ("text", "alone it is"),
        ("status", "status 500, not 200"),
        ("descriptors", "descriptors grew from 9 to 19."),
        ("gpu", "gpu_nbytes grew from 5 to 15."),
        ("health", "/health says"),
    ],
)
def test_what_is_wrong_is_seen(soak: Any, fault: str, sentence: str) -> None:
    """A server of a few lines, which begins to do something wrong in the last round."""
    rounds = 0

    def held(what: str) -> int:
        is_late = rounds == soak.ROUNDS
        return HELD[what] + (10 if fault and what.startswith(fault) and is_late else 0)

    def respond(request: httpx.Request) -> httpx.Response:
        nonlocal rounds
        is_late = rounds == soak.ROUNDS - 1
        if request.url.path == "/api/ps":
            rounds += 1
            return httpx.Response(200, json={"models": [{"size_vram": held("gpu_nbytes")}]})
        if request.url.path == "/health":
            return httpx.Response(200, json={"status": "ok" if fault != "health" else "tired"})
        if request.url.path == "/metrics":
            return httpx.Response(200, text="llamacpp:requests_processing 0\n")
        if fault == "status" and is_late:
            return httpx.Response(500, json={"error": "x"})
        text = "other" if fault == "text" and is_late else "text"
        return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})

    counts = {name: lambda what=name: held(what) for name in ("descriptors", "threads", "tasks")}
    server = SimpleNamespace(url="http://x", rss=lambda: held("rss_nbytes"), **counts)

    class MockedSoak(soak.Soak):  # type: ignore[misc]
        def _connect(self) -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(respond))

    path, body = soak.openai_chat(soak.Prompt("x"))
    jobs = [soak.Job("answer", path, body, soak.Prompt("x")) for _ in range(8)]
    found = asyncio.run(MockedSoak(server, "m", 2).run(jobs))
    assert bool(found.wrong) == bool(fault)
    assert sentence in " ".join(found.wrong)
