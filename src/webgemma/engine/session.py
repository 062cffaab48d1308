"""A conversation on a loaded model: the tokens read so far, their cache, and generation."""

import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from itertools import takewhile
from typing import ClassVar, Self

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.engine.batching import Batch, Generation
from webgemma.engine.constraints import Constraint
from webgemma.engine.plans import PlanKey, Plans
from webgemma.engine.saved_session import (
    SavedFile,
    SavedPath,
    SavedSession,
    check_saved,
    write_saved,
)
from webgemma.engine.slots import CHUNK, LARGEST_CHUNK, Slots
from webgemma.errors import InputError
from webgemma.gemma.gpu_sampler import GpuSampler
from webgemma.gemma.kv_cache import CacheSlot, cache_shapes
from webgemma.gemma.lora_weights import NO_CHOICE, Choice
from webgemma.gemma.soft_tokens import (
    SoftTokens,
    check_soft_tokens,
    chunk_end,
    copy_soft_tokens,
    marked,
    packed_ends,
    unmarked,
)
from webgemma.gemma.weights import Model
from webgemma.sampler import SampledToken
from webgemma.settings import Settings

PLAN_ROWS = (1, 8, 32, 128, CHUNK)  # a chunk runs on the smallest plan that holds it
LOGITS_NBYTES = 1 << 27  # of the logits that are computed at once


