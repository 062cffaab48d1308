"""WebGPU on this machine, through wgpu-py: Vulkan, Metal or Direct3D 12."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import wgpu  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import GPUShaderModule, ffi, lib  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native._api import libf  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native.extras import set_instance_extras  # type: ignore[import-untyped]

from webgemma.device.commands import Commands, NativeReading
from webgemma.device.forks import check_process, is_forked, mark_opened
from webgemma.device.interface import Buffer, Kernel, Limits, Plan
from webgemma.device.subgroups import shuffles
from webgemma.errors import DeviceError, DeviceMemoryError
from webgemma.sync import run_sync

FEATURES = {
    "subgroups": "subgroup",
    "shader-f16": "shader-f16",
    "timestamp-query": "timestamp-query",
}
USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC
CHECKS = lib.WGPUShaderRuntimeChecks_None  # Vulkan, Metal and Direct3D check bounds themselves
BACKENDS = ("Vulkan", "Metal", "DX12")  # OpenGL's driver crashes when the child of a fork ends
BINDING_TYPES = {"read": "read-only-storage", "write": "storage", "uniform": "uniform"}


def list_gpus() -> list[Any]:
    """Return the adapters (GPUs) of this machine, the fastest kind first, software last."""
    check_process()
    mark_opened()
    with suppress(RuntimeError):  # another package has made the process's instance already
        set_instance_extras(backends=BACKENDS)
    order = {"DiscreteGPU": 0, "IntegratedGPU": 1, "CPU": 3}
    with _runtime_folder():
        adapters = wgpu.gpu.enumerate_adapters_sync()
    found = [a for a in adapters if a.info["backend_type"] != "OpenGL"]
    return sorted(found, key=lambda a: order.get(a.info["adapter_type"], 2))


@contextmanager
def _runtime_folder() -> Iterator[None]:
    """Name a folder in XDG_RUNTIME_DIR, while GPUs are searched for.

    Without one, as in containers and notebooks, Wayland's library prints an error for each driver
    that looks for a display."""
    name = "XDG_RUNTIME_DIR"
    before = os.environ.get(name)
    if sys.platform != "linux" or (before or "").startswith("/"):
        yield
        return
    os.environ[name] = tempfile.gettempdir()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def describe(adapter: Any) -> str:
    """Return a GPU's name and its graphics API."""
    info = adapter.info
    return f"{info['device'] or info['description']} ({info['backend_type']})"


@dataclass(frozen=True, slots=True)
class NativePipeline:
    """A compute pipeline and the layout its bind groups need."""

    raw: Any
    layout: Any


@dataclass(frozen=True, slots=True)
class NativeGroup:
    """A bind group and the buffers it binds."""

    raw: Any
    buffers: tuple[Buffer, ...]


