"""A WebGPU library: its GPUs and devices, as far as wgpu-native and Dawn do the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, ClassVar

from wgpu.backends.wgpu_native import ffi  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import lib as constants

from webgemma.device.calls import (
    DeviceErrors,
    Handle,
    is_answered,
    new_request,
    on_adapter,
    on_device,
    take_answer,
    text,
)
from webgemma.device.interface import Limits, MatrixShape
from webgemma.errors import DeviceError

ANSWER_SECONDS = 60.0  # for an adapter or a device
SUCCESS = 1  # the status of every answer that is none of an error
BACKENDS = {
    constants.WGPUBackendType_Vulkan: "Vulkan",
    constants.WGPUBackendType_Metal: "Metal",
    constants.WGPUBackendType_D3D12: "D3D12",
}  # OpenGL's driver crashes when the child of a fork ends
KINDS = {
    constants.WGPUAdapterType_DiscreteGPU: "discrete",
    constants.WGPUAdapterType_IntegratedGPU: "integrated",
    constants.WGPUAdapterType_CPU: "software",
}
LAVAPIPE = "llvmpipe"  # Mesa's software GPU
ORDER = ("discrete", "integrated", "other", "software")  # the fastest kind first


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A GPU as one library finds it."""

    library: Library
    handle: Handle
    name: str
    backend: str  # the graphics API
    kind: str
    features: frozenset[str]
    raw_limits: Any
    subgroup_sizes: tuple[int, int]
    matrix_shapes: tuple[MatrixShape, ...]

    @property
    def software(self) -> bool:
        """Whether it is this machine's CPU."""
        return self.kind == "software"

    @property
    def limits(self) -> Limits:
        """Return its limits."""
        raw = self.raw_limits
        return Limits(
            binding_nbytes=raw.maxStorageBufferBindingSize,
            buffer_nbytes=raw.maxBufferSize,
            workgroup_nbytes=raw.maxComputeWorkgroupStorageSize,
            workgroup_threads=raw.maxComputeInvocationsPerWorkgroup,
            grid=raw.maxComputeWorkgroupsPerDimension,
        )


