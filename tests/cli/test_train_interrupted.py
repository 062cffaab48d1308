"""`webgemma train` and what may end it: signals, kill -9, full disks; nothing is lost."""

import copy
import errno
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import gpu
from helpers.command import answer, refused, webgemma

from webgemma.cli import out_folder, train
from webgemma.errors import DeviceLostError
from webgemma.gguf.reader import Gguf
from webgemma.lora.checkpoint import read_checkpoint
from webgemma.lora.loading import open_adapter
from webgemma.lora.trainer import StepResult, Trainer

GPU = ("--gpu", gpu.device().name)
SETTINGS = ("--rank", 2, "--targets", "attn_q,ffn_down", "--batch", 2, "--epochs", 3)
SETTINGS += (
    "--dropout",
    0.1,
    "--learning-rate",
    0.01,
    "--held-out",
    0.25,
)  # 6 steps, 3 evaluations
WEIGHTS = "adapter_model.safetensors"


class Command:
    """`webgemma train` on a tiny model, always with the same settings."""

    def __init__(self, model: Path, data: Path, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.out = folder / "adapter"

    def args(self, *more: object, out: Path | None = None) -> tuple[object, ...]:
        return ("train", self.model, self.data, "--out", out or self.out, *GPU, *SETTINGS, *more)

    def resumed(self, *more: object, out: Path | None = None) -> tuple[object, ...]:
        return ("train", self.model, self.data, "--out", out or self.out, *GPU, "--resume", *more)

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
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(autouse=True)
def shared_device() -> Iterator[None]:
    """Let all commands in this process share the device, whose kernels are compiled."""
    shared = copy.copy(gpu.device())
    shared.close = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "open_device", lambda _: shared)
        yield


@pytest.fixture
def command(model: Path, data: Path, tmp_path: Path) -> Command:
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


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


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


# The folder


def test_a_file_is_no_folder(command: Command, at_step: Any) -> None:
    at_step(1, lambda: pytest.fail("it must not train"))
    command.out.write_text("letter")
    assert "is a file; --out has to be a folder" in refused(*command.args())
    assert "is a file" in refused(*command.args("--force"))
    inside = command.out / "adapter"
    assert f"{inside} cannot be made a folder: Not a dir" in refused(*command.args(out=inside))
    assert command.out.read_text() == "letter"
    command.out.unlink()
    command.out.symlink_to("nowhere")
    assert "cannot be made a folder: File exists" in refused(*command.args())


