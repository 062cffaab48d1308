"""The command line in this process: what a command prints, its JSON, its one error sentence."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from webgemma.cli.program import app


def webgemma(*args: object, terminal: bool = False) -> Result:
    """Run the command in this process, as if on a terminal or not."""
    env = {"COLUMNS": "200", "FORCE_COLOR" if terminal else "NO_COLOR": "1"}
    return CliRunner(env=env).invoke(app, [str(arg) for arg in args])


def answer(*args: object) -> Any:
    """What a command that succeeds says as JSON."""
    result = webgemma(*args, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def refused(*args: object) -> str:
    """The one sentence of a command that must leave with 1."""
    result = webgemma(*args)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr
