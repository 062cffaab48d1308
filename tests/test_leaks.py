"""Memory stays flat: 2000 tokens of one conversation, ten loads and unloads of a model."""

import gc
import sys
from pathlib import Path

import pytest
import wgpu
from tiny import Tiny, tiny_gguf

from webgemma import Gemma
from webgemma.device import native

TOKENS, LOADS = 2000, 10
QUICK = Tiny(pattern="sf", width=32, ffn=32, ple=16, context=4096)
# Measured: 0 over the tokens, 0.3 MB over the loads. A bind group kept at each token is 2.6 MB, a
# buffer 3.6 MB; a plan or a model that is not freed keeps its device, 28 MB at each load.
FLAT_NBYTES = 1 << 20
# Loads take and leave heaps, also of the thread that records ahead: 2 MB up or down at each.
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


def test_memory_stays_as_it_is(path: Path) -> None:
    with Gemma.load(path, "gpu", context=TOKENS + 10) as gemma:
        for _ in range(2):  # the second time, the prompt is known but for its last token
            write(gemma, 100)
        before, blocks, nbytes = alive(), sys.getallocatedblocks(), resident_nbytes()
        write(gemma, TOKENS)
        assert alive() == before
        assert sys.getallocatedblocks() - blocks < TOKENS / 2
        assert resident_nbytes() - nbytes < FLAT_NBYTES


@pytest.mark.parametrize("ahead", [False, True], ids=["", "recorded ahead"])
def test_unloading_frees_all(path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded ahead, as on real GPUs, the commands of a step are left over at the end."""
    made = native.Commands
    monkeypatch.setattr(native, "Commands", lambda *args, **_: made(*args, ahead=ahead))
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
