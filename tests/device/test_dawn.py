"""Dawn: found, checked when it is opened, and chosen where it is better; else a sentence."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _cffi_backend
import pytest
import wgpu.backends.wgpu_native as wgpu_native
from browser.chromium import SWIFTSHADER
from helpers.command import webgemma
from helpers.tiny import SMALL, tiny_gguf

from webgemma.device import MatrixShape, dawn, listing, open_device, opening
from webgemma.device.dawn import FUNCTIONS, Dawn, find_dawn
from webgemma.device.interface import Limits
from webgemma.device.trials import check_sums, matrix_products
from webgemma.device.wgpu_native import WgpuNative
from webgemma.errors import DeviceError
from webgemma.sync import run_sync

LIMITS = Limits(1 << 27, 1 << 28, 1 << 14, 256, 65535)


def test_the_library_is_in_the_wheel() -> None:
    path = find_dawn()
    assert "litert" in path.name
    assert path.is_file()
    assert "litert_lm" not in sys.modules  # found without importing it


def test_every_function_that_is_called_is_checked_for() -> None:
    """In another library a missing one would be found in the middle of a reply."""
    called = set()
    folder = Path(dawn.__file__).parent
    for name in ("library", "dawn", "commands", "native"):
        called |= set(re.findall(r"lib\.(wgpu\w+)", (folder / f"{name}.py").read_text()))
    assert called == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: "/no/such/dawn.so", "WEBGEMMA_DAWN names /no/such/dawn.so, which is not a file"),
        (lambda folder: str(folder), "which is not a file"),
        (lambda folder: written(folder / "text.so"), "cannot be opened as a library: "),
        (
            lambda _: _cffi_backend.__file__,
            "is no Dawn: it has no wgpuHasInstanceFeature and 44 more",
        ),
        (lambda _: wgpu_native._ffi.lib_path, "is another WebGPU library than Dawn"),
    ],
    ids=["missing", "folder", "text", "no functions", "wgpu-native"],
)
def test_something_else_instead_of_dawn(
    make: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expect a sentence, and that the GPUs of wgpu-native are still there."""
    monkeypatch.setenv("WEBGEMMA_DAWN", make(tmp_path))
    listing._opened.cache_clear()
    with pytest.raises(DeviceError, match=re.escape(sentence)):
        open_device("dawn")
    shown = json.loads(webgemma("gpus", "--json").stdout)
    assert any(sentence in problem for problem in shown["problems"])
    assert {entry["library"] for entry in shown["gpus"]} == {"wgpu"}
    assert not open_device().name.endswith("(Dawn, Vulkan)")
    listing._opened.cache_clear()


def written(path: Path) -> str:
    """Return the name of a text file."""
    path.write_text("not a library")
    return str(path)


def test_dawn_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dawn, "PACKAGE", "no_such_package")
    listing._opened.cache_clear()
    with pytest.raises(
        DeviceError, match=r'Dawn is not installed: run `pip install "webgemma\[dawn'
    ):
        open_device("dawn")
    assert open_device().name
    listing._opened.cache_clear()


