"""Slots: the memory and the plans of conversations that share a model and decode together."""

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace

from webgemma.device import Device
from webgemma.engine.plans import Plans
from webgemma.errors import InputError
from webgemma.gemma.drafting import Drafting
from webgemma.gemma.gpu_sampler import MAX_SLOTS, Conversations, GpuSampler
from webgemma.gemma.kv_cache import ELEMENT_NBYTES, KvCache
from webgemma.gemma.lora_weights import LoraScales
from webgemma.gemma.record.precision import choose_precision
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.graph import BufferPool

CHUNK = 512  # tokens that are read at once, unless an image needs more
LARGEST_CHUNK = 1152  # holds the largest image


class Slots:
    """Caches for `count` conversations, a sampler with settings for each, and plans over them."""

    plans: Plans

    def __init__(
        self,
        model: Model,
        context: int,
        *,
        kv: str = "f16",
        precision: str = "auto",
        count: int = 1,
    ) -> None:
        if kv not in ELEMENT_NBYTES:
            raise InputError(f"The KV cache cannot be {kv!r}; use f16 or f32.")
        if not 1 <= count <= MAX_SLOTS:
            raise InputError(f"There can be 1 to {MAX_SLOTS} slots for conversations, not {count}.")
        if model.closed:
            raise InputError("The model of this session is closed: load it again.")
        self.precision = choose_precision(precision, model.device)
        self.model = model
        self.device: Device = model.device
        self.context = context
        self.kv = kv
        self.closed = False
        # Where several share the memory, it cannot be allocated again for one that needs more.
        images = count > 1 and model.config.bidirectional_images
        self._allocate(LARGEST_CHUNK if images else CHUNK, count)

    @property
    def count(self) -> int:
        """How many conversations there is memory for."""
        return self.cache.slots

    def make_plans(self, chunk: Inputs, rows: Inputs) -> Plans:
        """Return the plans over these inputs: a chunk of one conversation, rows of several."""
        hidden = self.memory.tensor(self.chunk, self.model.config.width, label="session")
        kv, precision, lora = self.kv, self.precision, self.lora
        return Plans(
            self.model, kv, precision, chunk, rows, hidden, self.sampler, lora, self.drafting
        )

    def enlarge_chunk(self) -> None:
        """Reallocate for images that are read whole; everything that was read is dropped."""
        self._reallocate(LARGEST_CHUNK, self.count)

    def grow(self, count: int, adopt: Callable[[KvCache], None]) -> None:
        """Reallocate for more conversations; `adopt` copies what the old caches hold.

        If there is too little memory, nothing changes."""
        before = copy(self)
        images = self.model.config.bidirectional_images
        try:
            self._allocate(LARGEST_CHUNK if images else self.chunk, count)
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise
        adopt(before.cache)
        if self.drafting and before.drafting:
            self.drafting.copy_states(before.drafting)
        before._owned.close()

    def allocate_soft_tokens(self) -> None:
        """Allocate the rows of a chunk's soft tokens, when there are some for the first time."""
        inputs = self.plans.chunk
        if inputs.soft is None:
            soft = self.memory.tensor(self.chunk, self.model.config.width, label="soft tokens")
            self.plans.chunk = replace(inputs, soft=soft)

    def follow_adapters(self) -> None:
        """Record plans anew if the model's adapters have changed."""
        if self.lora.lora is not self.model.lora:
            self.plans.close()
            self.lora.follow(self.model.lora)

    def close(self) -> None:
        """Free the memory."""
        if not self.closed:
            self.closed = True
            self._owned.close()

    def _reallocate(self, chunk: int, count: int) -> None:
        self._owned.close()
        try:
            self._allocate(chunk, count)
        except BaseException:
            self.closed = True  # there is no cache any more
            raise

    def _allocate(self, chunk: int, count: int) -> None:
        """Allocate everything, or nothing."""
        config = self.model.config
        with ExitStack() as owned:
            self.memory = BufferPool(self.device)
            owned.callback(self.memory.close)
            self.chunk = chunk
            self.cache = KvCache(self.device, config, self.context, self.kv, chunk, count)
            owned.callback(self.cache.close)
            batch, ids = (self.memory.tensor(n, label="session") for n in (4 + chunk, chunk))
            self.conversations = Conversations(self.device, self.memory)
            self.sampler = GpuSampler(
                self.device, config.vocab, self.context, config.suppressed, config.softcap, count
            )
            owned.callback(self.sampler.close)
            layers = self.cache.layers
            self.drafting: Drafting | None = None
            if self.model.drafter:
                self.drafting = Drafting(
                    self.model,
                    self.model.drafter,
                    self.conversations.tensor,
                    layers,
                    kv=self.kv,
                    precision=self.precision,
                    slots=count,
                )
                owned.callback(self.drafting.close)
            self.lora = LoraScales(self.model.lora, count)
            owned.callback(self.lora.close)
            rows = Inputs(self.conversations.tensor, None, layers)
            self.plans = self.make_plans(Inputs(batch, ids, layers), rows)
            owned.callback(self.plans.close)
            self._owned = owned.pop_all()
