"""Answers to requests for replies, in any API: whole, or streamed as they are written."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from webgemma.replies import Piece
from webgemma.server.ahead import Ahead
from webgemma.server.engine import Engine, Indexed
from webgemma.server.http import as_request_error, respond, respond_text
from webgemma.server.metrics import Metrics
from webgemma.server.protocol import Reply, Request, RequestError, Stage
from webgemma.server.registry import Registry
from webgemma.text.tokenizer import Tokenizer

SEND_SECONDS = 30.0  # that a client may leave its connection full
STAGE_SECONDS = 0.2  # between two looks at what an answer waits for

ErrorBody = Callable[[RequestError], dict[str, Any]]


@dataclass(slots=True)
class Facts:
    """What an answer says about itself."""

    created: float = field(default_factory=time.time)  # seconds since 1970
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    model: str = ""  # its name
    tokenizer: Tokenizer | None = None  # once the model is loaded
    started: int = field(default_factory=time.perf_counter_ns)
    loaded: int = 0
    first: int = 0  # when the first piece was there
    ended: int = 0

    def token_bytes(self, token: int) -> bytes:
        """Return the text of a token of a reply, or a part of a character."""
        assert self.tokenizer is not None
        return self.tokenizer.token_bytes(token)


class Dialect(ABC):
    """How one route of an API writes its answer."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, request: Request, facts: Facts) -> None:
        self.request = request
        self.facts = facts

    @staticmethod
    @abstractmethod
    def parse(body: Any, /) -> Request:
        """Return what a body asks for."""

    @staticmethod
    async def prepared(request: Request, _tokenizer: Tokenizer, /) -> Request:
        """Return a request as it is served, now that the model is there."""
        return request

    @staticmethod
    @abstractmethod
    def error(error: RequestError, /) -> dict[str, Any]:
        """Return the body of an error."""

    @abstractmethod
    def whole(self, replies: Sequence[Reply]) -> dict[str, Any] | str:
        """Return the whole answer: JSON or text."""

    @abstractmethod
    def begin(self, first: Piece | None) -> Iterable[bytes]:
        """Return the beginning of a stream, of which the first piece is known."""

    def stage(self, _stage: Stage, /) -> Iterable[bytes]:
        """Return what a stream says about what it waits for; only some routes have that."""
        return ()

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> Iterable[bytes]:
        """Return what a piece adds to a stream."""

    @abstractmethod
    def end(self) -> Iterable[bytes]:
        """Return the end of a stream."""

    @abstractmethod
    def failed(self, error: RequestError) -> Iterable[bytes]:
        """Return the end of a stream that cannot be continued."""


