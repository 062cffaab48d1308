"""HTTP without the APIs: bodies of requests within limits, and JSON answers."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from webgemma.errors import (
    DeviceMemoryError,
    InputError,
    MissingEncoderError,
    MissingPackageError,
    ModelNotFoundError,
    WebgemmaError,
)
from webgemma.server.bodies import json_text
from webgemma.server.forms import Form, parse_form
from webgemma.server.protocol import RequestError

MAX_BODY_NBYTES = 64 << 20  # a conversation with images and audio
BODY_SECONDS = 60.0  # until a body must be complete
MAX_HELD_NBYTES = 1 << 30  # of the bodies of all requests that are served or wait
MAX_VALUES = 1_000_000  # in JSON, where three bytes may become a hundred
SHORT_NBYTES = 1 << 16  # longer bodies are parsed in a thread, so that streams go on

log = logging.getLogger("webgemma.server")
T = TypeVar("T")


async def read(request: HttpRequest, parse: Callable[[Any], T], most: int = MAX_BODY_NBYTES) -> T:
    """Return what a body of JSON means; RequestError if it is too long, too slow or no JSON."""
    data = await read_bytes(request, most)
    if len(data) > SHORT_NBYTES:
        return await asyncio.to_thread(lambda: parse(_loads(data)))
    return parse(_loads(data))


async def read_form(request: HttpRequest, parse: Callable[[Form], T]) -> T:
    """Return what a form with files means; RequestError if it is too long, too slow or no form."""
    data = await read_bytes(request)
    kind = request.headers.get("content-type", "")
    return await asyncio.to_thread(lambda: parse(parse_form(data, kind)))


async def read_bytes(request: HttpRequest, most: int = MAX_BODY_NBYTES) -> bytes:
    """Return a body; RequestError if it is too long or too slow."""
    too_long = RequestError(f"The body is longer than {most >> 20} MiB.", 413)
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise too_long
    chunks, nbytes = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                nbytes += len(chunk)
                if nbytes > most:
                    raise too_long
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError("The body did not arrive in time.", 408) from None
    except ClientDisconnect:
        raise RequestError("The client left before its request was complete.", 400) from None
    return b"".join(chunks)


def _loads(data: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    if len(data) > MAX_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise RequestError(f"The body holds more than {MAX_VALUES} values.", 413)
    try:
        return json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise RequestError(f"The body is not JSON: {error}.") from None


class HeldBodies:
    """ASGI middleware that refuses bodies while those of other requests take too much memory."""

    def __init__(self, app: Any, most: int | None = None) -> None:
        self.app = app
        self.most = MAX_HELD_NBYTES if most is None else most
        self.nbytes = 0  # of all requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and count what comes of its body until it is answered."""
        nbytes = 0

        async def counted() -> Any:
            nonlocal nbytes
            message = await receive()
            length = len(message.get("body", b""))
            if length and self.nbytes + length > self.most:
                raise RequestError("The server is busy, please try again: its memory is full.", 503)
            nbytes += length
            self.nbytes += length
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.nbytes -= nbytes


HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}  # of all answers


def respond(body: Mapping[str, Any] | Sequence[Any], status: int = 200) -> Response:
    """Return an answer of JSON."""
    headers = dict(HEADERS)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        headers["Retry-After"] = "1"
    return Response(json_text(body), status, headers, "application/json")


def respond_bytes(body: bytes, status: int, headers: Mapping[str, str]) -> Response:
    """Return an answer whose headers say what it is."""
    return Response(body, status, dict(headers))


def respond_text(
    text: str, media_type: str = "text/plain", headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer of text."""
    return Response(text, 200, {**HEADERS, **(headers or {})}, media_type)


def as_request_error(error: Exception) -> RequestError:
    """Return any error as one that a client may see; what nobody expected is logged instead."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ModelNotFoundError):
        return RequestError(str(error), 404, "model")
    if isinstance(error, MissingEncoderError):
        return RequestError(error.reason)
    if isinstance(error, MissingPackageError):
        return RequestError(str(error), 501)
    if isinstance(error, InputError):
        return RequestError(str(error))
    if isinstance(error, DeviceMemoryError | MemoryError):
        return RequestError("There is not enough memory for this request.", 503)
    if isinstance(error, WebgemmaError):
        return RequestError(str(error), 500)
    log.error("A request failed.", exc_info=error)
    return RequestError("The server failed at this request; its log says more.", 500)
