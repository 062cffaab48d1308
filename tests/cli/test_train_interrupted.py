"""`webgemma train` and what may end it: signals, kill -9, full disks; nothing is lost."""

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.training import WEIGHTS, Command, Whole, files, no_space, send
from helpers.command import answer, refused, webgemma

from webgemma.errors import DeviceLostError
from webgemma.lora.checkpoint import read_checkpoint
from webgemma.lora.loading import open_adapter
from webgemma.lora.trainer import StepResult, Trainer

# Signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_save_and_the_rest_is_exactly_the_same(
    command: Command, whole: Whole, at_step: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    at_step(3, lambda: send(number))
    result = webgemma(*command.args())
    assert result.exit_code == 128 + number, result.output
    assert "stopped after 3 steps" in result.stdout
    assert "--resume continues" in result.stdout
    assert signal.getsignal(number) == before
    assert read_checkpoint(command.out / "checkpoint.safetensors").step == 3
    assert open_adapter(command.out).pairs  # it can be used at once
    monkeypatch.undo()
    message = refused(*command.args())
    assert "already holds a training" in message
    assert "--resume continues it, --force replaces it" in message
    command.assert_resumes(whole)


def test_a_stopped_training_says_so_as_json(command: Command, at_step: Any) -> None:
    at_step(3, lambda: send(signal.SIGTERM))
    result = webgemma(*command.args("--json", "--checkpoint-steps", 2))
    assert result.exit_code == 143
    assert result.stderr == ""
    facts = json.loads(result.stdout)
    assert facts["stopped"]
    assert facts["steps"] == len(facts["losses"]) == 3
    assert facts["checkpoints"] == [{"step": 2}, {"step": 3}]


