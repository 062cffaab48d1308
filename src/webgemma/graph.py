"""Tensor and Recorder: a forward pass is recorded once, as a plan over reused memory."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from webgemma.device import Buffer, Device, Dispatch, Kernel, Plan

ALIGNMENT = 3840  # of tensors in one buffer: WebGPU wants 256; divisible by groups of integers too
SMALL_NBYTES = 1 << 16  # scratch up to this size has memory of its own


@dataclass(eq=False, slots=True)
class Tensor:
    """A part of a buffer with a shape; scratch gets its place when the plan is made."""

    shape: tuple[int, ...]
    nbytes: int
    placed: Buffer | None = None
    offset: int = 0
    whole: "Tensor | None" = None  # scratch that it is a part of

    @property
    def buffer(self) -> Buffer:
        """Where it is; a scratch tensor has a place only once its plan is made."""
        assert self.placed is not None
        return self.placed


@dataclass(frozen=True, slots=True)
class _Call:
    kernel: Kernel
    params: bytes
    tensors: tuple[Tensor, ...]
    grid: tuple[int, int, int]


@dataclass(slots=True)
class Recorder:
    """Collects calls; `plan` gives scratch tensors their memory and binds everything."""

    device: Device
    pool: list[Buffer] | None = None  # scratch of plans that never run at the same time
    calls: list[_Call] = field(default_factory=list)
    _made: list[Buffer] = field(default_factory=list)

    def scratch(self, *shape: int) -> Tensor:
        """A float32 tensor that lives from its first to its last use in this plan."""
        return Tensor(shape, 4 * prod(shape))

    def rows(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """Some rows of a tensor; the first must begin where a binding may."""
        nbytes = tensor.nbytes // tensor.shape[0]
        whole = tensor.whole or (tensor if tensor.placed is None else None)
        offset = tensor.offset + first * nbytes
        return Tensor((count, *tensor.shape[1:]), count * nbytes, tensor.placed, offset, whole)

    def together(self, *tensors: Tensor) -> Tensor:
        """Put scratch tensors into one buffer, which has to become readable only once for all."""
        end = 0
        for tensor in tensors:
            tensor.offset = end
            end += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        whole = Tensor((end // 4,), end)
        for tensor in tensors:
            tensor.whole = whole
        return whole

    def call(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        params: Sequence[int | float],
        *tensors: Tensor,
    ) -> None:
        """One dispatch: params (u32 or f32 each) become its uniform, tensors its other bindings."""
        packed = struct.pack(
            "<" + "".join("I" if isinstance(p, int) else "f" for p in params), *params
        )
        x, y, z = (*grid, 1, 1)[:3]
        self.calls.append(_Call(kernel, packed, tensors, (x, y, z)))

    def plan(self) -> Plan:
        """The recorded calls, ready to run; the plan owns their params and scratch."""
        plan = Plan(buffers=self._made)
        try:
            self._place_scratch()
            plan.dispatches = self._dispatches()
        except BaseException:
            plan.close(self.device)
            raise
        self._made = []  # those of the next plan
        return plan

    def _dispatches(self) -> list[Dispatch]:
        device = self.device
        dispatches = []
        for call, uniform in zip(self.calls, self._upload_params(), strict=True):
            pipeline = device.pipeline(call.kernel)
            bound = [(t.buffer, t.offset, t.nbytes + -t.nbytes % 16) for t in call.tensors]
            group = device.bind(pipeline, [uniform, *bound])
            dispatches.append(Dispatch(call.kernel.name, pipeline, group, call.grid))
        return dispatches

    def _upload_params(self) -> list[tuple[Buffer, int, int]]:
        """All params in one buffer, each at a place that may be bound."""
        size = 256  # WebGPU's alignment of uniform bindings
        if not self.calls:
            return []
        data = b"".join(call.params.ljust(size, b"\0") for call in self.calls)
        buffer = self._make(len(data), "params")
        self.device.write(buffer, data)
        return [(buffer, i * size, size) for i in range(len(self.calls))]

    def _place_scratch(self) -> None:
        """Give each scratch tensor a buffer that nobody needs from its first to its last use.

        Only large ones take over memory: a device waits between calls that write the same buffer,
        and calls that have nothing to do with each other could run side by side."""
        last: dict[Tensor, int] = {}
        for index, call in enumerate(self.calls):
            for tensor in call.tensors:
                if tensor.placed is None:
                    last[tensor.whole or tensor] = index
        free = list(self.pool or ())
        for index, call in enumerate(self.calls):
            for tensor in call.tensors:
                if tensor.placed is None:
                    whole = tensor.whole or tensor
                    whole.placed = whole.placed or self._take(free, whole.nbytes)
                    tensor.placed = whole.placed
            ending = {t for t in (t.whole or t for t in call.tensors) if last.get(t) == index}
            free += [t.buffer for t in ending if t.nbytes > SMALL_NBYTES]

    def _take(self, free: list[Buffer], nbytes: int) -> Buffer:
        fitting = [b for b in free if nbytes <= b.nbytes <= 4 * nbytes + 4096]
        if not fitting and self.pool is not None:
            self.pool.append(self.device.buffer(nbytes, "scratch"))
            return self.pool[-1]
        if not fitting:
            return self._make(nbytes, "scratch")
        best = min(fitting, key=lambda b: b.nbytes)
        free.remove(best)
        return best

    def _make(self, nbytes: int, label: str) -> Buffer:
        self._made.append(self.device.buffer(nbytes, label))
        return self._made[-1]
