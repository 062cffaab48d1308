"""Dawn, Chromium's WebGPU library: it reaches the matrix units of GPUs.

The wheel litert-lm-api holds a shared library that exports all of its C functions; WEBGEMMA_DAWN
names another one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from cffi import FFI  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import ffi  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import lib as constants

from webgemma.device.calls import Handle, is_answered, new_request, on_mapped, take_answer
from webgemma.device.interface import MatrixShape
from webgemma.device.library import BACKENDS, SUCCESS, Adapter, Library
from webgemma.errors import DeviceError

VARIABLE = "WEBGEMMA_DAWN"
INSTALL = 'run `pip install "webgemma[dawn]"`'
PACKAGE = "litert_lm"  # of the wheel litert-lm-api
SUFFIXES = (".so", ".dylib", ".dll")

# What Dawn has beside webgpu.h.
OWN = FFI()
OWN.include(ffi)
OWN.cdef("""
typedef struct {
    WGPUChainedStruct chain;
    size_t enabledToggleCount;
    char const * const * enabledToggles;
    size_t disabledToggleCount;
    char const * const * disabledToggles;
} DawnToggles;
typedef struct { uint32_t component, result, m, n, k; } DawnMatrixConfig;
typedef struct {
    WGPUChainedStruct chain;
    size_t count;
    DawnMatrixConfig const * configs;
} DawnMatrixConfigs;
void wgpuAdapterPropertiesSubgroupMatrixConfigsFreeMembers(DawnMatrixConfigs configs);
void wgpuDeviceTick(WGPUDevice device);
""")
OWN_SYMBOL = "wgpuDeviceTick"  # only Dawn has it
MATRIX_SYMBOL = "wgpuAdapterPropertiesSubgroupMatrixConfigsFreeMembers"
TOGGLES_TYPE = 0x0005000A  # DawnTogglesDescriptor
MATRIX_CONFIGS_TYPE = 0x0005003B  # AdapterPropertiesSubgroupMatrixConfigs
FLOAT32, FLOAT16 = 1, 2  # component types of matrices

# Matrices are experimental; f16 is off by default on NVIDIA; kernels stay within their bounds.
ENABLED = ("allow_unsafe_apis", "vulkan_enable_f16_on_nvidia", "disable_robustness")
# Dawn checks every call. For a decode step that is a seventh of the host's work, which limits small
# models on fast GPUs. On software GPUs, the tests' among them, it goes on checking.
UNCHECKED = ("skip_validation",)
# SwiftShader, Chromium's software GPU, compiles one store for each word of workgroup memory.
SLOW_IN_SOFTWARE = ("use_vulkan_zero_initialize_workgroup_memory_extension",)

WARNING = b"Warning: "
SLICE_NS = 100_000_000  # Ctrl-C is noticed between two of them
# Functions of webgpu.h that are called, the newest ones first: in an older Dawn the structures that
# they receive had other fields.
FUNCTIONS = tuple(
    f"wgpu{name}"
    for name in """
    HasInstanceFeature InstanceWaitAny SupportedFeaturesFreeMembers AdapterInfoFreeMembers
    CreateInstance InstanceProcessEvents InstanceRequestAdapter AdapterGetInfo AdapterGetLimits
    AdapterGetFeatures AdapterRequestDevice AdapterRelease DeviceGetQueue DeviceDestroy
    DeviceRelease DeviceCreateBuffer DeviceCreateShaderModule DeviceCreateBindGroupLayout
    DeviceCreatePipelineLayout DeviceCreateComputePipeline DeviceCreateBindGroup
    DeviceCreateCommandEncoder CommandEncoderBeginComputePass CommandEncoderCopyBufferToBuffer
    CommandEncoderFinish CommandEncoderRelease ComputePassEncoderSetPipeline
    ComputePassEncoderSetBindGroup ComputePassEncoderDispatchWorkgroups ComputePassEncoderEnd
    ComputePassEncoderRelease CommandBufferRelease QueueSubmit QueueWriteBuffer QueueRelease
    BufferMapAsync BufferGetConstMappedRange BufferUnmap BufferDestroy BufferRelease
    ShaderModuleRelease BindGroupLayoutRelease PipelineLayoutRelease ComputePipelineRelease
    BindGroupRelease
    """.split()  # noqa: SIM905
)


def find_dawn() -> Path:
    """Return the file of the library; DeviceError if there is none."""
    if own := os.environ.get(VARIABLE):
        path = Path(own)
        if not path.is_file():
            raise DeviceError(f"{VARIABLE} names {own}, which is not a file.")
        return path
    spec = find_spec(PACKAGE)  # which does not import it
    if spec is None:
        raise DeviceError(f"Dawn is not installed: {INSTALL}.")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in SUFFIXES and "litert" in path.name:
                return path
    raise DeviceError(
        f"The installed package {PACKAGE} holds no library: {INSTALL}, or name one in {VARIABLE}."
    )


def _open_functions(path: Path) -> tuple[Any, Any]:
    """Return the functions of webgpu.h and Dawn's own."""
    try:
        functions, own = ffi.dlopen(str(path)), OWN.dlopen(str(path))
    except OSError as error:
        why = str(error).partition(".  Additionally")[0]  # cffi goes on about where it searched
        raise DeviceError(f"{path} cannot be opened as a library: {why}.") from error
    missing = [name for name in FUNCTIONS if not hasattr(functions, name)]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        what = "is too old a Dawn" if hasattr(functions, "wgpuCreateInstance") else "is no Dawn"
        raise DeviceError(f"{path} {what}: it has no {missing[0]}{more}. For another, {INSTALL}.")
    if not hasattr(own, OWN_SYMBOL):
        raise DeviceError(f"{path} is another WebGPU library than Dawn: it has no {OWN_SYMBOL}.")
    return functions, own


