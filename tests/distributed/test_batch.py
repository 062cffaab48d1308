"""Batches of work on a Ray of this machine: the right replies, whatever process dies when."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.command import answer, refused, webgemma
from helpers.live_server import tiny_model
from pyarrow import parquet

from webgemma import Gemma, InputError
from webgemma.distributed import batch, jobs
from webgemma.distributed.cluster import connected
from webgemma.distributed.worker import RowWorker

pytestmark = pytest.mark.filterwarnings(  # of Ray's own code
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)

PATIENCE = 90.0  # seconds; a busy machine starts Ray slowly
SETTINGS: dict[str, Any] = {"max_tokens": 12, "seed": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gemma(model: Path) -> Iterator[Gemma]:
    with Gemma.load(model, "cpu") as gemma:
        yield gemma


@pytest.fixture(scope="module")
def one_ray() -> Iterator[str]:
    """One Ray for all tests here, with its address: starting it takes the longest."""
    with connected(3) as ray:
        yield ray.get_runtime_context().gcs_address


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def replied(gemma: Gemma, asked: Any, **settings: Any) -> dict[str, Any]:
    """What the model says directly, as a row has it."""
    pieces = list(gemma.chat(asked, **(SETTINGS | settings)))
    usage = pieces[-1].usage
    assert usage is not None
    return {
        "reply": "".join(piece.text for piece in pieces),
        "finish": pieces[-1].finish,
        "usage": {"prompt": usage.prompt, "reply": usage.reply},
        "error": None,
    }


@pytest.mark.usefixtures("one_ray")
def test_replies_are_those_of_the_model(tmp_path: Path, model: Path, gemma: Gemma) -> None:
    """Also beside rows that are wrong, which keep their errors."""
    chat = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "the b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    rows: list[Any] = [{"prompt": f"the {x}", "id": x} for x in "abcdefg"]
    rows += [{"messages": chat}, {"id": "nothing"}, "{broken", {"messages": [{"role": "x"}]}]
    data, out, seen = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", []
    result = batch(
        data,
        out=out,
        model=model,
        device="cpu",
        replicas=2,
        rows_at_once=3,
        progress=lambda *at: seen.append(at),
        **SETTINGS,
    )
    assert (result.rows, result.failed, result.resumed) == (11, 3, 0)
    assert seen[0] == (2, 11)  # those that no model has to see
    assert seen[-1] == (11, 11)
    assert seen == sorted(seen)
    found = read(out)
    for row, given in zip(found[:7], rows[:7], strict=True):
        assert row == given | replied(gemma, given["prompt"])
    assert found[7] == rows[7] | replied(gemma, chat)
    nothing = {"reply": None, "finish": None, "usage": None}
    sentence = "This row has no 'messages' and no 'prompt'."
    assert found[8] == {"id": "nothing"} | nothing | {"error": sentence}
    assert found[9].items() >= ({"line": "{broken"} | nothing).items()
    assert found[9]["error"].startswith("Line 10 is not JSON")
    assert "role must be one of" in found[10]["error"]
    assert set(tmp_path.iterdir()) == {data, out}


@pytest.mark.usefixtures("one_ray")
def test_parquet_in_and_out(tmp_path: Path, model: Path, gemma: Gemma) -> None:
    texts = ["the a", "the b"]
    chats = [[{"role": "user", "content": text}] for text in texts]
    table = pa.table({"chat": chats, "id": pa.array([1, 2], pa.int8())})
    parquet.write_table(table, tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    batch(
        tmp_path / "in.parquet",
        out=out,
        model=model,
        column="chat",
        system="c",
        think=True,
        device="cpu",
        **SETTINGS,
    )
    back = parquet.read_table(out)
    assert back.select(["chat", "id"]).equals(table)
    for row, chat in zip(back.to_pylist(), chats, strict=True):
        asked = [{"role": "system", "content": "c"}, *chat]
        expected = replied(gemma, asked, think=True)
        assert {name: row[name] for name in expected} == expected
        assert isinstance(row["thinking"], str)


@pytest.mark.usefixtures("one_ray")
def test_processes_that_die_lose_nothing_and_double_nothing(
    tmp_path: Path, model: Path, gemma: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed in the middle; a row that ends every process is the only one with an error."""
    folder = str(tmp_path)

    def fragile() -> type[RowWorker]:  # inside a function it is sent to Ray as it is
        class Fragile(RowWorker):
            async def answer(self, asked: Any) -> dict[str, Any]:
                died = os.path.join(folder, "died")
                if asked == "the k" and not os.path.exists(died):
                    open(died, "x").close()
                    await asyncio.sleep(0.1)  # in the middle of others
                    os.kill(os.getpid(), signal.SIGKILL)
                if asked == "the r":
                    os.kill(os.getpid(), signal.SIGKILL)
                return await super().answer(asked)

        return Fragile

    monkeypatch.setattr(jobs, "RowWorker", fragile())
    rows = [{"prompt": f"the {chr(97 + n)}"} for n in range(20)]
    data, out, counts = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", []
    result = batch(
        data,
        out=out,
        model=model,
        device="cpu",
        replicas=2,
        rows_at_once=2,
        progress=lambda done, _: counts.append(done),
        **SETTINGS,
    )
    assert (tmp_path / "died").exists()
    assert counts == sorted(counts)
    assert (result.rows, result.failed) == (20, 1)
    for row, given in zip(read(out), rows, strict=True):
        if given["prompt"] == "the r":
            assert row["reply"] is None
            assert "ended each time" in row["error"]
        else:
            assert row == given | replied(gemma, given["prompt"])


