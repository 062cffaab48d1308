"""Ollama's `context`: a conversation as token ids, which clients send back with their next prompt.

Nothing is stored between requests: the ids say who said what, turn by turn as in Gemma's template.
They hold text alone, neither images nor thoughts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.text.markup import END_OF_TURN, START_OF_TURN, TURN_CLOSE, TURN_OPEN
from webgemma.text.tokenizer import Tokenizer

ROLES = {"system": "system", "user": "user", "assistant": "model"}  # and what ids call them
NAMES = {called: role for role, called in ROLES.items()}


def continued(request: Request, tokenizer: Tokenizer) -> Request:
    """Return a request with the messages of its context, and all of it as the new context."""
    if request.prompts:  # which are read as they are
        return request
    messages = list(request.messages)
    before: list[Mapping[str, Any]] = [*_messages(request.own["context"], tokenizer)]
    if messages[0]["role"] == "system":  # instead of the one before
        before = [message for message in before if message["role"] != "system"]
        before.insert(0, messages.pop(0))
    messages = [*before, *messages]
    ids = [tokenizer.bos, *_turns(messages, tokenizer)] if _marks(tokenizer) else []
    return replace(request, messages=messages, own={**request.own, "context": ids})


def with_reply(request: Request, reply: Reply, tokenizer: Tokenizer) -> list[int]:
    """Return the context after a reply to a request that `continued` returned."""
    ids: Sequence[int] = request.own["context"]
    said = {"role": "assistant", "content": reply.text}
    return [*ids, *_turns([said], tokenizer)] if ids else []


def _marks(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the tokens that begin and end a turn; None if the vocabulary has none."""
    for opening, closing in ((TURN_OPEN, TURN_CLOSE), (START_OF_TURN, END_OF_TURN)):
        if opening in tokenizer.special_ids:
            return tokenizer.special_ids[opening], tokenizer.special_ids[closing]
    return None


def _turns(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the ids of messages; their texts have no special tokens."""
    marks = _marks(tokenizer)
    assert marks is not None
    for message in messages:
        yield marks[0]
        yield from tokenizer.encode(f"{ROLES[message['role']]}\n{message['content']}")
        yield marks[1]
        yield from tokenizer.encode("\n")


def _messages(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the messages of a context; RequestError if it is none."""
    opening, closing = _marks(tokenizer) or (-1, -1)
    first = -1  # of the turn's ids
    for at, token in enumerate(ids):
        if token == opening:
            first = at + 1
        elif first < 0:  # between turns is a line break
            if token != tokenizer.bos and tokenizer.decode([token]).strip():
                raise _not_ours()
        elif token == closing:
            name, _, text = tokenizer.decode(ids[first:at]).partition("\n")
            if name not in NAMES:
                raise _not_ours()
            yield {"role": NAMES[name], "content": text}
            first = -1
    if first >= 0:
        raise _not_ours()


def _not_ours() -> RequestError:
    return RequestError(
        "context is none that this server gave for this model: leave it out, or send the "
        "conversation's messages to /api/chat.",
        param="context",
    )
