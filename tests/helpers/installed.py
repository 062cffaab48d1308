"""The wheel that `make wheel` builds, installed by pip in a folder away from the checkout."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]


def build_wheel(folder: Path, root: Path = ROOT) -> Path:
    """Build the wheel of the sources at `root` in a folder and return its path."""
    return _build("wheel", folder, root)


def build_sources(folder: Path) -> Path:
    """Build the source distribution in a folder and return its path."""
    return _build("sdist", folder, ROOT)


def _build(target: str, folder: Path, root: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    env = {**os.environ, "WEBGEMMA_LIBRARIES": "required", "SOURCE_DATE_EPOCH": "1580601600"}
    subprocess.run([*command, "--directory", folder], cwd=root, env=env, check=True, timeout=120)
    (built,) = folder.iterdir()
    return built


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel in a folder, without what it requires, and return the folder."""
    options = ["--no-deps", "--no-index", "--no-compile", "--target", folder, wheel]
    subprocess.run([*PIP, *options], check=True, timeout=120)
    return folder


def environment(installed: Path, home: Path) -> dict[str, str]:
    """Return the environment in which a fresh Python finds the installed package first."""
    kept = {key: value for key, value in os.environ.items() if key != "OLLAMA_MODELS"}
    state = {"XDG_STATE_HOME": str(home / "state"), "OLLAMA_MODELS": str(home / "store")}
    return {**kept, **state, "PYTHONPATH": str(installed)}


@contextmanager
def serving_installed(installed: Path, home: Path) -> Iterator[str]:
    """Run `webgemma web` of an installed package; the value is the address with its token."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "webgemma", "web", "--no-open", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=home, env=environment(installed, home), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        yield line.removeprefix("webgemma is at ").partition(" ")[0]
    finally:
        process.terminate()
        process.communicate(timeout=10)
