"""A conversation on a loaded model: the tokens read so far, their cache, and generation."""

import math
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from typing import Self

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.engine.plans import PlanKey, Plans
from webgemma.engine.saved_session import (
    SavedFile,
    SavedPath,
    SavedSession,
    check_saved,
    write_saved,
)
from webgemma.errors import GgufError, InputError
from webgemma.gemma.gpu_sampler import GpuSampler
from webgemma.gemma.kv_cache import ELEMENT_NBYTES, KvCache, cache_shapes
from webgemma.gemma.record.precision import choose_precision
from webgemma.gemma.soft_tokens import (
    SoftTokens,
    check_soft_tokens,
    chunk_end,
    copy_soft_tokens,
    marked,
    packed_ends,
    unmarked,
)
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.graph import BufferPool, Tensor
from webgemma.sampler import SampledToken
from webgemma.settings import Settings

CHUNK = 512  # tokens that are read at once, unless an image needs more
PLAN_ROWS = (1, 8, 32, 128, CHUNK)  # a chunk runs on the smallest plan that holds it
LARGEST_CHUNK = 1152  # holds the largest image
CHUNKS_AHEAD = 1  # that are submitted before one is finished; a cancelled call ends after it
STEPS_AHEAD = 2  # steps that are submitted before the host has the first one's result
IMPOSSIBLE_LOGPROB = 1e30  # reported where a logit was not finite: see partials/chunks.wgsl
LOGITS_NBYTES = 1 << 27  # of the logits that are computed at once


