"""The routes of embedding models: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and
`/api/embeddings`.

A text that is longer than the context is refused, as at OpenAI; Ollama's API cuts it, unless its
`truncate` is false. All routes take a `task`, which only webgemma has: see `Gemma.embed`."""

import asyncio
import base64
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from webgemma.embeddings import PREFIXES, ReadTexts, Texts
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.server import ollama
from webgemma.server.answers import ErrorBody, patient, until_left
from webgemma.server.bodies import Body
from webgemma.server.http import as_request_error, read, respond
from webgemma.server.metrics import Metrics
from webgemma.server.offered import Offered
from webgemma.server.openai_common import error_body, read_body, read_model
from webgemma.server.protocol import RequestError
from webgemma.server.registry import Registry

MAX_TEXTS = 2048  # of a request, as OpenAI has it
MAX_TOKENS = 300_000  # of all its texts together
TURN_TOKENS = 16384  # of texts that are computed in one turn: as many as the largest pass has
MAX_THREADS = 2  # that read texts or write answers; others need some, too
DIGITS = 9  # after the point, of a number in JSON: more than a float32 below 1 has

Text = str | Sequence[int]  # ids are taken as they are


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    model: str
    texts: Sequence[Text]
    size: int | None = None
    task: str | None = None
    truncate: bool = False  # texts that are too long; else they are refused
    as_base64: bool = False
    keep_alive: float | None = None  # seconds that the model stays loaded


@dataclass(frozen=True, slots=True)
class Embedded:
    """What became of it."""

    model: str
    vectors: Any  # rows of numbers
    tokens: int  # of all texts
    total: int  # nanoseconds
    load: int  # of the model, too


# Bodies


def parse_openai(given: Any) -> Asked:
    """Return what a body of `/v1/embeddings` asks for."""
    body = Body(read_body(given, {}))
    name, kind = "encoding_format", "float"
    if body.has(name):
        kind = body.choice(name, ("float", "base64"))
    return Asked(
        model=read_model(body.given),
        texts=_texts(body, ids=True),
        size=body.whole("dimensions", 1),
        task=_task(body),
        as_base64=kind == "base64",
    )


def parse_ollama(given: Any) -> Asked:
    """Return what a body of `/api/embed` asks for; without an input, the model is loaded."""
    body = Body(given)
    return Asked(
        model=ollama.parse_name(given),
        texts=_texts(body) if body.has("input") else (),
        size=body.whole("dimensions", 1),
        task=_task(body),
        truncate=body.flag("truncate", True),
        keep_alive=ollama.keep_alive(body),
    )


def parse_old_ollama(given: Any) -> Asked:
    """Return what a body of `/api/embeddings` asks for: one vector."""
    body = Body(given)
    prompt = body.text("prompt")
    return Asked(
        model=ollama.parse_name(given),
        texts=[prompt] if prompt else (),
        task=_task(body),
        truncate=True,
        keep_alive=ollama.keep_alive(body),
    )


def _task(body: Body) -> str | None:
    return body.choice("task", tuple(PREFIXES)) if body.has("task") else None


def _texts(body: Body, *, ids: bool = False) -> Sequence[Text]:
    """Return the texts of the field `input`: one or a list of them, and of ids if they may be."""
    given = body.given.get("input")
    allowed = "a text or a list of texts" + ", or token ids or a list of such lists" * ids
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise body.wrong("input", allowed)
    if ids and all(type(item) is int for item in given):
        return [given]
    for item in given:
        is_ids = ids and isinstance(item, list) and item and all(type(x) is int for x in item)
        if not (isinstance(item, str) or is_ids):
            raise body.wrong("input", allowed)
    if len(given) > MAX_TEXTS:
        raise RequestError(
            f"input has {len(given)} texts; there may be up to {MAX_TEXTS} in a request.",
            param="input",
        )
    return given


# Answers


def openai_answer(asked: Asked, embedded: Embedded) -> Mapping[str, Any]:
    """Return the answer of `/v1/embeddings`."""
    written = _base64 if asked.as_base64 else _numbers
    data = [
        {"object": "embedding", "index": index, "embedding": written(vector)}
        for index, vector in enumerate(embedded.vectors)
    ]
    usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
    return {"object": "list", "data": data, "model": embedded.model, "usage": usage}


def ollama_answer(asked: Asked, embedded: Embedded) -> Mapping[str, Any]:
    """Return the answer of `/api/embed`."""
    return {
        "model": asked.model,
        "embeddings": [_numbers(vector) for vector in embedded.vectors],
        "total_duration": embedded.total,
        "load_duration": embedded.load,
        "prompt_eval_count": embedded.tokens,
    }