def _toggles(
    enabled: tuple[str, ...] = ENABLED, disabled: tuple[str, ...] = ()
) -> tuple[Any, list[Any]]:
    """Return Dawn's switches as a chained structure, and what must be kept with it."""
    made, kept = OWN.new("DawnToggles *"), []
    made.chain.sType = TOGGLES_TYPE
    for kind, names in (("enabled", enabled), ("disabled", disabled)):
        texts = [ffi.new("char[]", name.encode()) for name in names]
        array = ffi.new("char const *[]", texts)
        setattr(made, f"{kind}ToggleCount", len(texts))
        setattr(made, f"{kind}Toggles", array)
        kept += [texts, array]
    return ffi.cast("WGPUChainedStruct *", made), [made, *kept]


@contextmanager
def _kept_warnings() -> Iterator[list[str]]:
    """Keep the warnings that Dawn prints on standard error; what others print is printed later."""
    warnings: list[str] = []
    try:
        terminal = os.dup(2)
    except OSError:  # a process without standard error
        yield warnings
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield warnings
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            others = []
            for line in file.read().splitlines(keepends=True):
                if line.startswith(WARNING):
                    warnings.append(
                        line.removeprefix(WARNING).decode(errors="replace").strip(" .\n")
                    )
                elif not (warnings and (line.startswith(b" ") or not line.strip())):
                    others.append(line)  # and not where in Dawn's source a warning arose
            if others:
                os.write(2, b"".join(others))


