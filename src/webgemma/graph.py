"""Tensors, buffer pools and the recorder: a pass is recorded once, as a plan over reused memory."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import Self

from webgemma.device import Buffer, Device, Dispatch, Kernel, Plan
from webgemma.kernels import link

ALIGNMENT = 3840  # of tensors in one buffer: WebGPU needs 256; also whole groups of integers
SMALL_NBYTES = 1 << 16  # scratch up to this size gets memory of its own
UNIFORM_NBYTES = 256  # WebGPU's alignment of uniform bindings
MAX_GRID = 32768  # workgroups along one axis; more are folded into the next


@dataclass(eq=False, slots=True)
class Tensor:
    """A part of a buffer with a shape; scratch gets its buffer when the plan is made."""

    shape: tuple[int, ...]
    nbytes: int
    allocated: Buffer | None = None
    offset: int = 0
    base: "Tensor | None" = None  # the scratch tensor that it is a part of

    @property
    def buffer(self) -> Buffer:
        """The buffer; a scratch tensor has one only once its plan is made."""
        assert self.allocated is not None
        return self.allocated

    def rows(self, first: int, count: int) -> Self:
        """Return some rows; the first must begin at an offset that can be bound."""
        if count == self.shape[0]:
            return self
        row_nbytes = self.nbytes // self.shape[0]
        part = copy(self)
        part.shape, part.nbytes = (count, *self.shape[1:]), count * row_nbytes
        part.offset = self.offset + first * row_nbytes
        part.base = self.base or (self if self.allocated is None else None)
        return part


class BufferPool:
    """Buffers of one owner: allocated one by one, freed together."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.buffers: list[Buffer] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def buffer(self, nbytes: int, label: str) -> Buffer:
        """Allocate a buffer."""
        self.buffers.append(self.device.buffer(nbytes, label))
        return self.buffers[-1]

    def tensor(self, *shape: int, label: str) -> Tensor:
        """Allocate a tensor of four-byte values, zero at first."""
        nbytes = 4 * prod(shape)
        return Tensor(shape, nbytes, self.buffer(nbytes, label))

    def upload(self, data: bytes | bytearray | memoryview, *shape: int, label: str) -> Tensor:
        """Allocate a tensor that holds these bytes."""
        tensor = Tensor(shape, len(data), self.buffer(len(data), label))
        self.device.write(tensor.buffer, data)
        return tensor

    def close(self) -> None:
        """Free all buffers."""
        while self.buffers:
            self.device.free(self.buffers.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Argument = int | float | bool | str | Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    kernel: Kernel
    params: bytes
    tensors: tuple[Tensor, ...]
    grid: tuple[int, int, int]


@dataclass(slots=True)
class Recorder:
    """Collects calls of kernels; `plan` allocates their scratch tensors and binds everything."""

    device: Device
    pool: BufferPool | None = None  # scratch of plans that never run at the same time
    calls: list[_Call] = field(default_factory=list)
    _owned: BufferPool = field(init=False)  # the next plan's own buffers

    def __post_init__(self) -> None:
        self._owned = BufferPool(self.device)

    def scratch(self, *shape: int) -> Tensor:
        """Return a float32 tensor that lives from its first to its last use in this plan."""
        return Tensor(shape, 4 * prod(shape))

    def share_buffer(self, *tensors: Tensor) -> Tensor:
        """Put scratch tensors into one buffer, so that one barrier serves all; return the whole."""
        end = 0
        for tensor in tensors:
            tensor.offset = end
            end += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        whole = Tensor((end // 4,), end)
        for tensor in tensors:
            tensor.base = whole
        return whole

    def call(self, op: str, grid: Sequence[int], /, **arguments: Argument) -> None:
        """Record one dispatch of an op, with the arguments that its WGSL file declares.

        Tensors are its bindings, strings the providers of its slots, upper-case names its constants
        and all others its parameters; KernelError for a missing, unknown or mistyped one."""
        tensors: dict[str, Tensor] = {}
        providers: dict[str, str] = {}
        constants: dict[str, int | float | bool] = {}
        params: dict[str, int | float] = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, str):
                providers[name] = value
            else:
                (constants if name.isupper() else params)[name] = value
        program = link(op, self.device.features, constants=constants, providers=providers)
        x, y, z = (*grid, *[1] * (3 - len(grid)))
        packed = program.pack(params)
        self.calls.append(_Call(program.kernel, packed, program.order(tensors), (x, y, z)))

    def plan(self) -> Plan:
        """Return the recorded calls, ready to run; the plan owns their parameters and scratch."""
        plan = Plan(buffers=self._owned.buffers)
        try:
            self._allocate_scratch()
            plan.dispatches = self._dispatches()
        except BaseException:
            plan.close(self.device)
            raise
        self._owned = BufferPool(self.device)
        return plan

    def _dispatches(self) -> list[Dispatch]:
        device = self.device
        dispatches = []
        for call, uniform in zip(self.calls, self._upload_params(), strict=True):
            pipeline = device.pipeline(call.kernel)
            bound = [(t.buffer, t.offset, t.nbytes + -t.nbytes % 16) for t in call.tensors]
            group = device.bind(pipeline, [*uniform, *bound])
            dispatches.append(Dispatch(call.kernel.name, pipeline, group, call.grid))
        return dispatches

    def _upload_params(self) -> list[list[tuple[Buffer, int, int]]]:
        """Upload all parameters in one buffer; return what each call binds of it, if anything."""
        size = UNIFORM_NBYTES
        packed = [call.params.ljust(size, b"\0") for call in self.calls if call.params]
        if not packed:
            return [[] for _ in self.calls]
        buffer = self._owned.buffer(size * len(packed), "params")
        self.device.write(buffer, b"".join(packed))
        offsets = iter(range(0, size * len(packed), size))
        return [[(buffer, next(offsets), size)] if call.params else [] for call in self.calls]

    def _allocate_scratch(self) -> None:
        """Give each scratch tensor a buffer that is unused from its first to its last use.

        Only large ones reuse memory: a device waits between calls that write the same buffer, and
        independent calls could run side by side."""
        last: dict[Tensor, int] = {}
        for index, call in enumerate(self.calls):
            for tensor in call.tensors:
                if tensor.allocated is None:
                    last[tensor.base or tensor] = index
        free = list(self.pool.buffers) if self.pool else []
        for index, call in enumerate(self.calls):
            for tensor in call.tensors:
                if tensor.allocated is None:
                    base = tensor.base or tensor
                    base.allocated = base.allocated or self._take(free, base.nbytes)
                    tensor.allocated = base.allocated
            ending = {t for t in (t.base or t for t in call.tensors) if last.get(t) == index}
            free += [t.buffer for t in ending if t.nbytes > SMALL_NBYTES]

    def _take(self, free: list[Buffer], nbytes: int) -> Buffer:
        fitting = [b for b in free if nbytes <= b.nbytes <= 4 * nbytes + 4096]
        if not fitting:
            return (self.pool or self._owned).buffer(nbytes, "scratch")
        best = min(fitting, key=lambda b: b.nbytes)
        free.remove(best)
        return best


def folded(groups: int) -> tuple[int, int]:
    """Return a grid of so many workgroups; more than one axis allows go over two."""
    return min(groups, MAX_GRID), -(-groups // MAX_GRID)
