"""Parser of the model's raw reply into content, thinking and tool calls, also as a stream."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from webgemma.text.calls import Schemas, ToolCall, parse_call
from webgemma.text.inputs import as_text, read_tools
from webgemma.text.markup import (
    CALL_CLOSE,
    CALL_OPEN,
    CHANNEL_CLOSE,
    CHANNEL_OPEN,
    RESPONSE_OPEN,
    THOUGHT,
)

__all__ = ["Parser", "Reply", "ReplyParser", "TextParser", "ToolCall", "parse_reply"]


@dataclass(frozen=True, slots=True)
class Reply:
    """Content, thinking and tool calls of a reply, or of one piece of a streamed reply."""

    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


_EMPTY = Reply()


class _State(Enum):
    CONTENT = auto()
    THOUGHT = auto()
    CALL = auto()


# The tags that end each state; other tags are text in that state.
_TAGS = {
    _State.CONTENT: re.compile(rf"<\|channel>(?:{THOUGHT})?|<\|tool_call>"),
    _State.THOUGHT: re.compile(r"<channel\|>"),
    _State.CALL: re.compile(r"<tool_call\|>"),
}
# Text after a thought or a call that is ignored: the model tends to repeat the end of a call, and
# stops with the opening of a response.
_AFTER_THOUGHT = re.compile(r"\s*+")
_AFTER_CALL = re.compile(r"(?:\s++|<tool_call\|>|<\|tool_response>)*")

_CALL_NOISE = (CALL_CLOSE, RESPONSE_OPEN)
_TAG_SPELLINGS = (CHANNEL_OPEN + THOUGHT, CHANNEL_CLOSE, CALL_OPEN, *_CALL_NOISE)
_INCOMPLETE_TAGS = frozenset(tag[:end] for tag in _TAG_SPELLINGS for end in range(1, len(tag)))
_LONGEST_TAG = max(map(len, _TAG_SPELLINGS))


class ReplyParser:
    """Streaming parser of a reply: any split into pieces gives the same result in total.

    White space next to a tag is dropped, so white space is buffered until something follows it.
    The time per character is constant, however long a thought or a call grows.
    """

    def __init__(
        self,
        think: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_thought: bool = False,
    ) -> None:
        """Start inside a thought if the prompt opened one (`in_thought`).

        Without `think`, thoughts are dropped. `tools` are needed to repair calls.
        """
        self._think = think
        self._schemas = _schemas(tools)
        self._state = _State.THOUGHT if in_thought else _State.CONTENT
        self._noise: re.Pattern[str] | None = None  # to be skipped before anything else
        self._partial = ""  # possibly the start of a tag, never a complete one
        self._spaces: list[str] = []  # dropped if a tag follows
        self._call: list[str] = []
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> Reply:
        """Parse the next piece of the reply and return what is certain after it."""
        text = self._partial + as_text(text, "The reply")
        end = _incomplete_tag(text)
        self._partial = text[end:]
        self._read(text[:end])
        return self._take()

    def finish(self) -> Reply:
        """End the reply and return the rest of it."""
        rest, self._partial = self._partial, ""
        if self._noise is not _AFTER_CALL or not any(tag.startswith(rest) for tag in _CALL_NOISE):
            self._read(rest)
        if self._state is _State.CALL:
            self._end_call()
        else:
            self._emit(self._spaces)
        self._spaces = []
        return self._take()

    def _read(self, text: str) -> None:
        """Parse a text that does not end inside a tag."""
        start = 0
        while True:
            if self._noise:
                noise = self._noise.match(text, start)
                start = noise.end() if noise else start
                if start == len(text):
                    return
                self._noise = None
            tag = _TAGS[self._state].search(text, start)
            self._write(text[start : tag.start() if tag else len(text)])
            if not tag:
                return
            self._enter_state(tag[0])
            start = tag.end()

    def _write(self, text: str) -> None:
        if self._state is _State.CALL:
            self._call.append(text)
            return
        body = text.rstrip()
        if body:
            self._emit(self._spaces)
            self._emit([body])
            self._spaces = []
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _emit(self, pieces: list[str]) -> None:
        if self._state is _State.CONTENT:
            self._content += pieces
        elif self._think:
            self._thinking += pieces

    def _enter_state(self, tag: str) -> None:
        self._spaces = []
        if self._state is _State.CONTENT:
            self._state = _State.CALL if tag == CALL_OPEN else _State.THOUGHT
        elif self._state is _State.THOUGHT:
            self._state, self._noise = _State.CONTENT, _AFTER_THOUGHT
        else:
            self._end_call()
            self._noise = _AFTER_CALL

    def _end_call(self) -> None:
        call = parse_call("".join(self._call), self._schemas)
        if call:
            self._calls.append(call)
        self._call = []
        self._state = _State.CONTENT

    def _take(self) -> Reply:
        if not (self._content or self._thinking or self._calls):
            return _EMPTY
        reply = Reply("".join(self._content), "".join(self._thinking), tuple(self._calls))
        self._content, self._thinking, self._calls = [], [], []
        return reply


class TextParser:
    """Parser of a reply that is nothing but text."""

    def feed(self, text: str) -> Reply:
        """Return the next piece of the reply."""
        return Reply(as_text(text, "The reply"))

    def finish(self) -> Reply:
        """Return nothing: all of it was certain."""
        return _EMPTY


Parser: TypeAlias = ReplyParser | TextParser


def parse_reply(
    text: str, think: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
) -> Reply:
    """Parse a complete reply, its special tokens spelled out; invalid calls are dropped."""
    parser = ReplyParser(think, tools)
    start, end = parser.feed(text), parser.finish()
    return Reply(
        start.content + end.content,
        start.thinking + end.thinking,
        start.tool_calls + end.tool_calls,
    )


def _incomplete_tag(text: str) -> int:
    """Return the index of an incomplete tag at the end of the text, or the text's length."""
    start = text.rfind("<", max(0, len(text) - _LONGEST_TAG))
    return start if start >= 0 and text[start:] in _INCOMPLETE_TAGS else len(text)


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """Return the properties of each function; of two with the same name, the first."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in read_tools(tools):
        parameters = tool.function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas.setdefault(tool.name, properties if isinstance(properties, Mapping) else {})
    return schemas
