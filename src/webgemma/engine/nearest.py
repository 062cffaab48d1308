"""Search by vectors on a device: the products of all of them with the vector of a question."""

import heapq
from array import array
from collections.abc import Sequence
from struct import pack
from typing import Self

from webgemma.device import Device
from webgemma.errors import InputError
from webgemma.gemma.matrices import Part, Weight, packed_floats
from webgemma.gemma.record.matmul import Matmul
from webgemma.gguf.formats import FORMATS
from webgemma.graph import BufferPool, Recorder, Tensor

FORMAT = FORMATS["F32"]
LANES = 4  # values of a row are read so many at once


class Vectors:
    """Vectors of one size on a device, as the rows of a matrix.

    They are multiplied as float32, so that the order of what is found is that of a plain loop."""

    def __init__(self, device: Device, data: bytes, size: int) -> None:
        """Upload the float32 values `data` as vectors of `size` numbers.

        DeviceMemoryError if the device has no room for them."""
        row_nbytes = 4 * size
        if size < 1 or size % LANES or not data or len(data) % row_nbytes:
            raise InputError(
                f"{len(data)} bytes are not vectors of {size} numbers, a multiple of {LANES}."
            )
        self._device, self._memory = device, BufferPool(device)
        self.count, self.size = len(data) // row_nbytes, size
        limits = device.limits
        at_once = min(limits.binding_nbytes, limits.buffer_nbytes) // row_nbytes
        try:
            parts = [
                self._part(memoryview(data), first, min(at_once, self.count - first))
                for first in range(0, self.count, at_once)
            ]
            weight = Weight("vectors", FORMAT, size, self.count, tuple(parts))
            batch = self._memory.upload(pack("<4I", 0, 1, 0, 0), 4, label="vectors")
            self._question = self._memory.tensor(1, size, label="vectors")
            self._scores = self._memory.tensor(1, self.count, label="vectors")
            recorder = Recorder(device)
            Matmul(recorder, batch, 1).linear(self._question, weight, self._scores)
            self._plan = recorder.plan()
        except BaseException:
            self._memory.close()
            raise

    def _part(self, data: memoryview, first: int, rows: int) -> Part:
        row_nbytes = 4 * self.size
        values = data[first * row_nbytes : (first + rows) * row_nbytes]
        tensor: Tensor = self._memory.upload(values, rows, self.size, label="vectors")
        return Part(tensor, first, rows, ())

    async def scores(self, question: Sequence[float]) -> Sequence[float]:
        """Return the product of each vector with that of a question."""
        if len(question) != self.size:
            raise InputError(f"The question has {len(question)} numbers, not {self.size}.")
        await self._device.compiled()
        self._device.write(self._question.buffer, packed_floats(question))
        reading = self._device.run(self._plan, (self._scores.buffer, 0, 4 * self.count))
        assert reading is not None
        values = array("f")
        values.frombytes(await reading.bytes())
        return values

    async def nearest(self, question: Sequence[float], count: int) -> list[int]:
        """Return the numbers of the vectors with the largest products, the largest first."""
        scores = await self.scores(question)
        return heapq.nsmallest(count, range(self.count), key=lambda at: (-scores[at], at))

    def close(self) -> None:
        """Free the memory."""
        self._plan.close(self._device)
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
