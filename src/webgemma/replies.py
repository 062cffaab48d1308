"""Replies: the ids of a prompt in, the pieces of a reply out, token by token."""

import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence, Sized
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any, Literal

from webgemma.denoising import Canvas, Denoising, canvas_capacity, tokens_of
from webgemma.engine.constraints import Constraint
from webgemma.engine.interface import Engine, Started
from webgemma.engine.speculation import DraftCounts
from webgemma.errors import InputError, PromptLengthError
from webgemma.gemma.config import Config
from webgemma.gemma.lora_weights import NO_CHOICE, Choice
from webgemma.media.encoders import MediaSpan
from webgemma.sampler import SampledToken
from webgemma.settings import SETTINGS, Settings
from webgemma.sync import ForDriver
from webgemma.text.parser import Parser, ToolCall
from webgemma.text.tokenizer import Tokenizer
from webgemma.values import shown

# What the reply parser reads; every other control token gives no text.
TAGS = frozenset(
    {
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    }
)
LINE_BREAK = "↵"  # a line break among noise, which must not break the canvas's lines

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the likeliest tokens at a step, with its own text; special ones are spelled out."""

    token: int
    logprob: float
    text: str


Top = tuple[TopToken, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a function returned that the model called, as JSON; or {"error": …} if it failed."""

    call: ToolCall
    value: Any
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of the context a conversation takes, in tokens."""

    prompt: int  # that the model read or had read before
    reply: int  # written so far
    context: int  # of which there is room for both
    left_out: int = 0  # messages at the beginning that did not fit, system messages not counted
    cached: int = 0  # tokens of the prompt that had been read before
    drafted: int = 0  # drafts of the reply's tokens that were checked
    accepted: int = 0  # those of them that remained


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text that became certain with it; the last one says why it is the last.

    `logprob` is the natural logarithm of the probability that the model gave the token, before
    penalties, bias, temperature and any cut. `top` holds the likeliest tokens in the same sense,
    the best first, as many as `top_logprobs`: without penalties and bias the first one is the token
    of temperature 0, while a token that was drawn or favoured by a bias need not be among them.

    With `watch`, DiffusionGemma also yields pieces that hold only the canvas after a step: their
    token is -1. So is that of a piece with `tool_results`, of functions that the reply called.

    `stop`, of the last piece, is the stop string that ended the reply, if one did.
    `value`, of the last piece of a complete reply to which `schema` was given, is what it stands
    for: JSON as Python has it, or an instance of the class that was given."""

    token: int
    text: str
    logprob: float
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Literal["", "stop", "length"] = ""
    top: Top = ()
    canvas: Canvas | None = None
    usage: Usage | None = None
    tool_results: tuple[ToolResult, ...] = ()
    value: Any = None
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Replies:
    """A model as a source of replies, whether it samples tokens or denoises canvases."""

    config: Config
    tokenizer: Tokenizer | None
    engine: Engine
    context: int  # positions

    def check_prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the ids as ints; InputError if the model cannot read them."""
        checked = check_ids(ids, self.config.vocab, "The prompt", self.context)
        if not checked:
            raise InputError("The prompt is empty: there is nothing to continue.")
        return checked

    def room(self, settings: Settings) -> int:
        """Return how many positions a conversation should leave for its reply."""
        least = self.config.diffusion.canvas if self.config.diffusion else 1
        most = settings["max_tokens"]
        share = self.context // 4
        return max(least, share if most is None else min(most, share))

    async def pieces(
        self,
        ids: Sequence[int],
        reader: "PlainReader | ReplyReader",
        settings: Settings,
        media: Sequence[MediaSpan] = (),
        left_out: int = 0,
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[Any, None]:
        """Yield the reply to a prompt, as the reader makes pieces of it.

        Its tokens keep to the constraint, and adapters are applied by choice. Before the first one
        may come what its driver reads: see `sync.ForDriver`."""
        prompt = self.check_prompt(ids)
        limit = self._limit(len(prompt), settings)
        if limit == 0:
            return
        ends = self.tokenizer.ends if self.tokenizer else frozenset[int]()
        usage, drafts = Usage(len(prompt), 0, self.context, left_out), DraftCounts()
        async with aclosing(self._stream(prompt, settings, media, constraint, choice)) as stream:
            async for item in stream:
                if isinstance(item, Started):
                    usage, drafts = replace(usage, cached=item.cached), item.drafts
                if isinstance(item, ForDriver):
                    yield item
                    continue
                if isinstance(item, Canvas):
                    yield Piece(-1, "", 0.0, canvas=item, usage=usage)
                    continue
                token, logprob, likeliest = item
                counts = {"drafted": drafts.checked, "accepted": drafts.remained}
                usage = replace(usage, reply=usage.reply + 1, **counts)
                top = top_tokens(self.tokenizer, likeliest)
                if token in ends:
                    piece = reader.last(token, logprob, "stop", top)
                elif usage.reply == limit:
                    piece = reader.last(token, logprob, "length", top)
                else:
                    piece = reader.read(token, logprob, top)
                yield replace(piece, usage=usage)
                if piece.finish:
                    return

    def _limit(self, length: int, settings: Settings) -> int:
        """Return how many tokens a reply to a prompt of so many may have."""
        limit, diffusion = self.context - length, self.config.diffusion
        if diffusion:
            limit = canvas_capacity(length, diffusion.canvas, self.context)
        requested = settings["max_tokens"]
        return limit if requested is None else min(limit, requested)

    def _stream(
        self,
        ids: list[int],
        settings: Settings,
        media: Sequence[MediaSpan],
        constraint: Constraint | None,
        choice: Choice,
    ) -> AsyncGenerator[SampledToken | Canvas | ForDriver, None]:
        """Return the sampled tokens, or those of canvas after canvas."""
        seed = settings["seed"]
        seed = secrets.randbits(32) if seed is None else seed
        if self.config.diffusion:
            canvases = self.engine.denoise(ids, self._denoising(settings), seed, media, choice)
            return tokens_of(canvases, settings["watch"])
        check_ids(list(settings["logit_bias"]), self.config.vocab, "logit_bias")
        return self.engine.generate(ids, settings, seed, media, constraint, choice)

    def _denoising(self, settings: Settings) -> Denoising:
        """Return the file's schedule, with what the settings change."""
        names = [field.name for field in fields(Denoising)]
        schedule: dict[str, Any] = {name: getattr(self.config.diffusion, name) for name in names}
        given = {name: value for name, value in settings.items() if name in schedule}
        changed = {name: value for name, value in given.items() if value is not None}
        return Denoising(**(schedule | changed))


