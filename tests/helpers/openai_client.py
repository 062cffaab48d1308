"""The `openai` package's own client, whose requests a function answers without a network."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import httpx2
import pytest
from hypothesis import strategies as st
from openai import OpenAI

from helpers.pieces import cached_prompt
from webgemma.replies import Piece, TopToken, Usage
from webgemma.server.openai_common import error_body
from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.text.calls import ToolCall

PROMPT, CONTEXT = 7, 100
SPECIAL = {1: "<turn|>", 2: "<|channel>", 3: "<channel|>", 4: "<|tool_call>", 5: "<tool_call|>"}

FRESH = count(10)  # ids of tokens

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)

Parse = Callable[[Any], Request]


def refusal(parse: Parse, given: Any) -> RequestError:
    """Return why a body is refused: status 400, and a sentence that names the parameter."""
    with pytest.raises(RequestError) as caught:
        parse(given)
    error = caught.value
    assert error.status == 400
    assert str(error).endswith(".")
    assert (error.param or "") in str(error)
    return error


def parsed_or_refused(parse: Parse, given: Any) -> Request | None:
    """Return the request that any JSON value is; None if it is refused as it should be."""
    try:
        return parse(given)
    except RequestError:
        refusal(parse, given)
        return None


class Script:
    """Writes the pieces of a reply, token by token, and knows the tokens' bytes."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.texts: dict[int, bytes] = dict.fromkeys(SPECIAL, b"")

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def special(self, token: int, **fields: Any) -> "Script":
        """Add a special token."""
        return self._add(token, **fields)

    def text(self, *tokens: str) -> "Script":
        """Add tokens of text."""
        for token in tokens:
            self._add(self._id(token.encode()), text=token)
        return self

    def think(self, *tokens: str) -> "Script":
        """Add tokens of thinking, between tags."""
        self.special(2)
        for token in tokens:
            self._add(self._id(token.encode()), thinking=token)
        return self.special(3)

    def call(self, name: str, **arguments: Any) -> "Script":
        """Add a tool call of three tokens."""
        self.special(4)._add(self._id(b"call"))
        return self.special(5, tool_calls=(ToolCall(name, arguments),))

    def halves(self, character: str) -> "Script":
        """Add a character whose bytes are two tokens."""
        data = character.encode()
        self._add(self._id(data[:1]))
        return self._add(self._id(data[1:]), text=character)

    def stop(self, text: str = "") -> "Script":
        """End with the token that ends a turn, and text that was held back."""
        return self.special(1, finish="stop", text=text)

    def length(self) -> "Script":
        """End because of the limit of tokens."""
        self.pieces[-1] = replace(self.pieces[-1], finish="length")
        return self

    def cache(self, tokens: int) -> "Script":
        """Have so many tokens of the prompt read before."""
        self.pieces = cached_prompt(self.pieces, tokens)
        return self

    def reply(self) -> Reply:
        """Return the whole reply."""
        reply = Reply()
        for piece in self.pieces:
            reply.add(piece, keep_tokens=True)
        return reply

    def _id(self, data: bytes) -> int:
        token = next(FRESH)
        self.texts[token] = data
        return token

    def _add(self, token: int, text: str = "", **fields: Any) -> "Script":
        at = len(self.pieces)
        top = (TopToken(token, -0.5, text), TopToken(1, float("-inf"), "<turn|>"))
        usage = Usage(PROMPT, at + 1, CONTEXT)
        self.pieces.append(Piece(token, text, -0.5 - at, top=top, usage=usage, **fields))
        return self


def client(answer: Callable[[Any], Mapping[str, Any] | Iterable[bytes]]) -> OpenAI:
    """Return a client; a RequestError is answered as the server does."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        try:
            answered = answer(json.loads(request.content))
        except RequestError as error:
            return httpx2.Response(error.status, json=error_body(error))
        if isinstance(answered, Mapping):
            # Through text, so that only what JSON holds passes.
            text = json.dumps(answered, allow_nan=False)
            return httpx2.Response(200, text=text, headers={"content-type": "application/json"})
        stream = b"".join(answered)
        return httpx2.Response(200, content=stream, headers={"content-type": "text/event-stream"})

    transport = httpx2.MockTransport(respond)
    return OpenAI(
        api_key="none",
        base_url="http://127.0.0.1/v1",
        max_retries=0,
        _strict_response_validation=True,
        http_client=httpx2.Client(transport=transport),
    )