def old_ollama_answer(_: Asked, embedded: Embedded) -> Mapping[str, Any]:
    """Return the answer of `/api/embeddings`."""
    return {"embedding": [x for vector in embedded.vectors for x in _numbers(vector)]}


def _numbers(vector: Any) -> list[float]:
    return [round(float(x), DIGITS) for x in vector]


def _base64(vector: Any) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# Routes

Parse = Callable[[Any], Asked]
Write = Callable[[Asked, Embedded], Mapping[str, Any]]


class Embeddings:
    """The routes of embedding models."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self.registry, self.metrics = registry, metrics
        self._threads = asyncio.Semaphore(MAX_THREADS)

    def routes(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return the endpoints by their paths."""
        return {
            "/v1/embeddings": self._endpoint(parse_openai, openai_answer, error_body),
            "/api/embed": self._endpoint(parse_ollama, ollama_answer, ollama.error),
            "/api/embeddings": self._endpoint(parse_old_ollama, old_ollama_answer, ollama.error),
        }

    def _endpoint(
        self, parse: Parse, write: Write, error: ErrorBody
    ) -> Callable[[Any], Awaitable[Any]]:
        async def endpoint(request: Any) -> Any:
            asked = await read(request, parse)

            async def answer(scope: Any, receive: Any, send: Any) -> None:
                await until_left(self._serve(asked, write, error, scope, receive, send), receive)

            return answer

        return endpoint

    async def _serve(
        self, asked: Asked, write: Write, error: ErrorBody, scope: Any, receive: Any, send: Any
    ) -> None:
        """Answer; who has left ends what is computed."""
        try:
            embedded = await self.embed(asked)
            response = await self._in_thread(lambda: respond(write(asked, embedded)))
        except Exception as caught:
            refused = as_request_error(caught)
            response = respond(error(refused), refused.status)
        await response(scope, receive, patient(send))

    async def embed(self, asked: Asked) -> Embedded:
        """Return the vectors of a request; RequestError if it cannot be served."""
        started = time.perf_counter_ns()
        name = asked.model or self.registry.find("").name
        if not self.registry.is_in_memory(name):  # else it would be loaded, to be of no use
            offered = await self.registry.afind(name)
            await asyncio.to_thread(lambda: _check_embeds(offered))
        async with self.registry.use(name, asked.keep_alive) as engine:
            loaded = time.perf_counter_ns()
            reader = replace(engine.model.texts, name=name)
            _named("model", lambda: reader.embedding)
            size = _named("dimensions", lambda: reader.size(asked.size))
            texts = await self._in_thread(
                lambda: _named("input", lambda: reader.read(asked.texts, asked.task))
            )
            tokens = _checked_tokens(texts, asked, reader)
            adapter = self.registry.adapter(name)
            vectors: list[Any] = []
            for ids in _turns(texts.ids):  # between which other requests have theirs
                vectors += list(await engine.model.aembed(ids, size=size, lora=adapter))
            ended = time.perf_counter_ns()
            self.metrics.read(tokens, 0, (ended - loaded) / 1e9)
        return Embedded(name, vectors, tokens, ended - started, loaded - started)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        async with self._threads:
            return await asyncio.to_thread(work)


def _check_embeds(offered: Offered) -> None:
    """Raise RequestError if a model does not embed; this opens its file."""
    with offered.found.open() as gguf:
        config = Config.from_gguf(gguf)
    _named("model", lambda: Texts(offered.name, config, None, config.context).embedding)


def _named(field: str, work: Callable[[], Any]) -> Any:
    """Return what a field leads to; an error names it."""
    try:
        return work()
    except InputError as error:
        raise RequestError(str(error), param=field) from None


def _turns(texts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Yield the texts in groups of so many tokens, at least a text each."""
    group: list[Sequence[int]] = []
    tokens = 0
    for ids in texts:
        if group and tokens + len(ids) > TURN_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(ids)
        tokens += len(ids)
    if group:
        yield group


def _checked_tokens(texts: ReadTexts, asked: Asked, reader: Texts) -> int:
    """Return how many tokens texts have together; RequestError if a text or all have too many."""
    if texts.cut and not asked.truncate:
        raise RequestError(
            f"input[{texts.cut[0]}] has more than {reader.context} tokens, which is all that the "
            "model reads: shorten or split it.",
            param="input",
        )
    tokens = sum(map(len, texts.ids))
    if tokens > MAX_TOKENS:
        raise RequestError(
            f"input has {tokens} tokens; there may be up to {MAX_TOKENS} in a request.",
            param="input",
        )
    return tokens