def test_a_signal_in_the_last_step_lets_it_finish(command: Command, at_step: Any) -> None:
    at_step(6, lambda: send(signal.SIGTERM))
    result = webgemma(*command.args())
    assert result.exit_code == 0, result.output
    assert "done after 6 steps" in result.stdout
    assert not (command.out / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_before_the_first_step_nothing_is_promised(
    command: Command, at_step: Any, name: str, code: int
) -> None:
    at_step(1, lambda: send(getattr(signal, name)))
    result = webgemma(*command.args())
    assert result.exit_code == code, result.output
    assert "nothing was written" in result.stderr
    assert "resume" not in result.output
    assert not command.out.exists()


def test_a_second_signal_does_not_disturb_saving(
    command: Command, whole: Whole, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, signals = os.fsync, list[int]()

    def interrupted(descriptor: int) -> None:
        fsync(descriptor)
        if not signals:
            signals.append(signal.SIGINT)
            send(signal.SIGINT)

    def first() -> None:
        send(signal.SIGINT)
        monkeypatch.setattr("os.fsync", interrupted)

    at_step(3, first)
    assert webgemma(*command.args()).exit_code == 130
    assert signals
    assert read_checkpoint(command.out / "checkpoint.safetensors").step == 3
    monkeypatch.undo()
    command.assert_resumes(whole)


def test_a_third_signal_ends_at_once_and_keeps_the_last_checkpoint(
    command: Command, whole: Whole, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    def third(_: int) -> None:
        send(signal.SIGINT)

    def two() -> None:
        send(signal.SIGINT)
        send(signal.SIGINT)
        monkeypatch.setattr("os.fsync", third)

    at_step(4, two)
    result = webgemma(*command.args("--checkpoint-steps", 2))
    assert result.exit_code == 130
    assert f"The checkpoint of step 2 is in {command.out}" in result.stderr
    monkeypatch.undo()
    command.assert_resumes(whole)


def test_ignored_signals_stay_ignored(command: Command, at_step: Any) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(2, lambda: send(signal.SIGHUP))
        assert not answer(*command.args())["stopped"]
    finally:
        signal.signal(signal.SIGHUP, before)


def subprocess_of(script: str, *args: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own, after a script."""
    code = f"{script}\nfrom webgemma.cli import main\nmain()"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], **options)


HANG_UP = """
import os, pathlib, time
from webgemma.lora.trainer import Trainer
step = Trainer.step
async def waits(self, *given):
    result = await step(self, *given)
    if self.steps == 2:
        pathlib.Path(os.environ["MARK"]).touch()
        for _ in range(6000):
            if not os.isatty(0):
                break
            time.sleep(0.01)
    return result
Trainer.step = waits
"""


def test_a_terminal_that_closes_loses_nothing(
    command: Command, whole: Whole, tmp_path: Path
) -> None:
    """Then there is SIGHUP, and nothing can be printed any more."""
    mark = tmp_path / "mark"
    master, slave = pty.openpty()
    env = os.environ | {"MARK": str(mark), "TERM": "xterm"}
    login = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    terminal = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
    process = subprocess_of(login + HANG_UP, *command.args(), env=env, **terminal)
    os.close(slave)
    os.set_blocking(master, False)
    while not mark.exists():
        assert process.poll() is None
        try:
            os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(master)
    assert process.wait(120) == 129
    assert read_checkpoint(command.out / "checkpoint.safetensors").step in (2, 3)
    command.assert_resumes(whole)


# Kill -9


KILL = """
import os, pathlib, signal
from webgemma.lora.trainer import Trainer
left, training = int(os.environ["CALLS"]), False
def dying(function):
    def call(*args, **kwargs):
        global left, training
        training = training or isinstance(args[0], Trainer)
        left -= training
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
for owner, names in (Trainer, "step state"), (os, "open fsync"), (pathlib.Path, "replace unlink"):
    for name in names.split():
        setattr(owner, name, dying(getattr(owner, name)))
"""


def test_kill_9_again_and_again_gives_the_same_adapter(command: Command, whole: Whole) -> None:
    """At random points: in steps, and before the system calls of a save."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw, done = random.Random(seed), 0
    for _ in range(4):
        options = ("--checkpoint-steps", 1, "--resume" if done else "--force")
        env = os.environ | {"CALLS": str(draw.randrange(1, 40))}
        killed = subprocess_of(KILL, *command.args(*options), env=env, stderr=subprocess.PIPE)
        _, errors = killed.communicate(timeout=300)
        assert killed.returncode in (0, -signal.SIGKILL), errors
        path, before = command.out / "checkpoint.safetensors", done
        if killed.returncode == 0 or (before and not path.exists()):
            assert files(command.out) == whole.files  # it was done
            return
        done = read_checkpoint(path).step if path.exists() else 0
        assert done >= before
    if done:
        command.assert_resumes(whole)


# Full disks


def test_a_full_disk_on_the_way_is_a_warning(
    command: Command, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    async def filling(self: Trainer, *given: Any) -> StepResult:
        """The disk is full in steps 3 and 4."""
        patch = {3: no_space, 5: fsync}.get(self.steps + 1)
        if patch:
            monkeypatch.setattr("os.fsync", patch)
        return await step(self, *given)

    fsync = os.fsync
    monkeypatch.setattr(Trainer, "step", filling)
    result = webgemma(*command.args("--checkpoint-steps", 1, "--json"))
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    events = [(event["step"], "error" in event) for event in facts["checkpoints"]]
    assert events == [(1, False), (2, False), (3, True), (4, True), (5, False)]
    assert "No space left on device" in facts["checkpoints"][2]["error"]
    assert "no checkpoint of step 3" in result.stderr
    assert "The training goes on; that of step 2 is kept." in result.stderr
    assert files(command.out) == whole.files  # also `best`, which could not be written then


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@pytest.mark.parametrize("stopped", [False, True])
def test_a_full_disk_at_the_end_says_where_everything_is(
    command: Command,
    whole: Whole,
    at_step: Any,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stopped: bool,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    out = small_disk / "adapter"

    def full() -> None:
        fill(small_disk)
        if stopped:
            send(signal.SIGTERM)

    at_step(5, full)
    result = webgemma(*command.args("--checkpoint-steps", 3, out=out))
    assert result.exit_code == 1
    assert "cannot be written: No space left on device." in result.stderr
    (place,) = elsewhere.iterdir()
    assert f"were written to {place} instead" in result.stderr.replace("\n", "")
    assert read_checkpoint(out / "checkpoint.safetensors").step == 3
    monkeypatch.undo()
    (small_disk / "filler").unlink()
    moved = place if stopped else out
    if not stopped:
        assert files(place)[WEIGHTS] == whole.files[WEIGHTS]
    answer(*command.resumed(out=moved))
    assert files(moved)[WEIGHTS] == whole.files[WEIGHTS]


def test_if_nothing_can_be_written_anywhere_the_last_checkpoint_is_named(
    command: Command, whole: Whole, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        monkeypatch.setattr("os.fsync", no_space)
        monkeypatch.setattr("tempfile.gettempdir", no_space)  # it tries to write, too

    at_step(5, full)
    result = webgemma(*command.args("--checkpoint-steps", 3))
    assert result.exit_code == 1
    assert f"The checkpoint of step 3 is in {command.out}; --resume" in result.stderr
    monkeypatch.undo()
    command.assert_resumes(whole)


# Errors on the way


def test_a_lost_gpu_leaves_the_last_checkpoint(
    command: Command, whole: Whole, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    def lose() -> None:
        raise DeviceLostError("The GPU was reset.")

    at_step(4, lose)
    result = webgemma(*command.args("--checkpoint-steps", 2))
    assert result.exit_code == 1
    assert "The GPU was reset. The checkpoint of step 2 is in" in result.stderr
    monkeypatch.undo()
    command.assert_resumes(whole)


def test_a_loss_that_diverges_leaves_the_adapter(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    async def diverging(self: Trainer, *given: Any) -> StepResult:
        result = await step(self, *given)
        return result._replace(loss=float("nan")) if self.steps == 4 else result

    monkeypatch.setattr(Trainer, "step", diverging)
    result = webgemma(*command.args("--checkpoint-steps", 2))
    assert result.exit_code == 1
    assert "not finite any more" in result.stderr
    assert f"The adapter as it was then is in {command.out}." in result.stderr
    assert open_adapter(command.out).pairs
    assert read_checkpoint(command.out / "checkpoint.safetensors").step == 2
