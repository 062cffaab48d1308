"""`webgemma serve --ray`: the same answers from two replicas, whichever of them dies when."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.command import refused
from openai import OpenAI

from webgemma import Gemma, InputError
from webgemma.distributed import cluster
from webgemma.distributed.cluster import take_gpu

pytestmark = pytest.mark.filterwarnings(  # of Ray's own code
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")

PATIENCE = 90.0  # seconds; a busy machine starts Ray slowly
HEADER = "x-webgemma-replica"


class Live:
    """A server with two replicas."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self.url = process, url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)

    def chat(self, *texts: str, **more: Any) -> httpx.Response:
        """Send a conversation, in which the user and the model take turns."""
        return self.http.post("/v1/chat/completions", json=body(*texts, **more))

    def replica_of(self, *texts: str) -> str:
        """Return which replica answers a conversation."""
        answer = self.chat(*texts)
        assert answer.status_code == 200, answer.text
        return answer.headers[HEADER]

    def processes(self) -> dict[str, int]:
        """Return the process of each replica, by the name in the file of its log."""
        found = {}
        for pid in descendants(self.process.pid):
            for link in (Path("/proc") / str(pid) / "fd").iterdir():
                name = os.path.basename(os.readlink(link))
                if name.startswith("replica_webgemma-"):
                    found[name.removesuffix(".log").rpartition("_")[2]] = pid
        return found


def body(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "demo", "messages": messages, "max_tokens": 4, "seed": 7} | more


