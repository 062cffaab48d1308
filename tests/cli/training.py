"""`webgemma train` on a tiny model, always with the same settings, for tests of what may end it."""

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

from helpers import gpu
from helpers.command import answer

SETTINGS = ("--rank", 2, "--targets", "attn_q,ffn_down", "--batch", 2, "--epochs", 3)
SETTINGS += ("--dropout", 0.1, "--learning-rate", 0.01, "--held-out", 0.25)  # 6 steps
WEIGHTS = "adapter_model.safetensors"


class Command:
    """The command with its model, data and folder."""

    def __init__(self, model: Path, data: Path, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.out = folder / "adapter"

    def args(self, *more: object, out: Path | None = None) -> tuple[object, ...]:
        """Return the arguments of a new training."""
        return (*self._common(out), *SETTINGS, *more)

    def resumed(self, *more: object, out: Path | None = None) -> tuple[object, ...]:
        """Return the arguments that continue the training."""
        return (*self._common(out), "--resume", *more)

    def _common(self, out: Path | None) -> tuple[object, ...]:
        to = ("--out", out or self.out, "--gpu", gpu.device().name)
        return ("train", self.model, self.data, *to)

    def assert_resumes(self, whole: "Whole") -> None:
        """Assert that --resume, without any options, leads to the same adapter."""
        facts = answer(*self.resumed())
        assert files(self.out) == whole.files
        for name in ("steps", "losses", "held_out_losses"):
            assert facts[name] == whole.facts[name]


class Whole(NamedTuple):
    """What a training gives that is not interrupted."""

    folder: Path
    facts: dict[str, Any]
    files: dict[str, bytes]


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files of a folder, by their paths."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def send(number: int) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), number)


def no_space(*_: Any) -> Any:
    """Fail as system calls do on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")