def too_long(length: int, context: int, *, at_least: bool = False) -> PromptLengthError:
    """Return the error for a prompt that the context does not hold."""
    return PromptLengthError(
        f"The prompt has {'at least ' * at_least}{length} tokens, but the context holds {context} "
        "for prompt and reply together",
        "shorten it or load the model with a larger context",
    )


def check_ids(ids: Iterable[int], vocab: int, what: str, most: int | None = None) -> list[int]:
    """Return the ids as ints; InputError for what is not a token, and for more than `most`."""
    try:
        length = len(ids) if isinstance(ids, Sized) else 0
        tokens = iter(ids)
    except TypeError:  # also arrays without dimensions
        raise InputError(f"{what} is {shown(ids)}; it must be a list of token ids.") from None
    if most is not None and length > most:
        raise too_long(length, most)
    checked: list[int] = []
    for position, given in enumerate(tokens):
        if position == most:  # the length of a generator is not known
            raise too_long(position + 1, most, at_least=True)
        try:
            if isinstance(given, bool):
                raise TypeError
            token = index(given)
        except TypeError:
            raise InputError(
                f"{what} holds {shown(given)} at position {position}; token ids are whole numbers."
            ) from None
        if not 0 <= token < vocab:
            raise InputError(
                f"{what} holds the id {shown(token)} at position {position}; "
                f"this model has the tokens 0 to {vocab - 1}."
            )
        checked.append(token)
    return checked


