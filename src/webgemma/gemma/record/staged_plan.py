"""Staged plans: long work recorded in stages that the device runs one after the other.

The device begins with the first stage while the second is recorded, no stage keeps it busy for
long, and progress is reported between them. All stages can run again on other inputs."""

import struct
from collections import deque
from collections.abc import Awaitable, Callable

from webgemma.device import Device, Plan, Reading
from webgemma.errors import DeviceError
from webgemma.gemma.matrices import Matrices
from webgemma.gguf.sources import Bytes
from webgemma.graph import BufferPool, Recorder, Tensor
from webgemma.progress import Progress, ignore_progress

AHEAD = 2  # stages that the device has queued at most, while the next one is recorded
# Memory of an idle staged plan that is kept: enough for an image of 280 soft tokens, 30 s of audio.
KEPT_NBYTES = 256 << 20


class StagedPlan:
    """Plans that run one after the other, and the buffers that they share."""

    def __init__(self, device: Device, stages: int = 1, size: tuple[int, ...] = ()) -> None:
        self.device = device
        self.size = size  # of the input that it was recorded for
        self.scratch = BufferPool(device)
        self.memory = BufferPool(device)
        self.recorder = Recorder(device, self.scratch)
        self.progress: Progress = ignore_progress  # may raise to cancel
        self.input: Tensor | None = None
        self.results: tuple[Tensor, ...] = ()  # once all stages are recorded
        self._plans: list[Plan] = []
        self._running: deque[Reading] = deque()
        self._done, self._stages = 0, stages
        self._closed = False

    def upload(self, data: Bytes, label: str) -> Tensor:
        """Allocate a tensor of words that holds these bytes."""
        return self.memory.upload(data, len(data) // 4, label=label)

    def batch(self, count: int) -> Tensor:
        """Allocate the batch of so many rows that are all there at once: see lib/batch."""
        return self.upload(struct.pack("<4I", 0, count, 0, 0), "batch")

    async def run(self, *kept: Tensor) -> None:
        """Run what was recorded since the last stage; of its scratch only these tensors stay."""
        for tensor in kept:
            if tensor.allocated is None:
                tensor.allocated = self.memory.tensor(*tensor.shape, label="kept").buffer
        plan = self.recorder.plan()
        plan.ahead = False  # the device is busy for longer than recording it again takes
        self._plans.append(plan)
        self.recorder.calls.clear()
        await self.device.compiled()
        await self._submit(plan)

    async def finish(self, *results: Tensor) -> None:
        """Run the last stage and wait for it."""
        await self.run(*results)
        await self._wait(0)
        self.results = results

    async def run_again(self) -> None:
        """Run all stages once more."""
        self._done = 0
        for plan in self._plans:
            await self._submit(plan)
        await self._wait(0)

    def copy_results(self) -> list[Tensor]:
        """Copy the results into memory that the caller owns."""
        pool = BufferPool(self.device)
        copies: list[Tensor] = []
        try:
            for tensor in self.results:
                copies.append(pool.tensor(*tensor.shape, label="result"))
                self.device.copy(tensor.buffer, copies[-1].buffer, tensor.nbytes)
        except BaseException:
            pool.close()
            raise
        return copies

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers."""
        own = sum(buffer.nbytes for plan in self._plans for buffer in plan.buffers)
        return self.memory.nbytes + self.scratch.nbytes + own

    def close(self) -> None:
        """Free the memory; work that is under way ends with a DeviceError."""
        self._closed = True
        while self._plans:
            self._plans.pop().close(self.device)
        self.memory.close()
        self.scratch.close()

    async def _submit(self, plan: Plan) -> None:
        self._check_open()
        reading = self.device.run(plan, (plan.buffers[0], 0, 4))
        assert reading is not None
        self._running.append(reading)
        await self._wait(AHEAD)

    async def _wait(self, count: int) -> None:
        """Wait until at most so many stages are running."""
        while len(self._running) > count:
            await self._running.popleft().bytes()
            self._check_open()
            self._done += 1
            self.progress(self._done, self._stages)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("The encoder was freed while it was at work.")


class EncoderWeights(Matrices):
    """An encoder's weights, and the staged plan of its last input: an equal size reuses it."""

    def __init__(self, device: Device, stages: int, precision: str = "exact") -> None:
        """Multiply on matrix units with the precision f16; with any other one in float32."""
        super().__init__(device)
        self.precision = "f16" if precision == "f16" else "exact"
        self._stages = stages
        self._idle: StagedPlan | None = None
        self._busy: list[StagedPlan] = []

    async def encode(
        self,
        size: tuple[int, ...],
        data: Bytes,
        record: Callable[[StagedPlan, Tensor], Awaitable[None]],
        progress: Progress,
    ) -> list[Tensor]:
        """Return the results for an input of a size; `record` records all stages for it."""
        plan = self._plan(size)
        self._busy.append(plan)
        plan.progress = progress
        try:
            if plan.input is None:
                plan.input = plan.upload(data, "input")
                await record(plan, plan.input)
            else:
                self.device.write(plan.input.buffer, data)
                await plan.run_again()
            results = plan.copy_results()
        except BaseException:
            plan.close()
            raise
        finally:
            self._busy.remove(plan)
            plan.progress = ignore_progress
        self.free_idle()
        self._idle = plan
        if plan.nbytes > KEPT_NBYTES:
            self.free_idle()
        return results

    def free_idle(self) -> None:
        """Free what is kept only to encode another input of the same size."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def close(self) -> None:
        """Free all memory."""
        self.free_idle()
        for plan in self._busy:
            plan.close()
        super().close()

    def _plan(self, size: tuple[int, ...]) -> StagedPlan:
        """Return the plan of this size if it is idle, or a new one."""
        if self._idle is None or self._idle.size != size:
            self.free_idle()
            return StagedPlan(self.device, self._stages, size)
        plan, self._idle = self._idle, None
        return plan


class Encoded:
    """Results of an encoder on the device, until they are closed."""

    def __init__(self, device: Device, *tensors: Tensor) -> None:
        self._memory = BufferPool(device)
        self._memory.buffers += [tensor.buffer for tensor in tensors]

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