def test_a_folder_that_cannot_be_written_is_refused_first(
    command: Command, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(1, lambda: pytest.fail("it must not train"))
    monkeypatch.setattr("os.fsync", no_space)
    message = refused(*command.args(out=command.folder / "new" / "adapter"))
    assert "cannot be written to: No space left on device" in message
    assert not (command.folder / "new").exists()


def test_a_disk_without_room_is_refused_first(
    command: Command, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(1, lambda: pytest.fail("it must not train"))
    with monkeypatch.context() as patch:
        patch.setattr(out_folder, "_free_nbytes", lambda _: 1000)
        result = webgemma(*command.args())
    assert result.exit_code == 1
    assert "The training writes up to 136 kB" in result.stderr
    assert "where 1.0 kB are free" in result.stderr
    monkeypatch.setattr("webgemma.gguf.writer.os.fsync", no_space)  # also where quotas hide it
    monkeypatch.setattr(out_folder, "_try_to_write", lambda _: None)
    result = webgemma(*command.args())
    assert result.exit_code == 1
    assert "cannot be written: No space left on device" in result.stderr
    assert not command.out.exists()


def test_an_adapter_is_not_overwritten_without_force(finished: Command) -> None:
    first, other = files(finished.out), ("--seed", 1, "--held-out", 0)
    assert "already holds an adapter" in refused(*finished.args(*other))
    assert "holds a finished adapter and no checkpoint" in refused(*finished.resumed())
    assert files(finished.out) == first
    answer(*finished.args(*other, "--force"))
    assert sorted(files(finished.out)) == ["adapter_config.json", WEIGHTS]  # no old `best`
    assert files(finished.out)[WEIGHTS] != first[WEIGHTS]


def test_what_force_replaces_stays_until_something_new_is_written(
    finished: Command, at_step: Any
) -> None:
    first = files(finished.out)
    at_step(1, lambda: send(signal.SIGINT))
    assert webgemma(*finished.args("--force", "--seed", 1)).exit_code == 130
    assert files(finished.out) == first


def test_half_replaced_adapters_do_not_pass_for_whole(
    finished: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of one with the configuration of another would be wrong without a word."""
    replace, first = Path.replace, files(finished.out)

    def only_weights(self: Path, target: Path) -> Path:
        if target == finished.out / "adapter_config.json":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", only_weights)
    webgemma(*finished.args("--force", "--alpha", 64))
    assert files(finished.out)[WEIGHTS] != first[WEIGHTS]
    assert "adapter_config.json" not in files(finished.out)


def test_two_trainings_do_not_share_a_folder(command: Command) -> None:
    with out_folder.OutFolder.reserved(command.out, resume=False, force=False):
        assert "Another training is writing to" in refused(*command.args())
    assert not command.out.exists()


def test_unfinished_files_of_a_killed_process_are_removed(command: Command) -> None:
    command.out.mkdir()
    unfinished = command.out / ".checkpoint.safetensors.0123abcd.part"
    unfinished.write_bytes(b"half")
    (command.out / "mine.part").write_bytes(b"mine")
    answer(*command.args("--held-out", 0))
    assert sorted(files(command.out)) == ["adapter_config.json", WEIGHTS, "mine.part"]


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
    at_step(5, lambda: monkeypatch.setattr("os.fsync", no_space))
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


# Resuming


@pytest.fixture
def stopped(command: Command, at_step: Any, monkeypatch: pytest.MonkeyPatch) -> Command:
    at_step(2, lambda: send(signal.SIGINT))
    assert webgemma(*command.args()).exit_code == 130
    monkeypatch.undo()
    return command


def test_resuming_with_something_else_is_refused_by_name(stopped: Command) -> None:
    before = files(stopped.out)
    for option, value, then in (
        ("--rank", 4, "2"),
        ("--learning-rate", 0.5, "0.01"),
        ("--steps", 9, "not given"),
        ("--targets", "attn_q", "attn_q,ffn_down"),
    ):
        message = refused(*stopped.resumed(option, value))
        assert f"{option} is {value}, but the training" in message
        assert f"was begun with {then}: leave the option out" in message
    stopped.data.write_text(stopped.data.read_text().replace("the b", "the c"))
    assert "examples to train on are not the same" in refused(*stopped.resumed())
    assert files(stopped.out) == before


def test_resuming_with_another_model_is_refused(stopped: Command) -> None:
    with Gguf.open(stopped.model) as gguf:
        at = gguf.tensors["token_embd.weight"].offset
    other = bytearray(stopped.model.read_bytes())
    other[at] ^= 1
    stopped.model.write_bytes(other)
    result = webgemma(*stopped.resumed())
    assert result.exit_code == 1
    assert "the model is another one" in result.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda good: good[: len(good) // 2], "cut short"),
        (lambda good: good[:-9] + b"damaged!" + good[-1:], "it is damaged"),
        (lambda _: b"", "is empty"),
        (lambda _: random.Random(1).randbytes(5000), "not a safetensors file"),
    ],
)
def test_damaged_checkpoints_get_a_sentence(stopped: Command, damage: Any, message: str) -> None:
    path = stopped.out / "checkpoint.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    found = refused(*stopped.resumed())
    assert f"The checkpoint {path} cannot be used" in found
    assert message in found


@pytest.mark.parametrize(
    "changed",
    [{"rank": "2"}, {"rank": True}, {"alpha": "x"}, {"keep_activations": 1}, {"more": 1}, None],
)
def test_settings_from_strangers_are_checked(
    stopped: Command, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    path = stopped.out / "checkpoint.safetensors"
    found = read_checkpoint(path)
    settings = None if changed is None else found.notes["settings"] | changed
    object.__setattr__(found, "notes", {"settings": settings})
    monkeypatch.setattr(train, "read_checkpoint", lambda _: found)
    assert f"The checkpoint {path}" in refused(*stopped.resumed())
