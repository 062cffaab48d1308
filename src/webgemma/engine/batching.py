"""Continuous batching: generations on the slots of one model join, decode together, and leave.

Nothing runs by itself. Whoever waits for a token takes the next step for all: one chunk of a prompt
that is being read, or one more token for every conversation that is being written. Steps follow
each other, and prompts and tokens take turns, so that no reply stalls while others begin.

Steps are submitted ahead of their results, because the device samples. A constraint says which
tokens may follow only once the token before is known: a step is submitted in halves then, first its
logits, and its choice when there are masks, which are made while the logits are computed. The host
makes the drafts of such steps, since masks depend on them: forced tokens, or what is looked up."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal, Protocol

from webgemma.device import Plan, Reading
from webgemma.engine.constraints import Constraint, choices
from webgemma.engine.plans import GIVEN, PlanKey
from webgemma.engine.slots import Slots
from webgemma.engine.speculation import (
    LOOKUP,
    MOST_ROWS,
    MTP,
    Speculation,
    StepCosts,
    StepSize,
    choose_drafts,
)
from webgemma.errors import DeviceError, GgufError, InputError, WebgemmaError
from webgemma.gemma.gpu_sampler import MAX_DRAFTS, MAX_SLOTS, NO_TOKEN, Row, plan_rows
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
    adapted: bool

    def write_scales(self) -> None: ...

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
    constraint: Constraint | None  # what the tokens keep to; it knows those that the host knows
    speculation: Speculation
    cached: int  # tokens of the prompt that were not read again
    written: int = 0  # tokens whose keys and values are written, or about to be; 0 while reading
    pending: int = 0  # steps that are under way
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

    def choices(self, drafts: Sequence[int] = ()) -> tuple[bytes | None, list[int]]:
        """Return the mask of the tokens that may come after these drafts, and what is forced.

        (None, []) after a draft that may not come: neither it nor what follows it will remain."""
        constraint = self.constraint
        if constraint is None or not self.check():
            return None, []
        accepted = _accept_allowed(constraint, drafts)
        try:
            if accepted < len(drafts):
                return None, []
            return choices(constraint, self.batch.slots.model.config.vocab)
        except WebgemmaError as error:
            self.error = error
            return None, []
        finally:
            constraint.rollback(accepted)

    def looked_up(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return drafts of the tokens after the one that follows these drafts, and is chosen now.

        They are what the conversation had before, as far as the constraint allows it."""
        expected = self.speculation.looked_up(drafts, self.batch.costs)
        if expected and self.constraint is not None:
            allowed = _accept_allowed(self.constraint, [*drafts, *expected])
            self.constraint.rollback(allowed)
            expected = expected[: max(0, allowed - len(drafts))]
        return expected[1:]

    def accept(self, token: int) -> None:
        """Let the constraint know of a token."""
        try:
            if self.constraint is not None:
                self.constraint.accept(token)
        except WebgemmaError as error:
            self.error = error

    def check(self) -> bool:
        """Return whether it goes on; what ended it otherwise is raised where it is read."""
        self.left |= self.turn is not None and self.turn.is_ended
        if not self.left and self.error is None:
            try:
                self.session.check_current(self.epoch)
            except WebgemmaError as error:
                self.error = error
        return not self.left and self.error is None


def _accept_allowed(constraint: Constraint, tokens: Sequence[int]) -> int:
    """Let a constraint go on by tokens up to one that may not come; return how many those are."""
    for count, token in enumerate(tokens):
        try:
            constraint.accept(token)
        except WebgemmaError:
            return count
    return len(tokens)


@dataclass(frozen=True, slots=True)
class _Line:
    """The rows of one generation in a step: its next token, and drafts of those that follow.

    The drafts are given, and forced or `looked_up`, or the device makes some, by a drafter of this
    name."""

    generation: Generation
    drafts: Sequence[int] = ()
    drafter: str = ""
    made: int = 0
    looked_up: bool = False

    @property
    def length(self) -> int:
        """How many rows these are."""
        return 1 + len(self.drafts) + self.made


