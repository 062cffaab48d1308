"""Other people's programs that test a server: where `tools/judges.sh` puts them, how they run."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "judges"
SUITES = {name: FOLDER / f"{name}-{version(name)}" for name in ("openai", "anthropic")}
PARTS = {
    "webai": FOLDER / "node" / "node_modules" / "webai-at-home" / "dist" / "cli.js",
    **{name: root / "tests" / "api_resources" for name, root in SUITES.items()},
    "sdk": FOLDER / "sdk" / "bin" / "python",
    "litellm": FOLDER / "litellm" / "bin" / "python",
}
PATIENCE = 300.0  # seconds


def run(
    command: Sequence[str | Path], *, environment: Mapping[str, str], folder: Path | None = None
) -> str:
    """Return what a program prints; AssertionError, with all of it, unless it succeeds.

    It finds neither this package nor keys or addresses of other servers in its environment."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept | {"NO_PROXY": "*"} | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout
