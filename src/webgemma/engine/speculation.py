"""Speculation: which drafts of the next tokens a step checks, and how many, so that it pays.

A step that reads a token and k drafts of those after it yields as many tokens as the drafts agree
with what is chosen, and one more; each is what it would be without drafts. It takes longer than a
step of one token, so drafts pay only if enough of them remain.

Drafts come from the conversation itself ("lookup") or from a drafter ("mtp")."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from webgemma.gemma.gpu_sampler import MAX_DRAFTS, plan_rows

LOOKUP, MTP = "lookup", "mtp"
MOST_ROWS = 8  # of a step with drafts: that many are computed as each would be alone
# How many drafts a step may have, apart from the most it may have: each number needs kernels of its
# own, and a reply waits while those compile.
DRAFTS_PER_STEP = (1, 3, 7)
RECENT = 32  # outcomes that the share of drafts that remain is taken from
FEWEST = 6  # outcomes before that share is believed; the weight of an expectation counts, too
PATIENCE, MOST_PATIENCE = 128, 1024  # tokens until it is tried again where drafts did not pay
GAIN = 1.05  # by which a step with drafts has to be faster
# Of a further row, and of a drafter's step, in steps of one row, until they have been measured.
ROW_COST, DRAFT_COST = 0.15, 0.05
INDEXED = 1 << 14  # tokens of a prompt whose pairs are remembered, the last ones
WEIGHT = 0.1  # of a measurement in the average
# The share of a drafter's drafts that remain, until it is known, and the outcomes it counts for.
# High enough that two drafts may be wrong by chance before it is given up.
EXPECTED, EXPECTED_WEIGHT = 0.75, 4


class StepSize(NamedTuple):
    """What decides how long a step takes: the rows of its plan, and who makes how many drafts."""

    rows: int
    drafter: str = ""
    drafts: int = 0  # of each conversation

    @property
    def estimate(self) -> float:
        """The time of such a step, in steps of one row."""
        return 1 + ROW_COST * (self.rows - 1) + DRAFT_COST * self.drafts * (self.drafter == MTP)


class StepCosts:
    """How long steps take: averages of what was measured."""

    def __init__(self) -> None:
        self._seconds: dict[StepSize, float] = {}

    def note(self, step: StepSize, seconds: float) -> None:
        """Note how long a step took."""
        before = self._seconds.get(step)
        if before is None or seconds < before / 2:
            self._seconds[step] = seconds
        else:
            self._seconds[step] = before + WEIGHT * (min(seconds, 2 * before) - before)

    def knows(self, step: StepSize) -> bool:
        """Return whether such a step has been measured."""
        return step in self._seconds

    def relative(self, step: StepSize, other: StepSize) -> float:
        """Return the time of a step in steps of another size, which has fewer rows."""
        mine, others = self._time(step), self._seconds.get(other)
        if mine is None or others is None:
            return step.estimate / other.estimate
        return max(1.0, mine / others)

    def _time(self, step: StepSize) -> float | None:
        """Return the time of a step: measured, or from the next size measured with its drafter.

        An estimate beside measured times would make the sizes that were never tried the best."""
        measured = [each for each in self._seconds if each.drafter == step.drafter]
        if not measured:
            return None
        nearest = min(
            measured, key=lambda each: (abs(each.rows - step.rows), abs(each.drafts - step.drafts))
        )
        return self._seconds[nearest] * step.estimate / nearest.estimate


@dataclass(slots=True)
class DraftCounts:
    """How many drafts were checked, and how many of them remained."""

    checked: int = 0
    remained: int = 0


@dataclass(slots=True)
class Share:
    """The share of drafts that remain, of those whose predecessors did: a recent average."""

    expected: float = 0.0
    weight: int = 0  # outcomes that the expectation counts for
    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note(self, offered: int, remained: int) -> None:
        """Note that so many of the drafts of a step remained."""
        self.outcomes.extend([True] * remained)
        if remained < offered:
            self.outcomes.append(False)

    @property
    def is_known(self) -> bool:
        """Whether there are enough outcomes, together with what was expected."""
        return len(self.outcomes) + self.weight >= FEWEST

    @property
    def value(self) -> float:
        """The share; without an expectation, 0 until it is known."""
        if not self.weight and not self.is_known:
            return 0.0
        total = sum(self.outcomes) + self.expected * self.weight
        return total / (len(self.outcomes) + self.weight)


class Repetition:
    """Whether a conversation repeats itself: what followed its last tokens before, follows again.

    It follows the tokens that the host knows, as lookup_drafts.wgsl does those of the device."""

    def __init__(self, tokens: list[int]) -> None:
        recent = tokens[-INDEXED:]
        self._after: dict[tuple[int, int], int] = {}
        for (first, second), third in zip(pairwise(recent), recent[2:], strict=False):
            self._after[first, second] = third
        self._last = tuple(recent[-2:])
        self.share = Share()

    def read(self, token: int) -> None:
        """Note the next token, and whether it was expected."""
        if len(self._last) == 2:
            pair = (self._last[0], self._last[1])
            self.share.note(1, int(self._after.get(pair) == token))
            self._after[pair] = token
        self._last = (*self._last[-1:], token)

    def following(self, drafts: Sequence[int], count: int) -> list[int]:
        """Return up to so many tokens that followed before what was read and then some drafts."""
        tokens = [*self._last, *drafts]
        known = len(tokens)
        while len(tokens) < known + count and len(tokens) > 1:
            token = self._after.get((tokens[-2], tokens[-1]))
            if token is None:
                break
            tokens.append(token)
        return tokens[known:]


class _Source:
    """Where drafts of one generation come from, and how many of them remained of late.

    Where they did not pay they are given up, and tried again after more and more tokens, with less
    and less hope."""

    def __init__(self, expected: float = 0.0, repetition: Repetition | None = None) -> None:
        self._share = Share(expected, EXPECTED_WEIGHT if expected else 0)
        self._repetition = repetition
        self._patience = PATIENCE
        self._wait = 0  # tokens until it is tried again

    @property
    def share(self) -> float:
        """The share of drafts that will remain, as far as one can tell."""
        if self._wait:
            return 0.0
        if self._repetition is None:
            return self._share.value
        found = self._repetition.share.value
        return min(found, self._share.value) if self._share.is_known else found

    @property
    def is_guessed(self) -> bool:
        """Whether the share is what was expected, and hardly anything was found out yet."""
        return self._share.weight > 0 and not self._share.is_known

    def read(self, token: int) -> None:
        """Note a token that was chosen."""
        self._wait = max(0, self._wait - 1)
        if self._repetition is not None:
            self._repetition.read(token)

    def following(self, drafts: Sequence[int], count: int) -> list[int]:
        """Return what is expected after some drafts, where the conversation repeats itself."""
        return self._repetition.following(drafts, count) if self._repetition else []

    def note(self, offered: int, remained: int) -> None:
        """Note how many drafts of a step remained."""
        if not self._wait:  # else the step was under way when they were given up
            self._share.note(offered, remained)

    def settle(self, pays: bool) -> None:
        """Go on, or give up for a while if it is known not to pay."""
        if pays and self._share.is_known:
            self._patience = PATIENCE
        elif not pays and self._share.is_known and not self._wait:
            self._wait = self._patience
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._share.outcomes.clear()


class Speculation:
    """The drafts of one generation: where they may come from, and what became of them."""

    def __init__(
        self, kind: str, most: int, tokens: list[int], drafters: Collection[str] = (LOOKUP,)
    ) -> None:
        """`kind` is auto, off or a drafter's name; `tokens` are those of the prompt."""
        self.most = min(most, MAX_DRAFTS, MOST_ROWS - 1)
        self.counts = DraftCounts()
        self.sources: dict[str, _Source] = {}
        if kind in ("auto", MTP) and MTP in drafters:
            self.sources[MTP] = _Source(EXPECTED)
        if kind in ("auto", LOOKUP) and LOOKUP in drafters:
            self.sources[LOOKUP] = _Source(repetition=Repetition(tokens))

    def read(self, token: int) -> None:
        """Note a token that was chosen."""
        for source in self.sources.values():
            source.read(token)

    def looked_up(self, drafts: Sequence[int], costs: StepCosts) -> list[int]:
        """Return the tokens that are expected after some drafts; none where it does not pay.

        The first of them is being chosen: the others are drafts of those after it."""
        source = self.sources.get(LOOKUP)
        if source is None:
            return []
        count = best_looked_up(source.share, self.most, costs)
        source.settle(count > 0)
        return source.following(drafts, 1 + count) if count else []

    def note(self, drafter: str, offered: int, remained: int) -> None:
        """Note how many drafts of a step remained."""
        self.counts.checked += offered
        self.counts.remained += remained
        if drafter in self.sources:
            self.sources[drafter].note(offered, remained)


