"""What the sites of this folder are built from: tools, wheels, and a list of Pyodide's packages.

Whoever opens such a site requests nothing from another server, so what a notebook wants is taken
from PyPI now: wheels that run in Pyodide, beside it, in its list of packages."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from webgemma.models import BUNDLED_PATH

BUILD = Path(__file__).resolve().parents[1] / "build"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
# Of Pyodide 314, whatever Python runs this.
TARGET = ("--python-version", "3.14", "--implementation", "cp", "--abi", "cp314", "--abi", "none")
PLATFORMS = ("--platform", "pyemscripten_2026_0_wasm32", "--platform", "any")


def site_and_model(usage: str | None) -> tuple[Path, Path]:
    """Return what the command line names: a new folder, and a model, by default the bundled one."""
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(usage)
    site, model = Path(sys.argv[1]).resolve(), Path([*sys.argv, BUNDLED_PATH][2])
    if site.exists():
        sys.exit(f"{site} exists: name a new folder.")
    if not model.is_file():
        sys.exit(f"{model} is not a file: name a .gguf.")
    return site, model


def environment(name: str, requirements: Iterable[str]) -> Path:
    """Make an environment below build/, unless it is there; return the folder of its programs."""
    folder, wanted = BUILD / name, " ".join(requirements)
    ready = folder / "ready"
    if not ready.is_file() or ready.read_text() != wanted:
        venv.create(folder / "venv", clear=True)
        python = folder / "venv" / "bin" / "python"
        subprocess.run([*PIP, "--python", python, "install", *wanted.split()], check=True)
        ready.write_text(wanted)
    return folder / "venv" / "bin"


def download(requirements: Iterable[str]) -> list[Path]:
    """Return wheels of these versions, which run in Pyodide."""
    options = ["--no-deps", "--only-binary", ":all:", *TARGET, *PLATFORMS]
    return _wheels("download", options, "--dest", requirements)


def build_plain(requirement: str) -> Path:
    """Return a wheel without compiled parts of a package that can do without them."""
    (wheel,) = _wheels("wheel", ["--no-deps", "--no-binary", ":all:"], "--wheel-dir", [requirement])
    return wheel


def _wheels(
    command: str, options: list[str], destination: str, requirements: Iterable[str]
) -> list[Path]:
    wanted = list(requirements)
    key = hashlib.sha256(" ".join([command, *wanted]).encode()).hexdigest()[:12]
    folder = BUILD / "wheels" / key
    if not folder.is_dir():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        arguments = [*PIP, command, *options, destination, unfinished, *wanted]
        subprocess.run(arguments, check=True, env=os.environ | {"PYYAML_FORCE_LIBYAML": "0"})
        unfinished.rename(folder)
    return sorted(folder.iterdir())


class Listing:
    """Pyodide's list of packages, left with those that a site has."""

    def __init__(self, path: Path) -> None:
        self._lock: dict[str, Any] = json.loads(path.read_text())
        listed = self._lock["packages"]
        self._known = {normal(name): facts for name, facts in listed.items()}
        self._kept: dict[str, Any] = {}

    def needed(self, names: Iterable[str]) -> dict[str, str]:
        """Return these packages, and all that they depend on, with their versions."""
        found = list(names)
        for name in found:  # which grows meanwhile
            depends = map(normal, self._known[name]["depends"])
            found += [other for other in depends if other not in found]
        return {name: self._known[name]["version"] for name in found}

    def add(self, wheel: Path, folder: Path, depends: Iterable[str] = ()) -> None:
        """Put a wheel into the site's folder, and on the list.

        PyPI's wheels differ in some bytes from those of Pyodide's own server."""
        project, version, *_ = wheel.name.split("-")
        data, name = wheel.read_bytes(), normal(project)
        (folder / wheel.name).write_bytes(data)
        facts: dict[str, Any] = {"name": name, "imports": [project.lower()]}
        facts |= {"install_dir": "site", "package_type": "package", "depends": list(depends)}
        facts["unvendored_tests"] = False
        if version == self._known.get(name, {}).get("version"):
            facts |= self._known[name]
        digest = hashlib.sha256(data).hexdigest()
        self._kept[name] = facts | {"version": version, "file_name": wheel.name, "sha256": digest}

    def write(self, path: Path) -> None:
        """Write the list."""
        path.write_text(json.dumps(self._lock | {"packages": self._kept}))


def exactly(versions: Mapping[str, str]) -> list[str]:
    """Return the requirements of these versions."""
    return [f"{name}=={version}" for name, version in versions.items()]


def normal(name: str) -> str:
    """Return a package's name as PyPI writes it."""
    return name.lower().replace("_", "-")