@dataclass(frozen=True, slots=True)
class _Step:
    """Tokens on their way to the host."""

    reading: Reading
    size: StepSize
    lines: list[_Line]
    top_logprobs: list[int]  # of the rows


class Batch:
    """The generations on some slots, and the steps that are under way."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.device = slots.device
        self.worker: Worker | None = None  # whose lock and thread steps take, if there is one
        self.generations: list[Generation] = []
        self._uses = 0  # of all sessions, ever
        self._chunks: deque[Reading] = deque()  # that are under way
        self._steps: deque[_Step] = deque()
        self._computed: list[_Line] = []  # whose logits are there, or under way
        self.choose_drafts = choose_drafts  # who makes how many for a step
        self.costs = StepCosts()
        self._finished: tuple[StepSize | None, float] = (None, 0.0)  # the last step, and when
        self._reads_next = True  # the next step is a chunk, if there is one to read
        self._stepping: asyncio.Future[None] | None = None

    # Joining and leaving

    def join(
        self,
        session: Conversation,
        marks: list[int],
        epoch: int,
        settings: Settings,
        seed: int,
        soft: Sequence[SoftTokens],
        constraint: Constraint | None = None,
    ) -> Generation:
        """Return a generation of what follows the marks, on the session's slot."""
        drafters = self.slots.plans.drafters
        if settings["speculate"] == MTP and MTP not in drafters:
            raise InputError(
                f"speculate is {MTP}, but {self.slots.model.name} was loaded without a drafter",
                "load it with draft=FILE, or use auto, lookup or off",
            )
        self.note_use(session)
        cached = len(session.tokens)
        speculation = Speculation(
            settings["speculate"], settings["max_drafts"], unmarked(marks), drafters
        )
        generation = Generation(
            self, session, marks, epoch, settings, seed, soft, constraint, speculation, cached
        )
        self._configure(generation)
        self.generations.append(generation)
        return generation

    def note_use(self, session: Conversation) -> None:
        """Let a session be the one that was used last."""
        self._uses += 1
        session.used = self._uses

    def _configure(self, generation: Generation) -> None:
        sampler, slot = self.slots.sampler, generation.session.index
        sampler.set(generation.settings, generation.seed, slot)
        sampler.set_history(unmarked(generation.marks), slot)
        generation.session.write_scales()

    def is_busy(self, session: Conversation) -> bool:
        """Return whether a generation has the session's slot."""
        return any(each.session is session and each.check() for each in self.generations)

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
        """Wait until nothing is under way; logits that nothing was chosen from are dropped."""
        await self.wait_for_chunks(0)
        await self._finish_steps()
        for line in self._computed:
            line.generation.pending -= 1
            line.generation.written -= line.length
        self._computed = []

    def close(self) -> None:
        """Free the slots."""
        for generation in self.generations:
            generation.leave()
        self.slots.close()
        self._forget()

    def _forget(self) -> None:
        """Drop what is under way."""
        self._chunks.clear()
        self._steps.clear()
        self._computed = []

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
            self._forget()  # what cannot be read must not end later generations, too

    async def _take_step(self) -> None:
        self.generations = [each for each in self.generations if each.check()]
        reading = next((each for each in self.generations if each.is_reading), None)
        writing = [each for each in self.generations if not each.is_reading]
        if reading is not None and (self._reads_next or not writing):
            self._reads_next = False
            await self._read(reading)
            return
        self._reads_next = True
        if self._computed or any(each.constraint for each in writing):
            await self._take_constrained_step(writing)
            return
        ahead = 0 if self.slots.model.table else STEPS_AHEAD  # the host uploads rows for tokens
        while len(self._steps) <= ahead:
            able = [each for each in writing if each.may_continue]
            drafter, drafts = self._drafts_of(able)
            lines = [_Line(each, drafter=drafter, made=drafts) for each in able]
            if not lines or not await self._compute(lines, "decode"):
                break
        if self._steps:
            await self._finish_step()

    def _drafts_of(self, generations: list[Generation]) -> tuple[str, int]:
        """Return who makes how many drafts for each of these conversations in the next step."""
        if not generations or self.slots.model.table:  # whose rows the host uploads for tokens
            return "", 0
        left = min(self.slots.context - each.written - 2 for each in generations)
        speculations = [each.speculation for each in generations]
        drafter, drafts = self.choose_drafts(speculations, self.costs)
        drafts = max(0, min(drafts, left))
        return (drafter, drafts) if drafts else ("", 0)

    async def _take_constrained_step(self, writing: list[Generation]) -> None:
        """Choose among the logits that are there or under way, and submit the next ones.

        What is chosen is read last: the device computes the next logits meanwhile."""
        await self._finish_steps()  # the masks depend on these tokens
        if not self._computed:
            lines = [_Line(each) for each in writing if each.may_continue]
            if not lines or not await self._compute(lines, "body"):
                return
        lines, self._computed = self._computed, []
        following = await self._choose(lines)
        if not self.slots.model.table:  # else the host has to know the tokens first
            present = {line.generation for line in lines}
            following += [_Line(each) for each in writing if each not in present]
            able = [line for line in following if line.generation.may_continue]
            if any(line.generation.constraint for line in able):
                await self._compute(_fitting(able), "body")
        await self._finish_steps()

    async def _choose(self, lines: list[_Line]) -> list[_Line]:
        """Submit choosing the tokens of rows whose logits are there; return the lines that follow.

        Where tokens are forced, the drafts after the one that is chosen now are known; elsewhere
        they are looked up."""
        rows, masks, following = list[Row](), dict[int, bytes](), list[_Line]()
        for line in lines:
            generation, forced = line.generation, list[int]()
            for ahead in range(line.length):
                mask, forced = generation.choices(line.drafts[:ahead])
                if mask is not None:
                    masks[len(rows)] = mask
                ended = not generation.check()  # its slot may have another conversation by now
                rows.append(Row(generation.session.index, ahead, mask is not None, ended))
            if forced and generation.check():
                following.append(_Line(generation, tuple(forced[1 : 1 + MAX_DRAFTS])))
            elif generation.check():
                drafts = generation.looked_up(line.drafts)
                following.append(_Line(generation, drafts, looked_up=True))
        settings = [line.generation.settings for line in lines]
        key = PlanKey(
            "choose",
            plan_rows(len(rows)),
            greedy=all(map(is_greedy, settings)),
            top_logprobs=any(each["top_logprobs"] for each in settings),
            masked=bool(masks),
            drafts=GIVEN if any(line.drafts for line in lines) else "",
        )
        plan = await self.slots.plans.compiled(key)
        for row, mask in masks.items():
            self.slots.sampler.set_mask(row, mask)
        self.slots.conversations.set_rows(rows)
        found = max(len(line.drafts) if line.looked_up else 0 for line in lines)
        self._submit_choice(plan, StepSize(key.rows, LOOKUP if found else "", found), lines)
        return following

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
        mask, _ = generation.choices()
        key = PlanKey(
            "sample",
            greedy=is_greedy(generation.settings),
            top_logprobs=generation.settings["top_logprobs"] > 0,
            masked=mask is not None,
            adapted=generation.session.adapted,
        )
        plan = await self.slots.plans.compiled(key)
        generation.session.check_current(generation.epoch)
        if mask is not None:
            self.slots.sampler.set_mask(0, mask)
        self.slots.conversations.set_rows([Row(slot, masked=mask is not None)])
        self.slots.conversations.set_next(slot, length - 1)
        self._submit_choice(plan, StepSize(1), [_Line(generation)])
        generation.pending += 1

    async def _compute(self, lines: list[_Line], kind: Literal["decode", "body"]) -> bool:
        """Submit the rows of these conversations; return whether that was possible.

        `decode` samples the tokens that follow, `body` leaves the logits."""
        settings = [line.generation.settings for line in lines]
        whole, drafter, made = kind == "decode", lines[0].drafter, lines[0].made
        given = any(line.drafts for line in lines)
        rows = sum(line.length for line in lines)
        key = PlanKey(
            kind,
            rows if made else plan_rows(rows),
            greedy=whole and all(map(is_greedy, settings)),
            top_logprobs=whole and any(each["top_logprobs"] for each in settings),
            drafts=drafter or (GIVEN if given else ""),
            line=1 + made,
            adapted=any(line.generation.session.adapted for line in lines),
        )
        plan = await self.slots.plans.compiled(key)
        live = [line for line in lines if line.generation.check()]
        if live != lines:
            return False
        if self.slots.model.table:
            tokens = [(line.generation.marks[-1], *line.drafts) for line in lines]
            await self.slots.model.table.upload([token for row in tokens for token in row])
        table = list[Row]()
        for line in lines:
            slot = line.generation.session.index
            table += [Row(slot, ahead) for ahead in range(line.length)]
            if line.drafts:
                self.slots.conversations.set_drafts(slot, line.drafts)
        self.slots.conversations.set_rows(table)
        if whole:
            self._submit_choice(plan, StepSize(key.rows, drafter, made), lines)
        else:
            self.device.run(plan)
            self._computed = lines
        for line in lines:
            line.generation.pending += 1
            line.generation.written += line.length
            line.generation.session.cache.advance(line.generation.written)
        return True

    def _submit_choice(self, plan: Plan, size: StepSize, lines: list[_Line]) -> None:
        """Submit a plan that chooses the tokens after these rows."""
        top = [
            line.generation.settings["top_logprobs"] for line in lines for _ in range(line.length)
        ]
        reading = self.device.run(plan, self.slots.sampler.result(size.rows, max(top)))
        assert reading is not None
        self._steps.append(_Step(reading, size, lines, top))

    async def _finish_steps(self) -> None:
        """Wait for all steps that are under way."""
        while self._steps:
            await self._finish_step()

    async def _finish_step(self) -> None:
        """Wait for the oldest step, and hand its tokens out."""
        step = self._steps[0]
        data = await step.reading.bytes()
        if not self._steps or self._steps[0] is not step:
            return  # the batch was closed meanwhile
        self._steps.popleft()
        self._note_cost(step.size)
        sampled = deque(self.slots.sampler.parse(data, step.size.rows, step.top_logprobs))
        for line in step.lines:
            tokens = [sampled.popleft() for _ in range(line.length)]
            tokens = [each for each in tokens if each.token != NO_TOKEN]
            line.generation.pending -= 1
            line.generation.written -= line.length - len(tokens)  # the drafts that do not remain
            if line.made:
                line.generation.speculation.note(line.drafter, line.made, len(tokens) - 1)
            elif line.looked_up and line.drafts:
                line.generation.speculation.note(LOOKUP, len(line.drafts), len(tokens) - 1)
            for token in tokens:
                if line.generation.check():
                    self._take(line.generation, token)

    def _note_cost(self, size: StepSize) -> None:
        """Note how long a step took that followed one of the same size, while others waited."""
        before, now = self._finished, perf_counter()
        if before[0] == size and (self._steps or self._computed):
            self.costs.note(size, now - before[1])
        self._finished = size, now

    def _take(self, generation: Generation, sampled: SampledToken) -> None:
        session, marks = generation.session, generation.marks
        if sampled.logprob > IMPOSSIBLE_LOGPROB:
            session.truncate(0)
            generation.error = not_finite(self.slots.model.name, self.device.name)
            return
        marks.append(sampled.token)
        known = min(generation.written, len(marks))
        session.tokens += marks[len(session.tokens) : known]
        generation.accept(sampled.token)
        generation.speculation.read(sampled.token)
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
        "of this GPU is broken",
        "`webgemma check` with this model shows which",
    )


def _fitting(lines: list[_Line]) -> list[_Line]:
    """Return lines with so many drafts that all rows fit a step, and the context of each.

    Where drafts are looked up, there are so few rows that each is computed as it would be alone."""
    if sum(line.length for line in lines) > MOST_ROWS:
        lines = [replace(line, drafts=()) if line.looked_up else line for line in lines]
    room = MAX_SLOTS - len(lines)
    fitting = []
    for line in lines:
        generation = line.generation
        left = generation.batch.slots.context - generation.written - 2
        drafts = line.drafts[: max(0, min(room, left))]
        room -= len(drafts)
        fitting.append(replace(line, drafts=drafts))
    return fitting
