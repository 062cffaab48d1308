"""The Device protocol: what the engine needs of a GPU, and the plans that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device."""

    binding_nbytes: int  # of a buffer bound to a kernel
    buffer_nbytes: int
    workgroup_nbytes: int  # of memory shared by a workgroup
    workgroup_threads: int
    grid: int  # workgroups along one axis


class MatrixShape(NamedTuple):
    """A product that matrix units compute: [m, k] times [k, n], float16 into float32."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A linked WGSL program, and for each binding "read", "write" or "uniform"."""

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
    """Memory of the device, and the device's own object for it."""

    raw: Any
    nbytes: int


@dataclass(slots=True)
class Plan:
    """A list of dispatches, recorded once and run often."""

    dispatches: list[Dispatch] = field(default_factory=list)
    ready: Any = None  # the device's own form of it
    buffers: list[Buffer] = field(default_factory=list)  # its own: parameters and scratch
    ahead: bool = True  # it runs so often that the device may record the next run ahead

    def close(self, device: "Device") -> None:
        """Free its memory; what was submitted is still computed."""
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
    """Everything that the engine needs of a GPU.

    Features: "subgroups"; "enable-subgroups": programs must enable them; "shuffle4" to "shuffle32":
    see subgroups.py; "packed-dots": dot4I8Packed is one instruction; "params-in-storage": kernels
    read their parameters from a storage buffer; "shader-f16"; "subgroup-matrix": matrix units, of
    `matrix_shapes`; "timestamp-query"."""

    name: str
    features: frozenset[str]
    limits: Limits
    matrix_shapes: tuple[MatrixShape, ...]
    subgroup_sizes: tuple[int, int]  # the smallest and the largest one; zeros where unknown
    software: bool  # the "GPU" is this machine's CPU
    unified: bool  # its memory is this machine's
    nbytes: int  # of the buffers that are not freed

    @property
    def recording_seconds(self) -> float:
        """Seconds that another thread has spent recording plans ahead."""
        ...

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        """Allocate a buffer, zero at first."""
        ...

    def write(self, buffer: Buffer, data: Any, offset: int = 0) -> None:
        """Copy bytes (a multiple of four) into a buffer."""
        ...

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> Reading:
        """Start reading bytes as they are when all submitted work is done."""
        ...

    def copy(
        self, source: Buffer, target: Buffer, nbytes: int, at: int = 0, target_at: int = 0
    ) -> None:
        """Copy bytes of a buffer, from `at` on, into another one, to `target_at`."""
        ...

    def pipeline(self, kernel: Kernel) -> Any:
        """Compile a kernel, the same one only once; it may be compiled in the background."""
        ...

    async def compiled(self) -> None:
        """Wait until every requested kernel is compiled; a plan that runs before that waits."""
        ...

    def bind(self, pipeline: Any, buffers: Sequence[tuple[Buffer, int, int]]) -> Any:
        """Bind buffers as (buffer, offset, nbytes), in the order of the kernel's bindings."""
        ...

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> Reading | None:
        """Submit the plan and, with it, reading (buffer, offset, nbytes)."""
        ...

    def retire(self, plan: Plan) -> None:
        """Declare that a plan will not run again, while the buffers it uses still exist."""
        ...

    def free(self, buffer: Buffer) -> None:
        """Free a buffer at once."""
        ...

    def close(self) -> None:
        """Close the device."""
        ...
