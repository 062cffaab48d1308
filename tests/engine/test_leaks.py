"""Memory does not grow with the tokens of a conversation, nor over ten loads of a model."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.gpu import LIBRARY
from helpers.objects import object_counts
from helpers.tiny import DIFFUSION, MOE, Tiny, tiny_gguf

from webgemma import Gemma
from webgemma.device import native

LOADS = 10
QUICK = Tiny(pattern="sf", width=32, ffn=32, ple=16, context=4096)
# Lavapipe kept 0.3 MB at each step of the other two while parameters were uniforms.
TOKENS = {"quick": 2000, "moe": 200, "diffusion": 240}
MODELS = {"quick": QUICK, "moe": MOE, "diffusion": DIFFUSION}
# Measured: 0 over the tokens, 0.3 MB over the loads. A bind group leaked at each token is 2.6 MB, a
# buffer 3.6 MB; a plan or a model that is not freed keeps its device alive, 28 MB at each load.
FLAT_NBYTES = 1 << 20
# The heaps of a device's threads grow or shrink by 3 MB at a load.
NOISE_NBYTES = 8 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models to files; return their folder."""
    target = tmp_path_factory.mktemp("models")
    for name, tiny in MODELS.items():
        (target / f"{name}.gguf").write_bytes(tiny_gguf(tiny))
    return target


def generate(gemma: Gemma, count: int) -> None:
    """Generate so many tokens, always the same one, or canvases until there are as many.

    Without drafts: how many of them pay is measured, and decides which plans are recorded."""
    if gemma.config.diffusion:
        for seed in range(count // gemma.config.diffusion.canvas):
            assert list(gemma.generate([2, 30, 31], seed=seed, steps=4, max_tokens=12))
        return
    settings = {"temperature": 0, "max_tokens": count, "logit_bias": {77: 100.0}}
    pieces = gemma.generate([2, 30, 31], **settings, speculate="off")
    assert [piece.token for piece in pieces] == [77] * count


def resident_nbytes() -> int:
    """Return the resident memory of the process; a software GPU's memory is in it."""
    gc.collect()
    facts = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(facts["VmRSS"].split()[0]) * 1024


def generate_many_tokens(path: Path) -> None:
    """Check that memory does not grow with the tokens of a conversation."""
    count = TOKENS[path.stem]
    with Gemma.load(path, gpu=LIBRARY, context=count + 10) as gemma:
        for _ in range(2):  # the second time, all but the last token of the prompt is cached
            generate(gemma, min(100, count))
        before, blocks, nbytes = object_counts(), sys.getallocatedblocks(), resident_nbytes()
        generate(gemma, count)
        assert object_counts() == before
        assert sys.getallocatedblocks() - blocks < max(count / 2, 500)
        assert resident_nbytes() - nbytes < FLAT_NBYTES


def load_many_times(path: Path, ahead: bool) -> None:
    """Check that memory does not grow with loads of a model."""
    commands = native.Commands
    native.Commands = lambda *args, **_: commands(*args, ahead=ahead)  # type: ignore[assignment,misc]
    counts, blocks, nbytes = [], [], []
    for _ in range(LOADS):
        with Gemma.load(path, gpu=LIBRARY, context=64) as gemma:
            generate(gemma, 4)
            loaded = object_counts()
        del gemma
        counts.append(object_counts())
        blocks.append(sys.getallocatedblocks())
        nbytes.append(resident_nbytes())
        assert counts[-1]["Buffer"] < loaded["Buffer"]
        assert counts[-1]["Device"] < loaded["Device"]
    warm = LOADS // 3  # until then, the driver fills its caches
    assert counts[warm:] == [counts[warm]] * (LOADS - warm)
    assert blocks[-1] - blocks[warm] < 1000
    assert nbytes[-1] - nbytes[warm] < NOISE_NBYTES


def failure_in_a_separate_process(*arguments: object) -> str:
    """Run this file as a program, and return how it failed; "" if it did not.

    In this process other tests would allocate and free memory meanwhile."""
    command = [sys.executable, "-W", "error", __file__, *map(str, arguments)]
    search = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # tests/helpers
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return done.stderr or "no message" if done.returncode else ""


@pytest.mark.parametrize("name", MODELS)
def test_generating_does_not_leak(folder: Path, name: str) -> None:
    assert failure_in_a_separate_process("tokens", folder / f"{name}.gguf") == ""


@pytest.mark.parametrize("ahead", [False, True], ids=["not ahead", "recorded ahead"])
def test_closing_a_model_frees_everything(folder: Path, ahead: bool) -> None:
    """Record ahead too, as on hardware GPUs: the commands of a step are left over at the end."""
    assert failure_in_a_separate_process("loads", folder / "quick.gguf", ahead) == ""


if __name__ == "__main__":
    model = Path(sys.argv[2])
    if sys.argv[1] == "tokens":
        generate_many_tokens(model)
    else:
        load_many_times(model, ahead=sys.argv[3] == "True")
