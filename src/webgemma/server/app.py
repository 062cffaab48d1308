"""The server as an ASGI application: OpenAI's, Ollama's and Anthropic's routes, and its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from webgemma.server import anthropic, ollama, ollama_models, openai_transcriptions
from webgemma.server.access import Guard, Keys
from webgemma.server.ahead import Ahead
from webgemma.server.answers import Answer, Dialect, ErrorBody, Facts
from webgemma.server.dialects import (
    Anthropic,
    OllamaChat,
    OllamaGenerate,
    OpenAiChat,
    OpenAiCompletions,
    OpenAiResponses,
    OpenAiTranscriptions,
)
from webgemma.server.embeddings import Embeddings
from webgemma.server.http import (
    HeldBodies,
    as_request_error,
    read,
    read_form,
    respond,
    respond_text,
)
from webgemma.server.metrics import Metrics
from webgemma.server.openai_common import (
    error_body,
    model_entry,
    model_list,
)
from webgemma.server.page import Page
from webgemma.server.protocol import RequestError
from webgemma.server.registry import Registry
from webgemma.server.status import Status
from webgemma.server.structures import Structures
from webgemma.server.tokens import Tokens

Endpoint = Callable[[HttpRequest], Awaitable[Any]]

ANSWERED: dict[str, type[Dialect]] = {
    "/v1/chat/completions": OpenAiChat,
    "/v1/completions": OpenAiCompletions,
    "/v1/responses": OpenAiResponses,
    "/v1/messages": Anthropic,
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
}


def make_app(
    registry: Registry,
    *,
    loopback: bool = True,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    ahead: Ahead | None = None,
    page: bool = True,
) -> Starlette:
    """Return the application; `origins` are the pages that may use and read it.

    `page`: whether it has a chat page of its own."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await registry.close()

    return Starlette(
        routes=[*(page_routes() if page else ()), *Routes(registry, ahead or Ahead()).all()],
        middleware=guards(loopback=loopback, keys=keys, origins=origins),
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _error},
    )


def page_routes() -> list[Route]:
    """Return the routes of the chat page, which come before all others."""
    return _got(Page().routes())


def guards(*, loopback: bool, keys: Sequence[str], origins: Sequence[str]) -> list[Middleware]:
    """Return what stands before all routes and refuses who may not use them."""
    middleware = [Middleware(Guard, refuse=refuse, loopback=loopback, origins=origins)]
    if origins:
        cors: Any = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **cors))
    middleware.append(Middleware(Keys, refuse=refuse, keys=keys))
    # The innermost: the bodies of those that were refused do not count.
    return [*middleware, Middleware(HeldBodies)]


def _is_anthropic(headers: Mapping[str, str]) -> bool:
    return "anthropic-version" in headers  # its clients always send it


def _error_form(scope: Any) -> ErrorBody:
    """Return how the client's API writes errors."""
    path = scope["path"]
    if path.startswith("/api/"):
        return ollama.error
    is_anthropic = path.startswith("/v1/messages") or _is_anthropic(Headers(scope=scope))
    return anthropic.error if is_anthropic else error_body


def refuse(scope: Any, error: RequestError) -> Response:
    """Return an error as the client's API writes it."""
    return respond(_error_form(scope)(error), error.status)


def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Return what there is to say of a route that does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    sentence = f"There is nothing at {path[:200]}."
    if error.status_code == 405:
        sentence = f"{path[:200]} does not answer {request.method[:20]}."
    response = refuse(request.scope, RequestError(sentence, error.status_code))
    response.headers.update(error.headers or {})
    return response


def _error(request: HttpRequest, error: Exception) -> Response:
    return refuse(request.scope, as_request_error(error))


