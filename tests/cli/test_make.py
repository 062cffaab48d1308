"""`make chat`, with a pretended installation: it says once where the command is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_first_chat_says_where_the_command_is(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    command = tmp_path / ".venv" / "bin" / "webgemma"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\necho a reply\n")
    command.chmod(0o755)
    for mark in ("created", "ready"):
        (tmp_path / ".venv" / mark).touch()
    # Make tells a make that it starts, as these tests may be, how to behave.
    env = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    first, second = (
        subprocess.run(
            ["make", "chat"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        for _ in range(2)
    )
    assert first.stdout == second.stdout == "a reply\n"
    assert "the command is .venv/bin/webgemma" in first.stderr
    assert second.stderr == ""
