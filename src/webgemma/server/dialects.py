"""The routes that answer with replies: each API's bodies, answers and streams."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

from webgemma.replies import Piece, canvas_facts
from webgemma.server import (
    anthropic,
    ollama,
    ollama_context,
    openai_chat,
    openai_completions,
    openai_responses,
    openai_transcriptions,
)
from webgemma.server.answers import Dialect, Facts
from webgemma.server.openai_common import DONE, Event, error_body, sse
from webgemma.server.protocol import Reply, Request, RequestError, Stage
from webgemma.text.tokenizer import Tokenizer


class _OpenAi(Dialect):
    """One of OpenAI's APIs, which differ in their modules."""

    prefix = ""  # of ids
    api: Any  # with `parse` and `answer`
    stream: Callable[..., Any]
    error = staticmethod(error_body)

    def __init__(self, request: Request, facts: Facts) -> None:
        super().__init__(request, facts)
        self._named = {
            "id": self.prefix + facts.id,
            "created": int(facts.created),
            "model": facts.model,
            "token_bytes": facts.token_bytes,
        }
        self._stream = self.stream(request, **self._named)

    def whole(self, replies: Sequence[Reply]) -> Event | str:
        """Return the whole answer."""
        answer: Event | str = self.api.answer(self.request, replies, **self._named)
        return answer

    def begin(self, _first: Piece | None) -> Iterator[bytes]:
        """Return the first events."""
        return self._written(self._stream.begin())

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Return the events of a piece."""
        return self._written(self._stream.piece(index, piece))

    def end(self) -> Iterator[bytes]:
        """Return the last events."""
        yield from self._written(self._stream.end())
        yield DONE

    def failed(self, error: RequestError) -> Iterator[bytes]:
        """Return the event of an error."""
        return self._written(self._stream.error(error))

    def _written(self, events: Iterable[Event]) -> Iterator[bytes]:
        return (sse(event) for event in events)


class OpenAiChat(_OpenAi):
    """`/v1/chat/completions`, which can say more of a stream than OpenAI's does."""

    prefix = "chatcmpl-"
    api = openai_chat
    stream = openai_chat.ChatStream
    parse = staticmethod(openai_chat.parse)

    def stage(self, stage: Stage) -> Iterator[bytes]:
        """Return the event of what the answer waits for."""
        yield sse(self._stream.stage(stage))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Return the events of a piece, also those of a canvas."""
        events = self._stream.piece(index, piece)
        if piece.canvas is not None and self.facts.tokenizer is not None:
            events = [self._stream.canvas(index, canvas_facts(piece.canvas, self.facts.tokenizer))]
        more = {}
        if self.request.own["timings"] and piece.usage:
            more["timings"] = openai_chat.timings(piece.usage, *self._seconds())
        return self._written(event | more for event in events)

    def _seconds(self) -> tuple[float, float]:
        """Return how long the prompt took, and the reply so far."""
        facts = self.facts
        now = facts.ended or time.perf_counter_ns()
        return (facts.first - facts.loaded) / 1e9, (now - facts.first) / 1e9


class OpenAiCompletions(_OpenAi):
    """`/v1/completions`."""

    prefix = "cmpl-"
    api = openai_completions
    stream = openai_completions.CompletionStream
    parse = staticmethod(openai_completions.parse)


class _NamedEvents(_OpenAi):
    """One of OpenAI's newer APIs, whose events have names, and whose streams have no DONE."""

    def end(self) -> Iterator[bytes]:
        """Return the last events."""
        return self._written(self._stream.end())

    def _written(self, events: Iterable[Event]) -> Iterator[bytes]:
        return (sse(event, event.get("type", "")) for event in events)


class OpenAiResponses(_NamedEvents):
    """`/v1/responses`."""

    prefix = "resp_"
    api = openai_responses
    stream = openai_responses.ResponseStream
    parse = staticmethod(openai_responses.parse)


class OpenAiTranscriptions(_NamedEvents):
    """`/v1/audio/transcriptions`, whose bodies are forms."""

    api = openai_transcriptions
    stream = openai_transcriptions.TranscriptionStream
    parse = staticmethod(openai_transcriptions.parse)


class _Ollama(Dialect):
    """Ollama's API, whose streams are lines of JSON."""

    media_type = "application/x-ndjson"
    route: Literal["chat", "generate"]
    error = staticmethod(ollama.error)

    def __init__(self, request: Request, facts: Facts) -> None:
        super().__init__(request, facts)
        self._stream = ollama.Stream(
            request,
            self.route,
            created=facts.created,
            call_ids=_call_ids("call_", facts.id),
            token_bytes=facts.token_bytes,
        )

    def begin(self, _first: Piece | None) -> Iterator[bytes]:
        """Return nothing: lines begin with the first piece."""
        return map(ollama.line, self._stream.begin())

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Return the line of a piece."""
        return map(ollama.line, self._stream.piece(index, piece))

    def end(self) -> Iterator[bytes]:
        """Return the last line."""
        return map(ollama.line, self._stream.end(self._durations()))

    def failed(self, error: RequestError) -> Iterator[bytes]:
        """Return the line of an error."""
        yield ollama.line(self._stream.error(error))

    def _durations(self) -> ollama.Durations:
        facts = self.facts
        first = facts.first or facts.ended
        return ollama.Durations(
            total=facts.ended - facts.started,
            load=facts.loaded - facts.started,
            prompt=first - facts.loaded,
            reply=facts.ended - first,
        )


class OllamaChat(_Ollama):
    """`/api/chat`."""

    route = "chat"
    parse = staticmethod(ollama.parse_chat)

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the whole answer."""
        return ollama.chat_answer(
            self.request,
            replies,
            created=self.facts.created,
            durations=self._durations(),
            call_ids=_call_ids("call_", self.facts.id),
            token_bytes=self.facts.token_bytes,
        )


class OllamaGenerate(_Ollama):
    """`/api/generate`."""

    route = "generate"

    parse = staticmethod(ollama.parse_generate)

    @staticmethod
    async def prepared(request: Request, tokenizer: Tokenizer) -> Request:
        """Return the request with the conversation that an earlier answer's context holds."""
        return await asyncio.to_thread(ollama_context.continued, request, tokenizer)

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the whole answer."""
        return ollama.generate_answer(
            self.request,
            replies,
            created=self.facts.created,
            durations=self._durations(),
            context=self._context(replies[0]),
            token_bytes=self.facts.token_bytes,
        )

    def end(self) -> Iterator[bytes]:
        """Return the last line."""
        context = self._context(self._stream.reply)
        return map(ollama.line, self._stream.end(self._durations(), context))

    def _context(self, reply: Reply) -> Sequence[int]:
        if self.facts.tokenizer is None:
            return ()
        return ollama_context.with_reply(self.request, reply, self.facts.tokenizer)


class Anthropic(Dialect):
    """`/v1/messages`."""

    parse = staticmethod(anthropic.parse)
    error = staticmethod(anthropic.error)

    def __init__(self, request: Request, facts: Facts) -> None:
        super().__init__(request, facts)
        self._named: dict[str, Any] = {
            "id": f"msg_{facts.id}",
            "call_ids": _call_ids("toolu_", facts.id),
        }
        self._stream = anthropic.Stream(request, **self._named)

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the whole answer."""
        return anthropic.answer(self.request, replies, **self._named)

    def begin(self, first: Piece | None) -> Iterator[bytes]:
        """Return the first events, with the prompt's tokens."""
        return map(anthropic.frame, self._stream.begin(first.usage if first else None))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Return the events of a piece."""
        return map(anthropic.frame, self._stream.piece(index, piece))

    def end(self) -> Iterator[bytes]:
        """Return the last events."""
        return map(anthropic.frame, self._stream.end())

    def failed(self, error: RequestError) -> Iterator[bytes]:
        """Return the event of an error."""
        yield anthropic.frame(self._stream.error(error))


def _call_ids(prefix: str, answer_id: str) -> Callable[[], str]:
    """Return a function that gives the id of the next tool call of an answer."""
    numbers = count()
    return lambda: f"{prefix}{answer_id}_{next(numbers)}"
