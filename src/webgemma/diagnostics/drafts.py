"""What drafts are worth on this machine: decoding with drafts that are right so often.

A drafter's share of right drafts depends on weights and text; here it is set, and the tokens that
follow are known from decoding without drafts. The time of the drafter itself is a part of it."""

import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from webgemma.diagnostics.bench import GREEDY, Task
from webgemma.engine.batching import STEPS_AHEAD
from webgemma.engine.plans import DraftRecorder
from webgemma.engine.session import Session
from webgemma.engine.speculation import DRAFTS_PER_STEP, MTP, DraftCounts
from webgemma.errors import InputError
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.settings import Settings

SPECULATING: Settings = {**GREEDY, "speculate": "auto"}
WARM_UP_SECONDS = 0.7  # kernels that are compiled leave the GPU idle, which lowers its clock
MOST_DRAFTS = 7
SEED = 91  # after 512 tokens, its first draws give each number of drafts what it has to expect
# The context ends some tokens after those that are timed, so that no step has fewer drafts there.
SPARE = (STEPS_AHEAD + 2) * (1 + MOST_DRAFTS)


@dataclass(frozen=True, slots=True)
class DraftSpeed:
    """Tokens per second with so many drafts a step, of which a share is right at each position."""

    share: float
    drafts: int
    rate: float
    accepted: float  # of a step's drafts, on the average


@dataclass(frozen=True, slots=True)
class ScriptedDrafts:
    """Drafts of known tokens, right with a probability; a drafter, if given, drafts before."""

    batch: Tensor  # the table of conversations
    script: Tensor  # the token of each position
    share: float
    vocab: int
    before: DraftRecorder | None = None

    def record(self, recorder: Recorder, rows: int, line: int) -> None:
        """Record drafts for conversations that have `line` rows each, of so many."""
        if self.before is not None:
            self.before(recorder, rows, line)
        recorder.call(
            "script_drafts",
            (1,),
            batch=self.batch,
            script=self.script,
            seed=SEED,
            right=round(self.share * 2**24),
            vocab=self.vocab,
            LINE=line,
        )


async def time_drafts(
    model: Model,
    task: Task,
    kv: str,
    precision: str = "auto",
    shares: Sequence[float] = (0.5, 0.7, 0.9),
    counts: Sequence[int] = DRAFTS_PER_STEP,
) -> tuple[float, list[DraftSpeed]]:
    """Return the tokens per second without drafts, and with so many of each share.

    AssertionError if drafts change the text."""
    if model.table is not None:
        raise InputError(
            f"{model.name} keeps its table of per-layer embeddings in the file, and drafts nothing "
            "then: leave --memory-gb out."
        )
    ids = task.ids(model.config.vocab)
    session = Session(model, len(ids) + task.decode + SPARE, kv=kv, precision=precision)
    drafters = session.plans.drafters
    try:
        _, (tokens, _) = await _decode(session, ids, task.decode + SPARE, GREEDY)
        packed = struct.pack(f"<{len(ids) + len(tokens)}I", *ids, *tokens)
        script = session.slots.memory.upload(packed, len(packed) // 4, label="script")
        plain, _ = await _median(session, ids, task, GREEDY)
        found = []
        for share in shares:
            name = f"scripted {share}"
            drafters[name] = ScriptedDrafts(
                session.slots.conversations.tensor,
                script,
                share,
                model.config.vocab,
                drafters.get(MTP),
            ).record
            for count in counts:
                session.batch.choose_drafts = partial(_always, (name, count))
                seconds, (written, drafts) = await _median(session, ids, task, SPECULATING)
                if written != tokens[: task.decode + 1]:
                    raise AssertionError(f"{count} drafts have changed the text")
                accepted = count * drafts.remained / max(1, drafts.checked)
                found.append(DraftSpeed(share, count, task.decode / seconds, accepted))
        return task.decode / plain, found
    finally:
        session.close()


def _always(chosen: tuple[str, int], *_: object) -> tuple[str, int]:
    return chosen


Written = tuple[list[int], DraftCounts]


async def _median(
    session: Session, ids: list[int], task: Task, settings: Settings
) -> tuple[float, Written]:
    """Return the median of the seconds for a task's tokens, and what was written."""
    end = time.perf_counter() + WARM_UP_SECONDS
    await _decode(session, ids, task.decode, settings)
    while time.perf_counter() < end:
        await _decode(session, ids, task.decode, settings)
    runs = [await _decode(session, ids, task.decode, settings) for _ in range(task.repetitions)]
    return statistics.median(seconds for seconds, _ in runs), runs[-1][1]


async def _decode(
    session: Session, ids: list[int], count: int, settings: Settings
) -> tuple[float, Written]:
    """Return the seconds for so many tokens after the first, and all of them."""
    session.rewind(0)
    generation = await session.begin(ids, settings, 0)
    try:
        tokens, start = list[int](), 0.0
        while len(tokens) <= count and (sampled := await generation.next()) is not None:
            start = start or time.perf_counter()
            tokens.append(sampled.token)
        return time.perf_counter() - start, (tokens, generation.speculation.counts)
    finally:
        generation.leave()
