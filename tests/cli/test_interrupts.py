"""Ctrl-C at any instant: exit code 130, nothing on standard error, nothing left half done."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from webgemma.gemma.config import Config
from webgemma.lora.adapter import TARGET_GROUPS, new_adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.models import find_model

POSIX_ONLY = pytest.mark.skipif(os.name == "nt", reason="signals of one process only")
DELAYS = (0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0)  # seconds; importing takes about half of one

# Before its first instruction webgemma can do nothing. This is the command, and a dot when the
# handler, which is the first thing that it installs, is in place.
COMMAND = """
import os, sys
import webgemma.cli

def announced(real=webgemma.cli.end_on_interrupt):
    real()
    os.write(1, b".")

webgemma.cli.end_on_interrupt = announced
sys.argv[0] = "webgemma"
webgemma.cli.main()
"""


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data to train on, and an adapter to merge."""
    made = tmp_path_factory.mktemp("interrupted")
    rows = [json.dumps({"prompt": str(number), "completion": "x"}) for number in range(999)]
    (made / "data.jsonl").write_text("\n".join(rows))
    with find_model(None).open() as gguf:
        adapter = new_adapter(Config.from_gguf(gguf), TARGET_GROUPS["all"], rank=2)
    write_peft_folder(adapter, made / "adapter")
    return made


@POSIX_ONLY
@pytest.mark.parametrize(
    "args",
    [
        ["run", "-", "Tell me a long story.", "--device", "cpu", "--max-tokens", "900"],
        ["train", "-", "data.jsonl", "--out", "trained", "--json"],
        ["merge", "-", "adapter", "merged.gguf", "--force"],
    ],
    ids=lambda args: args[0],
)
def test_it_ends_the_command_quietly_at_any_instant(args: list[str], folder: Path) -> None:
    for delay in DELAYS:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *args],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        assert not list(folder.glob(".*.part"))
        if args[0] == "merge" and b"matrices changed" in error:  # it was done by then
            # The line may be out before the command has returned (then it is interrupted as any
            # other), and while Python exits, the signal is the system's again.
            assert process.returncode in (0, 130, -signal.SIGINT)
            continue
        assert process.returncode == 130, f"after {delay} s: {error.decode()}"
        if args[0] == "train":  # says in a line what it has saved
            error = re.sub(rb"^stopped [^\n]*\n$", b"", error)
        assert error == b"", f"after {delay} s"


def test_until_it_can_be_answered_almost_nothing_is_imported() -> None:
    code = """
import sys
before = set(sys.modules)
import webgemma.cli
print(*sorted(set(sys.modules) - before))
"""
    imported = set(run_python(code).stdout.split())
    assert imported == {"webgemma", "webgemma.cli", "webgemma.cli.interrupts"}


@POSIX_ONLY
def test_an_import_inside_a_command_is_finished_first(tmp_path: Path) -> None:
    """An interrupted import ends in any error, or in a module that cannot be imported again."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "for _ in range(10): time.sleep(0.01)\n"
        "print('whole')\n"
    )
    code = """
import sys, time
from webgemma.cli.interrupts import Interruptible, end_on_interrupt

sys.path.insert(0, sys.argv[1])
end_on_interrupt()
try:
    with Interruptible():
        import slow
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    result = run_python(code, tmp_path)
    assert (result.stdout.split(), result.stderr) == (["whole", "interrupted"], "")


@POSIX_ONLY
def test_where_it_is_ignored_it_stays_so() -> None:
    """A shell script's background jobs ignore Ctrl-C."""
    code = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from webgemma.cli.interrupts import Interruptible, end_on_interrupt

end_on_interrupt()
with Interruptible():
    os.kill(os.getpid(), signal.SIGINT)
print("alive")
"""
    assert run_python(code).stdout == "alive\n"
