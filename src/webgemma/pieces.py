"""From tokens to pieces of text: what a user sees of a generation, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from webgemma.denoising import Canvas
from webgemma.errors import InputError
from webgemma.text.parser import ReplyParser, ToolCall
from webgemma.text.tokenizer import Tokenizer

# What the reply parser reads; every other control token stays invisible.
TAGS = frozenset(
    {
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    }
)
End = Literal["stop", "length"]
BREAK = "↵"  # a line break of noise, which must not tear the picture


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the likeliest tokens at a step, with its text by itself: special ones spelled out."""

    token: int
    logprob: float
    text: str


Top = tuple[TopToken, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text that became certain with it; the last one says why it is the last.

    `logprob` is the natural logarithm of the probability that the model gave the token, before
    penalties, bias, temperature and any cut (a token that must not come has none). `top` holds the
    likeliest tokens in the same sense, the best first, as many as `top_logprobs` asked for: without
    penalties and bias the first one is the token of temperature 0, while a token that was drawn or
    favoured by a bias need not be among them.

    While DiffusionGemma is watched, pieces come that hold the canvas after a step and nothing else:
    their token is -1."""

    token: int
    text: str
    logprob: float
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Literal["", "stop", "length"] = ""
    top: Top = ()
    canvas: Canvas | None = None


def top_tokens(tokenizer: Tokenizer | None, pairs: Sequence[tuple[int, float]]) -> Top:
    """Ids and log-probabilities with the tokens' text, which is empty without a vocabulary."""
    return tuple(
        TopToken(token, logprob, tokenizer.decode([token]) if tokenizer else "")
        for token, logprob in pairs
    )


def spelled(canvas: Canvas, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """A canvas as text, in runs of what is settled and what is noise; nothing is said of marks."""
    special = set(tokenizer.special_ids.values())
    runs: list[tuple[str, bool]] = []
    for token, settled in zip(canvas.ids, canvas.accepted, strict=True):
        text = "" if settled and token in special else tokenizer.decode([token])
        if not settled:
            text = text.replace("\n", BREAK)
        if runs and runs[-1][1] == settled:
            runs[-1] = (runs[-1][0] + text, settled)
        elif text:
            runs.append((text, settled))
    return runs


class StopText:
    """Ends a text at the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: str | Sequence[str]) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise InputError("A stop string must be text of at least one character.")
        self.stopped = False
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain not to be part of a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        found = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            return text[:found]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no stop string came of it."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class PlainReader:
    """Pieces of a plain completion: control tokens give no text."""

    def __init__(self, tokenizer: Tokenizer | None, stops: StopText) -> None:
        self.stream = tokenizer.stream(special=False) if tokenizer else None
        self.stops = stops

    def read(self, token: int, logprob: float, top: Top = ()) -> Piece:
        """The next token's piece."""
        text = self.stream.feed(token) if self.stream else ""
        text = self.stops.feed(text)
        finish: Literal["", "stop"] = "stop" if self.stops.stopped else ""
        return Piece(token, text, logprob, finish=finish, top=top)

    def last(self, token: int, logprob: float, finish: End, top: Top = ()) -> Piece:
        """The last token's piece, with all that was held back."""
        text = "" if finish == "stop" or self.stream is None else self.stream.feed(token)
        text += self.stream.finish() if self.stream else ""
        text = self.stops.feed(text) + self.stops.finish()
        return Piece(token, text, logprob, finish=finish, top=top)


class ReplyReader:
    """Pieces of a chat reply: content, thinking and tool calls told apart."""

    def __init__(self, tokenizer: Tokenizer, parser: ReplyParser, stops: StopText) -> None:
        self.stream = tokenizer.stream(special=True)
        self.hidden = {i for text, i in tokenizer.special_ids.items() if text not in TAGS}
        self.parser = parser
        self.stops = stops

    def read(self, token: int, logprob: float, top: Top = ()) -> Piece:
        """The next token's piece."""
        reply = self.parser.feed(self._text(token))
        text = self.stops.feed(reply.content)
        finish: Literal["", "stop"] = "stop" if self.stops.stopped else ""
        return Piece(token, text, logprob, reply.thinking, tuple(reply.tool_calls), finish, top)

    def last(self, token: int, logprob: float, finish: End, top: Top = ()) -> Piece:
        """The last token's piece, with all that was held back."""
        fed = self.parser.feed("" if finish == "stop" else self._text(token))
        rest = self.parser.feed(self.stream.finish())
        end = self.parser.finish()
        text = self.stops.feed(fed.content + rest.content + end.content) + self.stops.finish()
        thinking = fed.thinking + rest.thinking + end.thinking
        calls = (*fed.tool_calls, *rest.tool_calls, *end.tool_calls)
        return Piece(token, text, logprob, thinking, calls, finish, top)

    def _text(self, token: int) -> str:
        return "" if token in self.hidden else self.stream.feed(token)
