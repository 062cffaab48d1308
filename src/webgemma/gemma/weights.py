"""The weights of the text model on a device, and the embedding table that may stay in its file."""

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self

from webgemma.device import Device, Plan
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config, Drafter, text_tensors
from webgemma.gemma.drafter_config import read_ordering
from webgemma.gemma.lora_weights import Choice, LoraWeights, ScaledAdapter
from webgemma.gemma.matrices import Matrices, Weight, record_repack, whole_words
from webgemma.gemma.record.loop_limits import MAX_ROW
from webgemma.gemma.tensors import canonical_tensors, check_rope_factors, read_floats
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Recorder, Tensor

PLE_TABLE = "per_layer_token_embd.weight"
ONE = "one"  # a scale for layers that have none
BRANCH_NORMS, JOIN_NORMS = "blk.{}.branch_norms", "blk.{}.join_norms"  # derived: see Model
HEAD_DIMS = (16, 32, 64, 128, 256, 512)  # that attention_decode.wgsl supports
SAMPLE_NBYTES = 1 << 16  # of a tensor, for the fingerprint
BATCH_ROWS = 512  # of a table on the host that the device gets at a time: the largest batch

TableLocation = Literal["device", "host"]


class Model(Matrices):
    """A configuration and its weights on a device, named as in the file."""

    def __init__(self, config: Config, device: Device) -> None:
        super().__init__(device)
        self.config = config
        self.lora = LoraWeights(device, config, self.matrices)
        self.name = ""  # of its file
        self._fingerprint = ""
        self.table: HostTable | None = None  # if the per-layer embeddings stay in the file
        self.drafter: DrafterModel | None = None  # which guesses the tokens that follow
        self.head_norms: dict[int, Tensor] = {}  # of each layer: q_norm, scaled, then k_norm
        self.branch_norms: dict[int, Tensor] = {}  # of layers with experts: see next_norms/three
        self.join_norms: dict[int, Tensor] = {}  # of the branches' outputs: see added/two
        self.rotations: dict[bool, Tensor] = {}  # of sliding and full layers: see rope/fixed_point

    @classmethod
    async def load(
        cls,
        gguf: Gguf,
        config: Config,
        device: Device,
        progress: Callable[[int], None] | None = None,
        *,
        table: TableLocation = "device",
    ) -> Self:
        """Allocate and load every tensor: `allocate_all`, `derive`, `load_all`."""
        model = cls.allocate_all(gguf, config, device, table=table)
        await model.derive(gguf)
        await model.load_all(gguf, progress)
        return model

    @classmethod
    def allocate_all(
        cls, gguf: Gguf, config: Config, device: Device, *, table: TableLocation = "device"
    ) -> Self:
        """Return a model whose memory is allocated but not loaded; DeviceError if it is too small.

        The `table` of per-layer embeddings may stay in the file, which must then stay open."""
        if table not in ("device", "host"):
            raise InputError(f"The table cannot be on {table!r}; use device or host.")
        check_kernels_fit(gguf, config, device)
        model = cls(config, device)
        model.name = gguf.name
        try:
            used = used_tensors(gguf, config)
            model.allocate_vectors(vector_sizes(used, config))
            model.one = model.vectors[ONE]
            model.write_vector(ONE, [1.0])
            for name, tensors in stacks(used).items():
                if name == PLE_TABLE and table == "host":
                    model.table = HostTable(model, gguf, tensors[0])
                    model.matrices[name] = model.table.weight
                else:
                    model.allocate(name, tensors)
        except BaseException:
            model.close()
            raise
        return model

    async def load_all(self, gguf: Gguf, progress: Callable[[int], None] | None = None) -> None:
        """Load every tensor, chunk by chunk; the model is closed if that fails."""
        try:
            for name, tensors in stacks(used_tensors(gguf, self.config)).items():
                if not (name == PLE_TABLE and self.table):
                    await self.load_tensors(gguf, name, tensors)
                if progress is not None:
                    progress(sum(tensor.nbytes for tensor in tensors))
            self._fingerprint = await _fingerprint(gguf, self.config)
            await self.wait_until_loaded()
        except BaseException:
            self.close()
            raise

    def set_adapters(
        self,
        always: Sequence[ScaledAdapter] | None = None,
        named: Mapping[str, ScaledAdapter] | None = None,
    ) -> None:
        """Apply these adapters from now on, and attach others that conversations may choose.

        They replace those before; None: those stay. Sessions start over: what they have read was
        read without them."""
        if self.closed:
            raise InputError("The model is closed: load it again.")
        adapters = self.lora.adapters.changed(always, named)
        lora = LoraWeights(self.device, self.config, self.matrices, adapters)
        self.lora.close()
        self.lora = lora

    @property
    def fingerprint(self) -> str:
        """Identifies this model with the adapters that are always applied."""
        return self.fingerprint_with({})

    def fingerprint_with(self, choice: Choice) -> str:
        """Identify this model with the adapters that a conversation applies."""
        return self._fingerprint + self.lora.digest(choice)

    @property
    def head(self) -> Weight:
        """The matrix that turns states into logits; the embedding table, if that is tied."""
        return self.matrices["token_embd.weight" if self.config.tied else "output.weight"]

    async def derive(self, gguf: Gguf) -> None:
        """Compute what kernels need in another form; then plans can be recorded."""
        try:
            await self._derive(gguf, canonical_tensors(gguf))
        except BaseException:
            self.close()
            raise

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        for layer in self.config.layers:
            name = f"blk.{layer.index}."
            norms = await read_floats(gguf, tensors[name + "attn_q_norm.weight"])
            norms = [self.config.query_scale * weight for weight in norms]
            if not layer.shares_kv:
                norms += await read_floats(gguf, tensors[name + "attn_k_norm.weight"])
            self.head_norms[layer.index] = self.vector_of(norms)
            if layer.experts:
                await self._derive_expert_norms(gguf, tensors, layer.index)
        factors = tensors.get("rope_freqs.weight")
        for sliding in {layer.sliding for layer in self.config.layers}:
            size = next(x.head_dim for x in self.config.layers if x.sliding == sliding)
            base = self.config.rope_base_sliding if sliding else self.config.rope_base
            divisors = [1.0] * (size // 2)
            if not sliding:
                rotated = int(self.config.rope_share * (size // 2))
                divisors = [self.config.rope_scale] * rotated + [math.inf] * (size // 2 - rotated)
                if factors is not None and self.config.rope_share < 1:
                    divisors = check_rope_factors(gguf, await read_floats(gguf, factors))
            frequencies = [base ** (-2 * j / size) / divisors[j] for j in range(size // 2)]
            packed = packed_rotations(frequencies)
            self.rotations[sliding] = self.memory.upload(packed, size // 2, 2, label="rotations")

    async def _derive_expert_norms(
        self, gguf: Gguf, tensors: dict[str, TensorInfo], index: int
    ) -> None:
        """Join the norms of the three branches' inputs, and those of the two branches' outputs."""

        async def norm(name: str) -> list[float]:
            return await read_floats(gguf, tensors[f"blk.{index}.{name}"])

        shrink = 1 / math.sqrt(self.config.width)
        router = [shrink * scale for scale in await norm("ffn_gate_inp.scale")]
        inputs = await norm("ffn_norm.weight") + await norm("pre_ffw_norm_2.weight") + router
        outputs = await norm("post_ffw_norm_1.weight") + await norm("post_ffw_norm_2.weight")
        for kind, values in ((BRANCH_NORMS, inputs), (JOIN_NORMS, outputs)):
            self.write_vector(kind.format(index), values)
        self.branch_norms[index] = self.vectors[BRANCH_NORMS.format(index)]
        self.join_norms[index] = self.vectors[JOIN_NORMS.format(index)]

    def close(self) -> None:
        """Free the memory."""
        if self.table is not None:
            self.table.close()
        self.table = None
        if self.drafter is not None:
            self.drafter.close()
        self.lora.close()
        super().close()


class DrafterModel(Model):
    """The weights of a drafter."""

    def __init__(self, config: Config, device: Device) -> None:
        assert config.drafter is not None
        super().__init__(config, device)
        self.drafter_config: Drafter = config.drafter
        self.ordering: Tensor | None = None  # the ids of all clusters, if there are some

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        await super()._derive(gguf, tensors)
        if self.drafter_config.centroids:
            ids = await read_ordering(gguf, self.config)
            self.ordering = self.memory.upload(ids.tobytes(), len(ids), label="clusters")


class HostTable:
    """A table that stays in its file: the rows of each batch are uploaded."""

    def __init__(self, model: Model, gguf: Gguf, tensor: TensorInfo) -> None:
        self._device = model.device
        self._gguf = gguf
        self._tensor = tensor
        fmt, width = tensor.format, tensor.width
        part = model.allocate_part(tensor.name, fmt, width, 0, BATCH_ROWS)
        self.weight = Weight(tensor.name, fmt, width, BATCH_ROWS, (part,))
        self.ids = model.memory.tensor(BATCH_ROWS, label="row ids")  # of each token's row
        self._rows = part.data  # as they are in the file
        if fmt.planes:
            nbytes = BATCH_ROWS * fmt.row_nbytes(width)
            self._rows = Tensor((nbytes,), nbytes, model.memory.buffer(nbytes, "rows"))
        self._plans: dict[int, Plan] = {}

    async def upload(self, ids: Sequence[int]) -> None:
        """Upload the rows of these tokens for the next submitted plan; equal tokens share one."""
        assert len(ids) <= BATCH_ROWS
        indices = {token: index for index, token in enumerate(dict.fromkeys(ids))}
        nbytes = self._tensor.format.row_nbytes(self._tensor.width)
        rows = [await self._gguf.read(self._tensor, token * nbytes, nbytes) for token in indices]
        # No await from here on: another session's upload must not come between.
        self._device.write(self._rows.buffer, whole_words(b"".join(rows)))
        packed = struct.pack(f"<{len(ids)}I", *(indices[token] for token in ids))
        self._device.write(self.ids.buffer, packed)
        if self._tensor.format.planes:
            self._device.run(self._repacking(len(rows)))

    def _repacking(self, rows: int) -> Plan:
        """Return a plan that moves at least so many rows to their planes."""
        rows = 1 << (rows - 1).bit_length()  # a few plans serve all batches
        if rows not in self._plans:
            recorder = Recorder(self._device)
            blocks = rows * self._tensor.width // self._tensor.format.block
            part, fmt = self.weight.parts[0], self._tensor.format
            record_repack(recorder, self._rows, blocks, part, fmt)
            self._plans[rows] = recorder.plan()
        return self._plans[rows]

    def close(self) -> None:
        """Free the plans; all other memory is the model's."""
        for plan in self._plans.values():
            plan.close(self._device)
        self._plans.clear()


def packed_rotations(frequencies: Sequence[float]) -> bytes:
    """Return RoPE frequencies (radians per position) as 64-bit fractions of a revolution."""
    words: list[int] = []
    for frequency in frequencies:
        words += divmod(round(frequency / (2 * math.pi) * 2**64) % 2**64, 2**32)
    return struct.pack(f"<{len(words)}I", *words)


# Which tensors are loaded, and which of them as one matrix


def weights_nbytes(gguf: Gguf, config: Config) -> tuple[int, int]:
    """Return the bytes of the table of per-layer embeddings, and of all other text tensors."""
    tensors = used_tensors(gguf, config)
    table = tensors[PLE_TABLE].nbytes if PLE_TABLE in tensors else 0
    return table, sum(tensor.nbytes for tensor in tensors.values()) - table


def used_tensors(gguf: Gguf, config: Config) -> dict[str, TensorInfo]:
    """Return the tensors of the text model."""
    tensors = canonical_tensors(gguf)
    names = [name for name, _, _ in text_tensors(config)]
    return {name: tensors[name] for name in names if name in tensors}


def vector_sizes(tensors: dict[str, TensorInfo], config: Config) -> dict[str, int]:
    """Return how many values each vector has: of the file, and derived ones."""
    sizes = {ONE: 1}
    sizes |= {name: tensor.weights for name, tensor in tensors.items() if len(tensor.shape) == 1}
    for layer in config.layers:
        if layer.experts:
            sizes[BRANCH_NORMS.format(layer.index)] = 3 * config.width
            sizes[JOIN_NORMS.format(layer.index)] = 2 * config.width
    return sizes


def stacks(tensors: dict[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the tensors to load; those that are always used together are stacked if possible."""
    found = {name: [tensor] for name, tensor in tensors.items()}
    for name in tensors:
        if name.endswith(".attn_q.weight"):
            _stack(found, name, "attn_q", "attn_qkv", ("attn_k", "attn_v"))
        elif name.endswith(".ffn_gate.weight"):
            _stack(found, name, "ffn_gate", "ffn_gate_up", ("ffn_up",))
    return found


def _stack(
    stacks: dict[str, list[TensorInfo]], name: str, old: str, new: str, others: tuple[str, ...]
) -> None:
    """Stack as many of the others under the first as have its format and block alignment."""
    stack = stacks.pop(name)
    for other in others:
        below = stacks.get(name.replace(old, other))
        if below is None or below[0].format != stack[0].format:
            break
        if stack[-1].weights // stack[-1].format.block % 16:
            break  # a plane's chunk would begin within a word
        stack += stacks.pop(name.replace(old, other))
    stacks[name.replace(old, new)] = stack


def check_kernels_fit(gguf: Gguf, config: Config, device: Device) -> None:
    """Raise DeviceError for shapes that no Gemma has and that the kernels do not support."""
    for layer in config.layers:
        if layer.head_dim not in HEAD_DIMS:
            raise DeviceError(
                f"{gguf.name}: the GPU kernels support heads of {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} "
                f"dimensions, not {layer.head_dim}",
                "use device='cpu'",
            )
    for name, tensor in used_tensors(gguf, config).items():
        if len(tensor.shape) > 1 and tensor.width % 4:
            raise DeviceError(
                f"{gguf.name}: the rows of {name} have {tensor.width} weights, but the GPU kernels "
                "read four at a time",
                "use device='cpu'",
            )
        if len(tensor.shape) > 1 and tensor.width > MAX_ROW and device.software:
            raise DeviceError(
                f"{gguf.name}: the rows of {name} have {tensor.width} weights, but {device.name} "
                f"is a software GPU that sums at most {MAX_ROW}",
                "use device='cpu'",
            )


async def _fingerprint(gguf: Gguf, config: Config) -> str:
    """Return a digest of some numbers, the tensor table and samples of one layer's tensors."""
    tensors = used_tensors(gguf, config)
    digest = hashlib.sha256()
    numbers = (config.window, config.eps, config.rope_base, config.rope_base_sliding)
    digest.update(f"{numbers}\n".encode())
    if config.rope_scale != 1:
        digest.update(f"{config.rope_scale}\n".encode())
    for name, tensor in tensors.items():
        entry = f"{name} {tensor.shape} {tensor.format.name} {tensor.part} {tensor.offset}\n"
        digest.update(entry.encode())
    middle = f"blk.{len(config.layers) // 2}."
    for name, tensor in tensors.items():
        if name.startswith((middle, "token_embd.")):
            nbytes = min(tensor.nbytes, SAMPLE_NBYTES)
            digest.update(await gguf.read(tensor, 0, nbytes))
            digest.update(await gguf.read(tensor, tensor.nbytes - nbytes, nbytes))
    return digest.hexdigest()
