"""Where pictures and sounds are worked on: buffers on the device and what is done with them."""

import struct
from collections import deque
from collections.abc import Awaitable, Callable
from math import prod

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.errors import DeviceError
from webgemma.gemma.matrices import Matrices
from webgemma.gguf.sources import Bytes
from webgemma.graph import Recorder, Tensor
from webgemma.progress import Progress, unwatched

AHEAD = 2  # steps that the device has in hand at most, while the next one is recorded
KEPT_NBYTES = 256 << 20  # of an idle bench: enough for a picture of 280 soft tokens, 30 s of sound


class Bench:
    """A recorder, what it has recorded, and buffers that live until the bench is cleared.

    The work is cut into steps: the device begins with the first while the second is recorded, no
    step keeps it busy for long, and between them `progress` is told, which may raise to end it.
    All steps can run again, on other words in the same buffers."""

    def __init__(self, device: Device, steps: int = 1, size: tuple[int, ...] = ()) -> None:
        self.device = device
        self.size = size  # of what it was recorded for
        self.recorder = Recorder(device, pool=[])
        self.progress: Progress = unwatched
        self.words: Tensor | None = None  # that go in
        self.results: tuple[Tensor, ...] = ()  # once all steps are recorded
        self._buffers: list[Buffer] = []
        self._plans: list[Plan] = []
        self._under_way: deque[Reading] = deque()
        self._done, self._steps = 0, steps
        self._cleared = False

    def put(self, data: Bytes, label: str) -> Tensor:
        """Words that the host brings."""
        tensor = self.room(len(data) // 4, label=label)
        self.device.write(tensor.buffer, data)
        return tensor

    def state(self, count: int) -> Tensor:
        """What kernels read of so many rows that are all there at once: see lib/state.wgsl."""
        return self.put(struct.pack("<4I", 0, count, 0, 0), "state")

    def room(self, *shape: int, label: str) -> Tensor:
        """Words that a kernel writes."""
        nbytes = 4 * prod(shape)
        self._buffers.append(self.device.buffer(nbytes, label))
        return Tensor(shape, nbytes, self._buffers[-1])

    async def run(self, *kept: Tensor) -> None:
        """A step: what was recorded since the last one; of its scratch only these tensors stay."""
        for tensor in kept:
            if tensor.placed is None:
                tensor.placed = self.room(*tensor.shape, label="kept").buffer
        plan = self.recorder.plan()
        plan.ahead = False  # the device is busy for longer than preparing takes
        self._plans.append(plan)
        self.recorder.calls.clear()
        await self.device.compiled()
        await self._submit(plan)

    async def finish(self, *results: Tensor) -> None:
        """The last step."""
        await self.run(*results)
        await self._wait(0)
        self.results = results

    async def again(self) -> None:
        """All steps once more."""
        self._done = 0
        for plan in self._plans:
            await self._submit(plan)
        await self._wait(0)

    def copies(self) -> list[Tensor]:
        """The results in memory that does not belong to the bench."""
        made: list[Tensor] = []
        try:
            for tensor in self.results:
                buffer = self.device.buffer(tensor.nbytes, "result")
                made.append(Tensor(tensor.shape, tensor.nbytes, buffer))
                self.device.copy(tensor.buffer, buffer, tensor.nbytes)
        except BaseException:
            for tensor in made:
                self.device.free(tensor.buffer)
            raise
        return made

    @property
    def nbytes(self) -> int:
        """Of its buffers."""
        own = (buffer for plan in self._plans for buffer in plan.buffers)
        return sum(buffer.nbytes for buffer in (*self._buffers, *self._pool, *own))

    def clear(self) -> None:
        """Give the memory back; work that is under way ends with a DeviceError."""
        self._cleared = True
        while self._plans:
            self._plans.pop().close(self.device)
        for buffers in (self._buffers, self._pool):
            while buffers:
                self.device.free(buffers.pop())

    @property
    def _pool(self) -> list[Buffer]:
        assert self.recorder.pool is not None
        return self.recorder.pool

    async def _submit(self, plan: Plan) -> None:
        self._check()
        reading = self.device.run(plan, (plan.buffers[0], 0, 4))
        assert reading is not None
        self._under_way.append(reading)
        await self._wait(AHEAD)

    async def _wait(self, most: int) -> None:
        while len(self._under_way) > most:
            await self._under_way.popleft().bytes()
            self._check()
            self._done += 1
            self.progress(self._done, self._steps)

    def _check(self) -> None:
        if self._cleared:
            raise DeviceError("The tower was given back while it was at work.")


class Tower(Matrices):
    """A tower's weights, and the bench on which it worked last: the same size needs no other."""

    def __init__(self, device: Device, steps: int) -> None:
        super().__init__(device)
        self._steps = steps
        self._idle: Bench | None = None
        self._busy: list[Bench] = []

    async def work(
        self,
        size: tuple[int, ...],
        data: Bytes,
        record: Callable[[Bench, Tensor], Awaitable[None]],
        progress: Progress,
    ) -> list[Tensor]:
        """What becomes of words of a size; `record` says how, with all steps until `finish`."""
        bench = self._bench(size)
        self._busy.append(bench)
        bench.progress = progress
        try:
            if bench.words is None:
                bench.words = bench.put(data, "words")
                await record(bench, bench.words)
            else:
                self.device.write(bench.words.buffer, data)
                await bench.again()
            results = bench.copies()
        except BaseException:
            bench.clear()
            raise
        finally:
            self._busy.remove(bench)
            bench.progress = unwatched
        self.rest()
        self._idle = bench
        if bench.nbytes > KEPT_NBYTES:
            self.rest()
        return results

    def rest(self) -> None:
        """Give back what it needs only to work again."""
        if self._idle is not None:
            self._idle.clear()
            self._idle = None

    def close(self) -> None:
        """Give all memory back."""
        self.rest()
        for bench in self._busy:
            bench.clear()
        super().close()

    def _bench(self, size: tuple[int, ...]) -> Bench:
        """The one of this size, if nobody works there, or a new one."""
        if self._idle is None or self._idle.size != size:
            self.rest()
            return Bench(self.device, self._steps, size)
        bench, self._idle = self._idle, None
        return bench


class Encoded:
    """What something has become on the device, until it is closed."""

    def __init__(self, device: Device, *tensors: Tensor) -> None:
        self._device = device
        self._buffers = [tensor.buffer for tensor in tensors]

    def close(self) -> None:
        """Give the memory back."""
        while self._buffers:
            self._device.free(self._buffers.pop())
