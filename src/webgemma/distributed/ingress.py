"""The application that listens for all replicas: it checks who asks, and passes requests on."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.routing import Mount

from webgemma.distributed.cluster import import_ray
from webgemma.distributed.conversations import Asked, read_asked
from webgemma.distributed.replicas import Message, Replicas
from webgemma.server.ahead import Ahead
from webgemma.server.answers import Facts, patient, until_left
from webgemma.server.app import ANSWERED, guards, page_routes, refuse
from webgemma.server.http import SHORT_NBYTES, as_request_error, read_bytes
from webgemma.server.protocol import RequestError

ATTEMPTS = 3  # replicas that may die before a request is given up
REPLICA_SECONDS = 60.0  # until some replica has taken a request
REPLICA_HEADER = b"x-webgemma-replica"
# What the replicas need not know: who asks was checked here.
DROPPED = (b"authorization", b"x-api-key", b"cookie", b"origin")

Streamed = tuple[str, list[Message]]  # the replica, and messages of its application


def make_ingress(
    replicas: Replicas,
    *,
    loopback: bool,
    keys: Sequence[str],
    origins: Sequence[str],
    ahead: Ahead,
    page: bool,
) -> Starlette:
    """Return the application, which answers once the replicas are running."""
    return Starlette(
        routes=[*(page_routes() if page else ()), Mount("", app=Forward(replicas, ahead))],
        middleware=guards(loopback=loopback, keys=keys, origins=origins),
    )


class Forward:
    """Passes requests on to replicas, and their answers back as they are written."""

    def __init__(self, replicas: Replicas, ahead: Ahead) -> None:
        self.replicas, self.ahead = replicas, ahead
        self._errors = import_ray("ray.exceptions")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        try:
            body = await read_bytes(HttpRequest(scope, receive))
            long = len(body) > SHORT_NBYTES
            asked = await asyncio.to_thread(read_asked, body) if long else read_asked(body)
        except RequestError as error:
            await refuse(scope, error)(scope, receive, patient(send))
            return
        await until_left(self._serve(scope, receive, patient(send), asked, body), receive)

    async def _serve(self, scope: Any, receive: Any, send: Any, asked: Asked, body: bytes) -> None:
        begun = False
        try:
            async with aclosing(self.ahead.iterate(self._messages(scope, asked, body))) as batches:
                async for replica, messages in batches:
                    for message in messages:
                        if message["type"] == "http.response.start":
                            header = (REPLICA_HEADER, replica.encode())
                            message["headers"] = [*message.get("headers", ()), header]
                            if asked.digests and message["status"] == 200:
                                self.replicas.homes.loaded(replica, asked.model)
                        begun = True
                        await send(message)
        except TimeoutError:  # of the client
            raise
        except Exception as caught:
            error = as_request_error(caught)
            if not begun:
                await refuse(scope, error)(scope, receive, send)
                return
            last = await asyncio.to_thread(_last_words, scope["path"], body, error)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _messages(
        self, scope: Any, asked: Asked, body: bytes
    ) -> AsyncGenerator[Streamed, None]:
        """Yield the answer of a replica; if that dies before it has begun, of another one."""
        sent = {name: scope[name] for name in ("method", "path", "query_string")}
        handle = self.replicas.handle.options(stream=True)
        sent["headers"] = [pair for pair in scope["headers"] if pair[0] not in DROPPED]
        try:
            for attempt in range(1, ATTEMPTS + 1):
                begun = ended = False
                response = handle.answer.remote(asked, sent, body)
                try:
                    async with asyncio.timeout(REPLICA_SECONDS):
                        replica = await anext(response)
                    async for messages in response:
                        begun = True
                        yield replica, messages
                    ended = True
                    return
                except TimeoutError:
                    raise RequestError("No replica is free; please try again.", 503) from None
                except self._errors.RayActorError:
                    if begun or attempt == ATTEMPTS:
                        raise RequestError(
                            "The replica that wrote this reply ended; please try again.", 503
                        ) from None
                finally:
                    if not ended:
                        response.cancel()
        finally:
            self.replicas.homes.end(asked)


def _last_words(path: str, body: bytes, error: RequestError) -> bytes:
    """Return the end of a stream that cannot be continued, as its API writes it."""
    dialect = ANSWERED.get(path)
    if dialect is None:
        return b""
    try:
        request = dialect.parse(json.loads(body))
    except Exception:  # it began, so that this is not expected; the end of the connection says it
        return b""
    return b"".join(dialect(request, Facts(model=request.model)).failed(error))
