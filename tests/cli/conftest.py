"""A tiny model and examples for it, as files, and trainings of the one on the others."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.training import Command, Whole, files
from helpers import gpu
from helpers.command import answer
from helpers.tiny import SMALL, tiny_gguf

from webgemma.cli import train
from webgemma.lora.trainer import StepResult, Trainer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": f"the {x}", "completion": f"{x} in the {x}"} for x in "abcd"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def shared_device() -> Iterator[None]:
    """Let all commands in this process share the device, whose kernels are compiled."""
    shared = copy.copy(gpu.device())
    shared.close = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "open_device", lambda _: shared)
        yield


@pytest.fixture
def command(model: Path, data: Path, tmp_path: Path, shared_device: None) -> Command:
    del shared_device  # it is in use
    return Command(model, data, tmp_path)


_whole: list[Whole] = []


@pytest.fixture
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The same training for all tests; it is run once."""
    if not _whole:
        folder = tmp_path_factory.mktemp("whole") / "adapter"
        _whole.append(Whole(folder, answer(*command.args(out=folder)), files(folder)))
    return _whole[0]


@pytest.fixture
def finished(command: Command, whole: Whole) -> Command:
    """A command whose folder has a finished adapter."""
    shutil.copytree(whole.folder, command.out)
    return command


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets something happen in the middle of a step; the first is 1."""
    original = Trainer.step

    def at_step(number: int, act: Callable[[], object]) -> None:
        async def step(self: Trainer, *given: Any) -> StepResult:
            if self.steps + 1 == number:
                act()
            return await original(self, *given)

        monkeypatch.setattr(Trainer, "step", step)

    return at_step
