"""Output into anything: other encodings, full disks, closed pipes; and wrong arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import SMALL, tiny_gguf

COMMANDS = (
    *("", "run", "list", "show", "verify", "tokenize", "render", "logits", "check", "bench"),
    *("convert", "train", "merge", "gpus", "kernels", "web"),
)
NOT_UTF8 = ["ascii", "cp1252"]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def webgemma(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **options.pop("env", {})}
    command = [sys.executable, "-m", "webgemma", *map(str, args)]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
    return subprocess.run(
        command, env=env, stderr=subprocess.PIPE, timeout=120, check=False, **given
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


# Encodings


def test_every_help_in_ascii() -> None:
    code = f"""
import sys
from webgemma.cli.program import run_command

for command in {COMMANDS}:
    sys.argv = ["webgemma", *command.split(), "--help"]
    assert run_command() == 0, command
"""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (made.returncode, made.stderr) == (0, b"")
    assert made.stdout.count(b"Usage: webgemma") == len(COMMANDS)
    assert b"\\u" not in made.stdout  # everything has plain letters
    assert b"\\x" not in made.stdout


@pytest.mark.parametrize("encoding", NOT_UTF8)
def test_tokens_in_another_encoding(model: Path, encoding: str) -> None:
    env = {"PYTHONIOENCODING": encoding}
    shown = webgemma("tokenize", model, "the inner", env=env)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert "'\\u2581'" in shown.stdout.decode(encoding)
    as_json = webgemma("tokenize", model, "the inner", "--json", env=env)
    pieces = [entry["piece"] for entry in json.loads(as_json.stdout.decode(encoding))]
    assert pieces == ["the", "▁", "in", "n", "er"]


@pytest.mark.parametrize("encoding", [*NOT_UTF8, "utf-8"])
def test_an_error_about_any_name(encoding: str) -> None:
    """Also of one that is no Unicode, as file systems have them."""
    for name, shown in (("▁.gguf", "▁.gguf"), (os.fsdecode(b"\xff.gguf"), "\\udcff.gguf")):
        result = webgemma("show", name, env={"PYTHONIOENCODING": encoding})
        expected = shown if encoding == "utf-8" else shown.replace("▁", "\\u2581")
        sentence = f"error: There is no file {expected}.\n"
        assert (result.returncode, result.stderr.decode(encoding)) == (1, sentence)


def test_bars_have_letters_in_every_encoding() -> None:
    code = "from webgemma.cli.plot import bars; print(bars([4.0, 3.0, 2.0, 1.0]))"
    for encoding, shown in (("ascii", "#+,_"), ("utf-8", "█▆▃▁")):
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        made = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True
        )
        assert made.stdout.decode(encoding).strip() == shown


# Full disks


@needs_full
@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("kernels", "norm"),
        ("kernels", "--json"),
    ],
    ids=" ".join,
)
def test_a_full_disk_gets_a_sentence(args: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        result = webgemma(*args, stdout=full)
    assert (result.returncode, result.stderr) == (1, b"error: No space left on device.\n")


@needs_full
def test_an_error_that_cannot_be_printed_is_still_one() -> None:
    code = f"{sys.executable} -m webgemma show nothing.gguf 2>/dev/full"
    assert subprocess.run(code, shell=True, check=False).returncode == 1


def test_logits_are_written_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "ids.txt").write_text("2 30 31")
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "logits.npy"
    args = ("logits", model, "--ids", tmp_path / "ids.txt", "--device", "cpu", "--out")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    result = webgemma(*args, path, preexec_fn=limit)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == f"error: {path} cannot be written: File too large.\n"
    assert list(folder.iterdir()) == []
    assert webgemma(*args, path).returncode == 0
    whole = path.read_bytes()
    assert np.load(path).shape == (3, 320)
    assert webgemma(*args, path, preexec_fn=limit).returncode == 1
    assert path.read_bytes() == whole  # what was there is still there
    if FULL.exists():
        full = webgemma(*args, FULL)
        sentence = "error: /dev/full cannot be written: No space left on device.\n"
        assert (full.returncode, full.stderr.decode()) == (1, sentence)
        assert FULL.is_char_device()


# Pipes


@pytest.mark.parametrize(
    "args",
    [("kernels",), ("kernels", "norm"), ("kernels", "--json"), ("run", "--help")],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(args: tuple[str, ...]) -> None:
    """As in `webgemma kernels | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    result = webgemma(*args, stdout=writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
@pytest.mark.parametrize("args", ["kernels norm", "kernels --json", "--help"])
def test_closed_output_is_no_error(args: str) -> None:
    code = f"{sys.executable} -m webgemma {args} >&-"
    result = subprocess.run(code, shell=True, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


# Arguments


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nothing"], "No such command 'nothing'; see webgemma --help."),
        (["list", "--nothing"], "No such option: --nothing; see webgemma list --help."),
        (["merge", "-"], "Missing argument 'ADAPTER[:SCALE]'; see webgemma merge --help."),
        (["run", "--device", "abacus"], "--device"),
        (["run", "--temperature", "warm"], "--temperature"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_mistake_in_the_arguments_is_an_error_as_any_other(
    args: list[str], sentence: str
) -> None:
    result = webgemma(*args)
    message = result.stderr.decode()
    assert result.returncode == 1
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert sentence in message


def test_without_arguments_the_help_is_printed() -> None:
    result = webgemma()
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"Usage: webgemma" in result.stdout