class Answer:
    """The answer to a request, as an ASGI application."""

    def __init__(
        self,
        registry: Registry,
        ahead: Ahead,
        metrics: Metrics,
        dialect: type[Dialect],
        request: Request,
    ) -> None:
        self.registry, self.ahead, self.metrics = registry, ahead, metrics
        self.dialect, self.request = dialect, request
        self.facts = Facts()
        self._engine: Engine | None = None  # once the model is loaded
        self._encoded = (0, 0)  # how much of the prompt's images and audio, of how much

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, unless the client leaves: then the reply ends at its next step."""
        await until_left(self._serve(scope, receive, send), receive)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        async with (
            aclosing(self.ahead.iterate(self._pieces())) as pieces,
            aclosing(self._with_stages(pieces)) as items,
        ):
            try:
                if self.request.stream:
                    # Until the first item is there, an error has a status of its own.
                    first = await anext(items, None)
                else:
                    body = await self._whole(pieces)
                    response = respond_text(body) if isinstance(body, str) else respond(body)
            except Exception as caught:
                error = as_request_error(caught)
                response = respond(self.dialect.error(error), error.status)
            else:
                if self.request.stream:
                    await self._stream(first, items, patient(send))
                    return
        await response(scope, receive, patient(send))

    async def _pieces(self) -> AsyncGenerator[Indexed, None]:
        """Yield all pieces; the model is free when the last is written, whoever reads them when."""
        facts, request = self.facts, self.request
        facts.model = request.model or self.registry.find("").name
        keep_seconds, adapter = request.own.get("keep_alive"), self.registry.adapter(facts.model)
        async with self.registry.use(facts.model, keep_seconds) as engine:
            self._engine = engine
            facts.loaded = time.perf_counter_ns()
            facts.tokenizer = engine.model.tokenizer
            request = self.request = await self.dialect.prepared(request, facts.tokenizer)
            progress = self._note_encoded if request.progress else None
            with self.metrics.request() as count:
                async with aclosing(engine.replies(request, adapter, progress)) as replies:
                    async for item in replies:
                        facts.first = facts.first or time.perf_counter_ns()
                        count(*item)
                        yield item
            facts.ended = time.perf_counter_ns()

    def _note_encoded(self, done: int, total: int) -> None:
        self._encoded = (done, total)

    async def _with_stages(
        self, pieces: AsyncGenerator[Indexed, None]
    ) -> AsyncGenerator[Indexed | Stage, None]:
        """Yield the pieces; before the first, if that is wanted, what the request waits for."""
        first = asyncio.ensure_future(anext(pieces, None))
        said = None
        try:
            while self.request.progress and not first.done():
                await asyncio.wait([first], timeout=STAGE_SECONDS)
                if not first.done() and (stage := self._stage()) != said:
                    yield stage
                    said = stage
            item = await first
        finally:
            first.cancel()
            await asyncio.wait([first])
            if not first.cancelled():
                first.exception()  # nobody is there to get it
        if item is not None:
            yield item
            async for item in pieces:
                yield item

    def _stage(self) -> Stage:
        """Return what the request waits for now."""
        if self._engine is None:
            is_there = self.registry.is_in_memory(self.facts.model)
            return Stage("queued" if is_there else "loading")
        if self._engine.is_waiting(self.request):
            return Stage("queued")
        done, total = self._encoded
        return Stage("encoding", done, total) if done < total else Stage("reading")

    async def _whole(self, pieces: AsyncGenerator[Indexed, None]) -> dict[str, Any] | str:
        count = max(1, len(self.request.prompts)) * self.request.choices
        replies = [Reply() for _ in range(count)]
        keep = self.request.logprobs
        async for index, piece in pieces:
            replies[index].add(piece, keep_tokens=keep)
        return self.dialect(self.request, self.facts).whole(replies)

    async def _stream(
        self,
        first: Indexed | Stage | None,
        items: AsyncGenerator[Indexed | Stage, None],
        send: Any,
    ) -> None:
        dialect = self.dialect(self.request, self.facts)
        headers = {
            "content-type": dialect.media_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # proxies pass each piece on at once
            "x-content-type-options": "nosniff",
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

        async def write(parts: Iterable[bytes], more: bool = True) -> None:
            body = b"".join(parts)
            if body or not more:
                await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await write(dialect.begin(first[1] if isinstance(first, tuple) else None))
            item = first
            while item is not None:
                if isinstance(item, Stage):
                    await write(dialect.stage(item))
                else:
                    await write(dialect.piece(*item))
                item = await anext(items, None)
            last = list(dialect.end())
        except TimeoutError:
            raise
        except Exception as caught:
            last = list(dialect.failed(as_request_error(caught)))
        await write(last, more=False)


async def until_left(answering: Coroutine[Any, Any, None], receive: Any) -> None:
    """Answer a request until it is answered, or its client has left or reads no more."""
    serving = asyncio.create_task(answering)
    left = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({serving, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving.cancel()
        left.cancel()
        await asyncio.wait({serving, left})
    if not serving.cancelled():
        with suppress(TimeoutError):  # without an end, the connection is closed
            serving.result()


async def _disconnected(receive: Any) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def patient(send: Any) -> Any:
    """Return a `send` that waits only so long for a client; TimeoutError then."""

    async def sent(message: Any) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send(message)

    return sent
