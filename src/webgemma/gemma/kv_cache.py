"""Keys and values of one conversation: full layers keep all positions, sliding ones a ring."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from webgemma.device import Buffer, Device
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config, Layer
from webgemma.graph import Tensor

ELEMENT_NBYTES = {"f16": 2, "f32": 4}
PIECE_NBYTES = 16 << 20  # what passes through host memory at a time


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions that lie side by side in a tensor."""

    tensor: Tensor
    offset: int  # in bytes
    nbytes: int


def cache_shapes(config: Config) -> list[list[int]]:
    """What tells the cache of one model from another's: index, kind and size of its layers."""
    own = [layer for layer in config.layers if not layer.shares_kv]
    return [[x.index, int(x.sliding), x.kv_heads, x.head_dim] for x in own]


class Cache:
    """A tensor of keys and one of values, [ring, kv_heads, head_dim], for each layer with its own.

    Position p is at p % ring. A sliding layer's ring holds the window and a chunk, so that a chunk
    can be written before its first token looks back, and a conversation can go back a little."""

    def __init__(self, device: Device, config: Config, context: int, kv: str, chunk: int) -> None:
        self.device = device
        self.window = config.window
        self.layers = [layer for layer in config.layers if not layer.shares_kv]
        self.element_nbytes = ELEMENT_NBYTES[kv]
        ring = min(context, config.window + chunk)
        self.rings = {x.index: ring if x.sliding else context for x in self.layers}
        self.ring = min(self.rings.values())
        self.lost = 0  # positions before this one have left the rings
        self._check_size(context)
        self._buffers: list[Buffer] = []
        try:
            self.tensors = {x.index: (self._tensor(x), self._tensor(x)) for x in self.layers}
        except BaseException:
            self.close()
            raise

    def write_to(self, end: int) -> None:
        """Note that every position before `end` is written, or about to be."""
        self.lost = max(self.lost, end - self.ring)

    def reaches(self, length: int) -> bool:
        """Whether what a token at this position looks back on is still there."""
        return self.lost == 0 or length - self.window + 1 >= self.lost

    def copy(self, other: "Cache", length: int) -> None:
        """Take over the first `length` positions of a cache of the same shapes and context."""
        self.lost = other.lost
        for layer in self.layers:
            ring = self.rings[layer.index]
            wrapped = layer.sliding and self.lost > 0
            nbytes = (ring if wrapped else length) * self._position_nbytes(layer)
            if nbytes:
                for mine, theirs in zip(
                    self.tensors[layer.index], other.tensors[layer.index], strict=True
                ):
                    self.device.copy(theirs.buffer, mine.buffer, nbytes)

    def nbytes(self, length: int) -> int:
        """How much `read` gives for so many positions, and `write` wants."""
        return sum(run.nbytes for run in self._runs(length))

    async def read(self, length: int) -> AsyncIterator[bytes]:
        """What is held of the first `length` positions, layer by layer."""
        for run in self._runs(length):
            yield await self.device.read(run.tensor.buffer, run.offset, run.nbytes).bytes()

    async def write(self, length: int, take: Callable[[int], bytes]) -> None:
        """Put back what `read` gave: `take` hands over so many of its bytes, in the same order."""
        for run in self._runs(length):
            self.device.write(run.tensor.buffer, take(run.nbytes), run.offset)
            # Without waiting, the copies that the device has not yet made pile up in memory.
            await self.device.read(run.tensor.buffer, run.offset, 4).bytes()

    def close(self) -> None:
        """Give the memory back."""
        while self._buffers:
            self.device.free(self._buffers.pop())

    def _runs(self, length: int) -> Iterator[_Run]:
        for layer in self.layers:
            ring, each = self.rings[layer.index], self._position_nbytes(layer)
            most = max(1, PIECE_NBYTES // each)
            for tensor in self.tensors[layer.index]:
                first = self.lost if layer.sliding else 0
                while first < length:
                    slot = first % ring
                    count = min(length - first, ring - slot, most)
                    yield _Run(tensor, slot * each, count * each)
                    first += count

    def _position_nbytes(self, layer: Layer) -> int:
        return layer.kv_heads * layer.head_dim * self.element_nbytes

    def _check_size(self, context: int) -> None:
        most = self.device.limits.binding_nbytes
        # A sliding layer whose ring fits does not bound the context.
        bounding = [
            self._position_nbytes(x)
            for x in self.layers
            if not x.sliding or self.rings[x.index] * self._position_nbytes(x) > most
        ]
        each = max(bounding, default=0)
        if context * each > most:
            raise DeviceError(
                f"A context of {context} needs {context * each} bytes for the keys of one layer, "
                f"but this GPU shows a kernel at most {most}; "
                f"load the model with a context of {most // each} or less."
            )

    def _tensor(self, layer: Layer) -> Tensor:
        nbytes = self.rings[layer.index] * self._position_nbytes(layer)
        self._buffers.append(self.device.buffer(nbytes, "cache"))
        return Tensor((nbytes // 4,), nbytes, self._buffers[-1])