class NativeDevice:
    """One wgpu device with all the limits of its GPU."""

    def __init__(self, adapter: Any, without: frozenset[str] = frozenset()) -> None:
        info = adapter.info
        wanted = {
            ours: theirs
            for ours, theirs in FEATURES.items()
            if theirs in adapter.features and ours not in without
        }
        limits = adapter.limits
        self.name: str = describe(adapter)
        self.software: bool = info["adapter_type"] == "CPU"
        self.unified: bool = info["adapter_type"] in ("CPU", "IntegratedGPU")
        self.nbytes = 0  # of the buffers that are not freed
        self._alive: WeakSet[Buffer] = WeakSet()
        dots = frozenset(() if info["backend_type"] == "Metal" else ("packed-dots",))
        self.features = frozenset(wanted) | (dots - without)
        if self.software:  # lavapipe specialises kernels to uniforms at each run, and keeps them
            self.features |= {"params-in-storage"}
        self._device = adapter.request_device_sync(
            required_features=list(wanted.values()),
            required_limits={
                name: limits[name]
                for name in (
                    "max-buffer-size",
                    "max-storage-buffer-binding-size",
                    "max-compute-workgroup-storage-size",
                    "max-compute-invocations-per-workgroup",
                    "max-compute-workgroup-size-x",
                )
            },
        )
        self.limits = Limits(
            binding_nbytes=limits["max-storage-buffer-binding-size"],
            buffer_nbytes=limits["max-buffer-size"],
            workgroup_nbytes=limits["max-compute-workgroup-storage-size"],
            workgroup_threads=limits["max-compute-invocations-per-workgroup"],
            grid=limits["max-compute-workgroups-per-dimension"],
        )
        self._layouts: dict[tuple[str, ...], tuple[Any, Any]] = {}
        self._pipelines: dict[Kernel, NativePipeline] = {}
        self._commands = Commands(self._device, self.name, ahead=not self.software)
        if "subgroups" in self.features:
            self.features |= run_sync(shuffles(self)) - without

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        """Allocate a buffer, zero at first; its size is rounded up to 16 bytes."""
        nbytes += -nbytes % 16
        held, usage = self.nbytes, USAGE | wgpu.BufferUsage.UNIFORM
        with self._commands.errors(
            lambda error: DeviceMemoryError(
                f"The GPU has no {nbytes} bytes for {label} beside {held}: {error}.", held
            )
        ):
            raw = self._device.create_buffer(size=nbytes, usage=usage, label=label)
        self.nbytes += nbytes
        buffer = Buffer(raw, nbytes)
        self._alive.add(buffer)
        return buffer

    def write(self, buffer: Buffer, data: Any, offset: int = 0) -> None:
        """Copy bytes (a multiple of four) into a buffer."""
        with self._commands.errors():
            self._device.queue.write_buffer(buffer.raw, offset, data)

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> NativeReading:
        """Start reading bytes as they are when all submitted work is done."""
        size = buffer.nbytes - offset if nbytes is None else nbytes
        return self._commands.read(buffer, offset, size)

    def copy(self, source: Buffer, target: Buffer, nbytes: int) -> None:
        """Copy the first bytes of a buffer to the beginning of another."""
        with self._commands.errors():
            self._commands.submit([self._commands.copy(source.raw, 0, target.raw, nbytes)])

    def pipeline(self, kernel: Kernel) -> NativePipeline:
        """Compile a kernel; the same one only once."""
        pipeline = self._pipelines.get(kernel)
        if pipeline is None:
            with self._commands.errors(
                lambda error: DeviceError(f"The kernel {kernel.name} does not compile: {error}")
            ):
                group_layout, pipeline_layout = self._layout(kernel.bindings)
                module = self._shader_module(kernel.wgsl)
                raw = self._device.create_compute_pipeline(
                    layout=pipeline_layout, compute={"module": module, "entry_point": "main"}
                )
            pipeline = self._pipelines[kernel] = NativePipeline(raw, group_layout)
        return pipeline

    async def compiled(self) -> None:
        """Return at once: `pipeline` compiles in the foreground."""

    def bind(self, pipeline: Any, buffers: Sequence[tuple[Buffer, int, int]]) -> NativeGroup:
        """Return a bind group over parts of buffers."""
        entries = [
            {"binding": i, "resource": {"buffer": buffer.raw, "offset": offset, "size": nbytes}}
            for i, (buffer, offset, nbytes) in enumerate(buffers)
        ]
        with self._commands.errors():
            raw = self._device.create_bind_group(layout=pipeline.layout, entries=entries)
        return NativeGroup(raw, tuple(buffer for buffer, _, _ in buffers))

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> NativeReading | None:
        """Submit the plan and, with it, reading some bytes."""
        return self._commands.run(plan, read)

    @property
    def recording_seconds(self) -> float:
        """Seconds that another thread has spent recording plans ahead."""
        return self._commands.ahead_seconds

    def retire(self, plan: Plan) -> None:
        """Declare that a plan will not run again, while the buffers it uses still exist."""
        groups = {id(d.group): d.group for d in plan.dispatches}.values()
        usable = all(buffer in self._alive for group in groups for buffer in group.buffers)
        self._commands.retire(plan, usable)

    def free(self, buffer: Buffer) -> None:
        """Free a buffer at once."""
        if not is_forked():
            self._commands.settle()
            buffer.raw.destroy()
        self._alive.discard(buffer)
        self.nbytes -= buffer.nbytes

    def close(self) -> None:
        """Close the device."""
        self._pipelines.clear()
        self._commands.close()
        if not is_forked():
            self._device.destroy()

    def _shader_module(self, wgsl: str) -> Any:
        """Compile without the counter that naga puts into every loop of untrusted shaders.

        It prevents drivers from unrolling, and then small arrays are moved out of registers."""
        text = wgsl.encode()
        code = ffi.new("char[]", text)
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = code, len(text)
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        raw = libf.wgpuDeviceCreateShaderModuleTrusted(self._device._internal, descriptor, CHECKS)
        return GPUShaderModule("", raw, self._device)

    def _layout(self, bindings: tuple[str, ...]) -> tuple[Any, Any]:
        if bindings not in self._layouts:
            group = self._device.create_bind_group_layout(
                entries=[
                    {
                        "binding": i,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": BINDING_TYPES[kind]},
                    }
                    for i, kind in enumerate(bindings)
                ]
            )
            layout = self._device.create_pipeline_layout(bind_group_layouts=[group])
            self._layouts[bindings] = (group, layout)
        return self._layouts[bindings]
