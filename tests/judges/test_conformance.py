"""npm's `webai-at-home openai_test conformance`: which parts of Chat Completions a server honours.

The bundled model answers, except in 13 tests that need a model which can do what it is asked: those
prompts have a script, whose replies go the same way as the model's own tokens. JSON and calls that
are forced are its own."""

import json
import secrets
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.judges import PARTS, run
from helpers.live_server import Live, live_server
from helpers.scripted import follow_script

TESTS = 44  # as many as Ollama passes
SEED = 300  # of the first request that has none: the small model ends its JSON object then

# The prompts hold what the tests send: a history that was lost or a tool that is not in the prompt
# would leave the reply to the small model, which fails.
SCRIPT = {
    r"name is Ada and .* is Lisp\..*user\nWhat is my name": "You are Ada, and you like Lisp.",
    r"response:get_current_weather\{.*celsius\W+31\b.*State the temp": "It is 31 degrees.",
    r"declaration:get_current_weather\{.*:get_current_time\{.*time in Paris\?<turn\|>": (
        '<|tool_call>call:get_current_time{city:<|"|>Paris<|"|>}<tool_call|>'
    ),
    r"declaration:get_current_weather\{.*weather in Paris\?<turn\|>": (
        '<|tool_call>call:get_current_weather{city:<|"|>Paris<|"|>}<tool_call|>'
    ),
    r"Count from one to fifty in words": "one, two, three, four, five, six, seven, eight, nine",
    r"Count from 1 to 9, separated by spaces": "1 2 3 4 5 6 7 8 9",
}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    follow_script(monkeypatch, SCRIPT)
    seeds = count(SEED)  # by chance, a small model would now and then write a string without end
    monkeypatch.setattr(secrets, "randbits", lambda _: next(seeds))
    with live_server("-") as server:
        yield server


def test_every_test_passes(live: Live, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["node", PARTS["webai"], "openai_test", "conformance", "--profile", "full"]
    target = ["--base_url", f"{live.url}/v1", "--model", "demo"]
    run([*command, *target, "--format", "json", "--output", report], environment={})
    tests: list[Any] = json.loads(report.read_text("utf-8"))["tests"]
    assert len(tests) == TESTS
    others = [test for test in tests if test["status"] != "pass"]
    assert others == [], json.dumps(others, indent=1)
