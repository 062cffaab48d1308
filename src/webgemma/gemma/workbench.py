"""Where one picture or one sound is worked on: buffers on the device and what is done with them."""

import struct
from collections import deque
from collections.abc import Sequence
from math import prod

from webgemma.device import Buffer, Device, Reading
from webgemma.graph import Recorder, Tensor
from webgemma.progress import Progress, unwatched

AHEAD = 2  # steps that the device has in hand at most, while the next one is recorded


class Bench:
    """A recorder, and buffers that live until the bench is cleared.

    The work is cut into steps: the device begins with the first while the second is recorded, no
    step keeps it busy for long, and between them `progress` is told, which may raise to end it."""

    def __init__(self, device: Device, steps: int = 1, progress: Progress = unwatched) -> None:
        self.device = device
        self.recorder = Recorder(device)
        self._buffers: list[Buffer] = []
        self._under_way: deque[Reading] = deque()
        self._done, self._steps, self._progress = 0, steps, progress

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
        nbytes = 4 * prod(shape)
        self._buffers.append(self.device.buffer(nbytes, label))
        return Tensor(shape, nbytes, self._buffers[-1])

    async def run(self, *kept: Tensor) -> None:
        """A step: what was recorded since the last one; of its scratch only these tensors stay."""
        for tensor in kept:
            if tensor.placed is None:
                tensor.placed = self.room(*tensor.shape, label="kept").buffer
        plan = self.recorder.plan()
        try:
            await self.device.compiled()
            reading = self.device.run(plan, (plan.buffers[0], 0, 4))
        finally:
            plan.close(self.device)
            self.recorder.calls.clear()
        assert reading is not None
        self._under_way.append(reading)
        await self._wait(AHEAD)

    async def finish(self, *results: Tensor) -> None:
        """The last step; of all the memory only the results stay."""
        await self.run(*results)
        await self._wait(0)
        self.clear(but=results)

    async def _wait(self, most: int) -> None:
        while len(self._under_way) > most:
            await self._under_way.popleft().bytes()
            self._done += 1
            self._progress(self._done, self._steps)

    def clear(self, but: Sequence[Tensor] = ()) -> None:
        """Give the memory back, except that of some tensors."""
        kept = [tensor.buffer for tensor in but]
        for buffer in self._buffers:
            if buffer not in kept:
                self.device.free(buffer)
        self._buffers = kept
