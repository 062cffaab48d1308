"""Where one picture or one sound is worked on: buffers on the device and what is done with them."""

import struct
from collections.abc import Sequence

from webgemma.device import Buffer, Device
from webgemma.graph import Recorder, Tensor


class Bench:
    """A recorder, and buffers that live until the bench is cleared."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorder = Recorder(device)
        self._buffers: list[Buffer] = []

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

    def run(self, *kept: Tensor) -> None:
        """Have the device do what was recorded until now; of its scratch only these stay."""
        for tensor in kept:
            if tensor.placed is None:
                tensor.placed = self.room(*tensor.shape, label="kept").buffer
        plan = self.recorder.plan()
        try:
            self.device.run(plan)
        finally:
            plan.close(self.device)
            self.recorder.calls.clear()

    def finish(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Run the rest; of all the memory only the results stay."""
        self.run(*results)
        self.clear(but=results)
        return results

    def clear(self, but: Sequence[Tensor] = ()) -> None:
        """Give the memory back, except that of some tensors."""
        kept = [tensor.buffer for tensor in but]
        for buffer in self._buffers:
            if buffer not in kept:
                self.device.free(buffer)
        self._buffers = kept