class Session:
    """Tokens read so far, their keys and values on the device, and how to continue.

    Sessions of one model share only its weights. One session does one thing at a time: what changes
    its cache ends a generation that is under way."""

    def __init__(
        self, model: Model, context: int, *, kv: str = "f16", precision: str = "auto"
    ) -> None:
        if kv not in ELEMENT_NBYTES:
            raise InputError(f"The KV cache cannot be {kv!r}; use f16 or f32.")
        self.precision = choose_precision(precision, model.device)
        self.model = model
        self.device: Device = model.device
        self.context = context
        self.kv = kv
        self.tokens: list[int] = []  # whose keys and values the cache holds
        self.closed = False
        self._epoch = 0  # counts what changes the cache
        self._unawaited: deque[Reading] = deque()  # results of steps that are not waited for
        self._lora = model.lora  # with which plans and cache were made
        self._check_open()
        self._allocate(CHUNK)

    # Memory

    def _allocate(self, chunk: int) -> None:
        """Allocate everything for reading so many tokens at once, or nothing."""
        with ExitStack() as owned:
            self.memory = BufferPool(self.device)
            owned.callback(self.memory.close)
            self._chunk = chunk
            self._allocate_tensors(owned)
            self._owned = owned.pop_all()

    def _allocate_tensors(self, owned: ExitStack) -> None:
        config, chunk = self.model.config, self._chunk
        self.cache = KvCache(self.device, config, self.context, self.kv, chunk)
        owned.callback(self.cache.close)
        batch, ids = (self.memory.tensor(n, label="session") for n in (4 + chunk, chunk))
        hidden = self.memory.tensor(chunk, config.width, label="session")
        self.sampler = GpuSampler(
            self.device, config.vocab, self.context, config.suppressed, config.softcap
        )
        owned.callback(self.sampler.close)
        inputs = Inputs(batch, ids, self.cache.layers)
        self.plans = self.make_plans(inputs, hidden)
        owned.callback(self.plans.close)

    def make_plans(self, inputs: Inputs, hidden: Tensor) -> Plans:
        return Plans(self.model, self.kv, self.precision, inputs, hidden, self.sampler)

    def _enlarge_chunk(self) -> None:
        """Reallocate for images that are read whole; what was read before is dropped."""
        self.tokens.clear()
        self._owned.close()
        try:
            self._allocate(LARGEST_CHUNK)
        except BaseException:
            self.closed = True  # there is no cache any more
            raise

    def _allocate_soft_tokens(self) -> None:
        """Allocate the rows of a chunk's soft tokens, when there are some for the first time."""
        if self.plans.inputs.soft is None:
            soft = self.memory.tensor(self._chunk, self.model.config.width, label="soft tokens")
            self.plans.inputs = replace(self.plans.inputs, soft=soft)

    def close(self) -> None:
        """Free the memory."""
        if self.closed:
            return
        self.closed = True
        self._epoch += 1
        self.tokens.clear()
        self._owned.close()
        self._unawaited.clear()

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
        self.truncate(0)
        chunks = []
        for rows, count in self.chunks(marks, at_once, soft):
            await self.read_chunk(rows, marks, count, epoch, soft)
            self.device.run(await self.compiled(PlanKey("logits", rows), epoch))
            reading = self.device.read(self.plans.logits[rows].buffer, 0, count * row_nbytes)
            chunks.append(self._suppress(await reading.bytes()))
            self.check_current(epoch)
        return b"".join(chunks)

    async def generate(
        self, ids: Sequence[int], settings: Settings, seed: int, soft: Sequence[SoftTokens] = ()
    ) -> AsyncGenerator[SampledToken, None]:
        """Yield token after token with its log-probability, until the context is full.

        What the cache holds of the ids is not read again. The caller may stop at any token; the
        few steps that are under way by then are dropped. `soft` tokens are read instead of the ids
        at their positions."""
        marks, epoch = await self.start(ids, soft)
        self.sampler.set(settings, seed)
        self.sampler.set_history(unmarked(marks))
        for rows, count in self.chunks(marks, soft=soft):
            await self.read_chunk(rows, marks, count, epoch, soft)
        decode = PlanKey.sampling("decode", settings)
        ahead = 0 if self.model.table else STEPS_AHEAD  # the host uploads a row for each token
        written = len(marks)  # tokens whose keys and values are written, or about to be
        pending: deque[Reading] = deque()
        if written < self.context:
            plan = await self.compiled(PlanKey.sampling("sample", settings), epoch)
            pending.append(self.submit(plan, self.sampler.result(written)))
        try:
            while True:
                while len(pending) <= ahead and written + 1 < self.context:
                    written += 1
                    pending.append(await self._decode(decode, written, marks[-1], epoch))
                if not pending:
                    return
                sampled = self.sampler.parse(await pending.popleft().bytes())
                self.check_current(epoch)
                if sampled.logprob > IMPOSSIBLE_LOGPROB:
                    self.truncate(0)
                    raise not_finite(self.model.name, self.device.name)
                marks.append(sampled.token)
                self.tokens += marks[len(self.tokens) : written]
                yield sampled
                self.check_current(epoch)
        finally:
            self._unawaited += pending

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
        """Return another session that continues from here, with a cache of its own."""
        self._check_open()
        self._follow_adapters()
        other = type(self)(self.model, self.context, kv=self.kv, precision=self.precision)
        if other._chunk != self._chunk:
            other._enlarge_chunk()
        other.cache.copy_from(self.cache, len(self.tokens))
        other.tokens = list(self.tokens)
        return other

    # Files

    async def save(self, path: SavedPath) -> None:
        """Write tokens and cache to a file, so that `restore` can continue without reading them."""
        self._check_open()
        self._follow_adapters()
        saved = SavedSession(
            fingerprint=self.model.fingerprint,
            shapes=cache_shapes(self.model.config),
            kv=self.kv,
            context=self.context,
            lost=self.cache.lost,
            tokens=list(self.tokens),
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
        if length - saved.lost > self.cache.ring and self._chunk < LARGEST_CHUNK:
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
        self.tokens = list(saved.tokens)

    # Epochs: what changes the cache ends what is under way

    async def start(self, ids: Sequence[int], soft: Sequence[SoftTokens]) -> tuple[list[int], int]:
        """Return the marks of a prompt and an epoch; drop what of the cache does not agree."""
        check_soft_tokens(soft, len(ids), self.model.config.width, LARGEST_CHUNK)
        marks = marked(ids, soft)
        epoch = await self._begin(marks)
        if any(each.bidirectional and each.rows.shape[0] > self._chunk for each in soft):
            self._enlarge_chunk()
        self.truncate(self.reusable(marks, soft))
        return marks, epoch

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
        await self._wait_for_steps(0)
        self._check_open()
        self._follow_adapters()
        self._epoch += 1
        return self._epoch

    def _follow_adapters(self) -> None:
        """Start over if the model's adapters have changed."""
        if self._lora is not self.model.lora:
            self._lora = self.model.lora
            self.truncate(0)
            self.plans.close()

    async def _wait_for_steps(self, count: int) -> None:
        """Wait until at most so many submitted steps are unfinished."""
        while len(self._unawaited) > count:
            await self._unawaited.popleft().bytes()

    def _check_open(self) -> None:
        if self.closed:
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

    def reusable(self, marks: list[int], soft: Sequence[SoftTokens]) -> int:
        """Return how many tokens need not be read again; the last one is, for its logits."""
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
        while (at := len(self.tokens)) < len(marks):
            end = chunk_end(at, min(at + (at_once or self._chunk), len(marks)), soft)
            chunk = marks[at:end]
            ends = packed_ends(at, end, soft)
            batch = struct.pack("<2I", at, len(chunk)) + (ends or bytes(8))
            self.device.write(self.plans.inputs.batch.buffer, batch)
            ids = struct.pack(f"<{len(chunk)}I", *unmarked(chunk))
            self.device.write(self.plans.inputs.ids.buffer, ids)
            self.cache.advance(end)
            # Soft tokens are read as many rows are, even one.
            needed = max(len(chunk), 2 if len(batch) > 16 else 1)
            sizes = sorted({*PLAN_ROWS, self._chunk})
            yield next(rows for rows in sizes if rows >= needed), len(chunk)
            self.tokens += chunk

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
            self._allocate_soft_tokens()
        plan = await self.compiled(PlanKey("read", rows, soft=has_soft), epoch)
        await self._upload_rows(unmarked(marks[at:end]), epoch)
        inputs = self.plans.inputs
        if has_soft and inputs.soft is not None:
            copy_soft_tokens(self.device, inputs.soft, at, end, soft)
        self._unawaited.append(self.submit(plan, (inputs.batch.buffer, 0, 4)))
        await self._wait_for_steps(CHUNKS_AHEAD)
        self.check_current(epoch)

    async def _decode(self, key: PlanKey, length: int, last: int, epoch: int) -> Reading:
        """Submit reading the token before `length` and sampling the one after it."""
        plan = await self.compiled(key, epoch)
        await self._upload_rows([last], epoch)
        self.cache.advance(length)
        return self.submit(plan, self.sampler.result(length))

    async def _upload_rows(self, ids: list[int], epoch: int) -> None:
        """Upload rows of a table that stays in the file; the plan must be submitted next."""
        if self.model.table:
            await self.model.table.upload(ids)
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


def not_finite(name: str, device: str) -> GgufError:
    """Return the error for a model whose logits are not finite."""
    return GgufError(
        f"{name} computes NaN or infinity on {device}: its weights are damaged, or the arithmetic "
        "of this GPU is broken; `webgemma check` with this model shows which."
    )
