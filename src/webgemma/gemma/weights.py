"""The weights on the device: the bytes of the file, moved to planes where alignment wants it."""

import hashlib
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.stacks import TABLE, check_kernels_fit, stacks, wanted_tensors
from webgemma.gemma.tensors import canonical_tensors, check_rope_factors, read_floats
from webgemma.gguf.formats import Format
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.gguf.sources import Bytes
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link

CHUNK_NBYTES = 8 << 20  # what passes through host memory at a time: larger ones are no faster
SAMPLE_NBYTES = 1 << 16  # of a tensor, for the fingerprint
CHUNKS_AHEAD = 8  # chunks that the device's queue may hold before it has copied them
BATCH_ROWS = 512  # of a table on the host that the device sees at a time: the largest batch


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


class Model:
    """A blueprint and its weights on a device, named as in the file."""

    def __init__(self, config: Config, device: Device) -> None:
        self.config = config
        self.device = device
        self.name = ""  # its file's
        self.closed = False
        self.fingerprint = ""  # tells this model from others
        self.matrices: dict[str, Weight] = {}
        self.vectors: dict[str, Tensor] = {}
        self.table: HostTable | None = None  # if the per-layer embeddings stay in the file
        self._buffers: list[Buffer] = []
        self._copies: deque[Reading] = deque()  # each arrives when a chunk is copied
        self._uncounted_nbytes = 0  # written since the last of them
        self.one = self._vector([1.0])
        self.head_norms: dict[int, Tensor] = {}  # of each layer: q_norm, then k_norm
        self.fork_norms: dict[int, Tensor] = {}  # of layers with experts: see next_three.wgsl
        self.join_norms: dict[int, Tensor] = {}  # and y_two.wgsl
        self.turns: dict[bool, Tensor] = {}  # of sliding and full layers: see heads.wgsl

    @classmethod
    async def load(
        cls,
        gguf: Gguf,
        config: Config,
        device: Device,
        progress: Callable[[int], None] | None = None,
        *,
        table: Literal["device", "host"] = "device",
    ) -> "Model":
        """Make room for every tensor and bring it there: `reserve`, `derive`, `fill`."""
        model = cls.reserve(gguf, config, device, table=table)
        await model.derive(gguf)
        await model.fill(gguf, progress)
        return model

    @classmethod
    def reserve(
        cls,
        gguf: Gguf,
        config: Config,
        device: Device,
        *,
        table: Literal["device", "host"] = "device",
    ) -> "Model":
        """A model whose memory is there, but not yet its weights; DeviceError if it is too small.

        The `table` of per-layer embeddings may stay in the file, which must then stay open."""
        if table not in ("device", "host"):
            raise InputError(f"There is no table {table!r}; choose device or host.")
        check_kernels_fit(gguf, config, device)
        model = cls(config, device)
        model.name = gguf.name
        try:
            for name, tensors in stacks(wanted_tensors(gguf, config)).items():
                if len(tensors[0].shape) == 1:
                    size = tensors[0].weights
                    model.vectors[name] = Tensor((size,), 4 * size, model.keep(4 * size, name))
                elif name == TABLE and table == "host":
                    model.table = HostTable(model, gguf, tensors[0])
                    model.matrices[name] = model.table.weight
                else:
                    model.matrices[name] = model.room(name, tensors)
        except BaseException:
            model.close()
            raise
        return model

    async def fill(self, gguf: Gguf, progress: Callable[[int], None] | None = None) -> None:
        """Bring every tensor to the device, chunk by chunk; a model for which that fails closes."""
        try:
            for name, tensors in stacks(wanted_tensors(gguf, self.config)).items():
                if name in self.vectors:
                    data = _packed(await read_floats(gguf, tensors[0]))
                    self.device.write(self.vectors[name].buffer, data)
                elif not (name == TABLE and self.table):
                    await self.fill_matrix(gguf, self.matrices[name], tensors)
                if progress is not None:
                    progress(sum(tensor.nbytes for tensor in tensors))
            self.fingerprint = await _fingerprint(gguf, self.config)
            while self._copies:
                await self._copies.popleft().bytes()
        except BaseException:
            self.close()
            raise

    async def derive(self, gguf: Gguf) -> None:
        """Make what kernels want put together; with it, plans can be recorded."""
        try:
            await self._derive(gguf, canonical_tensors(gguf))
        except BaseException:
            self.close()
            raise

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        """Head norms side by side, rotations in turns."""
        for layer in self.config.layers:
            name = f"blk.{layer.index}."
            norms = await read_floats(gguf, tensors[name + "attn_q_norm.weight"])
            if not layer.shares_kv:
                norms += await read_floats(gguf, tensors[name + "attn_k_norm.weight"])
            self.head_norms[layer.index] = self._vector(norms)
            if layer.experts:
                await self._derive_branches(gguf, tensors, layer.index)
        factors = tensors.get("rope_freqs.weight")
        for sliding in {layer.sliding for layer in self.config.layers}:
            size = next(x.head_dim for x in self.config.layers if x.sliding == sliding)
            base = self.config.rope_base_sliding if sliding else self.config.rope_base
            scale = [1.0] * (size // 2)
            if not sliding:
                scale = [1.0] * (size // 8) + [math.inf] * (size // 2 - size // 8)
                if factors is not None:
                    scale = check_rope_factors(gguf, await read_floats(gguf, factors))
            turns = [base ** (-2 * j / size) / scale[j] / (2 * math.pi) for j in range(size // 2)]
            words = [part for turn in turns for part in divmod(round(turn * 2**64) % 2**64, 2**32)]
            packed = struct.pack(f"<{len(words)}I", *words)
            self.turns[sliding] = self._tensor(packed, "turns", len(turns), 2)

    async def _derive_branches(
        self, gguf: Gguf, tensors: dict[str, TensorInfo], index: int
    ) -> None:
        """The norms where a layer forks into dense branch, experts and router, and joins again."""

        async def norm(name: str) -> list[float]:
            return await read_floats(gguf, tensors[f"blk.{index}.{name}"])

        shrink = 1 / math.sqrt(self.config.width)
        router = [shrink * scale for scale in await norm("ffn_gate_inp.scale")]
        fork = await norm("ffn_norm.weight") + await norm("pre_ffw_norm_2.weight") + router
        join = await norm("post_ffw_norm_1.weight") + await norm("post_ffw_norm_2.weight")
        self.fork_norms[index], self.join_norms[index] = self._vector(fork), self._vector(join)

    def vector(self, name: str) -> Tensor:
        """A one-dimensional tensor; scales that a file leaves out are one."""
        return self.vectors.get(name, self.one)

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
        if self.table is not None:
            self.table.close()
        while self._buffers:
            self.device.free(self._buffers.pop())
        self._copies.clear()
        self.table = None
        self.matrices.clear()
        self.vectors.clear()

    def _tensor(self, data: bytes, label: str, *shape: int) -> Tensor:
        buffer = self.keep(len(data), label)
        self.device.write(buffer, data)
        return Tensor(shape, len(data), buffer)

    def _vector(self, values: list[float]) -> Tensor:
        return self._tensor(_packed(values), "vector", len(values))

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


class HostTable:
    """A table that stays in its file: each batch brings the rows of its tokens to the device."""

    def __init__(self, model: Model, gguf: Gguf, tensor: TensorInfo) -> None:
        self._device = model.device
        self._gguf = gguf
        self._tensor = tensor
        fmt, width = tensor.format, tensor.width
        part = model.part(tensor.name, fmt, width, 0, BATCH_ROWS)
        self.weight = Weight(tensor.name, fmt, width, BATCH_ROWS, (part,))
        places = model.keep(4 * BATCH_ROWS, "places")
        self.places = Tensor((BATCH_ROWS,), places.nbytes, places)  # of each token's row
        self._rows = part.data  # as they are in the file
        if fmt.planes:
            nbytes = BATCH_ROWS * fmt.row_nbytes(width)
            self._rows = Tensor((nbytes,), nbytes, model.keep(nbytes, "rows"))
        self._plans: dict[int, Plan] = {}

    async def bring(self, ids: Sequence[int]) -> None:
        """What is submitted next finds the rows of these tokens; equal tokens share one."""
        assert len(ids) <= BATCH_ROWS
        places = {token: place for place, token in enumerate(dict.fromkeys(ids))}
        nbytes = self._tensor.format.row_nbytes(self._tensor.width)
        rows = [await self._gguf.read(self._tensor, token * nbytes, nbytes) for token in places]
        # No await from here on: what another session brings must not come between.
        self._device.write(self._rows.buffer, _whole_words(b"".join(rows)))
        packed = struct.pack(f"<{len(ids)}I", *(places[token] for token in ids))
        self._device.write(self.places.buffer, packed)
        if self._tensor.format.planes:
            self._device.run(self._repacking(len(rows)))

    def _repacking(self, rows: int) -> Plan:
        """Moves at least so many rows to their planes; a few plans serve all batches."""
        rows = 1 << (rows - 1).bit_length()
        if rows not in self._plans:
            recorder = Recorder(self._device)
            blocks = rows * self._tensor.width // self._tensor.format.block
            part, fmt = self.weight.parts[0], self._tensor.format
            record_repack(recorder, self._rows, blocks, part, fmt)
            self._plans[rows] = recorder.plan()
        return self._plans[rows]

    def close(self) -> None:
        """Give the memory of the plans back; the rest is the model's."""
        for plan in self._plans.values():
            plan.close(self._device)
        self._plans.clear()


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


def _packed(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


async def _chunk(gguf: Gguf, tensor: TensorInfo, offset: int, nbytes: int) -> Any:
    """Bytes for the device; those of whole words need not pass through Python."""
    if nbytes % 4:
        return _whole_words(await gguf.read(tensor, offset, nbytes))
    return await gguf.read_raw(tensor, offset, nbytes)


def _whole_words(data: Bytes) -> Bytes:
    """The device takes four bytes at a time."""
    return data if len(data) % 4 == 0 else bytes(data) + bytes(-len(data) % 4)


async def _fingerprint(gguf: Gguf, config: Config) -> str:
    """A digest of some numbers, the tensor table, and both ends of one tensor of every kind."""
    tensors = wanted_tensors(gguf, config)
    digest = hashlib.sha256()
    numbers = (config.window, config.eps, config.rope_base, config.rope_base_sliding)
    digest.update(f"{numbers}\n".encode())
    for name, tensor in tensors.items():
        place = f"{name} {tensor.shape} {tensor.format.name} {tensor.part} {tensor.offset}\n"
        digest.update(place.encode())
    middle = f"blk.{len(config.layers) // 2}."
    for name, tensor in tensors.items():
        if name.startswith((middle, "token_embd.")):
            nbytes = min(tensor.nbytes, SAMPLE_NBYTES)
            digest.update(await gguf.read(tensor, 0, nbytes))
            digest.update(await gguf.read(tensor, tensor.nbytes - nbytes, nbytes))
    return digest.hexdigest()
