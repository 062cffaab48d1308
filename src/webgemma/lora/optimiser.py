"""The numbers that are trained, with their gradients and moments, and AdamW, which updates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from webgemma.device import Buffer, Device, Plan
from webgemma.errors import InputError
from webgemma.graph import BufferPool, Recorder, Tensor, folded
from webgemma.lora.adapter import Adapter, Pair

SLAB_NBYTES = 64 << 20  # of one buffer, at most: every device can bind so much to a kernel
ALIGNMENT = 256  # of bindings
THREADS, EACH = 256, 64  # of a workgroup that sums squares, and the values of each thread


@dataclass(frozen=True, slots=True)
class Slab:
    """The numbers of several pairs, one after the other, so that few dispatches update all."""

    values: Buffer
    gradients: Buffer
    means: Buffer
    squares: Buffer

    @property
    def nbytes(self) -> int:
        """Bytes of each buffer."""
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class TrainedPair:
    """A pair on the device: A [rank, inputs] and B [outputs, rank], with their gradients."""

    pair: Pair
    index: int  # among all pairs
    slab: Slab
    a: Tensor
    b: Tensor
    a_gradient: Tensor
    b_gradient: Tensor

    def halves(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        """Return A and B with the names that files use."""
        return ("lora_a", self.a), ("lora_b", self.b)


class Parameters:
    """All pairs of an adapter on a device, by the names of their matrices."""

    def __init__(self, device: Device, adapter: Adapter) -> None:
        self.device = device
        self.adapter = adapter
        self.slabs: list[Slab] = []
        self.pairs: dict[str, TrainedPair] = {}
        self._memory = BufferPool(device)
        try:
            for group, nbytes in _groups(adapter):
                labels = ("adapter", "gradients", "means", "squares")
                slab = Slab(*(self._memory.buffer(nbytes, label) for label in labels))
                self.slabs.append(slab)
                self._upload(slab, group)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        return self.adapter.nbytes // 4

    async def read(self) -> Adapter:
        """Return the adapter as it is now."""
        data = {slab.values: await self.device.read(slab.values).bytes() for slab in self.slabs}
        pairs = {}
        for name, trained in self.pairs.items():
            values = data[trained.slab.values]
            a, b = (values[t.offset : t.offset + t.nbytes] for t in (trained.a, trained.b))
            pairs[name] = replace(trained.pair, a=a, b=b)
        return replace(self.adapter, pairs=pairs)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        self.slabs.clear()
        self.pairs.clear()

    def _upload(self, slab: Slab, group: list[tuple[str, Pair]]) -> None:
        at, values = 0, bytearray(slab.nbytes)
        for name, pair in group:
            ranges = []
            for data in (pair.a, pair.b):
                values[at : at + len(data)] = data
                ranges.append((at, len(data)))
                at += _aligned(len(data))
            tensors = [
                Tensor((nbytes // 4,), nbytes, buffer, offset)
                for buffer in (slab.values, slab.gradients)
                for offset, nbytes in ranges
            ]
            self.pairs[name] = TrainedPair(pair, len(self.pairs), slab, *tensors)
        self.device.write(slab.values, bytes(values))


def _groups(adapter: Adapter) -> Iterator[tuple[list[tuple[str, Pair]], int]]:
    """Yield the pairs that share a slab, and its size."""
    group: list[tuple[str, Pair]] = []
    total = 0
    for name, pair in adapter.pairs.items():
        nbytes = _aligned(len(pair.a)) + _aligned(len(pair.b))
        if group and total + nbytes > SLAB_NBYTES:
            yield group, total
            group, total = [], 0
        group.append((name, pair))
        total += nbytes
    if group:
        yield group, total


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


@dataclass(frozen=True, slots=True)
class AdamW:
    """The constants of AdamW; the learning rate comes with every step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    max_norm: float = 1.0  # of all gradients together

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps > 0):
            raise InputError("AdamW's betas must be from 0 to below 1, its eps above 0.")
        if not (self.decay >= 0 and self.max_norm > 0):
            raise InputError("The weight decay must be 0 or more, the clipping norm above 0.")

    def corrections(self, step: int) -> dict[str, float]:
        """Return by what the moments are biased after so many steps: 1 - beta^step of each."""
        return {
            "mean_correction": 1 - self.beta1**step,
            "square_correction": 1 - self.beta2**step,
        }

    def plan(self, parameters: Parameters, training_step: Tensor, norm: Tensor) -> Plan:
        """Return the update of all parameters; `norm` becomes that of the gradients, unclipped."""
        recorder = Recorder(parameters.device)
        counts = [slab.nbytes // 4 for slab in parameters.slabs]
        groups = [-(-count // (THREADS * EACH)) for count in counts]
        sums = recorder.scratch(sum(groups))
        for i, slab in enumerate(parameters.slabs):
            recorder.call(
                "sum_squares",
                (groups[i],),
                x=_whole(slab.gradients),
                sums=sums,
                count=counts[i],
                first=sum(groups[:i]),
                THREADS=THREADS,
                EACH=EACH,
            )
        total = sum(groups)
        recorder.call("gradient_norm", (1,), sums=sums, norm=norm, count=total, THREADS=THREADS)
        for slab, count in zip(parameters.slabs, counts, strict=True):
            recorder.call(
                "adamw",
                folded(-(-count // THREADS)),
                training_step=training_step,
                norm=norm,
                w=_whole(slab.values),
                gradient=_whole(slab.gradients),
                means=_whole(slab.means),
                squares=_whole(slab.squares),
                count=count,
                beta1=float(self.beta1),
                beta2=float(self.beta2),
                eps=float(self.eps),
                decay=float(self.decay),
                max_norm=float(self.max_norm),
                THREADS=THREADS,
            )
        return recorder.plan()


def _whole(buffer: Buffer) -> Tensor:
    return Tensor((buffer.nbytes // 4,), buffer.nbytes, buffer)
