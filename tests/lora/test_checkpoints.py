"""Checkpoints: a training that is continued is the one that was not interrupted, to the bit."""

import errno
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.gpu import device
from helpers.tiny import SMALL, tiny_gguf

from webgemma.errors import GgufError, InputError, ModelNotFoundError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.safetensors import NewSafetensor, Safetensors, write_safetensors
from webgemma.gguf.sources import BytesSource
from webgemma.lora import checkpoint as checkpoint_file
from webgemma.lora.adapter import new_adapter
from webgemma.lora.checkpoint import read_checkpoint, write_checkpoint
from webgemma.lora.data import Example
from webgemma.lora.optimiser import AdamW
from webgemma.lora.schedule import Schedule
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.lora.training import Checkpoints, Training, train
from webgemma.sync import iterate_sync, run_sync

RNG = random.Random(5)
EXAMPLES = [
    Example(tuple(RNG.randrange(24, 310) for _ in range(length)), (True,) * length, line)
    for line, length in enumerate((9, 40, 12, 20, 33, 8), 1)
]
HELD_OUT = [Example((2, 30, 31, 32), (False, True, True, True), 7)]
OPTIONS = TrainingOptions(2, dropout=0.2, seed=3, optimiser=AdamW(decay=0.1))
SCHEDULE = Schedule(1e-2, epochs=2, accumulate=2, seed=3)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(SMALL), "tiny.gguf")))
    with run_sync(Model.load(gguf, Config.from_gguf(gguf), device())) as model:
        yield model


@pytest.fixture
def begin(model: Model) -> Iterator[Any]:
    """Return a function that begins a training, with other settings or data if given."""
    trainers = []

    def begin(**other: Any) -> Training:
        targets = other.get("targets", ("attn_q", "ffn_down"))
        adapter = new_adapter(model.config, targets, rank=other.get("rank", 2), seed=3)
        trainers.append(Trainer(model, adapter, other.get("options", OPTIONS)))
        examples, held_out = other.get("examples", EXAMPLES), other.get("held_out", HELD_OUT)
        return Training(trainers[-1], examples, held_out, other.get("schedule", SCHEDULE))

    yield begin
    for trainer in trainers:
        trainer.close()


def run(training: Training, stop: int | None = None, **checkpoints: Any) -> None:
    """Train so many steps, or to the end."""
    written = Checkpoints(**checkpoints) if checkpoints else None
    for done, _ in enumerate(iterate_sync(training.run(written)), 1):
        if done == stop:
            return


def result(training: Training) -> Any:
    """All that a training computed."""
    adapter = run_sync(training.trainer.adapter())
    return dict(adapter.pairs), training.losses, training.held_out_losses


def test_a_training_continues_from_any_step_exactly(begin: Any, tmp_path: Path) -> None:
    whole = begin()
    run(whole)
    assert len(whole.losses) == 4
    assert len(whole.held_out_losses) == 2
    for stop in range(1, 5):
        first, second = begin(), begin()
        run(first, stop)
        run_sync(first.save(tmp_path / "checkpoint"))
        second.restore(tmp_path / "checkpoint")
        assert second.trainer.steps == stop
        run(second)
        assert result(second) == result(whole)


def test_a_resumed_training_diverges_where_it_would_have(begin: Any, tmp_path: Path) -> None:
    """What recognises a rising loss has seen the losses before the interruption."""
    first, second = (begin(schedule=replace(SCHEDULE, max_steps=40)) for _ in range(2))
    run(first, 1)
    first.losses, first.trainer.steps = [0.1] * 10, 10
    run_sync(first.save(tmp_path / "checkpoint"))
    second.restore(tmp_path / "checkpoint")
    with pytest.raises(InputError, match=r"rose from 0\.10 to"):
        run(second)


def test_checkpoints_are_written_after_so_many_steps_or_minutes(begin: Any, tmp_path: Path) -> None:
    path, written = tmp_path / "checkpoint", list[tuple[int, Any]]()

    def report(*event: Any) -> None:
        written.append(event)

    run(begin(), path=path, steps=3, report=report)
    assert written == [(3, None)]
    run(begin(), path=path, steps=None, minutes=1e-9, report=report)
    assert written[1:] == [(1, None), (2, None), (3, None)]  # the last step is the adapter's
    run(begin(), path=path, steps=None, minutes=None, report=report)
    run(begin(), path=path, report=report)  # five minutes are not over
    assert len(written) == 4
    assert read_checkpoint(path).step == 3
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_the_caller_sees_a_step_before_its_checkpoint(begin: Any, tmp_path: Path) -> None:
    """So a best adapter is written before the checkpoint that knows of it."""
    path, training = tmp_path / "checkpoint", begin()
    for progress in iterate_sync(training.run(Checkpoints(path, steps=1))):
        before = read_checkpoint(path).step if path.exists() else 0
        assert before == progress.step - 1


def test_train_writes_checkpoints_too(begin: Any, tmp_path: Path) -> None:
    trainer, path = begin().trainer, tmp_path / "checkpoint"
    checkpoints = Checkpoints(path, steps=2, notes={"of": "a test"})
    assert len(list(iterate_sync(train(trainer, EXAMPLES, (), SCHEDULE, checkpoints)))) == 4
    found = read_checkpoint(path)
    assert (found.step, found.notes) == (2, {"of": "a test"})


