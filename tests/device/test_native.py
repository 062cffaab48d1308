"""WebGPU on this machine: plans that run repeatedly, reading results, and a device that is lost.

Through wgpu-native; with WEBGEMMA_GPU=dawn through Dawn."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from helpers.gpu import LIBRARY, device, first_gpu, get, put
from numpy import arange, float32

from webgemma.device import Dispatch, Kernel, Plan
from webgemma.device.native import NativeDevice
from webgemma.errors import DeviceError
from webgemma.graph import Tensor
from webgemma.sync import run_sync

COUNT = """
struct Params { step: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> total: array<u32>;
@compute @workgroup_size(1) fn main() { total[0] += params.step; }
"""
KERNEL = Kernel("count", COUNT, ("uniform", "write"))


def counter(on: NativeDevice, step: int) -> tuple[Plan, Tensor]:
    """Return a plan that adds a step to a number, and the number."""
    total = Tensor((4,), 16, on.buffer(16, "total"))
    params = on.buffer(16, "params")
    on.write(params, struct.pack("<4I", step, 0, 0, 0))
    pipeline = on.pipeline(KERNEL)
    group = on.bind(pipeline, [(params, 0, 16), (total.buffer, 0, 16)])
    return Plan([Dispatch("count", pipeline, group, (1, 1, 1))], buffers=[params]), total


@pytest.fixture(scope="module")
def eager() -> Iterator[NativeDevice]:
    """Open a device whose plans are recorded ahead, as on hardware GPUs."""
    opened = NativeDevice(first_gpu(LIBRARY))
    opened._commands._ahead = True
    yield opened
    opened.close()


def destroy(on: NativeDevice) -> None:
    """Lose a device."""
    on._lib.wgpuDeviceDestroy(on._device.raw)


def number(on: NativeDevice, total: Tensor) -> int:
    """Read the number."""
    return int.from_bytes(run_sync(on.read(total.buffer, 0, 4).bytes()), "little")


def test_a_plan_runs_as_often_as_it_is_submitted(eager: NativeDevice) -> None:
    """Check results from the second run on too, whose commands are recorded ahead."""
    plan, total = counter(eager, 3)
    for times in range(1, 8):
        reading = eager.run(plan, (total.buffer, 0, 4))
        assert reading is not None
        assert int.from_bytes(run_sync(reading.bytes()), "little") == 3 * times
    assert eager.recording_seconds > 0


def test_results_may_be_read_late_and_in_any_order(eager: NativeDevice) -> None:
    plan, total = counter(eager, 1)
    readings = [eager.run(plan, (total.buffer, 0, 4)) for _ in range(5)]
    for times in (5, 1, 3, 2, 4):
        reading = readings[times - 1]
        assert reading is not None
        assert int.from_bytes(run_sync(reading.bytes()), "little") == times


def test_plans_may_alternate(eager: NativeDevice) -> None:
    (one, total_one), (two, total_two) = counter(eager, 1), counter(eager, 10)
    for _ in range(4):
        eager.run(one)
        eager.run(two)
    assert number(eager, total_one) == 4
    assert number(eager, total_two) == 40


def test_memory_is_freed_while_commands_are_recorded_ahead(eager: NativeDevice) -> None:
    before = eager.nbytes
    for _ in range(20):
        plan, total = counter(eager, 1)
        for _ in range(3):
            eager.run(plan)
        eager.free(total.buffer)
        plan.close(eager)
    assert eager.nbytes == before


def test_a_plan_is_closed_while_a_run_of_it_is_recorded_ahead(eager: NativeDevice) -> None:
    """Close it while its buffers exist, and after one of them was freed."""
    for freed_before in (False, True):
        plan, total = counter(eager, 1)
        for _ in range(3):
            eager.run(plan)
        if freed_before:
            eager.free(total.buffer)
        plan.close(eager)
        assert plan.ready is None
        if not freed_before:
            assert number(eager, total) == 4  # the run that was recorded ahead, unused


def test_a_large_buffer_and_a_part_of_one_are_read() -> None:
    values = put(arange(1 << 16, dtype=float32))
    assert (get(values) == arange(1 << 16, dtype=float32)).all()
    part = run_sync(device().read(values.buffer, 4 * 100, 8).bytes())
    assert struct.unpack("<2f", part) == (100, 101)


@pytest.mark.parametrize("operation", ["run", "run ahead", "read", "write", "buffer", "pipeline"])
def test_a_lost_device_raises_an_error(operation: str) -> None:
    """Expect the error before anything is submitted, which would end the process."""
    lost = NativeDevice(first_gpu(LIBRARY))
    lost._commands._ahead = True
    plan, total = counter(lost, 1)
    if operation == "run ahead":
        for _ in range(3):
            lost.run(plan)
        number(lost, total)
    destroy(lost)
    operations = {
        "run": lambda: lost.run(plan),
        "run ahead": lambda: lost.run(plan),
        "read": lambda: number(lost, total),
        "write": lambda: lost.write(total.buffer, bytes(4)),
        "buffer": lambda: lost.buffer(16, "more"),
        "pipeline": lambda: lost.pipeline(Kernel("count", COUNT + "\n", ("uniform", "write"))),
    }
    with pytest.raises(DeviceError, match=r"was lost: .* Load the model again"):
        operations[operation]()


def test_another_device_works_after_one_was_lost() -> None:
    lost = NativeDevice(first_gpu(LIBRARY))
    destroy(lost)
    with pytest.raises(DeviceError):
        lost.buffer(16)
    other = NativeDevice(first_gpu(LIBRARY))
    plan, total = counter(other, 2)
    other.run(plan)
    assert number(other, total) == 2
    other.close()


def test_shuffling_threads_are_found_by_trying() -> None:
    names = {name for name in device().features if name.startswith("shuffle")}
    sizes = sorted(int(name.removeprefix("shuffle")) for name in names)
    assert sizes == [4, 8, 16, 32][: len(sizes)]
    assert not device(frozenset({"subgroups"})).features & names
    assert "shuffle8" not in device(frozenset({"shuffle8"})).features


def test_closing_a_device_ends_its_thread() -> None:
    """Check that a process ends once it has closed its device."""
    program = (
        "from test_native import LIBRARY, NativeDevice, counter, first_gpu\n"
        "device = NativeDevice(first_gpu(LIBRARY))\n"
        "device._commands._ahead = True\n"
        "plan, _ = counter(device, 1)\n"
        "for _ in range(4): device.run(plan)\n"
        "device.close()\n"
    )
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{program}"],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "")


def test_ctrl_c_inside_a_callback_of_the_library_is_raised(
    eager: NativeDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    """Waiting for results, that is where most of them are noticed: the library would drop them."""
    plan, total = counter(eager, 3)
    eager.run(plan)

    def interrupt(frame: FrameType, _event: str, _: object) -> None:
        if frame.f_code.co_name == "on_mapped":
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            number(eager, total)
    finally:
        sys.settrace(before)
    assert number(eager, total) == 3
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_RUNTIME_DIR is of Linux")
@pytest.mark.parametrize("folder", [None, "", "/run/user/nobody"])
def test_gpus_are_found_in_silence_and_the_environment_stays(folder: str | None) -> None:
    """In containers and notebooks XDG_RUNTIME_DIR is not set, and drivers complain of that."""
    code = (
        f"LIBRARY = {LIBRARY!r}"
        + """
import os
from webgemma.device import open_device

open_device(LIBRARY).close()
print(repr(os.environ.get("XDG_RUNTIME_DIR")))
"""
    )
    env = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    env |= {} if folder is None else {"XDG_RUNTIME_DIR": folder}
    made = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert (made.stdout, made.stderr) == (f"{folder!r}\n", "")
