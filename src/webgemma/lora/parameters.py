"""An adapter in training on a device: its numbers, their gradients and AdamW's moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from webgemma.device import Buffer, Device
from webgemma.graph import Tensor
from webgemma.lora.adapter import Adapter, Pair

SLAB_NBYTES = 64 << 20  # of neighbours in one buffer, at most: every device lets a kernel see them
PLACE_NBYTES = 256  # bindings begin at multiples of it


@dataclass(frozen=True, slots=True)
class Slab:
    """Pairs side by side, so that AdamW takes few steps: four buffers of one size."""

    values: Buffer
    gradients: Buffer
    means: Buffer
    squares: Buffer

    @property
    def nbytes(self) -> int:
        """Of each buffer."""
        return self.values.nbytes

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All numbers of each buffer."""
        a, b, c, d = (
            Tensor((buffer.nbytes // 4,), buffer.nbytes, buffer)
            for buffer in (self.values, self.gradients, self.means, self.squares)
        )
        return a, b, c, d


@dataclass(frozen=True, slots=True)
class Trained:
    """A pair on the device: A [rank, inputs] and B [outputs, rank], and where each one is."""

    pair: Pair
    number: int  # among all pairs
    a: Tensor
    b: Tensor
    a_gradient: Tensor
    b_gradient: Tensor


class Parameters:
    """All pairs of an adapter, by the names of their matrices."""

    def __init__(self, device: Device, adapter: Adapter) -> None:
        self.device = device
        self.adapter = adapter
        self.slabs: list[Slab] = []
        self.pairs: dict[str, Trained] = {}
        try:
            for group, nbytes in _groups(adapter):
                slab = self._slab(nbytes)
                self._place(slab, group)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """Numbers that are trained."""
        return self.adapter.nbytes // 4

    async def read(self) -> Adapter:
        """The adapter as it is now."""
        data = [await self.device.read(slab.values).bytes() for slab in self.slabs]
        places = {slab.values: i for i, slab in enumerate(self.slabs)}
        pairs = {}
        for name, trained in self.pairs.items():
            whole = data[places[trained.a.buffer]]
            a, b = (whole[t.offset : t.offset + t.nbytes] for t in (trained.a, trained.b))
            pairs[name] = replace(trained.pair, a=a, b=b)
        return replace(self.adapter, pairs=pairs)

    def close(self) -> None:
        """Give the memory back."""
        while self.slabs:
            slab = self.slabs.pop()
            for buffer in (slab.values, slab.gradients, slab.means, slab.squares):
                self.device.free(buffer)
        self.pairs.clear()

    def _slab(self, nbytes: int) -> Slab:
        made: list[Buffer] = []
        try:
            for label in ("adapter", "gradients", "means", "squares"):
                made.append(self.device.buffer(nbytes, label))
        except BaseException:
            for buffer in made:
                self.device.free(buffer)
            raise
        self.slabs.append(Slab(*made))
        return self.slabs[-1]

    def _place(self, slab: Slab, group: list[tuple[str, Pair]]) -> None:
        at, whole = 0, bytearray(slab.nbytes)
        for name, pair in group:
            places = []
            for data in (pair.a, pair.b):
                whole[at : at + len(data)] = data
                places.append((at, len(data)))
                at += _rounded(len(data))
            tensors = [
                Tensor((nbytes // 4,), nbytes, buffer, offset)
                for buffer in (slab.values, slab.gradients)
                for offset, nbytes in places
            ]
            self.pairs[name] = Trained(pair, len(self.pairs), *tensors)
        self.device.write(slab.values, bytes(whole))


def _groups(adapter: Adapter) -> Iterator[tuple[list[tuple[str, Pair]], int]]:
    """Pairs that share a slab, and its size."""
    group: list[tuple[str, Pair]] = []
    total = 0
    for name, pair in adapter.pairs.items():
        nbytes = _rounded(len(pair.a)) + _rounded(len(pair.b))
        if group and total + nbytes > SLAB_NBYTES:
            yield group, total
            group, total = [], 0
        group.append((name, pair))
        total += nbytes
    if group:
        yield group, total


def _rounded(nbytes: int) -> int:
    return nbytes + -nbytes % PLACE_NBYTES
