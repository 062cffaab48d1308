"""Matrices and vectors of a file on a device, split into planes where alignment requires it."""

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from webgemma.device import Buffer, Device, Reading
from webgemma.errors import DeviceError
from webgemma.gemma.tensors import read_floats
from webgemma.gguf.formats import Format
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.gguf.sources import Bytes
from webgemma.graph import Argument, BufferPool, Recorder, Tensor, folded
from webgemma.kernels import unit

CHUNK_NBYTES = 8 << 20  # what goes through host memory at a time: larger chunks are no faster
CHUNKS_AHEAD = 8  # chunks that the device's queue may hold before it has copied them
REPACK_THREADS = 64
BINDING_NBYTES = 256  # WebGPU's alignment of bindings


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix that one binding can hold."""

    data: Tensor
    first_row: int
    rows: int
    planes: tuple[int, ...]  # where the second and third plane begin, in words


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

    @property
    def units(self) -> int:
        """Units of a row: what one call of the format's decode returns."""
        return self.width // unit(self.format.name)

    def arguments(self, part: Part) -> Mapping[str, Argument]:
        """Return what every kernel that reads a part of this matrix is called with."""
        planes = {f"plane{number}": start for number, start in enumerate(part.planes, 1)}
        blocks = self.width // self.format.block
        return {
            "format": self.format.name,
            "W": part.data,
            "row_blocks": blocks,
            "units": self.units,
            **planes,
        }