def choose_drafts(generations: Sequence[Speculation], costs: StepCosts) -> tuple[str, int]:
    """Return who makes how many drafts for each of some generations in their next step.

    ("", 0) where none pay, or it is not known yet how long a step without them takes."""
    chosen, fastest = ("", 0), GAIN
    if not generations or not costs.knows(StepSize(plan_rows(len(generations)))):
        return chosen
    most = min(each.most for each in generations)
    names = [name for name in generations[0].sources if all(name in g.sources for g in generations)]
    for name in names:
        sources = [each.sources[name] for each in generations]
        limit = 1 if any(each.is_guessed for each in sources) else most  # to learn costs least
        drafts, rate = best_drafts([each.share for each in sources], limit, costs, name)
        for source in sources:
            source.settle(drafts > 0)
        if drafts and rate >= fastest:
            chosen, fastest = (name, drafts), rate
    return chosen


def drafts_per_step(most: int) -> list[int]:
    """Return the numbers of drafts that a step may have, at most so many."""
    return [*(drafts for drafts in DRAFTS_PER_STEP if drafts < most), most] if most > 0 else []


def best_drafts(
    shares: Sequence[float], most: int, costs: StepCosts, drafter: str
) -> tuple[int, float]:
    """Return the number of drafts, at most so many, with which tokens come fastest.

    There is one share of drafts that remain for each conversation. Also return how much faster
    tokens come; (0, 1.0) if no number of drafts gains enough."""
    best, fastest = 0, GAIN
    if not any(shares):
        return 0, 1.0  # at once: this is asked before every step
    lines = len(shares)
    alone = StepSize(plan_rows(lines))
    for drafts in drafts_per_step(min(most, MOST_ROWS // lines - 1)):
        tokens = sum(share**at for share in shares for at in range(drafts + 1)) / lines
        step = StepSize(lines * (1 + drafts), drafter, drafts)
        rate = tokens / costs.relative(step, alone)
        if rate >= fastest:
            best, fastest = drafts, rate
    return best, fastest if best else 1.0


def best_looked_up(share: float, most: int, costs: StepCosts) -> int:
    """Return the number of drafts, at most so many, with which tokens come fastest.

    They follow a token that is being chosen, which has to be the expected one, too."""
    best, fastest = 0, GAIN
    for drafts in drafts_per_step(most) if share else ():
        tokens = 1 + sum(share**at for at in range(2, drafts + 2))
        step = StepSize(plan_rows(1 + drafts), LOOKUP, drafts)
        rate = tokens / costs.relative(step, StepSize(1))
        if rate >= fastest:
            best, fastest = drafts, rate
    return best