class Session:
    """Tokens read so far, their keys and values in a slot on the device, and how to continue.

    Sessions of one model share its weights, and those on the same `Slots` decode together. One
    session does one thing at a time: what changes its cache ends a generation that is under way."""

    slots_type: ClassVar[type[Slots]] = Slots

    def __init__(
        self,
        model: Model,
        context: int,
        *,
        kv: str = "f16",
        precision: str = "auto",
        slots: int = 1,
    ) -> None:
        """Make a session with slots of its own, of which it takes the first."""
        owned = self.slots_type(model, context, kv=kv, precision=precision, count=slots)
        self._join(Batch(owned), 0, owns=True)

    @classmethod
    def in_slot(cls, batch: Batch, index: int) -> Self:
        """Return a session in one of the slots of a batch, which others own."""
        session = cls.__new__(cls)
        session._join(batch, index, owns=False)
        return session

    def _join(self, batch: Batch, index: int, *, owns: bool) -> None:
        self.batch = batch
        self.slots = batch.slots
        self.index = index
        self.model = self.slots.model
        self.device: Device = self.slots.device
        self.context = self.slots.context
        self.cache = CacheSlot(self.slots.cache, index)
        self.tokens: list[int] = []  # whose keys and values the cache holds
        self.closed = False
        self.used = 0  # when, in uses of the batch's sessions
        self._owns = owns
        self._epoch = 0  # counts what changes the cache
        self._lora = self.model.lora  # with which plans and cache were made
        self.choice: Choice = NO_CHOICE  # the adapters by name that its tokens were read with
        self.adapted = False  # whether any are applied
        self._check_open()

    @property
    def kv(self) -> str:
        """How keys and values are stored."""
        return self.slots.kv

    @property
    def precision(self) -> str:
        """The precision of activations."""
        return self.slots.precision

    @property
    def plans(self) -> Plans:
        """The plans of its slots."""
        return self.slots.plans

    @property
    def sampler(self) -> GpuSampler:
        """The sampler of its slots."""
        return self.slots.sampler

    # Memory

    def _enlarge_chunk(self) -> None:
        """Reallocate for images that are read whole; what was read before is dropped."""
        self.tokens.clear()
        self.slots.enlarge_chunk()
        self.cache = CacheSlot(self.slots.cache, self.index)

    def moved(self, lost: int) -> None:
        """Follow the slots to another cache, which holds the same."""
        self.cache = CacheSlot(self.slots.cache, self.index)
        self.cache.lost = lost

    def close(self) -> None:
        """Free the memory."""
        if self.closed:
            return
        self.closed = True
        self._epoch += 1
        self.tokens.clear()
        if self._owns:
            self.batch.close()

    # Generation

    def prepare(self) -> None:
        """Start compiling the kernels of a short prompt and of sampling, before they are needed."""
        for key in (PlanKey("read", 32), PlanKey("sample"), PlanKey("decode")):
            self.plans.get(key)

    async def logits(self, ids: Sequence[int], soft: Sequence[SoftTokens] = ()) -> bytes:
        """Return float32 logits after each of the ids, from an empty cache: [len(ids), vocab]."""
        row_nbytes = 4 * self.model.config.vocab
        at_once = max(n for n in PLAN_ROWS if n == 1 or n * row_nbytes <= LOGITS_NBYTES)
        check_soft_tokens(soft, len(ids), self.model.config.width, at_once)
        marks = marked(ids, soft)
        epoch = await self._begin(marks)
        self._choose(NO_CHOICE)
        self.truncate(0)
        chunks = []
        for rows, count in self.chunks(marks, at_once, soft):
            await self.read_chunk(rows, marks, count, epoch, soft)
            key = PlanKey("logits", rows, adapted=self.adapted)
            self.device.run(await self.compiled(key, epoch))
            reading = self.device.read(self.plans.logits[key].buffer, 0, count * row_nbytes)
            chunks.append(self._suppress(await reading.bytes()))
            self.check_current(epoch)
        return b"".join(chunks)

    async def begin(
        self,
        ids: Sequence[int],
        settings: Settings,
        seed: int,
        soft: Sequence[SoftTokens] = (),
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> Generation:
        """Return a generation of the tokens after the ids, which has joined the batch.

        What the cache holds of the ids is not read again. `soft` tokens are read instead of the ids
        at their positions. The tokens keep to the constraint, which is used up. The adapters of the
        choice are applied, beside those that always are."""
        self.sampler.check(settings)
        marks, epoch = await self.start(ids, soft, choice)
        return self.batch.join(self, marks, epoch, settings, seed, soft, constraint)

    async def generate(
        self,
        ids: Sequence[int],
        settings: Settings,
        seed: int,
        soft: Sequence[SoftTokens] = (),
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[SampledToken, None]:
        """Yield token after token with its log-probability, until the context is full.

        The caller may stop at any token; the few steps that are under way by then are dropped."""
        generation = await self.begin(ids, settings, seed, soft, constraint, choice)
        try:
            while (sampled := await generation.next()) is not None:
                yield sampled
        finally:
            generation.leave()

    def rewind(self, length: int) -> None:
        """Drop every token from `length` on; all of them if the rings do not reach so far back."""
        self._check_open()
        if not 0 <= length <= len(self.tokens):
            raise InputError(
                f"The session has {len(self.tokens)} tokens; it cannot be rewound to {length}."
            )
        self._epoch += 1
        self.truncate(length)

    def fork(self) -> Self:
        """Return another session that continues from here, with slots of its own."""
        self._check_open()
        self._follow_adapters()
        other = type(self)(self.model, self.context, kv=self.kv, precision=self.precision)
        if other.slots.chunk != self.slots.chunk:
            other._enlarge_chunk()
        other.cache.copy_from(self.cache, len(self.tokens))
        other.tokens, other.choice = list(self.tokens), self.choice
        return other

    def copy_prefix(self, other: "Session", length: int) -> None:
        """Begin with the first tokens of another session on the same slots."""
        self._epoch += 1
        self._follow_adapters()
        self.cache.copy_from(other.cache, length)
        self.tokens, self.choice = other.tokens[:length], other.choice

    # Files

    async def save(self, path: SavedPath) -> None:
        """Write tokens and cache to a file, so that `restore` can continue without reading them."""
        self._check_open()
        self._follow_adapters()
        saved = SavedSession(
            fingerprint=self.model.fingerprint_with(self.choice),
            shapes=cache_shapes(self.model.config),
            kv=self.kv,
            context=self.context,
            lost=self.cache.lost,
            tokens=list(self.tokens),
            adapters=dict(self.choice),
        )
        await write_saved(path, saved, self._cache_bytes(saved, self._epoch))

    @classmethod
    async def restore(cls, model: Model, path: SavedPath, *, precision: str = "auto") -> Self:
        """Return the session that was saved to a file, on the same model."""
        with SavedFile(path) as file:
            check_saved(file, model)
            session = cls(model, file.saved.context, kv=file.saved.kv, precision=precision)
            try:
                await session._load(file)
            except BaseException:
                session.close()
                raise
            return session

    async def load(self, path: SavedPath) -> None:
        """Continue where a saved session was; a damaged file leaves this one empty."""
        self._check_open()
        with SavedFile(path) as file:
            check_saved(file, self.model)
            if file.saved.kv != self.kv:
                raise InputError(
                    f"{file.name} was saved with kv {file.saved.kv}; load the model with the same."
                )
            await self._load(file)

    async def _cache_bytes(self, saved: SavedSession, epoch: int) -> AsyncIterator[bytes]:
        """Yield what the cache holds of the tokens, if nothing changes it meanwhile."""
        async for chunk in self.cache.read(len(saved.tokens)):
            self.check_current(epoch)
            yield chunk
        if self.cache.lost != saved.lost:
            raise InputError("The session continued while it was saved: save it again.")

    async def _load(self, file: SavedFile) -> None:
        """Read tokens and cache from a file; if that fails, the session is empty."""
        saved, length = file.saved, len(file.saved.tokens)
        if length > self.context:
            raise InputError(
                f"{file.name} holds {length} tokens, but the context holds {self.context}; "
                "load the model with a larger one."
            )
        epoch = await self._next_epoch()
        self.truncate(0)
        images = self.model.config.bidirectional_images  # whose rings are longer
        if length - saved.lost > self.cache.ring and images and self.slots.chunk < LARGEST_CHUNK:
            self._enlarge_chunk()
        self.cache.lost = saved.lost
        try:
            if length - saved.lost > self.cache.ring or self.cache.nbytes(length) != file.nbytes:
                raise file.damaged("its size does not match its header")
            await self.cache.write(length, file.take)
            file.finish()
            self.check_current(epoch)
        except BaseException:
            self.cache.lost = 0
            raise
        self.tokens, self.choice = list(saved.tokens), saved.adapters

    # Epochs: what changes the cache ends what is under way

    async def start(
        self, ids: Sequence[int], soft: Sequence[SoftTokens], choice: Choice = NO_CHOICE
    ) -> tuple[list[int], int]:
        """Return the marks of a prompt and an epoch; drop what of the cache does not agree."""
        check_soft_tokens(soft, len(ids), self.model.config.width, LARGEST_CHUNK)
        marks = marked(ids, soft)
        epoch = await self._begin(marks)
        if any(each.bidirectional and each.rows.shape[0] > self.slots.chunk for each in soft):
            self._enlarge_chunk()
        self._choose(choice)
        self.truncate(self.reusable(marks, soft, self.choice))
        return marks, epoch

    def _choose(self, choice: Choice) -> None:
        """Apply these adapters to the conversation; what was read without them is dropped."""
        self.adapted = self.model.lora.applies(choice)
        if not self._agrees(choice):
            self.truncate(0)
        self.choice = choice
        self.write_scales()

    def write_scales(self) -> None:
        """Write the scales of the conversation's adapters to its slot."""
        self.slots.lora.set(self.index, self.choice)

    def _agrees(self, choice: Choice) -> bool:
        """Return whether the cache was read with these adapters."""
        return self._lora is self.model.lora and self.choice == choice

    async def _begin(self, marks: list[int]) -> int:
        """Return an epoch; InputError if the prompt is empty or longer than the context."""
        self._check_open()
        if not marks:
            raise InputError("The prompt is empty: there is nothing to continue.")
        if len(marks) > self.context:
            raise InputError(
                f"The prompt has {len(marks)} tokens, but the context holds {self.context}."
            )
        return await self._next_epoch()

    async def _next_epoch(self) -> int:
        """End what is under way; return the number of the epoch that begins."""
        await self.batch.wait_for_chunks(0)
        self._check_open()
        self._follow_adapters()
        self._epoch += 1
        return self._epoch

    def _follow_adapters(self) -> None:
        """Start over if the model's adapters have changed."""
        if self._lora is not self.model.lora:
            self._lora = self.model.lora
            self.truncate(0)
            self.slots.follow_adapters()

    def _check_open(self) -> None:
        if self.closed or self.slots.closed:
            raise InputError("This session is closed: make another one.")
        if self.model.closed:
            raise InputError("The model of this session is closed: load it again.")

    def check_current(self, epoch: int) -> None:
        self._check_open()
        if self._lora is not self.model.lora:
            raise InputError("The adapters were changed meanwhile: start again.")
        if epoch != self._epoch:
            raise InputError(
                "Another request was started on this session meanwhile; "
                "conversations that take turns need a session each."
            )

    def _agreed(self, marks: list[int]) -> int:
        """Return how many of the marks the cache holds."""
        pairs = zip(self.tokens, marks, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def reusable(
        self, marks: list[int], soft: Sequence[SoftTokens], choice: Choice = NO_CHOICE
    ) -> int:
        """Return how many tokens need not be read again; the last one is, for its logits."""
        if not self._agrees(choice):
            return 0
        count = min(self._agreed(marks), len(marks) - 1)
        for each in soft:
            if each.bidirectional and each.first < count < each.end:
                return each.first
        return count

    def truncate(self, length: int) -> None:
        if length == 0 or not self.cache.covers_window(length):
            length = self.cache.lost = 0
        del self.tokens[length:]

    # Steps

    def chunks(
        self, marks: list[int], at_once: int | None = None, soft: Sequence[SoftTokens] = ()
    ) -> Iterator[tuple[int, int]]:
        """Upload what is not read yet, chunk by chunk; yield (rows of the plan, tokens)."""
        while len(self.tokens) < len(marks):
            rows, count = self.upload_chunk(marks, at_once, soft)
            yield rows, count
            self.tokens += marks[len(self.tokens) : len(self.tokens) + count]

    def upload_chunk(
        self, marks: list[int], at_once: int | None = None, soft: Sequence[SoftTokens] = ()
    ) -> tuple[int, int]:
        """Upload the next chunk of a prompt; return the rows of its plan, and its tokens."""
        at = len(self.tokens)
        end = chunk_end(at, min(at + (at_once or self.slots.chunk), len(marks)), soft)
        chunk = marks[at:end]
        ends = packed_ends(at, end, soft)
        batch = struct.pack("<4I", at, len(chunk), self.index, 0) + ends
        inputs = self.plans.chunk
        self.device.write(inputs.batch.buffer, batch)
        ids = struct.pack(f"<{len(chunk)}I", *unmarked(chunk))
        self.device.write(inputs.chunk_ids.buffer, ids)
        self.cache.advance(end)
        # Soft tokens are read as many rows are, even one.
        needed = max(len(chunk), 2 if ends else 1)
        sizes = sorted({*PLAN_ROWS, self.slots.chunk})
        return next(rows for rows in sizes if rows >= needed), len(chunk)

    async def read_chunk(
        self,
        rows: int,
        marks: list[int],
        count: int,
        epoch: int,
        soft: Sequence[SoftTokens] = (),
    ) -> None:
        """Submit reading the chunk that was uploaded, `count` marks after the tokens."""
        at = len(self.tokens)
        end = at + count
        has_soft = any(each.first < end and at < each.end for each in soft)
        if has_soft:
            self.slots.allocate_soft_tokens()
        key = PlanKey("read", rows, soft=has_soft, adapted=self.adapted)
        plan = await self.compiled(key, epoch)
        if self.model.table:
            await self.model.table.upload(unmarked(marks[at:end]))
            self.check_current(epoch)
        inputs = self.plans.chunk
        if has_soft and inputs.soft is not None:
            copy_soft_tokens(self.device, inputs.soft, at, end, soft)
        await self.batch.submit_chunk(plan)
        self.check_current(epoch)

    async def compiled(self, key: PlanKey, epoch: int) -> Plan:
        plan = await self.plans.compiled(key)
        self.check_current(epoch)
        return plan

    def submit(self, plan: Plan, read: tuple[Buffer, int, int]) -> Reading:
        reading = self.device.run(plan, read)
        assert reading is not None
        return reading

    def _suppress(self, logits: bytes) -> bytes:
        """Return rows of logits with -inf for suppressed tokens."""
        if not self.model.config.suppressed:
            return logits
        values = memoryview(bytearray(logits)).cast("f")
        for row in range(0, len(values), self.model.config.vocab):
            for token in self.model.config.suppressed:
                values[row + token] = -math.inf
        return values.tobytes()
