"""What the server has read and written so far, and who uses it now, for `/metrics` and `/slots`.

The names are those of llama.cpp's server, so that its dashboards can be used. Numbers alone are
kept: no prompt, no reply, nobody's name."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from webgemma.engine.interface import Slot
from webgemma.replies import Piece
from webgemma.server.loading import LoadedModel

MEDIA_TYPE = "text/plain; version=0.0.4"  # of Prometheus' text format
WINDOW = 60  # seconds that an average speed is of
NOW = 5  # seconds that the present throughput is of

SENTENCES = {
    "prompt_tokens_total": "Tokens of prompts that were read, without those that were cached.",
    "prompt_tokens_cached_total": "Tokens of prompts that had been read before.",
    "prompt_seconds_total": "Time until the first tokens of replies.",
    "tokens_predicted_total": "Tokens of replies.",
    "tokens_predicted_seconds_total": "Time between the tokens of replies.",
    "n_decode_total": "Steps of replies, one for each token.",
    "n_tokens_max": "Tokens of the longest conversation.",
    "prompt_tokens_seconds": "Tokens of a prompt in a second, over the last minute.",
    "predicted_tokens_seconds": "Tokens of a reply in a second, over the last minute.",
    "requests_processing": "Requests that are being served.",
    "requests_deferred": "Requests that wait, for a slot or until their model is loaded.",
    "n_busy_slots_per_decode": "Replies being written at a token, on average.",
}

Clock = Callable[[], float]


@dataclass(slots=True)
class Speed:
    """How many tokens there were in the last seconds, and the time that they took."""

    clock: Clock
    _seconds: deque[list[float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, tokens: int, seconds: float) -> None:
        """Count tokens that took so long."""
        second = int(self.clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += tokens
        self._seconds[-1][2] += seconds

    def average(self) -> float:
        """Return the tokens of one reply in a second of work, lately; 0 if there were none."""
        since = self.clock() - WINDOW
        recent = [row for row in self._seconds if row[0] >= since]
        seconds = sum(row[2] for row in recent)
        return sum(row[1] for row in recent) / seconds if seconds else 0.0

    def throughput(self) -> float:
        """Return the tokens of all replies in each of the last whole seconds."""
        end = int(self.clock())
        return sum(row[1] for row in self._seconds if end - NOW <= row[0] < end) / NOW


class Metrics:
    """Counts tokens and times."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.started = clock()
        self.prompt_tokens = 0  # that were read, and not cached
        self.cached_tokens = 0
        self.prompt_seconds = 0.0
        self.reply_tokens = 0
        self.reply_seconds = 0.0
        self.longest = 0  # tokens of a prompt and its reply
        self.prompt_speed, self.reply_speed = Speed(clock), Speed(clock)
        self.writing = 0  # replies that are being written
        self._written_beside = 0  # the sum of `writing` over all tokens

    @contextmanager
    def request(self) -> "Iterator[Callable[[int, Piece], None]]":
        """Give the function that counts the pieces of a request, each with its reply's index."""
        counted = _Request(self)
        try:
            yield counted.add
        finally:
            self.writing -= len(counted.last)

    def read(self, tokens: int, cached: int, seconds: float) -> None:
        """Count a prompt."""
        self.prompt_tokens += tokens - cached
        self.cached_tokens += cached
        self.prompt_seconds += seconds
        self.prompt_speed.add(tokens - cached, seconds)

    def wrote(self, seconds: float) -> None:
        """Count a token of a reply; its first one comes with the prompt and takes no time."""
        self.reply_tokens += 1
        self.reply_seconds += seconds
        self.reply_speed.add(1, seconds)
        self._written_beside += self.writing

    def prometheus(self, processing: int, deferred: int) -> str:
        """Return all of it in Prometheus' text format."""
        values = {
            "prompt_tokens_total": self.prompt_tokens,
            "prompt_tokens_cached_total": self.cached_tokens,
            "prompt_seconds_total": self.prompt_seconds,
            "tokens_predicted_total": self.reply_tokens,
            "tokens_predicted_seconds_total": self.reply_seconds,
            "n_decode_total": self.reply_tokens,
            "n_tokens_max": self.longest,
            "prompt_tokens_seconds": self.prompt_speed.average(),
            "predicted_tokens_seconds": self.reply_speed.average(),
            "requests_processing": processing,
            "requests_deferred": deferred,
            "n_busy_slots_per_decode": self._written_beside / max(1, self.reply_tokens),
        }
        lines = []
        for name, sentence in SENTENCES.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [
                f"# HELP llamacpp:{name} {sentence}",
                f"# TYPE llamacpp:{name} {kind}",
                f"llamacpp:{name} {values[name]!r}",
            ]
        return "\n".join(lines) + "\n"


class _Request:
    """The replies of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = metrics.clock()  # when the next reply's prompt may have been begun
        self.last: dict[int, float] = {}  # the time of the last token of each unfinished reply

    def add(self, index: int, piece: Piece) -> None:
        """Count a piece."""
        metrics, usage = self._metrics, piece.usage
        if usage is None or piece.token < 0:
            return
        now = metrics.clock()
        if index not in self.last:
            metrics.read(usage.prompt, usage.cached, now - self._began)
            metrics.writing += 1
        metrics.wrote(now - self.last.get(index, now))
        metrics.longest = max(metrics.longest, usage.prompt + usage.reply)
        self.last[index] = now
        if piece.finish:
            del self.last[index]
            metrics.writing -= 1
            self._began = now


def slots_of(models: Sequence[LoadedModel]) -> list[tuple[str, Slot]]:
    """Return the slots of all loaded models, each with its model's name."""
    return [
        (model.offered.name, slot)
        for model in models
        if model.engine
        for slot in model.engine.model.slots
    ]


def described(model: str, slot: Slot) -> dict[str, Any]:
    """Return a slot in llama.cpp's words."""
    return {
        "id": slot.id,
        "model": model,
        "n_ctx": slot.context,
        "speculative": False,
        "is_processing": slot.busy,
        "n_prompt_tokens": slot.tokens,
    }


def processing(models: Sequence[LoadedModel]) -> int:
    """Return how many requests are served now: those that wait for a slot are not."""
    return sum(model.users - model.engine.waiting for model in models if model.engine)