def descendants(pid: int) -> list[int]:
    """Return the processes that a process began, and those that they did."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    args = ("serve", "-", "--ray", "--replicas", "2", "--device", "cpu", "--port", "0", "--json")
    command = [sys.executable, "-m", "webgemma", *args]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    live = Live(process, json.loads(line)["url"])
    yield live
    live.http.close()
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def ends() -> dict[str, float]:
    """A bias without which a reply would end."""
    with Gemma.load(None, "cpu") as gemma:
        return {str(token): -100.0 for token in gemma.tokenizer.ends}


def test_a_stream_is_that_of_the_model(live: Live) -> None:
    settings: Any = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
    with Gemma.load(None, "cpu") as gemma:
        expected = [piece.text for piece in gemma.chat("Tell me a story", **settings)]
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Tell me a story"}]
        stream = client.chat.completions.create(
            model="demo", messages=messages, stream=True, **settings
        )
        chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert [text for text in texts if text] == [text for text in expected if text]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_all_routes_and_refusals_are_those_of_the_server(live: Live) -> None:
    assert live.http.get("/").text == "Ollama is running"
    page = live.http.get("/", headers={"Accept": "text/html"}, follow_redirects=True)
    assert (page.url.path, 'data-home="server"' in page.text) == ("/chat/", True)
    assert HEADER not in page.headers  # it needs none
    assert [model["name"] for model in live.http.get("/api/tags").json()["models"]] == ["demo"]
    assert live.http.get("/nothing").status_code == 404
    refusal = live.http.post("/v1/chat/completions", content=b"nonsense")
    assert refusal.status_code == 400
    assert "not JSON" in refusal.json()["error"]["message"]
    assert live.chat("hi", model="none").status_code == 404
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        answer = live.http.get("/api/tags", headers=headers)
        assert answer.status_code == 403
        assert HEADER not in answer.headers  # no replica was asked
    local = live.http.get("/api/tags", headers={"origin": "http://localhost:1"})
    assert local.status_code == 200


def test_conversations_stay_on_their_replicas(live: Live) -> None:
    first, second = live.replica_of("one"), live.replica_of("two")
    assert first != second
    one, two = ["one"], ["two"]
    for _ in range(3):
        one, two = [*one, "yes", "and?"], [*two, "no", "why?"]
        assert live.replica_of(*one) == first
        assert live.replica_of(*two) == second
    for reply in (live.chat("one", n=1), live.http.post("/api/chat", json=body("one"))):
        assert reply.headers[HEADER] == first  # whichever API it is


def test_a_client_that_leaves_ends_its_reply(live: Live, ends: dict[str, float]) -> None:
    """Else the next one would wait for it, since a CPU writes one reply at a time."""
    endless = body("leaving", max_tokens=900, stream=True, logit_bias=ends)
    with live.http.stream("POST", "/v1/chat/completions", json=endless) as answer:
        replica = answer.headers[HEADER]
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        begun = time.monotonic()
        for _ in range(50):
            next(lines)
        rest = (time.monotonic() - begun) / 50 * 800
    begun = time.monotonic()
    assert live.replica_of("leaving", "yes", "and?") == replica
    assert time.monotonic() - begun < rest / 2


@needs_proc
def test_a_killed_replica_is_replaced(live: Live, ends: dict[str, float]) -> None:
    """Its streams end with an error, its conversations go on elsewhere, and another one comes."""
    endless = body("dying", max_tokens=900, stream=True, logit_bias=ends)
    with live.http.stream("POST", "/v1/chat/completions", json=endless) as answer:
        replica = answer.headers[HEADER]
        lines = answer.iter_lines()
        assert "error" not in next(lines)
        os.kill(live.processes()[replica], signal.SIGKILL)
        events = [line for line in lines if line]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert "please try again" in error["message"]
    other = live.replica_of("dying", "yes", "and?")
    assert other != replica
    assert live.replica_of("dying", "yes", "and?", "so", "hm") == other
    wait_for(lambda: live.replica_of(str(time.monotonic())) not in (replica, other))
    assert live.replica_of("dying", "yes", "and?") == other


@needs_proc
def test_sigterm_ends_all(live: Live, ends: dict[str, float]) -> None:
    """Replies have some seconds to end; the clients of others are told; no process is left."""
    processes = descendants(live.process.pid)
    assert len(processes) > 3
    endless = body("ending", max_tokens=900, stream=True, logit_bias=ends)
    with live.http.stream("POST", "/v1/chat/completions", json=endless) as answer:
        lines = answer.iter_lines()
        next(lines)
        live.process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert last == "data: [DONE]" or "stopping" in last
    out, err = live.process.communicate(timeout=PATIENCE)
    assert (live.process.returncode, out, err) == (0, "", "stopped\n")
    wait_for(lambda: not any((Path("/proc") / str(pid)).exists() for pid in processes))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.2)


def test_what_it_refuses() -> None:
    assert "needs --ray" in refused("serve", "-", "--replicas", 2)
    assert "need --ray" in refused("serve", "-", "--gpu", "a", "--gpu", "b")
    args = ("serve", "-", "--ray", "--port", 0)
    assert "each GPU needs one" in refused(*args, "--gpu", "a", "--gpu", "b", "--replicas", 1)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused("serve", "-", "--ray", "--device", "cpu", "--port", 0)
    assert 'pip install "webgemma[ray]"' in said


def test_a_ray_that_does_not_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its processes may not find each other in the time that Ray gives them."""
    killed: list[Any] = []

    class Node:
        def __init__(self, *names: str) -> None:
            raise Exception(f"The current node timed out during {names[0]}.\nPerhaps.")

        def kill_all_processes(self, **options: Any) -> None:
            killed.append(options)

    monkeypatch.setattr(cluster, "_start", lambda *_: cluster._ended_on_failure(Node)("startup"))
    with (
        pytest.raises(InputError, match=r"Ray on this machine does not start: .* startup\.$"),
        cluster.connected(1),
    ):
        pass
    assert killed == [{"check_alive": False, "wait": True}]


def test_who_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RuntimeError(), RuntimeError(), {"a": 1}])

    def get_node(address: str) -> Any:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer | {"address": address}

    assert cluster._with_retries(get_node)("x") == {"a": 1, "address": "x"}
    monkeypatch.setattr(cluster, "START_SECONDS", 0)
    answers = iter([RuntimeError("not there")])
    with pytest.raises(RuntimeError, match="not there"):
        cluster._with_retries(get_node)("x")


def test_processes_of_a_machine_share_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the first that is free, also one whose process has ended."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cluster, "_locks", [])
    gpus = ["dawn:A", "B"]
    assert [take_gpu(gpus, "job") for _ in range(3)] == ["dawn:A", "B", "dawn:A"]
    assert take_gpu(gpus, "another") == "dawn:A"
    os.close(cluster._locks.pop(1))
    assert take_gpu(gpus, "job") == "B"
    cluster.remove_locks("job")
    cluster.remove_locks("another")
    assert not list(tmp_path.iterdir())
    assert (take_gpu([], "job"), take_gpu(["A"], "job")) == (None, "A")
    for descriptor in cluster._locks:
        os.close(descriptor)
