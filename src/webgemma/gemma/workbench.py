"""A workbench on the device, where one picture or sound becomes soft tokens."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.graph import Recorder, Tensor

AHEAD = 2  # stretches of work that the device has in hand at most
Progress: TypeAlias = Callable[[int, int], None]  # is told how many steps of how many are done


def unwatched(done: int, total: int) -> None:
    """The progress that nobody asked for."""


class Bench:
    """Where one picture or sound is worked on: buffers that live until it is cleared."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorder = Recorder(device)
        self._buffers: list[Buffer] = []
        self._pauses = [0]

    def pause(self) -> None:
        """What is recorded from here on is submitted apart, so that nobody waits for all of it."""
        self._pauses.append(len(self.recorder.calls))

    async def run(self, results: Sequence[Tensor], progress: Progress) -> None:
        """Run what was recorded, then keep only the results, which are copied to memory of theirs.

        `progress` is told how many stretches of how many are done, and may raise to end it."""
        kept = [self.room(*result.shape, label="result") for result in results]
        plan = self.recorder.plan()
        try:
            await self._run(plan, progress)
            for place, result in zip(kept, results, strict=True):
                self.device.copy(result.buffer, place.buffer, place.nbytes)
        finally:
            plan.close(self.device)
        self.clear(but=kept)
        for place, result in zip(kept, results, strict=True):
            result.placed, result.offset, result.whole = place.placed, 0, None

    async def _run(self, plan: Plan, progress: Progress) -> None:
        await self.device.compiled()
        stretches = list(pairwise([*self._pauses, len(plan.dispatches)]))
        under_way: deque[Reading] = deque()
        for done in range(-AHEAD, len(stretches)):
            if (next_one := done + AHEAD) < len(stretches):
                begin, end = stretches[next_one]
                stretch = Plan(plan.dispatches[begin:end])
                reading = self.device.run(stretch, (plan.buffers[0], 0, 4))
                self.device.retire(stretch)
                assert reading is not None
                under_way.append(reading)
            if done >= 0:
                await under_way.popleft().bytes()
                progress(done + 1, len(stretches))

    def put(self, data: bytes, label: str) -> Tensor:
        """Words that the host brings."""
        tensor = self.room(len(data) // 4, label=label)
        self.device.write(tensor.buffer, data)
        return tensor

    def room(self, *shape: int, label: str) -> Tensor:
        """Words that a kernel writes."""
        nbytes = 4
        for size in shape:
            nbytes *= size
        self._buffers.append(self.device.buffer(nbytes, label))
        return Tensor(shape, nbytes, self._buffers[-1])

    def clear(self, but: Sequence[Tensor] = ()) -> None:
        """Give the memory back, except that of some tensors."""
        kept = [tensor.buffer for tensor in but]
        for buffer in self._buffers:
            if buffer not in kept:
                self.device.free(buffer)
        self._buffers = kept