class Matrices:
    """Weights of a part of a model on a device, named as in the file: allocated, then loaded."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.closed = False
        self.matrices: dict[str, Weight] = {}
        self.vectors: dict[str, Tensor] = {}
        self.joined: Tensor | None = None  # the buffer of the vectors, if they have one together
        self.memory = BufferPool(device)
        self._copies: deque[Reading] = deque()  # each completes when a chunk is copied
        self._unpaced_nbytes = 0  # written since the last of them
        self.one = self.vector_of([1.0])

    def vector(self, name: str) -> Tensor:
        """Return a one-dimensional tensor; scales that the file leaves out are one."""
        return self.vectors.get(name, self.one)

    def vector_of(self, values: Sequence[float]) -> Tensor:
        """Upload values as a vector."""
        return self.memory.upload(packed_floats(values), len(values), label="vector")

    def allocate_vectors(self, sizes: Mapping[str, int]) -> None:
        """Allocate vectors of so many values in one buffer: one binding then reads several."""
        end = 0
        for name, size in sizes.items():
            self.vectors[name] = Tensor((size,), 4 * size, offset=end)
            end += 4 * size + -4 * size % BINDING_NBYTES
        buffer = self.memory.buffer(end, "vectors")
        for name in sizes:
            self.vectors[name].allocated = buffer
        self.joined = Tensor((end // 4,), end, buffer)

    def write_vector(self, name: str, values: Sequence[float]) -> None:
        """Fill a vector that is allocated."""
        vector = self.vectors[name]
        self.device.write(vector.buffer, packed_floats(values), vector.offset)

    def allocate(self, name: str, stacked: list[TensorInfo]) -> None:
        """Allocate a vector, or matrices of one format and width on top of each other."""
        first = stacked[0]
        if name in self.vectors:
            return
        if len(first.shape) == 1:
            self.vectors[name] = self.memory.tensor(first.weights, label=name)
            return
        rows = sum(tensor.rows for tensor in stacked)
        at_once = self._rows_at_once(name, first.format, first.width, rows)
        parts = [
            self.allocate_part(name, first.format, first.width, at, min(at_once, rows - at))
            for at in range(0, rows, at_once)
        ]
        self.matrices[name] = Weight(name, first.format, first.width, rows, tuple(parts))

    def allocate_part(self, name: str, fmt: Format, width: int, first: int, rows: int) -> Part:
        """Allocate so many rows, each plane at a multiple of 16 bytes."""
        starts, end = [], 0
        for _, nbytes in fmt.planes or ((0, fmt.nbytes),):
            starts.append(end // 4)
            end += rows * width // fmt.block * nbytes
            end += -end % 16
        data = Tensor((rows, width), end, self.memory.buffer(end, name))
        return Part(data, first, rows, tuple(starts[1:]))

    async def load_tensors(self, gguf: Gguf, name: str, stacked: list[TensorInfo]) -> None:
        """Load what was allocated under this name, chunk by chunk."""
        if name in self.vectors:
            self.write_vector(name, await read_floats(gguf, stacked[0]))
            return
        weight = self.matrices[name]
        for part in weight.parts:
            top = 0  # the row of the stack at which a tensor begins
            for tensor in stacked:
                await self._load_part(gguf, tensor, top, part, weight.format)
                top += tensor.rows

    async def wait_until_loaded(self) -> None:
        """Wait until the device has copied everything."""
        while self._copies:
            await self._copies.popleft().bytes()

    def close(self) -> None:
        """Free the memory."""
        self.closed = True
        self.memory.close()
        self._copies.clear()
        self.matrices.clear()
        self.vectors.clear()
        self.joined = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows_at_once(self, name: str, fmt: Format, width: int, rows: int) -> int:
        """Return how many rows of a matrix one binding can hold."""
        limits = self.device.limits
        capacity = min(limits.binding_nbytes, limits.buffer_nbytes) - 64  # for aligning planes
        fitting = capacity // fmt.row_nbytes(width)
        if fitting >= rows:
            return rows
        if fmt.planes:
            fitting -= fitting % 4  # four blocks fill a word in every plane
        if fitting < 1:
            raise DeviceError(
                f"{self.device.name} binds at most {limits.binding_nbytes} bytes to a kernel, too "
                f"few for one row of {name}; use another GPU."
            )
        return fitting

    async def _load_part(
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
        with BufferPool(self.device) as pool:
            source = pool.upload(chunk, len(chunk), label="chunk")
            source.nbytes = source.buffer.nbytes
            recorder = Recorder(self.device)
            record_repack(recorder, source, len(chunk) // fmt.nbytes, part, fmt, first_block)
            plan = recorder.plan()
            self.device.run(plan)
            plan.close(self.device)

    async def _pace(self, buffer: Buffer, nbytes: int) -> None:
        """Wait for the device now and then: its queue holds the bytes until it has copied them."""
        self._unpaced_nbytes += nbytes
        if self._unpaced_nbytes >= CHUNK_NBYTES:
            self._unpaced_nbytes = 0
            self._copies.append(self.device.read(buffer, 0, 4))
        while len(self._copies) > CHUNKS_AHEAD:
            await self._copies.popleft().bytes()


def record_repack(
    recorder: Recorder, chunk: Tensor, blocks: int, part: Part, fmt: Format, first_block: int = 0
) -> None:
    """Record moving blocks to the planes of a part, from its `first_block` (a multiple of 4) on."""
    for (offset, part_nbytes), start in zip(fmt.planes, (0, *part.planes), strict=True):
        words = (blocks * part_nbytes + 3) // 4
        recorder.call(
            "repack",
            folded(-(-words // REPACK_THREADS)),
            block_nbytes=fmt.nbytes,
            part_offset=offset,
            part_nbytes=part_nbytes,
            words=words,
            first_word=start + first_block * part_nbytes // 4,
            chunk=chunk,
            planes=part.data,
            THREADS=REPACK_THREADS,
        )


def packed_floats(values: Sequence[float]) -> bytes:
    """Return values as float32 bytes."""
    return struct.pack(f"<{len(values)}f", *values)


async def _chunk(gguf: Gguf, tensor: TensorInfo, offset: int, nbytes: int) -> Any:
    """Return bytes for the device; whole words need not pass through Python's memory."""
    if nbytes % 4:
        return whole_words(await gguf.read(tensor, offset, nbytes))
    return await gguf.read_raw(tensor, offset, nbytes)


def whole_words(data: Bytes) -> Bytes:
    """Pad bytes to a multiple of four, which is what the device takes."""
    return data if len(data) % 4 == 0 else bytes(data) + bytes(-len(data) % 4)