def top_tokens(tokenizer: Tokenizer | None, pairs: Sequence[tuple[int, float]]) -> Top:
    """Return ids and log-probabilities with the tokens' text, empty without a vocabulary."""
    return tuple(
        TopToken(token, logprob, tokenizer.decode([token]) if tokenizer else "")
        for token, logprob in pairs
    )


def canvas_runs(canvas: Canvas, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return a canvas as runs of text, each with whether it is accepted or noise."""
    special = set(tokenizer.special_ids.values())
    runs: list[tuple[str, bool]] = []
    for token, accepted in zip(canvas.ids, canvas.accepted, strict=True):
        text = "" if accepted and token in special else tokenizer.decode([token])
        if not accepted:
            text = text.replace("\n", LINE_BREAK)
        if runs and runs[-1][1] == accepted:
            runs[-1] = (runs[-1][0] + text, accepted)
        elif text:
            runs.append((text, accepted))
    return runs


def canvas_facts(canvas: Canvas, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a page shows of a canvas, as JSON."""
    return {
        "runs": canvas_runs(canvas, tokenizer),
        "number": canvas.number + 1,
        "step": canvas.step,
        "accepted": sum(canvas.accepted),
        "size": len(canvas.ids),
    }


class StopText:
    """Ends a text at the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: str | Sequence[str]) -> None:
        self.stops: Sequence[str] = SETTINGS["stop"].check(stops)
        self.stopped = False
        self.found = ""  # the one that ended it
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that is certain not to be part of a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            first, self.found = min(found)
            return text[:first]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of text that begins stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class PlainReader:
    """Makes pieces of a plain completion: control tokens give no text."""

    def __init__(self, tokenizer: Tokenizer | None, stops: StopText) -> None:
        self.stream = tokenizer.stream(special=False) if tokenizer else None
        self.stops = stops

    def read(self, token: int, logprob: float, top: Top = ()) -> Piece:
        """Return the next token's piece."""
        text = self.stream.feed(token) if self.stream else ""
        text = self.stops.feed(text)
        finish: Literal["", "stop"] = "stop" if self.stops.stopped else ""
        return Piece(token, text, logprob, finish=finish, top=top, stop=self.stops.found)

    def last(self, token: int, logprob: float, finish: Finish, top: Top = ()) -> Piece:
        """Return the last token's piece, with everything that was held back."""
        text = "" if finish == "stop" or self.stream is None else self.stream.feed(token)
        text += self.stream.finish() if self.stream else ""
        text = self.stops.feed(text) + self.stops.finish()
        finish = "stop" if self.stops.stopped else finish
        return Piece(token, text, logprob, finish=finish, top=top, stop=self.stops.found)


class ReplyReader:
    """Makes pieces of a chat reply: content, thinking and tool calls."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser, stops: StopText) -> None:
        self.stream = tokenizer.stream(special=True)
        self.hidden = {i for text, i in tokenizer.special_ids.items() if text not in TAGS}
        self.parser = parser
        self.stops = stops

    def read(self, token: int, logprob: float, top: Top = ()) -> Piece:
        """Return the next token's piece."""
        reply = self.parser.feed(self._text(token))
        text = self.stops.feed(reply.content)
        finish: Literal["", "stop"] = "stop" if self.stops.stopped else ""
        calls, stop = tuple(reply.tool_calls), self.stops.found
        return Piece(token, text, logprob, reply.thinking, calls, finish, top, stop=stop)

    def last(self, token: int, logprob: float, finish: Finish, top: Top = ()) -> Piece:
        """Return the last token's piece, with everything that was held back."""
        fed = self.parser.feed("" if finish == "stop" else self._text(token))
        rest = self.parser.feed(self.stream.finish())
        end = self.parser.finish()
        text = self.stops.feed(fed.content + rest.content + end.content) + self.stops.finish()
        thinking = fed.thinking + rest.thinking + end.thinking
        calls = (*fed.tool_calls, *rest.tool_calls, *end.tool_calls)
        finish, stop = "stop" if self.stops.stopped else finish, self.stops.found
        return Piece(token, text, logprob, thinking, calls, finish, top, stop=stop)

    def _text(self, token: int) -> str:
        return "" if token in self.hidden else self.stream.feed(token)
