"""KV caches of conversations: full layers keep all positions, sliding layers a ring."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from webgemma.device import Device
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config, Layer
from webgemma.graph import BufferPool, Recorder, Tensor, folded

ELEMENT_NBYTES = {"f16": 2, "f32": 4}
CHUNK_NBYTES = 16 << 20  # what goes through host memory at a time
COPY_THREADS, COPY_EACH = 64, 4


class LayerCache(NamedTuple):
    """Keys and values of one layer, [slots, ring, kv_heads, head_dim] each; p is at p % ring."""

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
    """A `LayerCache` for each layer that has its own keys and values, with slots for conversations.

    A sliding layer's ring holds the window and a chunk, so that a chunk can be written before its
    first token attends to the window, and a conversation can be rewound a little."""

    def __init__(
        self, device: Device, config: Config, context: int, kv: str, chunk: int, slots: int = 1
    ) -> None:
        self.device = device
        self.window = config.window
        self.slots = slots
        self._layers = [layer for layer in config.layers if not layer.shares_kv]
        self._element_nbytes = ELEMENT_NBYTES[kv]
        ring = min(context, config.window + chunk)
        self._rings = {x.index: ring if x.sliding else context for x in self._layers}
        self.ring = min(self._rings.values())
        self._check_size(context)
        self._memory = BufferPool(device)
        self._copies = Recorder(device)  # from slot to slot
        try:
            self.layers = {x.index: self._allocate(x) for x in self._layers}
        except BaseException:
            self.close()
            raise

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot."""
        return sum(2 * self._slot_nbytes(layer) for layer in self._layers)

    def runs(self, slot: int, first: int, length: int) -> Iterator[_Run]:
        """Yield where a slot keeps its first `length` positions; those of rings from `first` on."""
        for layer in self._layers:
            each = self._position_nbytes(layer)
            at_once = max(1, CHUNK_NBYTES // each)
            k, v, ring = self.layers[layer.index]
            for tensor in (k, v):
                at = first if layer.sliding else 0
                while at < length:
                    line = at % ring
                    count = min(length - at, ring - line, at_once)
                    yield _Run(tensor, (slot * ring + line) * each, count * each)
                    at += count

    def copy_slot(
        self, slot: int, source: "KvCache", source_slot: int, length: int, lost: int
    ) -> None:
        """Copy the first `length` positions of a slot of a cache of the same layers.

        A ring from which positions are lost is copied whole or, into one of another length, from
        its first position that is not."""
        for layer in self._layers:
            mine, theirs = self.layers[layer.index], source.layers[layer.index]
            each = self._position_nbytes(layer)
            wrapped = layer.sliding and lost > 0
            runs = [(0, mine.ring if wrapped else length)]
            if wrapped and mine.ring != theirs.ring:
                runs = list(_common_runs(lost, length, mine.ring, theirs.ring))
            for first, count in runs:
                to = (slot * mine.ring + first % mine.ring) * each
                at = (source_slot * theirs.ring + first % theirs.ring) * each
                for tensor, copied in ((mine.k, theirs.k), (mine.v, theirs.v)):
                    if count and source is self:
                        self._copy_within(tensor, at, to, count * each)
                    elif count:
                        self.device.copy(copied.buffer, tensor.buffer, count * each, at, to)
        if source is self:
            plan = self._copies.plan()
            self._copies.calls.clear()
            self.device.run(plan)
            plan.close(self.device)

    def _copy_within(self, tensor: Tensor, at: int, to: int, nbytes: int) -> None:
        vec4s = -(-nbytes // 16)
        self._copies.call(
            "copy_within",
            folded(-(-vec4s // (COPY_THREADS * COPY_EACH))),
            data=tensor,
            first=at // 16,
            first_to=to // 16,
            vec4s=vec4s,
            THREADS=COPY_THREADS,
            EACH=COPY_EACH,
        )

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _position_nbytes(self, layer: Layer) -> int:
        return layer.kv_heads * layer.head_dim * self._element_nbytes

    def _slot_nbytes(self, layer: Layer) -> int:
        return self._rings[layer.index] * self._position_nbytes(layer)

    def _check_size(self, context: int) -> None:
        limit = self.device.limits.binding_nbytes // self.slots
        # A sliding layer whose ring fits does not limit the context.
        limiting = [
            self._position_nbytes(x)
            for x in self._layers
            if not x.sliding or self._slot_nbytes(x) > limit
        ]
        each = max(limiting, default=0)
        if context * each > limit:
            slots = f" for each of {self.slots} conversations" if self.slots > 1 else ""
            raise DeviceError(
                f"A context of {context} needs {context * each} bytes for the keys of one layer"
                f"{slots}, but {self.device.name} binds at most {self.device.limits.binding_nbytes}"
                f" to a kernel; load the model with a context of {limit // each} or less."
            )

    def _allocate(self, layer: Layer) -> LayerCache:
        words = self.slots * self._slot_nbytes(layer) // 4
        k, v = (self._memory.tensor(words, label="KV cache") for _ in range(2))
        return LayerCache(k, v, self._rings[layer.index])


def _common_runs(first: int, end: int, ring: int, other: int) -> Iterator[tuple[int, int]]:
    """Yield positions and counts that are contiguous in two rings."""
    while first < end:
        count = min(end - first, ring - first % ring, other - first % other)
        yield first, count
        first += count


class CacheSlot:
    """What a cache keeps of one conversation."""

    def __init__(self, cache: KvCache, index: int = 0) -> None:
        self.cache = cache
        self.index = index
        self.lost = 0  # positions before this one have left the rings

    @property
    def ring(self) -> int:
        """Positions that a sliding layer keeps."""
        return self.cache.ring

    def advance(self, end: int) -> None:
        """Note that every position before `end` is written, or about to be."""
        self.lost = max(self.lost, end - self.cache.ring)

    def covers_window(self, length: int) -> bool:
        """Return whether everything that a token at this position attends to is still there."""
        return self.lost == 0 or length - self.cache.window + 1 >= self.lost

    def copy_from(self, other: "CacheSlot", length: int) -> None:
        """Copy the first `length` positions of another one, of the same shapes and context."""
        self.lost = other.lost
        self.cache.copy_slot(self.index, other.cache, other.index, length, other.lost)

    def nbytes(self, length: int) -> int:
        """Return how many bytes `read` returns and `write` takes for so many positions."""
        return sum(run.nbytes for run in self.cache.runs(self.index, self.lost, length))

    async def read(self, length: int) -> AsyncIterator[bytes]:
        """Read what is kept of the first `length` positions, layer by layer."""
        for run in self.cache.runs(self.index, self.lost, length):
            reading = self.cache.device.read(run.tensor.buffer, run.offset, run.nbytes)
            yield await reading.bytes()

    async def write(self, length: int, take: Callable[[int], bytes]) -> None:
        """Write what `read` returned; `take` returns so many of its bytes, in the same order."""
        device = self.cache.device
        for run in self.cache.runs(self.index, self.lost, length):
            device.write(run.tensor.buffer, take(run.nbytes), run.offset)
            # Without waiting, the copies that the device has not made yet pile up in memory.
            await device.read(run.tensor.buffer, run.offset, 4).bytes()