def test_an_older_dawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the newest functions is refused; one without matrices is used without them."""
    monkeypatch.setattr(dawn, "FUNCTIONS", ("wgpuSomethingNewer", *FUNCTIONS))
    with pytest.raises(DeviceError, match="is too old a Dawn: it has no wgpuSomethingNewer"):
        Dawn()
    monkeypatch.setattr(dawn, "FUNCTIONS", FUNCTIONS)
    monkeypatch.setattr(dawn, "MATRIX_SYMBOL", "wgpuMatricesOfLater")
    old = Dawn()
    everything = frozenset(Dawn.features)
    assert old._matrix_shapes(None, everything) == ()
    assert "is a Dawn without matrix units" in old.problems([pretended("dawn")])[0]


# Which GPU is chosen


def pretended(library: str, kind: str = "discrete", shapes: int = 0, name: str = "Card") -> Any:
    """Return a GPU that does not exist."""
    of = SimpleNamespace(key=library)
    return SimpleNamespace(
        library=of if library == "wgpu" else Pretended(),
        name=f"{name} ({'Dawn, ' if library == 'dawn' else ''}Vulkan)",
        kind=kind,
        software=kind == "software",
        matrix_shapes=(MatrixShape(16, 16, 16),) * shapes,
        limits=LIMITS,
    )


class Pretended(Dawn):
    """A Dawn without a library."""

    def __init__(self) -> None:
        pass


def choose(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[Any],
    broken: str = "",
    wrong_units: bool = False,
    **options: Any,
) -> str:
    """Return the name of the GPU that is opened, if those are there."""

    def opened(gpu: Any) -> Any:
        if broken and broken in gpu.name:
            raise DeviceError(f"{gpu.name} computes wrong sums.")
        shapes = () if wrong_units else gpu.matrix_shapes
        return SimpleNamespace(name=gpu.name, matrix_shapes=shapes, close=lambda: None)

    def listed(key: str) -> tuple[list[Any], list[str]]:
        return [gpu for gpu in gpus if gpu.library.key == key], []

    monkeypatch.setattr(listing, "list_one", listed)
    monkeypatch.setattr(opening, "open_gpu", opened)
    return open_device(options.pop("gpu", None), **options).name


@pytest.mark.parametrize(
    ("shapes", "options", "expected"),
    [
        (1, {}, "Card (Dawn, Vulkan)"),
        (0, {}, "Card (Vulkan)"),
        (1, {"broken": "Dawn"}, "Card (Vulkan)"),
        (1, {"wrong_units": True}, "Card (Vulkan)"),
        (1, {"wrong_units": True, "gpu": "dawn"}, "Card (Dawn, Vulkan)"),
        (1, {"gpu": "wgpu"}, "Card (Vulkan)"),
        (0, {"gpu": "dawn"}, "Card (Dawn, Vulkan)"),
        (0, {"gpu": "Dawn:car"}, "Card (Dawn, Vulkan)"),
        (0, {"gpu": "card"}, "Card (Vulkan)"),
        (1, {"gpu": "card"}, "Card (Dawn, Vulkan)"),
        (1, {"gpu": "wgpu:pipe"}, "Pipe (Vulkan)"),
        (1, {"gpu": "pipe"}, "Pipe (Vulkan)"),
    ],
)
def test_which_gpu_is_chosen(
    shapes: int, options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [
        pretended("wgpu"),
        pretended("wgpu", "software", name="Pipe"),
        pretended("dawn", shapes=shapes),
        pretended("dawn", "software", shapes=1, name="Pipe"),
    ]
    assert choose(monkeypatch, gpus, **options) == expected


def test_a_gpu_that_only_dawn_finds_is_not_replaced_by_a_software_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [pretended("wgpu", "software", name="Pipe"), pretended("dawn")]
    assert choose(monkeypatch, gpus) == "Card (Dawn, Vulkan)"


def test_a_gpu_that_was_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [pretended("wgpu"), pretended("dawn", shapes=1)]
    for name in ("dawn", "dawn:card", "card"):
        with pytest.raises(DeviceError, match="wrong sums"):
            choose(monkeypatch, gpus, "Dawn", gpu=name)
    with pytest.raises(DeviceError, match="There is no GPU named 'dawn:voodoo' on this machine"):
        choose(monkeypatch, gpus, gpu="dawn:voodoo")
    with pytest.raises(DeviceError, match="There is no GPU on this machine"):
        choose(monkeypatch, [pretended("dawn", "software", 1)], software=False)


# Trials


class Wrong:
    """A device whose results are those of another kernel: every product is 1."""

    name, subgroup_sizes, matrix_shapes = "Wrong", (32, 32), (MatrixShape(8, 8, 8),)

    def buffer(self, nbytes: int, _: str) -> Any:
        return SimpleNamespace(nbytes=nbytes)

    def read(self, _: Any, offset: int, nbytes: int) -> Any:
        async def ones() -> bytes:
            return bytes([0, 0, 0x80, 0x3F]) * (nbytes // 4 - offset)

        return SimpleNamespace(bytes=ones)

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


def test_a_device_that_computes_wrongly_is_found_out() -> None:
    with pytest.raises(DeviceError, match="Wrong computes wrong sums"):
        run_sync(check_sums(Wrong()))  # type: ignore[arg-type]
    assert run_sync(matrix_products(Wrong())) == ()  # type: ignore[arg-type]


# In a process of its own, where the only Vulkan driver is Chromium's

needs_swiftshader = pytest.mark.skipif(not SWIFTSHADER, reason="needs Chromium's Vulkan driver")


def on_swiftshader(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "VK_ICD_FILENAMES": SWIFTSHADER}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@needs_swiftshader
def test_both_libraries_list_the_same_gpu() -> None:
    done = on_swiftshader(sys.executable, "-m", "webgemma", "gpus", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert listed["problems"] == []
    plain, dawns = listed["gpus"]
    assert (plain["library"], dawns["library"]) == (WgpuNative.key, Dawn.key)
    assert dawns["name"] == plain["name"].replace("(Vulkan)", "(Dawn, Vulkan)")
    assert {"subgroups", "enable-subgroups", "shuffle4"} <= set(dawns["features"])
    assert dawns["subgroup_sizes"] == [4, 4]
    assert dawns["matrix_shapes"] == []
    assert dawns["no_matrix_units"] == "the GPU or its driver has no float16"
    assert not {"subgroup-matrix", "shader-f16", "threads"} & set(dawns["features"])
    assert dawns["problem"] is None


@needs_swiftshader
def test_a_reply_of_the_bundled_model_with_dawn() -> None:
    question = ("What is 1 + 2?", "--temperature", "0")
    done = on_swiftshader(sys.executable, "-m", "webgemma", "run", "-", *question, "--gpu", "dawn")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 plus 2 is 3.\n"


AS_HARDWARE = """
import sys
from webgemma import Gemma
from webgemma.device.dawn import OWN, Dawn
from webgemma.device.library import Adapter
Adapter.software = software = sys.argv[2] == "software"
with Gemma.load(sys.argv[1], "gpu", gpu="dawn", precision="exact", context=64) as model:
    pieces = model.generate([2, 5, 9], max_tokens=8, temperature=0, speculate="off")
    print([piece.token for piece in pieces])
    print(model.gpu_engine("").model.device.recording_seconds > 0)
