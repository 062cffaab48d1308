"""LoRA adapters on a device: for each matrix the A and B of all adapters that are applied to it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from webgemma.device import Device
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.matrices import Weight, packed_floats
from webgemma.graph import BufferPool, Tensor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
RANKS_AT_ONCE = 4  # that a workgroup computes; ranks are padded to a multiple of them


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
ScaledPair = tuple[LoraPair, float]


class Member(NamedTuple):
    """One of the matrices that are stacked into one on the device."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class LoraWeight:
    """What all adapters together add to a matrix: their ranks side by side, padded with zeros."""

    a: Tensor  # [segments * ranks, inputs]
    b: Tensor  # [rows, ranks]
    scales: Tensor  # [segments * ranks]
    ranks: int
    firsts: tuple[int, ...]  # the row at which each segment begins: one for each member

    def segments(self) -> dict[str, int]:
        """Return where the segments of the rows begin, as the kernels' parameters."""
        second, third = (*self.firsts[1:], 1 << 31, 1 << 31)[:2]
        return {"second": second, "third": third, "segments": len(self.firsts)}


class LoraWeights:
    """All adapters that are applied to a model, in the device's memory."""

    def __init__(
        self,
        device: Device,
        config: Config,
        matrices: Mapping[str, Weight],
        adapters: Sequence[ScaledAdapter] = (),
    ) -> None:
        self._matrices = matrices
        self._memory = BufferPool(device)
        self.weights: dict[str, LoraWeight] = {}  # by the name of the device's matrix
        self.embedding: LoraWeight | None = None
        applied = [(pairs, scale) for pairs, scale in adapters if pairs and scale]
        self.digest = _digest(applied)
        try:
            self._upload_all(config, applied)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        self.weights.clear()
        self.embedding = None

    def _upload_all(self, config: Config, adapters: list[ScaledAdapter]) -> None:
        left = {name for pairs, _ in adapters for name in pairs}
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
                f"An adapter changes {min(left)}, which the GPU cannot adapt; use device='cpu'."
            )

    def _matrix(
        self, matrix: str, members: list[Member], adapters: list[ScaledAdapter]
    ) -> LoraWeight:
        found = [_pairs_of(member.name, adapters) for member in members]
        ranks = _padded(max(sum(pair.rank for pair, _ in pairs) for pairs in found))
        inputs = self._matrices[matrix].width
        a, b, scales = bytearray(), bytearray(), list[float]()
        for member, pairs in zip(members, found, strict=True):
            rows = b"".join(pair.a for pair, _ in pairs)
            a += rows + bytes(4 * ranks * inputs - len(rows))
            b += _side_by_side([(pair.b, pair.rank) for pair, _ in pairs], member.rows, ranks)
            scales += _scales(pairs, ranks)
        firsts = [sum(member.rows for member in members[:at]) for at in range(len(members))]
        return LoraWeight(
            self._upload(a, len(scales), inputs),
            self._upload(b, len(b) // (4 * ranks), ranks),
            self._upload(packed_floats(scales), len(scales)),
            ranks,
            tuple(firsts),
        )

    def _experts(self, pairs: list[ScaledPair]) -> LoraWeight:
        """Upload A [experts, ranks, inputs] and B [experts, outputs, ranks], as one column each."""
        first = pairs[0][0]
        ranks = _padded(sum(pair.rank for pair, _ in pairs))
        rows = bytearray()
        for expert in range(first.experts):
            own = [_expert_share(pair.a, expert, first.experts) for pair, _ in pairs]
            rows += b"".join(own) + bytes(4 * ranks * first.inputs - sum(map(len, own)))
        outputs = first.experts * first.outputs
        b = _side_by_side([(pair.b, pair.rank) for pair, _ in pairs], outputs, ranks)
        return LoraWeight(
            self._upload(rows, first.experts * ranks, first.inputs),
            self._upload(b, outputs, ranks),
            self._upload(packed_floats(_scales(pairs, ranks)), ranks),
            ranks,
            (0,),
        )

    def _embedding(self, pairs: list[ScaledPair]) -> LoraWeight:
        ranks = _padded(sum(pair.rank for pair, _ in pairs))
        tokens, width = pairs[0][0].inputs, pairs[0][0].outputs
        a = _side_by_side([(pair.a, pair.rank) for pair, _ in pairs], tokens, ranks)
        b = _side_by_side([(pair.b, pair.rank) for pair, _ in pairs], width, ranks)
        return LoraWeight(
            self._upload(a, tokens, ranks),
            self._upload(b, width, ranks),
            self._upload(packed_floats(_scales(pairs, ranks)), ranks),
            ranks,
            (0,),
        )

    def _upload(self, data: bytes | bytearray, *shape: int) -> Tensor:
        device = self._memory.device
        if len(data) > device.limits.binding_nbytes:
            raise DeviceError(
                f"{device.name} binds at most {device.limits.binding_nbytes} bytes to a kernel, "
                f"and an adapter needs {len(data)}; use a lower rank."
            )
        return self._memory.upload(data, *shape, label="LoRA adapter")


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


def _pairs_of(name: str, adapters: list[ScaledAdapter]) -> list[ScaledPair]:
    return [(pairs[name], scale) for pairs, scale in adapters if name in pairs]


def _scales(pairs: list[ScaledPair], ranks: int) -> list[float]:
    """Return the scale of every rank, zero for padded ones."""
    scales = [scale * pair.scale for pair, scale in pairs for _ in range(pair.rank)]
    return scales + [0.0] * (ranks - len(scales))


def _expert_share(data: bytes, expert: int, experts: int) -> bytes:
    size = len(data) // experts
    return data[expert * size : (expert + 1) * size]


def _padded(ranks: int) -> int:
    return ranks + -ranks % RANKS_AT_ONCE


def _side_by_side(columns: list[tuple[bytes, int]], rows: int, width: int) -> bytes:
    """Join matrices of so many rows side by side, padded to the width with zeros."""
    if len(columns) == 1 and columns[0][1] == width:
        return columns[0][0]
    joined, first = array("I", bytes(4 * rows * width)), 0
    for data, own in columns:
        words = array("I", data)
        for column in range(own):
            joined[first + column :: width] = words[column::own]
        first += own
    return joined.tobytes()


def _digest(adapters: list[ScaledAdapter]) -> str:
    """Identify the applied adapters; empty when there are none."""
    if not adapters:
        return ""
    digest = hashlib.sha256()
    for pairs, scale in adapters:
        for name, pair in sorted(pairs.items()):
            digest.update(f"{name} {pair.rank} {pair.scale * scale!r}\n".encode())
            digest.update(pair.a)
            digest.update(pair.b)
    return digest.hexdigest()
