"""Processes forked from one with a loaded model: a sentence at once, and they end cleanly."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.gpu import LIBRARY

SECONDS = 120  # a hang takes longer

FORK = """
import os, sys
from webgemma import Gemma, WebgemmaError

def load(device):
    return Gemma.load(device="cpu") if device == "cpu" else Gemma.load(gpu=device)

def reply(model):
    pieces = model.chat("What is 1 + 2?", temperature=0, max_tokens=9)
    return "".join(piece.text for piece in pieces)

if __name__ == "__main__":
    device, action = sys.argv[1:]
    model = load(device)
    stream = model.chat("Tell me a story.", temperature=0, max_tokens=9)
    next(stream)  # a plan is being recorded ahead, and this thread has its turn
    child = os.fork()
    if child == 0:
        try:
            if action == "use":
                print(reply(model))
            elif action == "close":
                model.close()
                print("closed")
            elif action == "load":
                with load(device) as other:
                    print(reply(other))
            elif action == "go on":
                print(len(list(stream)))
        except WebgemmaError as error:
            print(error)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    print("status", status)
    assert reply(model)
"""
SPAWN = """
import multiprocessing, sys
from webgemma import Gemma

def reply(question):
    where = {"device": "cpu"} if sys.argv[1] == "cpu" else {"gpu": sys.argv[1]}
    with Gemma.load(**where) as model:
        return "".join(piece.text for piece in model.chat(question, temperature=0, max_tokens=9))

if __name__ == "__main__":
    question = "What is 1 + 2?"
    expected = reply(question)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(reply, [question]) == [expected]
    print("same")
"""


def run(folder: Path, program: str, *arguments: str) -> list[str]:
    script = folder / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("action", ["use", "load", "go on"])
def test_a_fork_cannot_use_the_gpu_and_is_told_so(tmp_path: Path, action: str) -> None:
    said, status = run(tmp_path, FORK, LIBRARY, action)
    assert said.startswith("This process was forked from one that had opened the GPU")
    assert "'spawn'" in said
    assert status == "status 0"


def test_a_fork_closes_a_model_on_the_gpu_and_ends(tmp_path: Path) -> None:
    assert run(tmp_path, FORK, LIBRARY, "close") == ["closed", "status 0"]
    assert run(tmp_path, FORK, LIBRARY, "nothing") == ["status 0"]


def test_a_fork_uses_a_model_on_the_cpu(tmp_path: Path) -> None:
    assert run(tmp_path, FORK, "cpu", "use") == ["1 plus 2 is 3.", "status 0"]
    assert run(tmp_path, FORK, "cpu", "go on") == ["8", "status 0"]


@pytest.mark.parametrize("device", ["cpu", LIBRARY])
def test_spawned_processes_load_the_model_themselves(tmp_path: Path, device: str) -> None:
    assert run(tmp_path, SPAWN, device) == ["same"]
