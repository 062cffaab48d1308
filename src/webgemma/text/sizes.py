"""Sizes of tools and messages, found before they are written: what no context holds is refused."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from webgemma.errors import InputError

MAX_DEPTH = 64  # of nested values and schemas, in prompts and replies
MAX_TOKENS = 1 << 18  # of the longest context
MAX_TOTAL = 1 << 20  # values of all tools or messages together
TOKEN_LENGTH = 64  # characters; hardly a token is longer

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ROLES[:2]
LISTS = (list, tuple)
TURN_TOKENS = 4  # of a turn without content: <|turn>, the role, <turn|>, a line break
MEDIA_TOKENS = 3  # of an image or audio: one soft token between two special ones
CALL_TOKENS = 2  # of a tool, a call or a response: the special tokens around it


class Sizes:
    """Adds up how large values become when they are written, without writing them.

    Objects may share parts, so that a few of them stand for millions of values, or contain
    themselves."""

    def __init__(self) -> None:
        self.total = 0
        self._known: dict[int, tuple[object, int]] = {}  # by id, with the object, which keeps it

    def add(self, value: object, where: str) -> None:
        """Raise InputError for a value that no context holds, or if all together are too many."""
        size = self._size(value, where, 0)
        if size > MAX_TOKENS:
            raise InputError(
                f"{where} would take more tokens than the longest context has, {MAX_TOKENS}: "
                "shorten it."
            )
        self._count(size, where)

    def add_parts(self, count: int, where: str) -> None:
        """Raise InputError if a content's parts are too many with all others."""
        self._count(count, where)

    def _count(self, size: int, where: str) -> None:
        self.total += size
        if self.total > MAX_TOTAL:
            raise InputError(
                f"With {where}, all tools, arguments and contents hold more than {MAX_TOTAL} "
                "values: shorten them."
            )

    def _size(self, value: object, where: str, depth: int) -> int:
        """Return about the least number of tokens: one for each value, more for long texts."""
        if isinstance(value, str):
            return 1 + len(value) // TOKEN_LENGTH
        if not isinstance(value, (Mapping, *LISTS)):
            return 1
        if depth > 4 * MAX_DEPTH:  # a level of a schema is several of mappings
            raise InputError(
                f"{where} is nested more than {MAX_DEPTH} levels deep, or contains itself."
            )
        known = self._known.get(id(value))
        if known is None:
            size = 1
            for each in value:
                size += self._size(each, where, depth + 1)
                if isinstance(value, Mapping):
                    size += self._size(value[each], where, depth + 1)
                if size > MAX_TOKENS:
                    break
            known = self._known[id(value)] = (value, size)
        return known[1]


def least_tokens(message: Mapping[str, Any], token_length: int) -> int:
    """Return the least number of tokens that a message takes, if none is longer than that."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role == "tool":
        return 0  # a tool's message without a call is dropped
    tokens = MEDIA_TOKENS * _length(message.get("images"))
    if role == "assistant":  # may continue the turn before it; thoughts in its text are dropped
        calls, responses = message.get("tool_calls"), message.get("tool_responses")
        return tokens + CALL_TOKENS * (_length(calls) + _length(responses))
    tokens += TURN_TOKENS
    if isinstance(content, str):
        return tokens + _text_tokens(content, token_length)
    for part in content if isinstance(content, LISTS) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            continue
        if kind == "text":
            tokens += _text_tokens(part.get("text"), token_length)
        elif kind.startswith(("image", "audio", "video", "input_audio")):
            tokens += MEDIA_TOKENS
    return tokens


def _length(given: object) -> int:
    return len(given) if isinstance(given, LISTS) else 0


def _text_tokens(text: object, token_length: int) -> int:
    # Two surrogates may be one character.
    return len(text.strip()) // (2 * token_length) if isinstance(text, str) else 0


def least_length(messages: Sequence[Any], tools: object, token_length: int) -> int:
    """Return the least number of tokens of a prompt with these messages and tools."""
    valid = (message for message in messages if isinstance(message, Mapping))
    least = sum(least_tokens(message, token_length) for message in valid)
    return least + CALL_TOKENS * _length(tools)


def without_oldest(messages: Sequence[Any], context: int, token_length: int) -> Sequence[Any]:
    """Return the messages that a context may hold, the system's all, to write no more than those.

    From the beginning on, whenever there are twice as many as it may hold, the oldest are left out:
    so the first one rarely changes, and what is kept has all that fits."""
    exchanges: deque[list[int]] = deque()  # each a user's message and what follows: place, tokens
    length = 0
    for at, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            return messages  # `read_messages` reports it
        if role in SYSTEM_ROLES:
            continue
        if role == "user" or not exchanges:
            exchanges.append([at, 0])
        least = least_tokens(message, token_length)
        exchanges[-1][1] += least
        length += least
        if length > 2 * context:
            while length > context and len(exchanges) > 1:
                length -= exchanges.popleft()[1]
    first = exchanges[0][0] if exchanges else 0
    systems = [message for message in messages[:first] if message["role"] in SYSTEM_ROLES]
    return [*systems, *messages[first:]] if first > len(systems) else messages