@pytest.mark.parametrize("reported", [True, False])
def test_a_full_disk_does_not_end_a_training(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    path, events = tmp_path / "checkpoint", list[tuple[int, str]]()
    training, whole = begin(), begin()
    run(whole)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def report(step: int, error: GgufError | None) -> None:
        events.append((step, str(error)))

    steps = iterate_sync(training.run(Checkpoints(path, 1, report=report if reported else None)))
    next(steps)
    next(steps)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        if reported:
            next(steps)
        else:
            with pytest.warns(UserWarning, match="No checkpoint of step 2: .*No space left"):
                next(steps)
    assert read_checkpoint(path).step == 1  # the one before
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
    next(steps)
    assert read_checkpoint(path).step == 3  # tried again
    assert not list(steps)
    assert result(training) == result(whole)
    if reported:
        message = f"{path} cannot be written: No space left on device."
        assert events == [(1, "None"), (2, message), (3, "None")]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"schedule": replace(SCHEDULE, learning_rate=1e-3)}, "learning_rate is 0.001, there .*01"),
        ({"schedule": replace(SCHEDULE, max_steps=9)}, "max_steps is 9, there it was None"),
        ({"schedule": replace(SCHEDULE, seed=4)}, "order_seed is 4, there it was 3"),
        ({"options": replace(OPTIONS, dropout=0.0)}, "dropout is 0.0, there it was 0.2"),
        ({"options": replace(OPTIONS, optimiser=AdamW())}, "decay is 0.0, there it was 0.1"),
        ({"examples": EXAMPLES[1:]}, "the examples to train on are not the same"),
        ({"held_out": ()}, "the held-out examples are not the same"),
        ({"rank": 3}, "other matrices, ranks or scales"),
        ({"targets": ("attn_q",), "rank": 3, "held_out": ()}, "scales; .*held-out examples"),
    ],
)
def test_other_settings_or_data_are_refused_by_name(
    begin: Any, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    first, second = begin(), begin(**other)
    run(first, 1)
    run_sync(first.save(tmp_path / "checkpoint"))
    before = run_sync(second.trainer.adapter())
    with pytest.raises(InputError, match=message):
        second.restore(tmp_path / "checkpoint")
    assert second.trainer.steps == 0
    assert run_sync(second.trainer.adapter()) == before


def test_another_model_is_refused(begin: Any, tmp_path: Path, model: Model) -> None:
    first, second = begin(), begin()
    run_sync(first.save(tmp_path / "checkpoint"))
    before = model._fingerprint
    try:
        model._fingerprint = "another"
        with pytest.raises(InputError, match="the model is another one"):
            second.restore(tmp_path / "checkpoint")
    finally:
        model._fingerprint = before


def test_more_steps_than_a_training_has_are_refused(begin: Any, tmp_path: Path) -> None:
    first, second = begin(), begin()
    first.trainer.steps = 5
    run_sync(first.save(tmp_path / "checkpoint"))
    with pytest.raises(GgufError, match="has 5 steps of 4"):
        second.restore(tmp_path / "checkpoint")


def test_the_trainer_refuses_the_state_of_another_adapter(begin: Any, tmp_path: Path) -> None:
    first, second = begin(), begin(rank=3)
    run_sync(first.save(tmp_path / "checkpoint"))
    with (
        Safetensors.open(tmp_path / "checkpoint") as file,
        pytest.raises(GgufError, match="belongs to another adapter"),
    ):
        second.trainer.restore(file, 1)


# Files from strangers


def small(path: Path, **changed: Any) -> bytes:
    """Write a checkpoint of nothing in particular; return its bytes."""
    tensors = [NewSafetensor("x.lora_a.values", "F32", (40,), bytes(range(160)))]
    given = {"step": 2, "losses": [1.0, 2.0], "held_out_losses": [1.0], "facts": {"a": 1}}
    write_checkpoint(path, tensors=tensors, **(given | changed))
    return path.read_bytes()


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    good = small(path)
    assert read_checkpoint(path).losses == (1.0, 2.0)
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(WebgemmaError, match="cannot be used: "):
            read_checkpoint(path)
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(WebgemmaError, match="cannot be used: "):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 1}, "cannot be that of a training"),
        ({"step": -1, "losses": []}, "cannot be that of a training"),
        ({"step": "2"}, "cannot be that of a training"),
        ({"step": 1 << 40}, "cannot be that of a training"),
        ({"losses": [float("nan")]}, "losses are not finite"),
    ],
)
def test_states_that_no_training_has_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    small(tmp_path / "checkpoint", **changed)
    with pytest.raises(GgufError, match=message):
        read_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "state", ["", "[]", "3", '{"step": 1}', '{"step": 1, "facts": 3, "notes": {}}', "[" * 10**5]
)
def test_forged_states_are_refused(tmp_path: Path, state: str) -> None:
    losses = [NewSafetensor(name, "F64", (0,), b"") for name in ("losses", "held_out_losses")]
    digest = checkpoint_file._content_digest(state, ((t.name, t.shape, [t.data]) for t in losses))
    metadata = {"format": checkpoint_file.FORMAT, "state": state, "sha256": digest}
    write_safetensors(tmp_path / "checkpoint", losses, metadata)
    with pytest.raises(GgufError, match="its state cannot be"):
        read_checkpoint(tmp_path / "checkpoint")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(ModelNotFoundError, match="There is no checkpoint"):
        read_checkpoint(path)
    with pytest.raises(WebgemmaError, match=r"checkpoint"):
        read_checkpoint(tmp_path)
    write_safetensors(path, [], {"steps": "3"})
    with pytest.raises(GgufError, match="it is not the checkpoint of a training"):
        read_checkpoint(path)
    write_safetensors(path, [], {"format": "webgemma training 2"})
    with pytest.raises(GgufError, match="by another version of webgemma"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "at least 1 step"),
        ({"minutes": 0.0}, "minutes apart"),
        ({"minutes": float("nan")}, "minutes apart"),
        ({"minutes": float("inf")}, "minutes apart"),
    ],
)
def test_invalid_intervals_raise_an_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Checkpoints("checkpoint", **wrong)
