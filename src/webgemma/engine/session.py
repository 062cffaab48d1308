"""One conversation on a loaded model: what was read, whose turn it is, and generation."""

import math
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import takewhile
from typing import Self

from webgemma.device import Plan, Reading
from webgemma.engine.saved_session import Saved, SavedFile, SavedPath, check_saved, write_saved
from webgemma.engine.session_memory import SessionMemory
from webgemma.errors import GgufError, InputError
from webgemma.gemma.kv_cache import cache_shapes
from webgemma.gemma.soft_tokens import Soft, bring, check_soft, end_of_chunk, ends, marked, plain
from webgemma.gemma.weights import Model
from webgemma.sampler import Chosen, Sampling

CHUNK = 512  # tokens that one prefill plan reads at most, unless a picture asks for more
BATCHES = (1, 8, 32, 128, CHUNK)  # a chunk runs on the smallest plan that holds it
LARGEST_CHUNK = 1152  # holds the largest picture
AHEAD = 2  # steps that are submitted before the host has seen the first one's result
IMPOSSIBLE = 1e30  # no log-probability: the mark that a logit was no number (partial.wgsl)
LOGITS_NBYTES = 1 << 27  # of the logits that are computed at once


class Session(SessionMemory):
    """Tokens read so far, their keys and values on the device, and how to go on.

    Sessions of one model share nothing but its weights. One session does one thing at a time: what
    changes its cache ends a generation that is under way."""

    def __init__(
        self, model: Model, context: int, *, kv: str = "f16", precision: str = "auto"
    ) -> None:
        super().__init__(model, context, kv, precision)
        self.tokens: list[int] = []  # whose keys and values the cache holds
        self.closed = False
        self._turn = 0  # counts what changes the cache
        self._unread: deque[Reading] = deque()  # results that nobody waits for
        self._adapters = model.adapters  # that the plans and the cache were made with
        self._check_open()
        self._make_room(CHUNK)

    def prepare(self) -> None:
        """Have the kernels of a short prompt and of sampled tokens compiled before they are needed:
        a browser does it beside other work."""
        for kind, batch in (("read", 32), ("sample", 1), ("decode sample", 1)):
            self._plan(kind, batch)

    async def logits(self, ids: Sequence[int], soft: Sequence[Soft] = ()) -> bytes:
        """Float32 logits after each of the ids, from an empty cache: [len(ids), vocab]."""
        row_nbytes = 4 * self.model.config.vocab
        most = max(n for n in BATCHES if n == 1 or n * row_nbytes <= LOGITS_NBYTES)
        check_soft(soft, len(ids), self.model.config.width, most)
        known = marked(ids, soft)
        turn = await self._begin(known)
        self._forget(0)
        rows = []
        for batch, count in self._chunks(known, most, soft):
            at = len(self.tokens)
            await self._read_chunk(batch, plain(known[at : at + count]), turn, soft)
            self.device.run(await self._compiled("logits", batch, turn))
            reading = self.device.read(self._logits[batch].buffer, 0, count * row_nbytes)
            rows.append(self._suppress(await reading.bytes()))
            self._check_turn(turn)
        return b"".join(rows)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int, soft: Sequence[Soft] = ()
    ) -> AsyncIterator[Chosen]:
        """Token after token with its log-probability, until the context is full.

        What the cache holds of the ids is not read again. The caller may stop at any token; the
        few steps that are under way by then are forgotten. Where there are `soft` tokens, their
        rows are read in place of the ids."""
        known, turn = await self._take_up(ids, soft)
        self._sampler.set(sampling, seed)
        self._sampler.tell(plain(known))
        for batch, count in self._chunks(known, soft=soft):
            at = len(self.tokens)
            await self._read_chunk(batch, plain(known[at : at + count]), turn, soft)
        kind = ("greedy" if sampling.greedy else "sample") + " top" * bool(sampling.top_logprobs)
        ahead = 0 if self.model.table else AHEAD  # the host brings a row for each token it knows
        steps = len(known)  # tokens whose keys and values are written, or about to be
        pending: deque[Reading] = deque()
        if steps < self.context:
            plan = await self._compiled(kind, 1, turn)
            pending.append(self._submit(plan, self._sampler.result(steps)))
        try:
            while True:
                while len(pending) <= ahead and steps + 1 < self.context:
                    steps += 1
                    pending.append(await self._decode(kind, steps, known[-1], turn))
                if not pending:
                    return
                chosen = self._sampler.chosen(await pending.popleft().bytes())
                self._check_turn(turn)
                if chosen.logprob > IMPOSSIBLE:
                    self._forget(0)
                    raise no_numbers(self.model.name, self.device.name)
                known.append(chosen.token)
                self.tokens += known[len(self.tokens) : steps]
                yield chosen
                self._check_turn(turn)
        finally:
            self._unread += pending

    def rewind(self, length: int) -> None:
        """Forget every token from `length` on; too far back for the rings means all of them."""
        self._check_open()
        if not 0 <= length <= len(self.tokens):
            raise InputError(
                f"The session cannot go back to {length} tokens; it has {len(self.tokens)}."
            )
        self._turn += 1
        self._forget(length)

    def fork(self) -> Self:
        """Another session that goes on from here, with a cache of its own."""
        self._check_open()
        self._take_adapters()
        other = type(self)(self.model, self.context, kv=self.kv, precision=self.precision)
        if other._chunk != self._chunk:
            other._grow()
        other._cache.copy(self._cache, len(self.tokens))
        other.tokens = list(self.tokens)
        return other

    async def save(self, path: SavedPath) -> None:
        """Write tokens and cache to a file, so that `restore` can go on without reading them."""
        self._check_open()
        self._take_adapters()
        saved = Saved(
            fingerprint=self.model.fingerprint,
            shapes=cache_shapes(self.model.config),
            kv=self.kv,
            context=self.context,
            lost=self._cache.lost,
            tokens=list(self.tokens),
        )
        await write_saved(path, saved, self._held(saved, self._turn))

    @classmethod
    async def restore(cls, model: Model, path: SavedPath, *, precision: str = "auto") -> Self:
        """The session that was saved to a file, on the same model."""
        with SavedFile(path) as file:
            check_saved(file, model)
            session = cls(model, file.saved.context, kv=file.saved.kv, precision=precision)
            try:
                await session._fill(file)
            except BaseException:
                session.close()
                raise
            return session

    async def take_over(self, path: SavedPath) -> None:
        """Go on where a saved session was, in this one's memory; a damaged file leaves it empty."""
        self._check_open()
        with SavedFile(path) as file:
            check_saved(file, self.model)
            if file.saved.kv != self.kv:
                raise InputError(
                    f"{file.name} was saved with kv {file.saved.kv}; load the model with the same."
                )
            await self._fill(file)

    def close(self) -> None:
        """Give the memory back."""
        if self.closed:
            return
        self.closed = True
        self._turn += 1
        self.tokens.clear()
        self._let_go()
        self._unread.clear()

    async def _take_up(self, ids: Sequence[int], soft: Sequence[Soft]) -> tuple[list[int], int]:
        """The ids as the cache knows them, and a turn; the cache forgets what does not agree."""
        check_soft(soft, len(ids), self.model.config.width, LARGEST_CHUNK)
        known = marked(ids, soft)
        turn = await self._begin(known)
        if any(each.both_ways and each.rows.shape[0] > self._chunk for each in soft):
            self._grow()
        self._forget(self._kept(known, soft))
        return known, turn

    async def _begin(self, ids: list[int]) -> int:
        """A turn, if the ids are such that the session can read them."""
        self._check_open()
        if not ids:
            raise InputError("The prompt is empty: there is nothing to continue.")
        if len(ids) > self.context:
            raise InputError(
                f"The prompt has {len(ids)} tokens, but the context holds {self.context}."
            )
        return await self._take_turn()

    async def _take_turn(self) -> int:
        """End what is under way; gives the number of the turn that begins."""
        await self._pace(0)
        self._check_open()
        self._take_adapters()
        self._turn += 1
        return self._turn

    def _take_adapters(self) -> None:
        """Begin anew if the model's adapters are others than before."""
        if self._adapters is not self.model.adapters:
            self._adapters = self.model.adapters
            self._forget(0)
            self._drop_plans()

    async def _pace(self, most: int) -> None:
        """Wait until at most so many submitted steps are unfinished."""
        while len(self._unread) > most:
            await self._unread.popleft().bytes()

    def _check_open(self) -> None:
        if self.closed:
            raise InputError("This session is closed: make another one.")
        if self.model.closed:
            raise InputError("The model of this session is closed: load it again.")

    def _check_turn(self, turn: int) -> None:
        self._check_open()
        if self._adapters is not self.model.adapters:
            raise InputError("The adapters were changed meanwhile: begin again.")
        if turn != self._turn:
            raise InputError(
                "Something else was begun on this session meanwhile; "
                "conversations that take turns need a session each."
            )

    def _agreed(self, ids: list[int]) -> int:
        """How many of the ids the cache holds."""
        pairs = zip(self.tokens, ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _kept(self, known: list[int], soft: Sequence[Soft]) -> int:
        """How many of the tokens need not be read again; the last is, for its logits."""
        kept = min(self._agreed(known), len(known) - 1)
        for each in soft:
            if each.both_ways and each.first < kept < each.end:
                return each.first
        return kept

    def _forget(self, length: int) -> None:
        if length == 0 or not self._cache.reaches(length):
            length = self._cache.lost = 0
        del self.tokens[length:]

    def _grow(self) -> None:
        """Make room for pictures that are read whole; what was read before is forgotten."""
        self.tokens.clear()
        self._let_go()
        try:
            self._make_room(LARGEST_CHUNK)
        except BaseException:
            self.closed = True  # there is no cache any more
            raise

    def _chunks(
        self, known: list[int], most: int | None = None, soft: Sequence[Soft] = ()
    ) -> Iterator[tuple[int, int]]:
        """Hand what is not read yet to the device chunk by chunk: (batch of the plan, tokens)."""
        while (at := len(self.tokens)) < len(known):
            end = end_of_chunk(at, min(at + (most or self._chunk), len(known)), soft)
            chunk = known[at:end]
            state = struct.pack("<2I", at, len(chunk)) + (ends(at, end, soft) or bytes(8))
            self.device.write(self._inputs.state.buffer, state)
            ids = struct.pack(f"<{len(chunk)}I", *plain(chunk))
            self.device.write(self._inputs.ids.buffer, ids)
            self._cache.write_to(end)
            least = 2 if len(state) > 16 else 1  # soft tokens are read as many are
            least = max(len(chunk), least)
            batches = sorted({*BATCHES, self._chunk})
            yield next(batch for batch in batches if batch >= least), len(chunk)
            self.tokens += chunk

    async def _read_chunk(
        self, batch: int, chunk: list[int], turn: int, soft: Sequence[Soft] = ()
    ) -> None:
        """Have the device read a chunk that it was handed."""
        at = len(self.tokens)
        sees = any(each.first < at + len(chunk) and at < each.end for each in soft)
        plan = await self._compiled("see" if sees else "read", batch, turn)
        await self._bring(chunk, turn)
        if sees:
            bring(self.device, self._soft_rows(), at, at + len(chunk), soft)
        self._unread.append(self._submit(plan, (self._inputs.state.buffer, 0, 4)))
        await self._pace(AHEAD)
        self._check_turn(turn)

    async def _decode(self, kind: str, length: int, last: int, turn: int) -> Reading:
        """Have the device read the token before `length` and choose the one after it."""
        plan = await self._compiled("decode " + kind, 1, turn)
        await self._bring([last], turn)
        self._cache.write_to(length)
        return self._submit(plan, self._sampler.result(length))

    async def _bring(self, ids: list[int], turn: int) -> None:
        """Bring the rows of a table that stayed in the file; nothing may come before the plan."""
        if self.model.table:
            await self.model.table.bring(ids)
            self._check_turn(turn)

    def _suppress(self, logits: bytes) -> bytes:
        """Rows of logits in which the tokens that must not come are impossible."""
        if not self.model.config.suppressed:
            return logits
        values = memoryview(bytearray(logits)).cast("f")
        for row in range(0, len(values), self.model.config.vocab):
            for token in self.model.config.suppressed:
                values[row + token] = -math.inf
        return values.tobytes()

    async def _compiled(self, kind: str, batch: int, turn: int) -> Plan:
        """A plan whose kernels are compiled."""
        plan = self._plan(kind, batch)
        if self._compiling:
            await self.device.compiled()
            self._check_turn(turn)
            self._compiling = False
        return plan

    async def _held(self, saved: Saved, turn: int) -> AsyncIterator[bytes]:
        """What the cache holds of the tokens, if nothing changes it on the way."""
        async for piece in self._cache.read(len(saved.tokens)):
            self._check_turn(turn)
            yield piece
        if self._cache.lost != saved.lost:
            raise InputError("The session went on while it was saved: save it again.")

    async def _fill(self, file: SavedFile) -> None:
        """Take tokens and cache from a file; where that fails, the session is empty."""
        saved, length = file.saved, len(file.saved.tokens)
        if length > self.context:
            raise InputError(
                f"{file.name} holds {length} tokens, but the context holds {self.context}; "
                "load the model with a larger one."
            )
        turn = await self._take_turn()
        self._forget(0)
        if length - saved.lost > self._cache.ring and self._chunk < LARGEST_CHUNK:
            self._grow()
        self._cache.lost = saved.lost
        try:
            if length - saved.lost > self._cache.ring or self._cache.nbytes(length) != file.nbytes:
                raise file.damaged("it does not hold what it says")
            await self._cache.write(length, file.take)
            file.finish()
            self._check_turn(turn)
        except BaseException:
            self._cache.lost = 0
            raise
        self.tokens = list(saved.tokens)


def no_numbers(name: str, device: str) -> GgufError:
    """The sentence for a model whose logits are no numbers."""
    return GgufError(
        f"{name} computes NaN or infinity on {device}: its weights are damaged, or this "
        "GPU's arithmetic is broken; `webgemma check` with this model tells which."
    )
