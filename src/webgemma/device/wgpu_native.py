"""wgpu-native, the WebGPU library in wgpu-py's wheel."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

from wgpu.backends.wgpu_native import ffi, lib  # type: ignore[import-untyped]

from webgemma.device.calls import Handle, is_answered, new_request, on_mapped, take_answer
from webgemma.device.library import SUCCESS, Library

MAP_SECONDS = 5.0  # until another thread has stored the answer
BACKENDS = 1 << 0 | 1 << 2 | 1 << 3  # Vulkan, Metal, Direct3D 12
FLAGS = 1 << 24  # the default ones
CHECKS = lib.WGPUShaderRuntimeChecks_None  # Vulkan, Metal and Direct3D check bounds themselves


class WgpuNative(Library):
    """wgpu-native."""

    key, title, mark = "wgpu", "wgpu-native", ""
    features = {  # noqa: RUF012
        "subgroups": lib.WGPUNativeFeature_Subgroup,
        "shader-f16": lib.WGPUFeatureName_ShaderF16,
        "timestamp-query": lib.WGPUFeatureName_TimestampQuery,
    }

    def __init__(self) -> None:
        super().__init__(lib)

    def new_shader_module(self, device: Any, descriptor: Any) -> Any:
        """Compile without the counter that naga puts into every loop of untrusted shaders.

        It prevents drivers from unrolling, and then small arrays are moved out of registers."""
        return lib.wgpuDeviceCreateShaderModuleTrusted(device, descriptor, CHECKS)

    def submit(self, queue: Any, commands: list[Any]) -> int:
        """Submit command buffers; return the submission's index."""
        index: int = lib.wgpuQueueSubmitForIndex(queue, len(commands), commands)
        return index

    def map(self, device: Any, buffer: Any, nbytes: int, index: int) -> bool:
        """Wait for one submission only: waiting for all would hold up the next `submit`."""
        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, on_mapped
        number = new_request(info)
        lib.wgpuBufferMapAsync(buffer, lib.WGPUMapMode_Read, 0, nbytes, info[0])
        lib.wgpuDevicePoll(device, True, ffi.new("WGPUSubmissionIndex *", index))
        deadline = monotonic() + MAP_SECONDS
        while not is_answered(number) and monotonic() < deadline:
            sleep(0)  # another thread's poll has the result and is about to store it
        return take_answer(number).status == SUCCESS

    def _new_instance(self) -> Any:
        extras = ffi.new("WGPUInstanceExtras *")
        extras.chain.sType = lib.WGPUSType_InstanceExtras
        extras.backends, extras.flags = BACKENDS, FLAGS
        descriptor = ffi.new("WGPUInstanceDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", extras)
        return lib.wgpuCreateInstance(descriptor)

    def _handles(self) -> list[Handle]:
        count = lib.wgpuInstanceEnumerateAdapters(self.instance, ffi.NULL, ffi.NULL)
        found = ffi.new("WGPUAdapter[]", count)
        lib.wgpuInstanceEnumerateAdapters(self.instance, ffi.NULL, found)
        return [Handle(raw, lib.wgpuAdapterRelease) for raw in found]