class Dawn(Library):
    """Dawn."""

    key, title, mark = "dawn", "Dawn", "Dawn, "
    features = {  # noqa: RUF012
        "subgroups": constants.WGPUFeatureName_Subgroups,
        "shader-f16": constants.WGPUFeatureName_ShaderF16,
        "timestamp-query": constants.WGPUFeatureName_TimestampQuery,
        "subgroup-matrix": 0x00050034,  # ChromiumExperimentalSubgroupMatrix
        "threads": 0x00050004,  # ImplicitDeviceSynchronization
    }

    def __init__(self) -> None:
        self.path = find_dawn()
        functions, self._own = _open_functions(self.path)
        self.refusals: list[str] = []
        toggles = [_toggles(), _toggles(ENABLED + UNCHECKED), _toggles(disabled=SLOW_IN_SOFTWARE)]
        self._switches, self._on_hardware, self._in_software = (made for made, _ in toggles)
        self._kept = toggles  # what these refer to
        super().__init__(functions)

    def adapters(self) -> list[Adapter]:
        """Return the GPUs of this machine; `refusals` are Dawn's reasons against others."""
        with _kept_warnings() as refusals:
            found = super().adapters()
        self.refusals += [why for why in refusals if why not in self.refusals]
        return found

    def problems(self, found: list[Adapter]) -> list[str]:
        """Return why it finds no GPU, or no matrix units."""
        if not found:
            return [f"Dawn finds no GPU{''.join(f' ({why})' for why in self.refusals)}."]
        if not hasattr(self._own, MATRIX_SYMBOL):
            return [f"{self.path} is a Dawn without matrix units: for a newer one, {INSTALL}."]
        return []

    def device_features(self, adapter: Adapter, wanted: frozenset[str]) -> frozenset[str]:
        """Return what a device with these features of its adapter offers to kernels."""
        features = super().device_features(adapter, wanted)
        if "subgroups" in features:
            features |= {"enable-subgroups"}  # Tint, its compiler, requires that
        return features

    def is_threaded(self, adapter: Adapter) -> bool:
        """Return whether another thread may record commands."""
        return "threads" in adapter.features

    def new_shader_module(self, device: Any, descriptor: Any) -> Any:
        """Compile WGSL."""
        return self.lib.wgpuDeviceCreateShaderModule(device, descriptor)

    def submit(self, queue: Any, commands: list[Any]) -> int:
        """Submit command buffers; a mapping waits for all before it."""
        self.lib.wgpuQueueSubmit(queue, len(commands), commands)
        return 0

    def map(self, device: Any, buffer: Any, nbytes: int, index: int) -> bool:
        """Wait until the buffer is mapped."""
        del device, index
        info, waiting = ffi.new("WGPUBufferMapCallbackInfo *"), ffi.new("WGPUFutureWaitInfo *")
        info.mode, info.callback = constants.WGPUCallbackMode_WaitAnyOnly, on_mapped
        number = new_request(info)
        read = constants.WGPUMapMode_Read
        waiting.future = self.lib.wgpuBufferMapAsync(buffer, read, 0, nbytes, info[0])
        status = constants.WGPUWaitStatus_TimedOut
        while status == constants.WGPUWaitStatus_TimedOut and not is_answered(number):
            status = self.lib.wgpuInstanceWaitAny(self.instance, 1, waiting, SLICE_NS)
        return take_answer(number).status == SUCCESS

    def _new_instance(self) -> Any:
        timed = constants.WGPUInstanceFeatureName_TimedWaitAny
        if not self.lib.wgpuHasInstanceFeature(timed):
            raise DeviceError(f"{self.path} is a Dawn that cannot wait: for another, {INSTALL}.")
        features = ffi.new("WGPUInstanceFeatureName[]", [timed])
        descriptor = ffi.new("WGPUInstanceDescriptor *")
        descriptor.nextInChain = self._switches
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = 1, features
        instance = self.lib.wgpuCreateInstance(descriptor)
        if not instance:
            raise DeviceError(f"{self.path} makes no WebGPU instance: for another, {INSTALL}.")
        return instance

    def _handles(self) -> list[Handle]:
        """Ask for the fast, the economical and the software GPU: Dawn lists none."""
        options = ffi.new("WGPURequestAdapterOptions *")
        options.nextInChain = self._switches
        options.featureLevel = constants.WGPUFeatureLevel_Core
        fast = constants.WGPUPowerPreference_HighPerformance
        economical = constants.WGPUPowerPreference_LowPower
        found: dict[tuple[Any, ...], Handle] = {}
        for backend, (preference, fallback) in product(
            BACKENDS, ((fast, False), (economical, False), (fast, True))
        ):
            options.backendType = backend
            options.powerPreference, options.forceFallbackAdapter = preference, fallback
            if handle := self._request_adapter(options):
                found.setdefault(self._identity(handle.raw), handle)
        return list(found.values())

    def _identity(self, adapter: Any) -> tuple[Any, ...]:
        """Return what tells a GPU from others."""
        info = ffi.new("WGPUAdapterInfo *")
        self.lib.wgpuAdapterGetInfo(adapter, info)
        device = ffi.string(info.device.data, info.device.length) if info.device.data else b""
        identity = (info.backendType, info.adapterType, info.vendorID, info.deviceID, device)
        self.lib.wgpuAdapterInfoFreeMembers(info[0])
        return identity

    def _chain(self, adapter: Adapter) -> Any:
        return self._in_software if adapter.software else self._on_hardware

    def _matrix_shapes(self, adapter: Any, features: frozenset[str]) -> tuple[MatrixShape, ...]:
        offered = {"subgroup-matrix", "shader-f16"} <= features
        if not (offered and hasattr(self._own, MATRIX_SYMBOL)):
            return ()
        info, chained = ffi.new("WGPUAdapterInfo *"), OWN.new("DawnMatrixConfigs *")
        chained.chain.sType = MATRIX_CONFIGS_TYPE
        info.nextInChain = ffi.cast("WGPUChainedStruct *", chained)
        if self.lib.wgpuAdapterGetInfo(adapter, info) != SUCCESS:
            return ()
        shapes = [
            MatrixShape(config.m, config.n, config.k)
            for config in (chained.configs[i] for i in range(chained.count))
            if (config.component, config.result) == (FLOAT16, FLOAT32)
        ]
        self.lib.wgpuAdapterInfoFreeMembers(info[0])
        self._own.wgpuAdapterPropertiesSubgroupMatrixConfigsFreeMembers(chained[0])
        return tuple(dict.fromkeys(shapes))
