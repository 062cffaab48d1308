"""The weights of the text model on a device, and the table that may stay in its file."""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Literal

from webgemma.device import Device, Plan
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.lora_weights import Adapters, Scaled
from webgemma.gemma.matrices import Matrices, Weight, record_repack, whole_words
from webgemma.gemma.stacks import TABLE, check_kernels_fit, stacks, wanted_tensors
from webgemma.gemma.tensors import canonical_tensors, check_rope_factors, read_floats
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Recorder, Tensor

SAMPLE_NBYTES = 1 << 16  # of a tensor, for the fingerprint
BATCH_ROWS = 512  # of a table on the host that the device sees at a time: the largest batch


class Model(Matrices):
    """A blueprint and its weights on a device, named as in the file."""

    def __init__(self, config: Config, device: Device) -> None:
        super().__init__(device)
        self.config = config
        self.adapters = Adapters(self)
        self.name = ""  # its file's
        self._fingerprint = ""
        self.table: HostTable | None = None  # if the per-layer embeddings stay in the file
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
                if name == TABLE and table == "host":
                    model.table = HostTable(model, gguf, tensors[0])
                    model.matrices[name] = model.table.weight
                else:
                    model.reserve_tensors(name, tensors)
        except BaseException:
            model.close()
            raise
        return model

    async def fill(self, gguf: Gguf, progress: Callable[[int], None] | None = None) -> None:
        """Bring every tensor to the device, chunk by chunk; a model for which that fails closes."""
        try:
            for name, tensors in stacks(wanted_tensors(gguf, self.config)).items():
                if not (name == TABLE and self.table):
                    await self.fill_tensors(gguf, name, tensors)
                if progress is not None:
                    progress(sum(tensor.nbytes for tensor in tensors))
            self._fingerprint = await _fingerprint(gguf, self.config)
            await self.settle()
        except BaseException:
            self.close()
            raise

    def set_adapters(self, adapters: Sequence[Scaled]) -> None:
        """Have these on from now on, each as much as its number says, and no others.

        Sessions begin anew: what they have read was read without them."""
        if self.closed:
            raise InputError("The model is closed: load it again.")
        made = Adapters(self, adapters)
        self.adapters.close()
        self.adapters, self.low = made, made.low

    @property
    def fingerprint(self) -> str:
        """Tells this model, with what it has on, from others."""
        return self._fingerprint + self.adapters.digest

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
            self.head_norms[layer.index] = self.vector_of(norms)
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
            self.turns[sliding] = self.tensor(packed, "turns", len(turns), 2)

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
        self.fork_norms[index], self.join_norms[index] = self.vector_of(fork), self.vector_of(join)

    def close(self) -> None:
        """Give the memory back."""
        if self.table is not None:
            self.table.close()
        self.table = None
        self.adapters.close()
        super().close()


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
        self._device.write(self._rows.buffer, whole_words(b"".join(rows)))
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
