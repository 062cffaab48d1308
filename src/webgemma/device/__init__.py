"""The GPU: what the engine needs of one, in a Protocol that three files fulfil."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from webgemma.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device allows."""

    binding_nbytes: int  # of a buffer that one kernel sees
    buffer_nbytes: int
    workgroup_nbytes: int  # of memory shared by a workgroup
    workgroup_threads: int
    grid: int  # workgroups along one axis


@dataclass(frozen=True, slots=True)
class Kernel:
    """Linked WGSL: the program, and for each binding "read", "write" or "uniform"."""

    name: str
    wgsl: str
    bindings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One kernel launch, ready to be replayed."""

    name: str
    pipeline: Any
    group: Any
    grid: tuple[int, int, int]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Buffer:
    """Memory of the device, and the device's own name for it."""

    raw: Any
    nbytes: int


@dataclass(slots=True)
class Plan:
    """A list of dispatches, recorded once and run often; `ready` is the device's own form of it."""

    dispatches: list[Dispatch] = field(default_factory=list)
    ready: Any = None
    buffers: list[Buffer] = field(default_factory=list)  # its own: params and scratch
    ahead: bool = True  # it runs so often that the device may prepare the next run

    def close(self, device: "Device") -> None:
        """Give its memory back; what was submitted is still computed."""
        device.retire(self)
        while self.buffers:
            device.free(self.buffers.pop())
        self.dispatches, self.ready = [], None


class Reading(Protocol):
    """Bytes on their way from the device."""

    async def bytes(self) -> bytes:
        """Wait for them."""
        ...


class Device(Protocol):
    """All that the engine asks of a GPU."""

    name: str
    # "subgroups"; "enable-subgroups": programs must say so; "shuffle4" to "shuffle32": see
    # neighbours.py; "packed-dots": dot4I8Packed is an instruction; "shader-f16"; "timestamp-query"
    features: frozenset[str]
    limits: Limits
    software: bool  # the "GPU" is this machine's CPU
    unified: bool  # its memory is this machine's
    nbytes: int  # of the buffers that are not freed

    @property
    def recording_seconds(self) -> float:
        """That another thread has worked to record plans ahead."""
        ...

    def buffer(self, nbytes: int, label: str = "") -> Buffer: ...

    def write(self, buffer: Buffer, data: Any, offset: int = 0) -> None: ...

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> Reading: ...

    def copy(self, source: Buffer, target: Buffer, nbytes: int) -> None: ...

    def pipeline(self, kernel: Kernel) -> Any: ...

    async def compiled(self) -> None:
        """Wait until every kernel asked for is compiled; a plan that runs before waits itself."""
        ...

    def bind(self, pipeline: Any, buffers: Sequence[tuple[Buffer, int, int]]) -> Any:
        """Buffers as (buffer, offset, nbytes), in the order of the kernel's bindings."""
        ...

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> Reading | None:
        """Submit the whole plan and, with it, a copy of (buffer, offset, nbytes) for the host."""
        ...

    def retire(self, plan: Plan) -> None:
        """The plan will not run again; said while the buffers it uses are still there."""
        ...

    def free(self, buffer: Buffer) -> None: ...

    def close(self) -> None: ...


def open_device(adapter: str | None = None, *, software: bool = True) -> Device:
    """The best GPU of this machine, or the one whose name holds `adapter`.

    Without `software`, an adapter that is this machine's CPU does not count."""
    try:
        from webgemma.device.native import NativeDevice, adapters, describe
    except ImportError as error:
        raise DeviceError(f"WebGPU is not installed here ({error}): pip install wgpu.") from error
    found = [a for a in adapters() if software or a.info["adapter_type"] != "CPU"]
    if adapter is not None:
        found = [a for a in found if adapter.lower() in describe(a).lower()]
    if not found:
        wanted = f" that is called {adapter!r}" if adapter else ""
        names = ", ".join(describe(a) for a in adapters()) or "none at all"
        raise DeviceError(f"There is no GPU{wanted} on this machine; WebGPU finds: {names}.")
    return NativeDevice(found[0])


async def aopen_device(adapter: str | None = None, *, software: bool = True) -> Device:
    """As `open_device`, also in a browser, which has one GPU to offer and makes us wait for it."""
    if sys.platform == "emscripten":
        from webgemma.device.browser import open_browser

        return await open_browser(software=software)
    return open_device(adapter, software=software)