class Routes:
    """All routes of the server."""

    def __init__(self, registry: Registry, ahead: Ahead) -> None:
        self.registry, self.ahead, self.metrics = registry, ahead, Metrics()
        self._decoding = asyncio.Lock()  # hours of audio take much memory
        self._structures = Structures()

    def all(self) -> list[Route]:
        """Return the routes."""
        got: dict[str, Endpoint] = {
            "/": self.root,
            "/health": self.health,
            "/api/version": self.version,
            "/api/tags": self.tags,
            "/api/ps": self.processes,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            **Status(self.registry, self.metrics).routes(),
        }
        posted: dict[str, Endpoint] = {
            "/api/show": self.show,
            "/v1/audio/transcriptions": self.transcribe,
            "/v1/messages/count_tokens": self.count_tokens,
            **Embeddings(self.registry, self.metrics).routes(),
            **Tokens(self.registry).routes(),
            **{path: self.answering(dialect) for path, dialect in ANSWERED.items()},
        }
        refused = [
            Route(f"/api/{route}{rest}", _reported(_refusing(route)), methods=methods)
            for route in ollama_models.REFUSED
            for rest, methods in [("/{digest}", ["HEAD", "POST"])]
            + [("", ["POST", "DELETE"])] * (route != "blobs")
        ]
        return [
            *_got(got),
            *(Route(path, _reported(point), methods=["POST"]) for path, point in posted.items()),
            *refused,
        ]

    def answering(self, dialect: type[Dialect]) -> Endpoint:
        """Return the endpoint of a route that answers with replies."""

        async def endpoint(request: HttpRequest) -> Any:
            asked = await read(request, dialect.parse)
            await self._structures.check(asked)
            if asked.own.get("task", "reply") == "reply":
                return Answer(self.registry, self.ahead, self.metrics, dialect, asked)
            if asked.own["task"] == "unload":  # Ollama's empty prompt
                await self.registry.unload(asked.model)
            else:
                async with self.registry.use(asked.model, asked.own["keep_alive"]):
                    pass
            chat = dialect is OllamaChat
            return respond(ollama.loaded(asked, created=Facts().created, chat=chat))

        return endpoint

    async def transcribe(self, request: HttpRequest) -> Any:
        """Answer with the text of speech."""
        asked = await read_form(request, openai_transcriptions.parse)
        if asked.own["format"] == "verbose_json":
            async with self._decoding:
                seconds = await asyncio.to_thread(openai_transcriptions.audio_seconds, asked)
            asked = replace(asked, own={**asked.own, "seconds": seconds})
        return Answer(self.registry, self.ahead, self.metrics, OpenAiTranscriptions, asked)

    # Models

    async def root(self, _: HttpRequest) -> Response:
        """Answer as Ollama does, by which its clients know it."""
        return respond_text(ollama_models.RUNNING)

    async def health(self, _: HttpRequest) -> Response:
        """Say whether requests are answered now."""
        if self.registry.is_loading:
            return respond(error_body(RequestError("A model is being loaded.", 503)), 503)
        return respond({"status": "ok"})

    async def version(self, _: HttpRequest) -> Response:
        """Say which version of Ollama's API this is."""
        return respond(ollama_models.version())

    async def tags(self, _: HttpRequest) -> Response:
        """List the models for Ollama's clients."""
        return respond(ollama_models.tags(await asyncio.to_thread(self.registry.entries)))

    async def processes(self, _: HttpRequest) -> Response:
        """List the models in memory."""
        return respond(ollama_models.processes(self.registry.running()))

    async def show(self, request: HttpRequest) -> Response:
        """Describe a model."""
        name, verbose = await read(request, ollama_models.parse_show)

        def describe() -> Response:
            entry, gguf, capabilities = self.registry.describe(name)
            with closing(gguf):
                return respond(ollama_models.show(entry, gguf, capabilities, verbose=verbose))

        return await asyncio.to_thread(describe)

    async def models(self, request: HttpRequest) -> Response:
        """List the models for OpenAI's and Anthropic's clients."""
        entries = await asyncio.to_thread(self.registry.entries)
        listed = [_model(request, entry) for entry in entries]
        list_all = anthropic.model_list if _is_anthropic(request.headers) else model_list
        return respond(list_all(listed))

    async def model(self, request: HttpRequest) -> Response:
        """Describe one model for OpenAI's and Anthropic's clients."""
        name = request.path_params["name"]
        return respond(_model(request, (await self.registry.afind(name)).entry))

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Count the tokens of a prompt for Anthropic's clients."""
        asked = await read(request, anthropic.parse_count)
        async with self.registry.use(asked.model) as engine:
            tokens = await engine.model.acount_tokens(
                asked.messages,
                tools=() if asked.tool_choice == "none" else asked.tools,
                think=bool(asked.think),
                continue_last=asked.continue_last,
            )
        return respond(anthropic.count_answer(tokens))


def _model(request: HttpRequest, entry: ollama_models.ModelEntry) -> dict[str, Any]:
    """Return a model as the client's API describes it: two have the same route."""
    if _is_anthropic(request.headers):
        return anthropic.model_entry(entry.name, ollama.timestamp(entry.modified))
    return model_entry(entry.name, int(entry.modified))


def _got(endpoints: Mapping[str, Endpoint]) -> list[Route]:
    """Return the routes of what is read."""
    return [Route(path, _reported(each), methods=["GET"]) for path, each in endpoints.items()]


def _refusing(route: str) -> Endpoint:
    async def endpoint(_: HttpRequest) -> Response:
        raise ollama_models.refusal(route)

    return endpoint


def _reported(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint whose errors are answers of its API."""

    async def reported(request: HttpRequest) -> Any:
        try:
            return await endpoint(request)
        except Exception as error:
            return _error(request, error)

    return reported
