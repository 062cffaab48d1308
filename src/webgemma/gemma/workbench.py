"""Where one picture or one sound is worked on: buffers on the device and what is done with them."""

import struct
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.graph import Recorder, Tensor
from webgemma.progress import Progress, unwatched

AHEAD = 2  # stretches of work that the device has in hand at most


class Bench:
    """A recorder, and buffers that live until the bench is cleared."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorder = Recorder(device)
        self._buffers: list[Buffer] = []
        self._pauses = [0]

    def pause(self) -> None:
        """What is recorded from here on is submitted apart, so that nobody waits for all of it."""
        self._pauses.append(len(self.recorder.calls))

    def put(self, data: bytes | memoryview, label: str) -> Tensor:
        """Words that the host brings."""
        tensor = self.room(len(data) // 4, label=label)
        self.device.write(tensor.buffer, data)
        return tensor

    def state(self, count: int) -> Tensor:
        """What kernels read of so many rows that are all there at once: see lib/state.wgsl."""
        return self.put(struct.pack("<4I", 0, count, 0, 0), "state")

    def room(self, *shape: int, label: str) -> Tensor:
        """Words that a kernel writes."""
        nbytes = 4
        for size in shape:
            nbytes *= size
        self._buffers.append(self.device.buffer(nbytes, label))
        return Tensor(shape, nbytes, self._buffers[-1])

    async def run(self, results: Sequence[Tensor], progress: Progress = unwatched) -> None:
        """Have the device do what was recorded; of all the memory only these results stay.

        `progress` is told how many stretches of how many are done, and may raise to end it."""
        for result in results:
            if result.placed is None:  # scratch, which something later could take over
                result.placed = self.room(*result.shape, label="result").buffer
        plan = self.recorder.plan()
        try:
            await self._run(plan, progress)
        finally:
            plan.close(self.device)
        self.clear(but=results)

    async def _run(self, plan: Plan, progress: Progress) -> None:
        await self.device.compiled()
        stretches = list(pairwise([*self._pauses, len(plan.dispatches)]))
        under_way: deque[Reading] = deque()
        for done in range(-AHEAD, len(stretches)):
            if (latest := done + AHEAD) < len(stretches):
                begin, end = stretches[latest]
                stretch = Plan(plan.dispatches[begin:end])
                reading = self.device.run(stretch, (plan.buffers[0], 0, 4))
                self.device.retire(stretch)
                assert reading is not None
                under_way.append(reading)
            if done >= 0:
                await under_way.popleft().bytes()
                progress(done + 1, len(stretches))

    def clear(self, but: Sequence[Tensor] = ()) -> None:
        """Give the memory back, except that of some tensors."""
        kept = [tensor.buffer for tensor in but]
        for buffer in self._buffers:
            if buffer not in kept:
                self.device.free(buffer)
        self._buffers = kept
