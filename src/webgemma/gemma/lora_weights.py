"""Low-rank adapters on a device: what is added to each matrix, and the steps that add it."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from webgemma.device import Buffer
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.record.quantised import pieces_of
from webgemma.graph import Tensor

if TYPE_CHECKING:
    from webgemma.gemma.record.ops import Steps
    from webgemma.gemma.weights import Model

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
EACH = 4  # ranks that a workgroup computes; there are a multiple of them
TOKENS, WIDE_TOKENS = 8, 4  # and for how many tokens of a batch; likewise on the wide side
LANES, SOFTWARE_LANES = 32, 8
WIDE_THREADS = 64


class LowRank(Protocol):
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


Scaled = tuple[Mapping[str, LowRank], float]  # an adapter by its tensors' names, and how much of it


class Member(NamedTuple):
    """One of the matrices that the device has on top of each other."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Low:
    """What adapters add to a matrix; all of them side by side, filled up with zeros."""

    a: Tensor  # [segments * ranks, inputs]
    b: Tensor  # [rows, ranks]
    scales: Tensor  # [segments * ranks]
    ranks: int
    firsts: tuple[int, ...]  # the row at which each segment begins: one for each member

    def product_params(self, first_row: int) -> list[int]:
        """What finish_adapted.wgsl wants to know of a part of the matrix."""
        second, third = (*self.firsts[1:], 1 << 31, 1 << 31)[:2]
        return [self.ranks // 4, first_row, second, third, len(self.firsts)]


class Adapters:
    """All adapters that a model has on, in the device's memory."""

    def __init__(self, model: Model, adapters: Sequence[Scaled] = ()) -> None:
        self.model = model
        self.low: dict[str, Low] = {}  # by the name of the device's matrix; a tied head's too
        self.embedding: Low | None = None
        self._buffers: list[Buffer] = []
        wanted = [(pairs, scale) for pairs, scale in adapters if pairs and scale]
        self.digest = _digest(wanted)
        try:
            self._bring(wanted)
        except BaseException:
            self.close()
            raise

    def _bring(self, adapters: list[Scaled]) -> None:
        left = {name for pairs, _ in adapters for name in pairs}
        for matrix, members in matrix_members(self.model) if left else ():
            if left & {member.name for member in members}:
                self.low[matrix] = self._low(matrix, members, adapters)
                left -= {member.name for member in members}
        for name in sorted(left):
            if name.endswith("_exps.weight") and name in self.model.matrices:
                self.low[name] = self._experts(name, adapters)
                left.remove(name)
        if EMBEDDING in left:
            self.embedding = self._embedding(adapters)
            left.remove(EMBEDDING)
        if left:
            raise InputError(
                f"An adapter changes {min(left)}, which the GPU cannot adapt; use device='cpu'."
            )

    def _low(self, matrix: str, members: list[Member], adapters: list[Scaled]) -> Low:
        found = [[(p[m.name], s) for p, s in adapters if m.name in p] for m in members]
        ranks = _padded(max(sum(pair.rank for pair, _ in pairs) for pairs in found))
        inputs = self.model.matrices[matrix].width
        a, b, scales = bytearray(), bytearray(), list[float]()
        for member, pairs in zip(members, found, strict=True):
            rows = b"".join(pair.a for pair, _ in pairs)
            a += rows + bytes(4 * ranks * inputs - len(rows))
            b += _beside([(pair.b, pair.rank) for pair, _ in pairs], member.rows, ranks)
            own = [scale * pair.scale for pair, scale in pairs for _ in range(pair.rank)]
            scales += own + [0.0] * (ranks - len(own))
        starts = [sum(member.rows for member in members[:at]) for at in range(len(members))]
        return Low(
            self._keep(a, len(scales), inputs),
            self._keep(b, len(b) // (4 * ranks), ranks),
            self._keep(struct.pack(f"<{len(scales)}f", *scales), len(scales)),
            ranks,
            tuple(starts),
        )

    def _experts(self, name: str, adapters: list[Scaled]) -> Low:
        """A [experts, ranks, inputs] and B [experts, outputs, ranks], as if in one column."""
        found = [(pairs[name], scale) for pairs, scale in adapters if name in pairs]
        pair = found[0][0]
        ranks = _padded(sum(each.rank for each, _ in found))
        rows = bytearray()
        for expert in range(pair.experts):
            own = [_share(each.a, expert, pair.experts) for each, _ in found]
            rows += b"".join(own) + bytes(4 * ranks * pair.inputs - sum(map(len, own)))
        outputs = pair.experts * pair.outputs
        scales = [scale * each.scale for each, scale in found for _ in range(each.rank)]
        scales += [0.0] * (ranks - len(scales))
        return Low(
            self._keep(rows, pair.experts * ranks, pair.inputs),
            self._keep(_beside([(e.b, e.rank) for e, _ in found], outputs, ranks), outputs, ranks),
            self._keep(struct.pack(f"<{ranks}f", *scales), ranks),
            ranks,
            (0,),
        )

    def _embedding(self, adapters: list[Scaled]) -> Low:
        found = [(pairs[EMBEDDING], scale) for pairs, scale in adapters if EMBEDDING in pairs]
        ranks = _padded(sum(pair.rank for pair, _ in found))
        tokens, width = found[0][0].inputs, found[0][0].outputs
        scales = [scale * pair.scale for pair, scale in found for _ in range(pair.rank)]
        scales += [0.0] * (ranks - len(scales))
        return Low(
            self._keep(_beside([(p.a, p.rank) for p, _ in found], tokens, ranks), tokens, ranks),
            self._keep(_beside([(p.b, p.rank) for p, _ in found], width, ranks), width, ranks),
            self._keep(struct.pack(f"<{ranks}f", *scales), ranks),
            ranks,
            (0,),
        )

    def _keep(self, data: bytes | bytearray, *shape: int) -> Tensor:
        device = self.model.device
        if len(data) > device.limits.binding_nbytes:
            raise DeviceError(
                f"A kernel sees at most {device.limits.binding_nbytes} bytes of a buffer on "
                f"{device.name}, and an adapter needs {len(data)}; take a lower rank."
            )
        buffer = device.buffer(len(data), "adapter")
        self._buffers.append(buffer)
        device.write(buffer, data)
        return Tensor(shape, len(data), buffer)

    def close(self) -> None:
        """Give the memory back."""
        while self._buffers:
            self.model.device.free(self._buffers.pop())
        self.low.clear()
        self.embedding = None


def matrix_members(model: Model) -> Iterator[tuple[str, list[Member]]]:
    """Each matrix of the device that a product can adapt, and the file's matrices it is made of."""
    matrices, config = model.matrices, model.config
    yield EMBEDDING if config.tied else HEAD, [Member(HEAD, config.vocab)]
    if config.ple:
        name = "per_layer_model_proj.weight"
        yield name, [Member(name, matrices[name].rows)]
    for layer in config.layers:
        stem = f"blk.{layer.index}."
        keys = layer.kv_heads * layer.head_dim
        sizes = {"attn_q": layer.heads * layer.head_dim, "attn_k": keys, "attn_v": keys}
        sizes |= {"ffn_gate": layer.ffn, "ffn_up": layer.ffn}
        for whole, parts in _STACKS.items():
            weight, members = matrices[f"{stem}{whole}.weight"], list[Member]()
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


def _share(data: bytes, part: int, parts: int) -> bytes:
    size = len(data) // parts
    return data[part * size : (part + 1) * size]


def _padded(ranks: int) -> int:
    return ranks + -ranks % EACH


def _beside(columns: list[tuple[bytes, int]], rows: int, width: int) -> bytes:
    """Matrices of so many rows next to each other, filled up to the width with zeros."""
    if len(columns) == 1 and columns[0][1] == width:
        return columns[0][0]
    whole, first = array("I", bytes(4 * rows * width)), 0
    for data, own in columns:
        words = array("I", data)
        for column in range(own):
            whole[first + column :: width] = words[column::own]
        first += own
    return whole.tobytes()


def _digest(adapters: list[Scaled]) -> str:
    """Tells what is on from anything else; empty when nothing is."""
    if not adapters:
        return ""
    digest = hashlib.sha256()
    for pairs, scale in adapters:
        for name, pair in sorted(pairs.items()):
            digest.update(f"{name} {pair.rank} {pair.scale * scale!r}\n".encode())
            digest.update(pair.a)
            digest.update(pair.b)
    return digest.hexdigest()


def narrow(steps: Steps, x: Tensor, low: Low) -> Tensor:
    """scales · A x: [tokens, segments * ranks]."""
    tokens, width = x.shape
    ranks = low.scales.shape[0]
    lanes = SOFTWARE_LANES if steps.software else LANES
    at_once = 1 if tokens == 1 else TOKENS
    out = steps.recorder.scratch(tokens, ranks)
    steps.call(
        "adapter_down",
        (ranks // EACH, -(-tokens // at_once)),
        [width // 4, ranks],
        *(low.a, steps.state, x, low.scales, out),
        pieces=("state", "lanes", *pieces_of("four", x)),
        THREADS=lanes,
        LANES=lanes,
        EACH=EACH,
        TOKENS=at_once,
    )
    return out


def widen(steps: Steps, y: Tensor, first: int, low: Low, inner: Tensor) -> None:
    """y += B inner, in the columns from `first` on."""
    rows, tokens = low.b.shape[0], y.shape[0]
    columns, layers = steps.fold(-(-rows // WIDE_THREADS))
    grid = (columns, -(-tokens // WIDE_TOKENS), layers)
    params = [rows, y.shape[1], first, *low.product_params(0)]
    steps.call(
        "adapter_up",
        grid,
        params,
        *(steps.state, low.b, inner, y),
        pieces=("state",),
        THREADS=WIDE_THREADS,
        TOKENS=WIDE_TOKENS,
    )


def adapt_experts(
    steps: Steps, low: Low, ids: Tensor, x: Tensor, fan: int, y: Tensor, first: int, rows: int
) -> None:
    """y += scale · B A x with each place's expert, in a place's columns from `first` on.

    `fan` places share a row of x; an expert has so many `rows`."""
    used, width = ids.shape[1], low.a.shape[1]
    places = steps.batch * used
    lanes = SOFTWARE_LANES if steps.software else LANES
    inner = steps.recorder.scratch(places, low.ranks)
    steps.call(
        "expert_adapter_down",
        (low.ranks // EACH, places),
        [width // 4, low.ranks, used, fan],
        *(low.a, steps.state, x, low.scales, ids, inner),
        pieces=("state", "lanes", *pieces_of("four", x)),
        THREADS=lanes,
        LANES=lanes,
        EACH=EACH,
    )
    steps.call(
        "expert_adapter_up",
        (-(-rows // WIDE_THREADS), places),
        [rows, y.shape[1] // used, first, low.ranks // 4, used],
        *(steps.state, low.b, ids, inner, y),
        pieces=("state",),
        THREADS=WIDE_THREADS,
    )
