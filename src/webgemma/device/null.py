"""A device without a GPU: it validates as WebGPU does, keeps the plans and counts the memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from webgemma.device.interface import Buffer, Dispatch, Kernel, Limits, MatrixShape, Plan
from webgemma.errors import DeviceError, DeviceMemoryError

# What WebGPU guarantees on every device.
DEFAULT_LIMITS = Limits(
    binding_nbytes=128 << 20,
    buffer_nbytes=256 << 20,
    workgroup_nbytes=16 << 10,
    workgroup_threads=256,
    grid=65535,
)
STORAGE_BINDINGS = 8  # of one kernel
OFFSET_NBYTES = 256  # bindings begin at multiples of it

Bound = tuple[tuple[Buffer, int, int], ...]


@dataclass(frozen=True, slots=True)
class NullReading:
    """Zeros instead of what a GPU would have computed."""

    nbytes: int

    async def bytes(self) -> bytes:
        """Return zeros."""
        return bytes(self.nbytes)


class NullDevice:
    """Buffers without bytes, up to `memory_nbytes` in total if that is given."""

    def __init__(
        self,
        features: frozenset[str] = frozenset({"packed-dots"}),
        limits: Limits = DEFAULT_LIMITS,
        memory_nbytes: int | None = None,
    ) -> None:
        self.name = "no GPU"
        self.software = False
        self.unified = False
        self.matrix_shapes: tuple[MatrixShape, ...] = ()
        self.subgroup_sizes = (0, 0)
        self.recording_seconds = 0.0
        self.features = features
        self.limits = limits
        self.memory_nbytes = memory_nbytes
        self.buffers: set[Buffer] = set()  # not freed yet; `raw` is the label of each
        self.nbytes = 0  # of those buffers
        self.peak_nbytes = 0
        self.written_nbytes = 0
        self.plans: list[Plan] = []  # in the order they ran

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        """Count a buffer; its size is rounded up to 16 bytes."""
        buffer = Buffer(label, nbytes + -nbytes % 16)
        after = self.nbytes + buffer.nbytes
        full = self.memory_nbytes is not None and after > self.memory_nbytes
        if full or buffer.nbytes > self.limits.buffer_nbytes:
            raise DeviceMemoryError(
                f"The GPU has no {buffer.nbytes} bytes for {label} beside {self.nbytes}.",
                self.nbytes,
            )
        self.buffers.add(buffer)
        self.nbytes = after
        self.peak_nbytes = max(self.peak_nbytes, after)
        return buffer

    def write(self, buffer: Buffer, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Count bytes (a multiple of four) that would be copied into a buffer."""
        nbytes = memoryview(data).nbytes
        self._check_range(buffer, offset, nbytes)
        if nbytes % 4 or offset % 4:
            raise DeviceError(f"{nbytes} bytes at {offset} are not whole words.")
        self.written_nbytes += nbytes

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> NullReading:
        """Return zeros."""
        size = buffer.nbytes - offset if nbytes is None else nbytes
        self._check_range(buffer, offset, size)
        return NullReading(size)

    def copy(
        self, source: Buffer, target: Buffer, nbytes: int, at: int = 0, target_at: int = 0
    ) -> None:
        """Check that both have so many bytes."""
        assert source is not target  # as WebGPU demands
        self._check_range(source, at, nbytes)
        self._check_range(target, target_at, nbytes)

    def pipeline(self, kernel: Kernel) -> Kernel:
        """Return the kernel itself, if it binds few enough buffers."""
        if sum(kind != "uniform" for kind in kernel.bindings) > STORAGE_BINDINGS:
            raise DeviceError(f"{kernel.name} binds more than {STORAGE_BINDINGS} storage buffers.")
        return kernel

    async def compiled(self) -> None:
        """Return at once."""

    def bind(self, pipeline: Kernel, buffers: Sequence[tuple[Buffer, int, int]]) -> Bound:
        """Return the bindings themselves, if WebGPU would accept them."""
        if len(buffers) != len(pipeline.bindings):
            raise DeviceError(
                f"{pipeline.name} has {len(pipeline.bindings)} bindings, not {len(buffers)}."
            )
        for buffer, offset, nbytes in buffers:
            self._check_range(buffer, offset, nbytes)
            if offset % OFFSET_NBYTES or not 0 < nbytes <= self.limits.binding_nbytes:
                raise DeviceError(
                    f"{pipeline.name} cannot bind {nbytes} bytes at {offset} of {buffer.raw}."
                )
        return tuple(buffers)

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> NullReading | None:
        """Keep the plan; its buffers must not have been freed."""
        for dispatch in plan.dispatches:
            self._check_dispatch(dispatch)
        self.plans.append(plan)
        return None if read is None else self.read(*read)

    def retire(self, plan: Plan) -> None:
        """Do nothing: no plan is recorded ahead."""

    def free(self, buffer: Buffer) -> None:
        """Stop counting a buffer."""
        self._check_range(buffer, 0, 0)
        self.buffers.remove(buffer)
        self.nbytes -= buffer.nbytes

    def close(self) -> None:
        """Free everything."""
        self.buffers.clear()
        self.nbytes = 0

    def _check_dispatch(self, dispatch: Dispatch) -> None:
        if not all(0 < size <= self.limits.grid for size in dispatch.grid):
            raise DeviceError(f"{dispatch.name} has a grid of {dispatch.grid} workgroups.")
        for buffer, offset, nbytes in dispatch.group:
            self._check_range(buffer, offset, nbytes)

    def _check_range(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        if buffer not in self.buffers:
            raise DeviceError(f"The buffer {buffer.raw} belongs to another device, or is freed.")
        if not 0 <= offset <= offset + nbytes <= buffer.nbytes:
            raise DeviceError(
                f"The buffer {buffer.raw} has {buffer.nbytes} bytes: "
                f"{offset} to {offset + nbytes} are outside."
            )