library = Dawn()
toggles = OWN.cast("DawnToggles *", library._chain(library.adapters()[0]))
names = [OWN.string(toggles.enabledToggles[i]) for i in range(toggles.enabledToggleCount)]
print(b"skip_validation" in names)
"""


@needs_swiftshader
def test_hardware_has_its_plans_recorded_ahead_and_no_calls_checked(tmp_path: Path) -> None:
    """The software GPU is taken for hardware."""
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf(replace(SMALL, suppressed=(1, 9))))
    outputs = []
    for kind in ("software", "hardware"):
        arguments = ("-c", AS_HARDWARE, str(tmp_path / "tiny.gguf"), kind)
        done = on_swiftshader(sys.executable, *arguments)
        assert done.returncode == 0, done.stderr
        tokens, *rest = done.stdout.splitlines()
        outputs.append(tokens)
        assert rest == [str(kind == "hardware")] * 2
    assert outputs[0] == outputs[1]
    assert len(json.loads(outputs[0])) == 8


def test_a_gpu_that_dawn_refuses_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dawn prints its reasons; what others print meanwhile is not lost."""

    def warn(_: Any) -> list[Any]:
        os.write(
            2, b"Warning: No dynamic indexing.\n - While initializing\n    at x.cpp:1\nother\n"
        )
        return []

    monkeypatch.setattr(Dawn, "_handles", warn)
    library = Dawn()
    for _ in range(2):
        assert library.adapters() == []
    assert library.problems([]) == ["Dawn finds no GPU (No dynamic indexing)."]
    assert capfd.readouterr().err == "other\n" * 2
