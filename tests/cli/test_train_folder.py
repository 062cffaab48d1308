"""The folder of `webgemma train`: what it may replace, and what continues the training in it."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from cli.training import WEIGHTS, Command, files, no_space, send
from helpers.command import answer, refused, webgemma

from webgemma.cli import out_folder, train
from webgemma.gguf.reader import Gguf
from webgemma.lora.checkpoint import read_checkpoint

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


def test_older_checkpoints_are_of_float32(stopped: Command, monkeypatch) -> None:
    """They have no precision; it was exact, whatever the default is now."""
    found = read_checkpoint(stopped.out / "checkpoint.safetensors")
    found.notes["settings"].pop("precision")
    found.facts.pop("precision")
    monkeypatch.setattr(train, "read_checkpoint", lambda _: found)
    assert "--precision is f16" in refused(*stopped.resumed("--precision", "f16"))


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
