"""bench/serve.py: figures of the engine, of the server, and of a server that is a peer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.live_server import live_server

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "serve.py"


def bench(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, "--clients", "1,3", "--tokens", "6", *args],
        capture_output=True,
        text=True,
        timeout=120,
    )


def check(timings: Any) -> None:
    assert [each["clients"] for each in timings] == [1, 3]
    assert [each["tokens"] for each in timings] == [6, 18]
    assert all(0 < each["first"] < each["seconds"] for each in timings)


def test_the_engine_and_the_server() -> None:
    finished = bench("--device", "cpu", "--json")
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert set(found) == {"engine", "HTTP"}
    for timings in found.values():
        check(timings)


def test_a_peer() -> None:
    asked = ("--extra", '{"ignore_eos": false, "temperature": 0}')
    with live_server("-") as live:
        refused = bench("--peer", live.url, "other", *asked)
        finished = bench("--peer", f"{live.url}/v1", "demo", "--json", *asked)
    assert refused.returncode == 1
    assert "model 'other' not found" in refused.stderr
    assert finished.returncode == 0, finished.stderr
    check(json.loads(finished.stdout)["peer"])
