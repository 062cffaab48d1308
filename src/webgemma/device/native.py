"""WebGPU on this machine, through wgpu-native or Dawn: Vulkan, Metal or Direct3D 12."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from wgpu.backends.wgpu_native import ffi  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import lib as constants

from webgemma.device.calls import DeviceErrors, Handle, set_text
from webgemma.device.commands import Commands, NativeReading
from webgemma.device.forks import check_process, is_forked
from webgemma.device.interface import Buffer, Kernel, Plan
from webgemma.device.library import Adapter
from webgemma.device.subgroups import shuffles
from webgemma.device.trials import matrix_products
from webgemma.errors import DeviceError, DeviceMemoryError
from webgemma.sync import run_sync

USAGE = (
    constants.WGPUBufferUsage_Storage
    | constants.WGPUBufferUsage_Uniform
    | constants.WGPUBufferUsage_CopyDst
    | constants.WGPUBufferUsage_CopySrc
)
BINDING_TYPES = {
    "read": constants.WGPUBufferBindingType_ReadOnlyStorage,
    "write": constants.WGPUBufferBindingType_Storage,
    "uniform": constants.WGPUBufferBindingType_Uniform,
}


@dataclass(frozen=True, slots=True)
class NativePipeline:
    """A compute pipeline and the layout its bind groups need."""

    handle: Handle
    layout: Handle


@dataclass(frozen=True, slots=True)
class NativeGroup:
    """A bind group and the buffers it binds."""

    handle: Handle
    buffers: tuple[Buffer, ...]


class NativeDevice:
    """One device with all the limits of its GPU."""

    def __init__(self, adapter: Adapter, without: frozenset[str] = frozenset()) -> None:
        check_process()
        wanted = adapter.features - without
        if not {"subgroups", "shader-f16"} <= wanted or not adapter.matrix_shapes:
            wanted -= {"subgroup-matrix"}
        self.name = adapter.name
        self.software = adapter.software
        self.unified = adapter.kind in ("software", "integrated")
        self.nbytes = 0  # of the buffers that are not freed
        self.limits = adapter.limits
        self.subgroup_sizes = adapter.subgroup_sizes
        self.matrix_shapes = adapter.matrix_shapes if "subgroup-matrix" in wanted else ()
        self.features = adapter.library.device_features(adapter, wanted) - without
        self._alive: WeakSet[Buffer] = WeakSet()
        self._lib = adapter.library.lib
        self._new_shader_module = adapter.library.new_shader_module
        self._errors = DeviceErrors(self.name)
        self._device, self._queue = adapter.library.new_device(
            adapter, sorted(wanted), self._errors
        )
        self._layouts: dict[tuple[str, ...], tuple[Handle, Handle]] = {}
        self._pipelines: dict[Kernel, NativePipeline] = {}
        self._commands = Commands(
            adapter.library,
            self._device.raw,
            self._queue.raw,
            self._errors,
            ahead=not self.software and adapter.library.is_threaded(adapter),
        )
        if "subgroups" in self.features:
            self.features |= run_sync(shuffles(self)) - without
        if "subgroup-matrix" in self.features:
            self.matrix_shapes = run_sync(matrix_products(self))
            if not self.matrix_shapes:
                self.features -= {"subgroup-matrix"}

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        """Allocate a buffer, zero at first; its size is rounded up to 16 bytes."""
        nbytes += -nbytes % 16
        held, view = self.nbytes, ffi.new("WGPUStringView *")
        kept = set_text(view, label)
        with self._errors.raised(
            lambda error: DeviceMemoryError(
                f"The GPU has no {nbytes} bytes for {label} beside {held}: {error}.", held
            )
        ):
            handle = self._commands.new_buffer(nbytes, USAGE, view[0])
        del kept
        self.nbytes += nbytes
        buffer = Buffer(handle, nbytes)
        self._alive.add(buffer)
        return buffer

    def write(self, buffer: Buffer, data: Any, offset: int = 0) -> None:
        """Copy bytes (a multiple of four) into a buffer."""
        source = ffi.from_buffer(data)
        with self._errors.raised():
            self._lib.wgpuQueueWriteBuffer(
                self._queue.raw, buffer.raw.raw, offset, source, len(source)
            )

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> NativeReading:
        """Start reading bytes as they are when all submitted work is done."""
        size = buffer.nbytes - offset if nbytes is None else nbytes
        return self._commands.read(buffer, offset, size)

    def copy(
        self, source: Buffer, target: Buffer, nbytes: int, at: int = 0, target_at: int = 0
    ) -> None:
        """Copy bytes of a buffer, from `at` on, into another one, to `target_at`."""
        with self._errors.raised():
            copied = self._commands.copy(source.raw, at, target.raw, nbytes, target_at)
            self._commands.submit([copied])

    def pipeline(self, kernel: Kernel) -> NativePipeline:
        """Compile a kernel; the same one only once."""
        pipeline = self._pipelines.get(kernel)
        if pipeline is None:
            with self._errors.raised(
                lambda error: DeviceError(f"The kernel {kernel.name} does not compile: {error}")
            ):
                made = self._compile(kernel)
            pipeline = self._pipelines[kernel] = made
        return pipeline

    async def compiled(self) -> None:
        """Return at once: `pipeline` compiles in the foreground."""

    def bind(self, pipeline: Any, buffers: Sequence[tuple[Buffer, int, int]]) -> NativeGroup:
        """Return a bind group over parts of buffers."""
        entries = ffi.new("WGPUBindGroupEntry[]", len(buffers))
        for i, (entry, (buffer, offset, nbytes)) in enumerate(zip(entries, buffers, strict=True)):
            entry.binding, entry.buffer = i, buffer.raw.raw
            entry.offset, entry.size = offset, nbytes
        descriptor = ffi.new("WGPUBindGroupDescriptor *")
        descriptor.layout = pipeline.layout.raw
        descriptor.entryCount, descriptor.entries = len(buffers), entries
        with self._errors.raised():
            raw = self._lib.wgpuDeviceCreateBindGroup(self._device.raw, descriptor)
            handle = self._errors.made(raw, self._lib.wgpuBindGroupRelease)
        return NativeGroup(handle, tuple(buffer for buffer, _, _ in buffers))

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
            self._commands.destroy(buffer.raw)
        self._alive.discard(buffer)
        self.nbytes -= buffer.nbytes

    def close(self) -> None:
        """Close the device."""
        self._pipelines.clear()
        self._commands.close()
        if not is_forked():
            self._lib.wgpuDeviceDestroy(self._device.raw)

    def _compile(self, kernel: Kernel) -> NativePipeline:
        group_layout, pipeline_layout = self._layout(kernel.bindings)
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = constants.WGPUSType_ShaderSourceWGSL
        code = set_text(source.code, kernel.wgsl)
        shader = ffi.new("WGPUShaderModuleDescriptor *")
        shader.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        module = self._errors.made(
            self._new_shader_module(self._device.raw, shader), self._lib.wgpuShaderModuleRelease
        )
        descriptor = ffi.new("WGPUComputePipelineDescriptor *")
        descriptor.layout, descriptor.compute.module = pipeline_layout.raw, module.raw
        entry_point = set_text(descriptor.compute.entryPoint, "main")
        raw = self._lib.wgpuDeviceCreateComputePipeline(self._device.raw, descriptor)
        del code, entry_point
        handle = self._errors.made(raw, self._lib.wgpuComputePipelineRelease)
        return NativePipeline(handle, group_layout)

    def _layout(self, bindings: tuple[str, ...]) -> tuple[Handle, Handle]:
        if bindings not in self._layouts:
            entries = ffi.new("WGPUBindGroupLayoutEntry[]", len(bindings))
            for i, (entry, kind) in enumerate(zip(entries, bindings, strict=True)):
                entry.binding, entry.visibility = i, constants.WGPUShaderStage_Compute
                entry.buffer.type = BINDING_TYPES[kind]
            group = ffi.new("WGPUBindGroupLayoutDescriptor *")
            group.entryCount, group.entries = len(bindings), entries
            group_layout = self._errors.made(
                self._lib.wgpuDeviceCreateBindGroupLayout(self._device.raw, group),
                self._lib.wgpuBindGroupLayoutRelease,
            )
            groups = ffi.new("WGPUBindGroupLayout[]", [group_layout.raw])
            whole = ffi.new("WGPUPipelineLayoutDescriptor *")
            whole.bindGroupLayoutCount, whole.bindGroupLayouts = 1, groups
            layout = self._errors.made(
                self._lib.wgpuDeviceCreatePipelineLayout(self._device.raw, whole),
                self._lib.wgpuPipelineLayoutRelease,
            )
            self._layouts[bindings] = (group_layout, layout)
        return self._layouts[bindings]