@pytest.mark.usefixtures("one_ray")
def test_a_model_that_cannot_be_loaded_ends_the_job(tmp_path: Path, model: Path) -> None:
    data, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    with pytest.raises(InputError, match="no GPU named 'no such'") as caught:
        batch(data, out=out, model=model, device="gpu", gpus=["no such"])
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="Ray knows of 0 GPUs, but 1 process"):
        batch(data, out=out, model=model, num_gpus=0.5)
    with pytest.raises(InputError, match="cores, but 1000 processes"):
        batch(data, out=out, model=model, replicas=1000)
    assert list(tmp_path.iterdir()) == [data]


def test_a_driver_that_is_killed_goes_on(tmp_path: Path, one_ray: str) -> None:
    """It is killed, then interrupted, then left alone: each row is computed and written once."""
    rows = [{"prompt": f"Tell me {n} stories"} for n in range(24)]
    data, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    settings = ("--max-tokens", "24", "--seed", "7")
    args = ("batch", str(data), "--out", str(out), "--device", "cpu", *settings)

    def begin() -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "webgemma", *args, "--rows-at-once", "1"]
        pipe = subprocess.PIPE
        # The second lets this process find a Ray that listens on the loopback address alone.
        env = os.environ | {"RAY_ADDRESS": one_ray, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)

    def answered() -> list[str]:
        return partial.read_text().splitlines()[1:] if partial.exists() else []

    with begin() as process:
        wait_for(lambda: len(answered()) >= 3, process)
        process.kill()
    first = answered()
    assert not out.exists()
    with partial.open("a") as file:
        file.write('{"row": 23, "reply": "half')  # as a disk that was full would leave it
    with begin() as process:
        wait_for(lambda: len(answered()) >= len(first) + 4, process)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)
    second = answered()
    assert process.returncode == 130
    assert said[0] == ""
    sentence = f"stopped: {len(second)} of 24 rows are done; the same command goes on\n"
    assert said[1] == sentence
    assert second[: len(first)] == first
    result = answer(*args)
    assert result == {"out": str(out), "rows": 24, "failed": 0, "resumed": len(second)}
    assert not partial.exists()
    found = read(out)
    for line in second:
        kept = json.loads(line)
        row = found[kept.pop("row")]
        assert row == row | kept
    with Gemma.load(None, "cpu") as gemma:
        for row, given in list(zip(found, rows, strict=True))[::6]:
            assert row == given | replied(gemma, given["prompt"], max_tokens=24)
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"it did not come true: {process.communicate()}")
        time.sleep(0.02)


def test_what_it_refuses(tmp_path: Path, model: Path) -> None:
    data, out = write(tmp_path / "in.jsonl", [{"prompt": "a", "reply": "b"}]), tmp_path / "o.jsonl"
    args = (data, "--out", out)
    assert "has a column 'reply'" in refused("batch", *args)
    assert "no file" in refused("batch", tmp_path / "none.jsonl", "--out", out)
    write(data, [{"text": "a"}])
    assert "--column" in refused("batch", *args)
    assert "no file" in refused("batch", *args, "--column", "text", "--model", "/none.gguf")
    assert "temperature" in refused("batch", *args, "--column", "text", "--temperature", 1000)
    two = ("--gpu", "a", "--gpu", "b", "--replicas", 1)
    assert "each GPU needs one" in refused("batch", *args, "--column", "text", *two)
    assert "must be named" in refused("batch", data, "--out", tmp_path / "o.txt")
    assert "no folder" in refused("batch", data, "--out", tmp_path / "none" / "o.jsonl")
    assert "the data itself" in refused("batch", data, "--out", data)
    write(data, [])
    assert "has no rows" in refused("batch", *args)
    out.write_text("something")
    assert "--force" in refused("batch", *args)
    assert set(tmp_path.iterdir()) == {data, out}
    with pytest.raises(InputError, match="list of names"):
        batch(write(data, [{"prompt": "a"}]), out=tmp_path / "p.jsonl", model=model, gpus="dawn")


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused("batch", data, "--out", tmp_path / "out.jsonl")
    assert 'pip install "webgemma[ray]"' in said


def test_help_has_examples() -> None:
    assert "--model gemma4:e2b --out answers.jsonl" in webgemma("batch", "--help").stdout
