"""KV cache of one conversation: full layers keep all positions, sliding layers a ring."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from webgemma.device import Device
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config, Layer
from webgemma.graph import BufferPool, Tensor

ELEMENT_NBYTES = {"f16": 2, "f32": 4}
CHUNK_NBYTES = 16 << 20  # what goes through host memory at a time


class LayerCache(NamedTuple):
    """Keys and values of one layer, [ring, kv_heads, head_dim] each; position p is at p % ring."""

    k: Tensor
    v: Tensor
    ring: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions that are contiguous in a tensor."""

    tensor: Tensor
    offset: int  # in bytes
    nbytes: int


def cache_shapes(config: Config) -> list[list[int]]:
    """Return what distinguishes the caches of two models: index, kind and size of the layers."""
    own = [layer for layer in config.layers if not layer.shares_kv]
    return [[x.index, int(x.sliding), x.kv_heads, x.head_dim] for x in own]


class KvCache:
    """A `LayerCache` for each layer that has its own keys and values.

    A sliding layer's ring holds the window and a chunk, so that a chunk can be written before its
    first token attends to the window, and a conversation can be rewound a little."""

    def __init__(self, device: Device, config: Config, context: int, kv: str, chunk: int) -> None:
        self.device = device
        self.window = config.window
        self._layers = [layer for layer in config.layers if not layer.shares_kv]
        self._element_nbytes = ELEMENT_NBYTES[kv]
        ring = min(context, config.window + chunk)
        self._rings = {x.index: ring if x.sliding else context for x in self._layers}
        self.ring = min(self._rings.values())
        self.lost = 0  # positions before this one have left the rings
        self._check_size(context)
        self._memory = BufferPool(device)
        try:
            self.layers = {x.index: self._allocate(x) for x in self._layers}
        except BaseException:
            self.close()
            raise

    def advance(self, end: int) -> None:
        """Note that every position before `end` is written, or about to be."""
        self.lost = max(self.lost, end - self.ring)

    def covers_window(self, length: int) -> bool:
        """Return whether everything that a token at this position attends to is still there."""
        return self.lost == 0 or length - self.window + 1 >= self.lost

    def copy_from(self, other: "KvCache", length: int) -> None:
        """Copy the first `length` positions of a cache of the same shapes and context."""
        self.lost = other.lost
        for layer in self._layers:
            wrapped = layer.sliding and self.lost > 0
            positions = self._rings[layer.index] if wrapped else length
            nbytes = positions * self._position_nbytes(layer)
            if nbytes:
                mine, theirs = self.layers[layer.index], other.layers[layer.index]
                self.device.copy(theirs.k.buffer, mine.k.buffer, nbytes)
                self.device.copy(theirs.v.buffer, mine.v.buffer, nbytes)

    def nbytes(self, length: int) -> int:
        """Return how many bytes `read` returns and `write` takes for so many positions."""
        return sum(run.nbytes for run in self._runs(length))

    async def read(self, length: int) -> AsyncIterator[bytes]:
        """Read what is kept of the first `length` positions, layer by layer."""
        for run in self._runs(length):
            yield await self.device.read(run.tensor.buffer, run.offset, run.nbytes).bytes()

    async def write(self, length: int, take: Callable[[int], bytes]) -> None:
        """Write what `read` returned; `take` returns so many of its bytes, in the same order."""
        for run in self._runs(length):
            self.device.write(run.tensor.buffer, take(run.nbytes), run.offset)
            # Without waiting, the copies that the device has not made yet pile up in memory.
            await self.device.read(run.tensor.buffer, run.offset, 4).bytes()

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _runs(self, length: int) -> Iterator[_Run]:
        for layer in self._layers:
            each = self._position_nbytes(layer)
            at_once = max(1, CHUNK_NBYTES // each)
            k, v, ring = self.layers[layer.index]
            for tensor in (k, v):
                first = self.lost if layer.sliding else 0
                while first < length:
                    slot = first % ring
                    count = min(length - first, ring - slot, at_once)
                    yield _Run(tensor, slot * each, count * each)
                    first += count

    def _position_nbytes(self, layer: Layer) -> int:
        return layer.kv_heads * layer.head_dim * self._element_nbytes

    def _check_size(self, context: int) -> None:
        limit = self.device.limits.binding_nbytes
        # A sliding layer whose ring fits does not limit the context.
        limiting = [
            self._position_nbytes(x)
            for x in self._layers
            if not x.sliding or self._rings[x.index] * self._position_nbytes(x) > limit
        ]
        each = max(limiting, default=0)
        if context * each > limit:
            raise DeviceError(
                f"A context of {context} needs {context * each} bytes for the keys of one layer, "
                f"but {self.device.name} binds at most {limit} to a kernel; load the model with a "
                f"context of {limit // each} or less."
            )

    def _allocate(self, layer: Layer) -> LayerCache:
        ring = self._rings[layer.index]
        words = ring * self._position_nbytes(layer) // 4
        k, v = (self._memory.tensor(words, label="KV cache") for _ in range(2))
        return LayerCache(k, v, ring)
