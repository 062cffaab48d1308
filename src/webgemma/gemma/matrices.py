"""Matrices and vectors of a file on a device, moved to planes where alignment wants it."""

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from webgemma.device import Buffer, Device, Reading
from webgemma.errors import DeviceError
from webgemma.gemma.tensors import read_floats
from webgemma.gguf.formats import Format
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.gguf.sources import Bytes
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link

if TYPE_CHECKING:
    from webgemma.gemma.lora_weights import Low

CHUNK_NBYTES = 8 << 20  # what passes through host memory at a time: larger ones are no faster
CHUNKS_AHEAD = 8  # chunks that the device's queue may hold before it has copied them


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix that one binding can hold."""

    data: Tensor
    first_row: int
    rows: int
    planes: tuple[int, int]  # where the second and third plane begin, in words


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix (or, with experts, a stack of them) in its file's format."""

    name: str
    format: Format
    width: int
    rows: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.data.nbytes for part in self.parts)


class Matrices:
    """What a part of a model has on a device, named as in the file: room is made, then filled."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.closed = False
        self.matrices: dict[str, Weight] = {}
        self.vectors: dict[str, Tensor] = {}
        self._buffers: list[Buffer] = []
        self._copies: deque[Reading] = deque()  # each arrives when a chunk is copied
        self._uncounted_nbytes = 0  # written since the last of them
        self.one = self.vector_of([1.0])
        self.low: Mapping[str, Low] = {}  # what adapters add, by the matrix

    def vector(self, name: str) -> Tensor:
        """A one-dimensional tensor; scales that a file leaves out are one."""
        return self.vectors.get(name, self.one)

    def reserve_tensors(self, name: str, stacked: list[TensorInfo]) -> None:
        """Make room for a vector, or for matrices on top of each other."""
        if len(stacked[0].shape) == 1:
            size = stacked[0].weights
            self.vectors[name] = Tensor((size,), 4 * size, self.keep(4 * size, name))
        else:
            self.matrices[name] = self.room(name, stacked)

    async def fill_tensors(self, gguf: Gguf, name: str, stacked: list[TensorInfo]) -> None:
        """Bring them there, chunk by chunk."""
        if name in self.vectors:
            data = packed_floats(await read_floats(gguf, stacked[0]))
            self.device.write(self.vectors[name].buffer, data)
        else:
            await self.fill_matrix(gguf, self.matrices[name], stacked)

    async def settle(self) -> None:
        """Wait until the device has copied everything."""
        while self._copies:
            await self._copies.popleft().bytes()

    def keep(self, nbytes: int, label: str) -> Buffer:
        """Memory of the device that lives as long as the model."""
        buffer = self.device.buffer(nbytes, label)
        self._buffers.append(buffer)
        return buffer

    def part(self, name: str, fmt: Format, width: int, first: int, rows: int) -> Part:
        """Memory for so many rows, each plane at a multiple of 16 bytes."""
        starts, end = [], 0
        for _, nbytes in fmt.planes or ((0, fmt.nbytes),):
            starts.append(end)
            end += rows * width // fmt.block * nbytes
            end += -end % 16
        second, third = (*starts[1:], 0, 0)[:2]
        data = Tensor((rows, width), end, self.keep(end, name))
        return Part(data, first, rows, (second // 4, third // 4))

    def close(self) -> None:
        """Give the memory back."""
        self.closed = True
        while self._buffers:
            self.device.free(self._buffers.pop())
        self._copies.clear()
        self.matrices.clear()
        self.vectors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensor(self, data: bytes, label: str, *shape: int) -> Tensor:
        buffer = self.keep(len(data), label)
        self.device.write(buffer, data)
        return Tensor(shape, len(data), buffer)

    def vector_of(self, values: list[float]) -> Tensor:
        return self.tensor(packed_floats(values), "vector", len(values))

    def room(self, name: str, stacked: list[TensorInfo]) -> Weight:
        """Memory for one matrix, or several of one format and width on top of each other."""
        fmt, width = stacked[0].format, stacked[0].width
        rows = sum(tensor.rows for tensor in stacked)
        at_once = self._rows_at_once(name, fmt, width, rows)
        parts = [
            self.part(name, fmt, width, first, min(at_once, rows - first))
            for first in range(0, rows, at_once)
        ]
        return Weight(name, fmt, width, rows, tuple(parts))

    async def fill_matrix(self, gguf: Gguf, weight: Weight, stacked: list[TensorInfo]) -> None:
        """Bring the tensors that are put on top of each other to their matrix."""
        for part in weight.parts:
            top = 0  # the row of the whole at which a tensor begins
            for tensor in stacked:
                await self._fill(gguf, tensor, top, part, weight.format)
                top += tensor.rows

    def _rows_at_once(self, name: str, fmt: Format, width: int, rows: int) -> int:
        """How many rows of a matrix one binding can hold."""
        limits = self.device.limits
        room = min(limits.binding_nbytes, limits.buffer_nbytes) - 64  # aligning planes adds some
        most = room // fmt.row_nbytes(width)
        if most >= rows:
            return rows
        if fmt.planes:
            most -= most % 4  # four blocks fill a word in every plane
        if most < 1:
            raise DeviceError(
                f"A kernel sees at most {limits.binding_nbytes} bytes of a buffer on "
                f"{self.device.name}, too few for the rows of {name}; take another GPU."
            )
        return most

    async def _fill(
        self, gguf: Gguf, tensor: TensorInfo, top: int, part: Part, fmt: Format
    ) -> None:
        """Copy the rows that a tensor and a part have in common."""
        row_nbytes = fmt.row_nbytes(tensor.width)
        low = max(top, part.first_row)
        high = min(top + tensor.rows, part.first_row + part.rows)
        step = max(1, CHUNK_NBYTES // (16 * fmt.nbytes)) * 16 * fmt.nbytes
        total = max(0, high - low) * row_nbytes
        for at in range(0, total, step):
            chunk = await _chunk(gguf, tensor, (low - top) * row_nbytes + at, min(step, total - at))
            to = (low - part.first_row) * row_nbytes + at
            if fmt.planes:
                self._repack(chunk, part, fmt, to // fmt.nbytes)
            else:
                self.device.write(part.data.buffer, chunk, to)
            await self._pace(part.data.buffer, len(chunk))

    def _repack(self, chunk: Any, part: Part, fmt: Format, first_block: int) -> None:
        """Move a chunk's blocks to their planes, on the device."""
        buffer = self.device.buffer(len(chunk), "chunk")
        try:
            self.device.write(buffer, chunk)
            recorder = Recorder(self.device)
            source = Tensor((len(chunk),), buffer.nbytes, buffer)
            record_repack(recorder, source, len(chunk) // fmt.nbytes, part, fmt, first_block)
            plan = recorder.plan()
            self.device.run(plan)
            plan.close(self.device)
        finally:
            self.device.free(buffer)

    async def _pace(self, buffer: Buffer, nbytes: int) -> None:
        """Wait for the device now and then: until it has copied them, its queue holds the bytes."""
        self._uncounted_nbytes += nbytes
        if self._uncounted_nbytes >= CHUNK_NBYTES:
            self._uncounted_nbytes = 0
            self._copies.append(self.device.read(buffer, 0, 4))
        while len(self._copies) > CHUNKS_AHEAD:
            await self._copies.popleft().bytes()


def record_repack(
    recorder: Recorder, chunk: Tensor, blocks: int, part: Part, fmt: Format, first_block: int = 0
) -> None:
    """A chunk's blocks to the planes of a part, from its `first_block` (a multiple of 4) on."""
    kernel = link("repack", recorder.device.features, constants={"THREADS": 64})
    for (offset, part_nbytes), start in zip(fmt.planes, (0, *part.planes), strict=False):
        words = (blocks * part_nbytes + 3) // 4
        groups = (words + 63) // 64
        grid = (min(groups, 32768), (groups + 32767) // 32768)
        first_word = start + first_block * part_nbytes // 4
        params = [fmt.nbytes, offset, part_nbytes, words, first_word]
        recorder.call(kernel, grid, params, chunk, part.data)


def packed_floats(values: Sequence[float]) -> bytes:
    """Float32, as the device has them."""
    return struct.pack(f"<{len(values)}f", *values)


async def _chunk(gguf: Gguf, tensor: TensorInfo, offset: int, nbytes: int) -> Any:
    """Bytes for the device; those of whole words need not pass through Python."""
    if nbytes % 4:
        return whole_words(await gguf.read(tensor, offset, nbytes))
    return await gguf.read_raw(tensor, offset, nbytes)


def whole_words(data: Bytes) -> Bytes:
    """The device takes four bytes at a time."""
    return data if len(data) % 4 == 0 else bytes(data) + bytes(-len(data) % 4)
