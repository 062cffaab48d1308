"""`make chat`, with a pretended installation: what it says once, and which model it runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def pretend(folder: Path, command: str, marks: tuple[str, ...]) -> None:
    """Make a folder in which `webgemma` is this command of a shell."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    path = folder / ".venv" / "bin" / "webgemma"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    for mark in marks:
        (folder / ".venv" / mark).touch()


def make_chat(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    # Make tells a make that it starts, as these tests may be, how to behave.
    env = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    command = ["make", "chat", *given]
    return subprocess.run(
        command, cwd=folder, env=env, input="", capture_output=True, text=True, check=True
    )


def test_the_first_chat_says_where_the_command_is(tmp_path: Path) -> None:
    pretend(tmp_path, "echo a reply", ("created", "ready"))
    first, second = (make_chat(tmp_path) for _ in range(2))
    assert first.stdout == second.stdout == "a reply\n"
    assert "the command is .venv/bin/webgemma" in first.stderr
    assert second.stderr == ""


@pytest.mark.parametrize(
    ("given", "fetched", "ran"),
    [
        ([], "", "run\n"),
        (["MODEL=gemma4:e2b"], "", "run gemma4:e2b\n"),
        (["MODEL=gemma3-270m"], "fetch gemma3-270m\n", "run gemma3-270m --raw --max-tokens 200\n"),
        (
            ["MODEL=gemma3-270m", "ACCEPT=1"],
            "fetch gemma3-270m --accept-terms\n",
            "run gemma3-270m --raw --max-tokens 200\n",
        ),
    ],
)
def test_another_model_is_fetched_if_pip_has_it(
    given: list[str], fetched: str, ran: str, tmp_path: Path
) -> None:
    """It is a base model: what a pipe brings is continued."""
    pretend(tmp_path, "echo $@", ("created", "ready", "introduced"))
    said = make_chat(tmp_path, *given)
    assert (said.stderr, said.stdout) == (fetched, ran)
