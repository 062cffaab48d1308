"""Memory stays flat: 2000 tokens of one conversation, ten loads and unloads of a model."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wgpu
from helpers.tiny import Tiny, tiny_gguf

from webgemma import Gemma
from webgemma.device import native

TOKENS, LOADS = 2000, 10
QUICK = Tiny(pattern="sf", width=32, ffn=32, ple=16, context=4096)
# Measured: 0 over the tokens, 0.3 MB over the loads. A bind group kept at each token is 2.6 MB, a
# buffer 3.6 MB; a plan or a model that is not freed keeps its device, 28 MB at each load.
FLAT_NBYTES = 1 << 20
# The heaps of a device's threads come and go, 3 MB up or down at a load.
WAVY_NBYTES = 8 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "quick.gguf"
    made.write_bytes(tiny_gguf(QUICK))
    return made


def write(gemma: Gemma, count: int) -> None:
    pieces = gemma.generate([2, 30, 31], temperature=0, max_tokens=count, logit_bias={77: 100.0})
    assert [piece.token for piece in pieces] == [77] * count


def alive() -> dict[str, int]:
    """How many buffers, pipelines, bind groups and so on there are, on all devices."""
    gc.collect()
    kinds = wgpu.diagnostics.object_counts.get_dict()
    return {kind: counts["count"] for kind, counts in kinds.items()}


def resident_nbytes() -> int:
    """What the process has of the machine's memory; a software GPU's memory is in it."""
    gc.collect()
    facts = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(facts["VmRSS"].split()[0]) * 1024


def write_many_tokens(path: Path) -> None:
    with Gemma.load(path, "gpu", context=TOKENS + 10) as gemma:
        for _ in range(2):  # the second time, the prompt is known but for its last token
            write(gemma, 100)
        before, blocks, nbytes = alive(), sys.getallocatedblocks(), resident_nbytes()
        write(gemma, TOKENS)
        assert alive() == before
        assert sys.getallocatedblocks() - blocks < TOKENS / 2
        assert resident_nbytes() - nbytes < FLAT_NBYTES


def load_many_times(path: Path, ahead: bool) -> None:
    made = native.Commands
    native.Commands = lambda *args, **_: made(*args, ahead=ahead)  # type: ignore[assignment,misc]
    counts, blocks, nbytes = [], [], []
    for _ in range(LOADS):
        with Gemma.load(path, "gpu", context=64) as gemma:
            write(gemma, 4)
            loaded = alive()
        del gemma
        counts.append(alive())
        blocks.append(sys.getallocatedblocks())
        nbytes.append(resident_nbytes())
        assert counts[-1]["Buffer"] < loaded["Buffer"]
        assert counts[-1]["Device"] < loaded["Device"]
    warm = LOADS // 3  # until then, the driver fills its own stores
    assert counts[warm:] == [counts[warm]] * (LOADS - warm)
    assert blocks[-1] - blocks[warm] < 1000
    assert nbytes[-1] - nbytes[warm] < WAVY_NBYTES


def in_a_process_of_its_own(*what: object) -> None:
    """Other tests would take and leave memory meanwhile."""
    command = [sys.executable, "-W", "error", __file__, *map(str, what)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}  # where tests/helpers is
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


def test_memory_stays_as_it_is(path: Path) -> None:
    in_a_process_of_its_own("tokens", path)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "recorded ahead"])
def test_unloading_frees_all(path: Path, ahead: bool) -> None:
    """Recorded ahead, as on real GPUs, the commands of a step are left over at the end."""
    in_a_process_of_its_own("loads", path, ahead)


if __name__ == "__main__":
    model = Path(sys.argv[2])
    if sys.argv[1] == "tokens":
        write_many_tokens(model)
    else:
        load_many_times(model, ahead=sys.argv[3] == "True")
