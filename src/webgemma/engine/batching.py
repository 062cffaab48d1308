"""Continuous batching: generations on the slots of one model join, decode together, and leave.

Nothing runs by itself. Whoever waits for a token takes the next step for all: one chunk of a prompt
that is being read, or one more token for every conversation that is being written. Steps follow
each other, and prompts and tokens take turns, so that no reply stalls while others begin."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from webgemma.device import Plan, Reading
from webgemma.engine.plans import PlanKey
from webgemma.engine.slots import Slots
from webgemma.errors import DeviceError, GgufError, WebgemmaError
from webgemma.gemma.gpu_sampler import plan_rows
from webgemma.gemma.kv_cache import CacheSlot, KvCache
from webgemma.gemma.soft_tokens import SoftTokens, unmarked
from webgemma.sampler import SampledToken
from webgemma.settings import Settings, is_greedy
from webgemma.sync import Worker, current_turn, is_driven
from webgemma.turns import Turn

CHUNKS_AHEAD = 1  # that are submitted before one is finished; a cancelled call ends after it
STEPS_AHEAD = 2  # steps that are submitted before the host has the first one's result
MOST_UNREAD = 64  # tokens that a conversation may be ahead of who reads it
IMPOSSIBLE_LOGPROB = 1e30  # reported where a logit was not finite: see partials/chunks.wgsl


class Conversation(Protocol):
    """What a batch needs of a session."""

    index: int
    used: int
    tokens: list[int]
    cache: CacheSlot

    def check_current(self, epoch: int) -> None: ...

    def upload_chunk(
        self, marks: list[int], at_once: int | None = None, soft: Sequence[SoftTokens] = ()
    ) -> tuple[int, int]: ...

    async def read_chunk(
        self, rows: int, marks: list[int], count: int, epoch: int, soft: Sequence[SoftTokens] = ()
    ) -> None: ...

    def truncate(self, length: int) -> None: ...

    def moved(self, lost: int) -> None: ...


@dataclass(eq=False, slots=True)
class Generation:
    """The tokens that follow a prompt, while they are being computed."""

    batch: "Batch"
    session: Conversation
    marks: list[int]  # the prompt, then the tokens that the host knows
    epoch: int
    settings: Settings
    seed: int
    soft: Sequence[SoftTokens]
    cached: int  # tokens of the prompt that were not read again
    written: int = 0  # tokens whose keys and values are written, or about to be; 0 while reading
    pending: int = 0  # tokens that are under way
    left: bool = False
    error: Exception | None = None
    turn: Turn | None = field(default_factory=current_turn)  # of who reads it
    unread: deque[SampledToken] = field(default_factory=deque)

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.written

    @property
    def may_continue(self) -> bool:
        """Whether one more token can be computed, and is wanted."""
        has_room = self.written + 1 < self.batch.slots.context
        return has_room and len(self.unread) + self.pending < MOST_UNREAD

    @property
    def is_over(self) -> bool:
        """Whether nothing follows what is unread."""
        full = not self.is_reading and self.written + 1 >= self.batch.slots.context
        return self.left or self.error is not None or (full and not self.pending)

    async def next(self) -> SampledToken | None:
        """Return the next token; None if the context is full."""
        while not self.unread and not self.is_over:
            await self.batch.advance(self)
        if self.error is not None and not self.unread:
            raise self.error
        self.session.check_current(self.epoch)
        return self.unread.popleft() if self.unread else None

    def leave(self) -> None:
        """End it: its steps that are under way are dropped. Any thread may call this."""
        self.left = True

    def check(self) -> bool:
        """Return whether it goes on; what ended it otherwise is raised where it is read."""
        self.left |= self.turn is not None and self.turn.is_ended
        if not self.left and self.error is None:
            try:
                self.session.check_current(self.epoch)
            except WebgemmaError as error:
                self.error = error
        return not self.left and self.error is None


@dataclass(frozen=True, slots=True)
class _Step:
    """Tokens on their way to the host."""

    reading: Reading
    rows: int  # of the plan
    generations: list[Generation]  # of the rows
    top_logprobs: list[int]


class Batch:
    """The generations on some slots, and the steps that are under way."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.device = slots.device
        self.worker: Worker | None = None  # whose lock and thread steps take, if there is one
        self.generations: list[Generation] = []
        self._began = 0  # generations, ever
        self._chunks: deque[Reading] = deque()  # that are under way
        self._steps: deque[_Step] = deque()
        self._reads_next = True  # the next step is a chunk, if there is one to read
        self._stepping: asyncio.Future[None] | None = None
        self._lora = slots.model.lora

    # Joining and leaving

    def join(
        self,
        session: Conversation,
        marks: list[int],
        epoch: int,
        settings: Settings,
        seed: int,
        soft: Sequence[SoftTokens],
    ) -> Generation:
        """Return a generation of what follows the marks, on the session's slot."""
        self._began += 1
        session.used = self._began
        cached = len(session.tokens)
        generation = Generation(self, session, marks, epoch, settings, seed, soft, cached)
        self._configure(generation)
        self.generations.append(generation)
        return generation

    def _configure(self, generation: Generation) -> None:
        sampler, slot = self.slots.sampler, generation.session.index
        sampler.set(generation.settings, generation.seed, slot)
        sampler.set_history(unmarked(generation.marks), slot)

    def is_busy(self, session: Conversation) -> bool:
        """Return whether a generation has the session's slot."""
        return any(each.session is session and each.check() for each in self.generations)

    def follow_adapters(self) -> None:
        """Record plans anew if the model's adapters have changed."""
        if self._lora is not self.slots.model.lora:
            self._lora = self.slots.model.lora
            self.slots.plans.close()

    async def grow(self, count: int, sessions: Sequence[Conversation]) -> None:
        """Get slots for more conversations; these sessions keep what they have read."""
        await self.settle()
        self.generations = [each for each in self.generations if each.check()]

        def adopt(before: KvCache) -> None:
            for session in sessions:
                lost, length = session.cache.lost, len(session.tokens)
                length = max(
                    [length, *(g.written for g in self.generations if g.session is session)]
                )
                self.slots.cache.copy_slot(session.index, before, session.index, length, lost)
                session.moved(lost)

        tokens = {g: (g.marks[-1], g.written) for g in self.generations if not g.is_reading}
        self.slots.grow(count, adopt)
        for generation in self.generations:
            self._configure(generation)
        for generation, (token, written) in tokens.items():
            self.slots.conversations.set_next(generation.session.index, written, token)

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        await self.wait_for_chunks(0)
        while self._steps:
            await self._finish_step()

    def close(self) -> None:
        """Free the slots."""
        for generation in self.generations:
            generation.leave()
        self.slots.close()
        self._chunks.clear()
        self._steps.clear()

    # Steps

    async def advance(self, waiting: Generation) -> None:
        """Take one step, or wait for one that another task has begun."""
        if self.worker is None or is_driven():
            await self._step(waiting)  # who drives this has the lock
            if self.worker is not None:
                self.worker.breathe()
            return
        stepping, loop = self._stepping, asyncio.get_running_loop()
        if stepping is None or stepping.done() or stepping.get_loop() is not loop:
            stepping = asyncio.ensure_future(self.worker.drive(self._step(waiting)))
            self._stepping = stepping
        await asyncio.shield(stepping)

    async def _step(self, waiting: Generation) -> None:
        """Read a chunk of a prompt, or a token of every conversation; its errors end them."""
        if waiting.unread or waiting.is_over:
            return  # somebody else's step was enough
        try:
            await self._take_step()
        except Exception as error:  # of the device, say: it is everybody's
            for generation in self.generations:
                generation.error = generation.error or error
            self.generations.clear()
            self._steps.clear()  # one that cannot be read must not end later generations, too
            self._chunks.clear()

    async def _take_step(self) -> None:
        self.generations = [each for each in self.generations if each.check()]
        reading = next((each for each in self.generations if each.is_reading), None)
        writing = [each for each in self.generations if not each.is_reading]
        if reading is not None and (self._reads_next or not writing):
            self._reads_next = False
            await self._read(reading)
            return
        self._reads_next = True
        ahead = 0 if self.slots.model.table else STEPS_AHEAD  # the host uploads rows for tokens
        while len(self._steps) <= ahead:
            rows = [each for each in writing if each.may_continue]
            if not rows or not await self._submit(rows):
                break
        if self._steps:
            await self._finish_step()

    async def _read(self, generation: Generation) -> None:
        """Submit the next chunk of a prompt and, after the last one, sampling."""
        session, marks = generation.session, generation.marks
        try:
            if len(session.tokens) < len(marks):
                rows, count = session.upload_chunk(marks, soft=generation.soft)
                await session.read_chunk(rows, marks, count, generation.epoch, generation.soft)
                at = len(session.tokens)
                session.tokens += marks[at : at + count]
            if len(session.tokens) == len(marks):
                await self._sample(generation)
        except DeviceError:
            raise
        except WebgemmaError as error:
            generation.error = error

    async def _sample(self, generation: Generation) -> None:
        """Submit sampling of the first token after a prompt."""
        length, slot = len(generation.marks), generation.session.index
        generation.written = length
        if length >= self.slots.context:
            return
        top = generation.settings["top_logprobs"]
        greedy = is_greedy(generation.settings)
        key = PlanKey("sample", greedy=greedy, top_logprobs=top > 0)
        plan = await self.slots.plans.compiled(key)
        generation.session.check_current(generation.epoch)
        self.slots.conversations.set_rows([slot])
        self.slots.conversations.set_next(slot, length - 1)
        self._submit_plan(plan, 1, [generation])

    async def _submit(self, generations: list[Generation]) -> bool:
        """Submit one more token of these conversations; return whether that was possible."""
        rows = plan_rows(len(generations))
        greedy = all(is_greedy(each.settings) for each in generations)
        report = any(each.settings["top_logprobs"] for each in generations)
        key = PlanKey("decode", rows, greedy=greedy, top_logprobs=report)
        plan = await self.slots.plans.compiled(key)
        live = [each for each in generations if each.check()]
        if live != generations:
            return False
        if self.slots.model.table:
            await self.slots.model.table.upload([each.marks[-1] for each in generations])
        self.slots.conversations.set_rows([each.session.index for each in generations])
        self._submit_plan(plan, rows, generations)
        for generation in generations:
            generation.written += 1
            generation.session.cache.advance(generation.written)
        return True

    def _submit_plan(self, plan: Plan, rows: int, generations: list[Generation]) -> None:
        top = [each.settings["top_logprobs"] for each in generations]
        reading = self.device.run(plan, self.slots.sampler.result(rows, max(top)))
        assert reading is not None
        self._steps.append(_Step(reading, rows, generations, top))
        for generation in generations:
            generation.pending += 1

    async def _finish_step(self) -> None:
        """Wait for the oldest step, and hand its tokens out."""
        step = self._steps[0]
        data = await step.reading.bytes()
        if not self._steps or self._steps[0] is not step:
            return  # the batch was closed meanwhile
        self._steps.popleft()
        sampled = self.slots.sampler.parse(data, step.rows, step.top_logprobs)
        for generation, token in zip(step.generations, sampled, strict=True):
            generation.pending -= 1
            if generation.check():
                self._take(generation, token)

    def _take(self, generation: Generation, sampled: SampledToken) -> None:
        session, marks = generation.session, generation.marks
        if sampled.logprob > IMPOSSIBLE_LOGPROB:
            session.truncate(0)
            generation.error = not_finite(self.slots.model.name, self.device.name)
            return
        marks.append(sampled.token)
        known = min(generation.written, len(marks))
        session.tokens += marks[len(session.tokens) : known]
        generation.unread.append(sampled)

    # Chunks

    async def submit_chunk(self, plan: Plan) -> None:
        """Submit reading the uploaded chunk, when few enough are under way."""
        reading = self.device.run(plan, (self.slots.plans.chunk.batch.buffer, 0, 4))
        assert reading is not None
        self._chunks.append(reading)
        await self.wait_for_chunks(CHUNKS_AHEAD)

    async def wait_for_chunks(self, count: int) -> None:
        """Wait until at most so many chunks are under way."""
        while len(self._chunks) > count:
            reading = self._chunks[0]
            await reading.bytes()
            if self._chunks and self._chunks[0] is reading:
                self._chunks.popleft()


def not_finite(name: str, device: str) -> GgufError:
    """Return the error for a model whose logits are not finite."""
    return GgufError(
        f"{name} computes NaN or infinity on {device}: its weights are damaged, or the arithmetic "
        "of this GPU is broken; `webgemma check` with this model shows which."
    )
