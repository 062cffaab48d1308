"""LoRA adapters on a device: for each matrix the A and B of all adapters that change it.

How strongly an adapter is applied is not a matter of the weights: the conversation of each slot has
a scale for every adapter, in a table that the kernels read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from webgemma.device import Device
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.matrices import Weight, packed_floats
from webgemma.graph import BufferPool, Tensor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
RANKS_AT_ONCE = 4  # that a workgroup computes; ranks are padded to a multiple of them
LARGEST_SCALE = 3.4e38  # in float32


class LoraPair(Protocol):
    """A and B of one matrix, row by row in float32; the embedding's A has a row for each token."""

    @property
    def a(self) -> bytes: ...
    @property
    def b(self) -> bytes: ...
    @property
    def rank(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def experts(self) -> int: ...


ScaledAdapter = tuple[Mapping[str, LoraPair], float]  # pairs by the names of their tensors; a scale
Choice = Mapping[str, float]  # adapters by their names, each with a factor of its scale
NO_CHOICE: Choice = MappingProxyType({})
OwnedPair = tuple[LoraPair, int]  # with the index of its adapter


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model: some are always applied, others where a conversation chooses so."""

    always: Sequence[ScaledAdapter] = ()
    named: Mapping[str, ScaledAdapter] = field(default_factory=dict)

    def changed(
        self,
        always: Sequence[ScaledAdapter] | None = None,
        named: Mapping[str, ScaledAdapter] | None = None,
    ) -> Adapters:
        """Return adapters of which these are others; None: those stay."""
        return Adapters(
            self.always if always is None else [each for each in always if each[0] and each[1]],
            self.named if named is None else dict(named),
        )

    def scaled(self, choice: Choice) -> list[ScaledAdapter]:
        """Return all adapters with the scales of a conversation that has chosen these."""
        for name in choice:
            if name not in self.named:
                known = ", ".join(self.named) or "none"
                raise InputError(f"There is no adapter {name!r}; those attached: {known}.")
        named = self.named.items()
        return [
            *self.always,
            *((pairs, scale * choice.get(name, 0.0)) for name, (pairs, scale) in named),
        ]


class Member(NamedTuple):
    """One of the matrices that are stacked into one on the device."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class LoraWeight:
    """What all adapters may add to a matrix: their ranks side by side, each padded with zeros.

    So a kernel takes RANKS_AT_ONCE ranks of one adapter, and skips those that no row applies; what
    an adapter adds does not depend on which others there are."""

    a: Tensor  # [segments * ranks, inputs]
    b: Tensor  # [rows, ranks]
    columns: Tensor  # [segments * ranks / RANKS_AT_ONCE], u32: where their scales are
    ranks: int
    firsts: tuple[int, ...]  # the row at which each segment begins: one for each member

    def segments(self) -> dict[str, int]:
        """Return where the segments of the rows begin, as the kernels' parameters."""
        second, third = (*self.firsts[1:], 1 << 31, 1 << 31)[:2]
        return {"second": second, "third": third, "segments": len(self.firsts)}


@dataclass(frozen=True, slots=True)
class AppliedLora:
    """Adapters as a pass applies them: to each row with the scales of its slot."""

    weights: Mapping[str, LoraWeight]  # by the name of the device's matrix
    embedding: LoraWeight | None
    scales: Tensor  # [slots, columns]


class LoraWeights:
    """All adapters of a model, in the device's memory."""

    def __init__(
        self,
        device: Device,
        config: Config,
        matrices: Mapping[str, Weight],
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters = adapters or Adapters()
        self.device = device
        self._matrices = matrices
        self._memory = BufferPool(device)
        self._columns: dict[tuple[int, float], int] = {}  # by an adapter and a scale of its pairs
        self.weights: dict[str, LoraWeight] = {}  # by the name of the device's matrix
        self.embedding: LoraWeight | None = None
        self._digest = _digest(adapters.always)
        self._digests = {name: _digest([each]) for name, each in adapters.named.items()}
        try:
            self._upload_all(config, [pairs for pairs, _ in adapters.scaled({})])
        except BaseException:
            self.close()
            raise

    @property
    def columns(self) -> int:
        """How many scales a conversation has; 0 without adapters."""
        return len(self._columns)

    def scales(self, choice: Choice) -> list[float]:
        """Return the scales of a conversation that has chosen these adapters: [columns]."""
        scaled = self.adapters.scaled(choice)
        scales = [scaled[adapter][1] * own for adapter, own in self._columns]
        if max(map(abs, scales), default=0.0) > LARGEST_SCALE:
            raise InputError("The scale of an adapter is too large for float32: use less.")
        return scales

    def applies(self, choice: Choice) -> bool:
        """Return whether such a conversation needs a pass with adapters.

        One without, which chooses none, is computed in either as it is alone. Only products of
        adapted experts are divided in another way: with those it is always the same pass."""
        experts = any(name.endswith("_exps.weight") for name in self.weights)
        return experts or any(self.scales(choice))

    def digest(self, choice: Choice) -> str:
        """Identify the adapters that are applied; empty if there are none."""
        chosen = sorted((self._digests.get(name, ""), factor) for name, factor in choice.items())
        return self._digest + "".join(f"{digest}{factor!r}" for digest, factor in chosen)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        self.weights.clear()
        self.embedding = None

    def _upload_all(self, config: Config, adapters: list[Mapping[str, LoraPair]]) -> None:
        left = {name for pairs in adapters for name in pairs}
        for matrix, members in matrix_members(config, self._matrices) if left else ():
            if left & {member.name for member in members}:
                self.weights[matrix] = self._matrix(matrix, members, adapters)
                left -= {member.name for member in members}
        for name in sorted(left):
            if name.endswith("_exps.weight") and name in self._matrices:
                self.weights[name] = self._experts(_pairs_of(name, adapters))
                left.remove(name)
        if EMBEDDING in left:
            self.embedding = self._embedding(_pairs_of(EMBEDDING, adapters))
            left.remove(EMBEDDING)
        if left:
            raise InputError(
                f"An adapter changes {min(left)}, which the GPU cannot adapt", "use device='cpu'"
            )

    def _matrix(
        self, matrix: str, members: list[Member], adapters: list[Mapping[str, LoraPair]]
    ) -> LoraWeight:
        found = [_pairs_of(member.name, adapters) for member in members]
        ranks = max(_ranks(pairs) for pairs in found)
        inputs = self._matrices[matrix].width
        a, b, columns = bytearray(), bytearray(), list[int]()
        for member, pairs in zip(members, found, strict=True):
            rows = _on_top([(pair.a, pair.rank) for pair, _ in pairs])
            a += rows + bytes(4 * ranks * inputs - len(rows))
            b += _side_by_side([(pair.b, pair.rank) for pair, _ in pairs], member.rows, ranks)
            columns += self._columns_of(pairs, ranks)
        firsts = [sum(member.rows for member in members[:at]) for at in range(len(members))]
        return self._weight(a, b, columns, ranks, inputs, tuple(firsts))

    def _experts(self, pairs: list[OwnedPair]) -> LoraWeight:
        """Upload A [experts, ranks, inputs] and B [experts, outputs, ranks], as one column each."""
        first, ranks = pairs[0][0], _ranks(pairs)
        a = bytearray()
        for expert in range(first.experts):
            a += _on_top(
                [(_expert_share(pair.a, expert, first.experts), pair.rank) for pair, _ in pairs]
            )
        outputs = first.experts * first.outputs
        b = _side_by_side([(pair.b, pair.rank) for pair, _ in pairs], outputs, ranks)
        return self._weight(a, b, self._columns_of(pairs, ranks), ranks, first.inputs)

    def _embedding(self, pairs: list[OwnedPair]) -> LoraWeight:
        """Upload A [tokens, ranks] and B [width, ranks]."""
        ranks, (tokens, width) = _ranks(pairs), (pairs[0][0].inputs, pairs[0][0].outputs)
        a = _side_by_side([(pair.a, pair.rank) for pair, _ in pairs], tokens, ranks)
        b = _side_by_side([(pair.b, pair.rank) for pair, _ in pairs], width, ranks)
        return self._weight(a, b, self._columns_of(pairs, ranks), ranks, ranks)

    def _columns_of(self, pairs: list[OwnedPair], ranks: int) -> list[int]:
        """Return where the scales of so many ranks are, RANKS_AT_ONCE at a time."""
        columns = list[int]()
        for pair, adapter in pairs:
            column = self._columns.setdefault((adapter, pair.scale), len(self._columns))
            columns += [column] * (_padded(pair.rank) // RANKS_AT_ONCE)
        return columns + [0] * (ranks // RANKS_AT_ONCE - len(columns))  # whose A and B are zero

    def _weight(
        self,
        a: bytes | bytearray,
        b: bytes | bytearray,
        columns: list[int],
        ranks: int,
        a_width: int,
        firsts: tuple[int, ...] = (0,),
    ) -> LoraWeight:
        return LoraWeight(
            self._upload(a, len(a) // (4 * a_width), a_width),
            self._upload(b, len(b) // (4 * ranks), ranks),
            self._upload(array("I", columns).tobytes(), len(columns)),
            ranks,
            firsts,
        )

    def _upload(self, data: bytes | bytearray, *shape: int) -> Tensor:
        device = self._memory.device
        if len(data) > device.limits.binding_nbytes:
            raise DeviceError(
                f"{device.name} binds at most {device.limits.binding_nbytes} bytes to a kernel, "
                f"and an adapter needs {len(data)}; use a lower rank."
            )
        return self._memory.upload(data, *shape, label="LoRA adapter")


class LoraScales:
    """The scales with which the conversation of each slot applies a model's adapters."""

    def __init__(self, lora: LoraWeights, slots: int) -> None:
        self._memory = BufferPool(lora.device)
        self._slots = slots
        self.follow(lora)

    def follow(self, lora: LoraWeights) -> None:
        """Hold the scales of other adapters, which are to be set."""
        self._memory.close()
        self.lora = lora
        self.applied: AppliedLora | None = None  # without adapters, nothing is
        if lora.columns:
            scales = self._memory.tensor(self._slots, lora.columns, label="LoRA scales")
            self.applied = AppliedLora(lora.weights, lora.embedding, scales)

    def set(self, slot: int, choice: Choice) -> None:
        """Let the conversation of a slot apply the adapters that it has chosen."""
        scales = packed_floats(self.lora.scales(choice))
        if self.applied:
            self.lora.device.write(self.applied.scales.buffer, scales, slot * len(scales))

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()


def matrix_members(
    config: Config, matrices: Mapping[str, Weight]
) -> Iterator[tuple[str, list[Member]]]:
    """Yield each matrix on the device that can be adapted, and the file's matrices in its stack."""
    yield EMBEDDING if config.tied else HEAD, [Member(HEAD, config.vocab)]
    if config.ple:
        name = "per_layer_model_proj.weight"
        yield name, [Member(name, matrices[name].rows)]
    for layer in config.layers:
        stem = f"blk.{layer.index}."
        keys = layer.kv_heads * layer.head_dim
        sizes = {"attn_q": layer.heads * layer.head_dim, "attn_k": keys, "attn_v": keys}
        sizes |= {"ffn_gate": layer.ffn, "ffn_up": layer.ffn}
        for stack, parts in _STACKS.items():
            weight, members = matrices[f"{stem}{stack}.weight"], list[Member]()
            for part in parts:
                if sum(member.rows for member in members) < weight.rows:
                    members.append(Member(f"{stem}{part}.weight", sizes[part]))
            yield weight.name, members
        for part in _SINGLE:
            name = f"{stem}{part}.weight"
            if name in matrices:
                yield name, [Member(name, matrices[name].rows)]


_STACKS = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up")}
_SINGLE = (
    *("attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down", "inp_gate", "proj"),
    "ffn_gate_inp",
)


def _pairs_of(name: str, adapters: list[Mapping[str, LoraPair]]) -> list[OwnedPair]:
    return [(pairs[name], index) for index, pairs in enumerate(adapters) if name in pairs]


def _ranks(pairs: list[OwnedPair]) -> int:
    return sum(_padded(pair.rank) for pair, _ in pairs)


def _expert_share(data: bytes, expert: int, experts: int) -> bytes:
    size = len(data) // experts
    return data[expert * size : (expert + 1) * size]


def _padded(ranks: int) -> int:
    return ranks + -ranks % RANKS_AT_ONCE


def _on_top(parts: list[tuple[bytes, int]]) -> bytes:
    """Join matrices of so many rows each on top of each other, each padded with rows of zeros."""
    joined = bytearray()
    for data, own in parts:
        joined += data + bytes(len(data) // own * (_padded(own) - own))
    return bytes(joined)


def _side_by_side(columns: list[tuple[bytes, int]], rows: int, width: int) -> bytes:
    """Join matrices of so many rows side by side, each padded and all together to the width."""
    if len(columns) == 1 and columns[0][1] == width:
        return columns[0][0]
    joined, first = array("I", bytes(4 * rows * width)), 0
    for data, own in columns:
        words = array("I", data)
        for column in range(own):
            joined[first + column :: width] = words[column::own]
        first += _padded(own)
    return joined.tobytes()


def _digest(adapters: Sequence[ScaledAdapter]) -> str:
    """Identify adapters with their scales; empty when there are none."""
    if not adapters:
        return ""
    digest = hashlib.sha256()
    for pairs, scale in adapters:
        for name, pair in sorted(pairs.items()):
            digest.update(f"{name} {pair.rank} {pair.scale * scale!r}\n".encode())
            digest.update(pair.a)
            digest.update(pair.b)
    return digest.hexdigest()