class Library(ABC):
    """One WebGPU library; `lib` are its functions."""

    key: ClassVar[str]  # as users write it
    title: ClassVar[str]
    mark: ClassVar[str]  # in the names of its GPUs
    features: ClassVar[dict[str, int]]  # the library's numbers of ours

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.instance = self._new_instance()

    def adapters(self) -> list[Adapter]:
        """Return the GPUs of this machine, the fastest kind first, software last."""
        found = [self._adapter(handle) for handle in self._handles()]
        known = [adapter for adapter in found if adapter is not None]
        return sorted(known, key=lambda adapter: ORDER.index(adapter.kind))

    def problems(self, found: list[Adapter]) -> list[str]:
        """Return why it finds no GPU, or not all that it could offer."""
        return [] if found else [f"{self.title} finds no GPU."]

    def new_device(
        self, adapter: Adapter, features: Sequence[str], errors: DeviceErrors
    ) -> tuple[Handle, Handle]:
        """Return a new device with all the limits of its GPU, and its queue."""
        wanted = ffi.new("WGPUFeatureName[]", [self.features[name] for name in features])
        descriptor = ffi.new("WGPUDeviceDescriptor *")
        descriptor.nextInChain = self._chain(adapter)
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(wanted), wanted
        descriptor.requiredLimits = adapter.raw_limits
        errors.listen(descriptor)
        info = ffi.new("WGPURequestDeviceCallbackInfo *")
        info.mode, info.callback = constants.WGPUCallbackMode_AllowProcessEvents, on_device
        number = new_request(info)
        self.lib.wgpuAdapterRequestDevice(adapter.handle.raw, descriptor, info[0])
        device = self._answer(number, self.lib.wgpuDeviceRelease)
        if isinstance(device, str):
            raise DeviceError(f"{adapter.name} cannot be opened: {device}.")
        queue = self.lib.wgpuDeviceGetQueue(device.raw)
        return device, Handle(queue, self.lib.wgpuQueueRelease)

    def device_features(self, adapter: Adapter, wanted: frozenset[str]) -> frozenset[str]:
        """Return what a device with these features of its adapter offers to kernels."""
        offered = set(wanted - {"threads"})
        if adapter.backend != "Metal":
            offered.add("packed-dots")
        if LAVAPIPE in adapter.name:  # specialises kernels to uniforms at each run, and keeps them
            offered.add("params-in-storage")
        return frozenset(offered)

    def is_threaded(self, adapter: Adapter) -> bool:
        """Return whether another thread may record commands."""
        del adapter
        return True

    @abstractmethod
    def new_shader_module(self, device: Any, descriptor: Any) -> Any:
        """Compile WGSL."""

    @abstractmethod
    def submit(self, queue: Any, commands: list[Any]) -> int:
        """Submit command buffers; return the submission's index, to wait for."""

    @abstractmethod
    def map(self, device: Any, buffer: Any, nbytes: int, index: int) -> bool:
        """Wait for a submission and map a buffer for reading; return whether that succeeded."""

    @abstractmethod
    def _new_instance(self) -> Any:
        """Make the instance of the library."""

    @abstractmethod
    def _handles(self) -> list[Handle]:
        """Return the library's own adapters."""

    def _chain(self, adapter: Adapter) -> Any:
        """Return what is chained to the request for a device."""
        del adapter
        return ffi.NULL

    def _matrix_shapes(self, adapter: Any, features: frozenset[str]) -> tuple[MatrixShape, ...]:
        """Return the shapes of matrix units that multiply float16 into float32."""
        del adapter, features
        return ()

    def _request_adapter(self, options: Any) -> Handle | None:
        info = ffi.new("WGPURequestAdapterCallbackInfo *")
        info.mode, info.callback = constants.WGPUCallbackMode_AllowProcessEvents, on_adapter
        number = new_request(info)
        self.lib.wgpuInstanceRequestAdapter(self.instance, options, info[0])
        handle = self._answer(number, self.lib.wgpuAdapterRelease)
        return handle if isinstance(handle, Handle) else None

    def _answer(self, number: int, release: Any) -> Handle | str:
        """Wait for the answer to a request: an object, or why there is none."""
        deadline = monotonic() + ANSWER_SECONDS
        while True:
            self.lib.wgpuInstanceProcessEvents(self.instance)
            if is_answered(number) or monotonic() > deadline:
                break
            sleep(0.001)
        answer = take_answer(number)
        if answer.status == SUCCESS and answer.raw:
            return Handle(answer.raw, release)
        return answer.message or f"{self.title} does not answer"

    def _adapter(self, handle: Handle) -> Adapter | None:
        """Return what is known of an adapter; None for one of OpenGL."""
        info, limits = ffi.new("WGPUAdapterInfo *"), ffi.new("WGPULimits *")
        supported = ffi.new("WGPUSupportedFeatures *")
        if self.lib.wgpuAdapterGetInfo(handle.raw, info) != SUCCESS:
            return None
        self.lib.wgpuAdapterGetLimits(handle.raw, limits)
        self.lib.wgpuAdapterGetFeatures(handle.raw, supported)
        numbers = {supported.features[i] for i in range(supported.featureCount)}
        self.lib.wgpuSupportedFeaturesFreeMembers(supported[0])
        name = text(info.device) or text(info.description)
        backend = BACKENDS.get(info.backendType)
        kind = KINDS.get(info.adapterType, "other")
        sizes = (info.subgroupMinSize, info.subgroupMaxSize)
        self.lib.wgpuAdapterInfoFreeMembers(info[0])
        if backend is None:
            return None
        features = frozenset(ours for ours, number in self.features.items() if number in numbers)
        return Adapter(
            library=self,
            handle=handle,
            name=f"{name} ({self.mark}{backend})",
            backend=backend,
            kind=kind,
            features=features,
            raw_limits=limits,
            subgroup_sizes=sizes,
            matrix_shapes=self._matrix_shapes(handle.raw, features),
        )
