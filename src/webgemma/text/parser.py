"""From the model's raw reply to content, thinking and tool calls, in one go or as it streams."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

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

__all__ = ["Reply", "ReplyParser", "ToolCall", "parse_reply"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said, what it thought and what it wants called; or a piece of that."""

    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


_NOTHING = Reply()


class _State(Enum):
    CONTENT = auto()
    THOUGHT = auto()
    CALL = auto()


# The tags that end each state; any other tag is text there.
_TAGS = {
    _State.CONTENT: re.compile(rf"<\|channel>(?:{THOUGHT})?|<\|tool_call>"),
    _State.THOUGHT: re.compile(r"<channel\|>"),
    _State.CALL: re.compile(r"<tool_call\|>"),
}
# What may follow a thought or a call and means nothing: the model tends to repeat the end of a
# call, and stops with the opening of a response.
_AFTER_THOUGHT = re.compile(r"\s*+")
_AFTER_CALL = re.compile(r"(?:\s++|<tool_call\|>|<\|tool_response>)*+")

_CALL_NOISE = (CALL_CLOSE, RESPONSE_OPEN)
_WHOLE_TAGS = (CHANNEL_OPEN + THOUGHT, CHANNEL_CLOSE, CALL_OPEN, *_CALL_NOISE)
_UNFINISHED_TAGS = frozenset(tag[:end] for tag in _WHOLE_TAGS for end in range(1, len(tag)))
_LONGEST_TAG = max(map(len, _WHOLE_TAGS))


class ReplyParser:
    """Reads a reply piece by piece; however it is cut, the pieces add up to the same.

    White space next to a tag is dropped, so white space is held back until something follows it.
    Each character is looked at a few times at most, however long a thought or a call grows.
    """

    def __init__(
        self,
        think: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_thought: bool = False,
    ) -> None:
        """`in_thought`: the prompt has opened a thought; without `think`, thoughts are dropped."""
        self._think = think
        self._schemas = _schemas(tools)
        self._state = _State.THOUGHT if in_thought else _State.CONTENT
        self._noise: re.Pattern[str] | None = None  # to be passed over before anything else
        self._partial = ""  # perhaps the start of a tag, never a whole one
        self._spaces: list[str] = []  # dropped if a tag follows
        self._call: list[str] = []
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> Reply:
        """What became certain with this piece of the reply."""
        text = self._partial + as_text(text, "The reply")
        end = _unfinished_tag(text)
        self._partial = text[end:]
        self._read(text[:end])
        return self._take()

    def finish(self) -> Reply:
        """The rest, now that nothing follows."""
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
        """Read a text that does not end within a tag."""
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
            self._pass_tag(tag[0])
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

    def _pass_tag(self, tag: str) -> None:
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
            return _NOTHING
        reply = Reply("".join(self._content), "".join(self._thinking), tuple(self._calls))
        self._content, self._thinking, self._calls = [], [], []
        return reply


def parse_reply(
    text: str, think: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
) -> Reply:
    """A whole reply, special tokens spelled out; calls that make no sense are dropped."""
    parser = ReplyParser(think, tools)
    start, end = parser.feed(text), parser.finish()
    return Reply(
        start.content + end.content,
        start.thinking + end.thinking,
        start.tool_calls + end.tool_calls,
    )


def _unfinished_tag(text: str) -> int:
    """Where a tag starts that the text ends within; the text's end if there is none."""
    start = text.rfind("<", max(0, len(text) - _LONGEST_TAG))
    return start if start >= 0 and text[start:] in _UNFINISHED_TAGS else len(text)


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """The properties of each function; of two with one name, the first."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in read_tools(tools):
        parameters = tool.function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        known = properties if isinstance(properties, Mapping) else {}
        schemas.setdefault(tool.name, known)
    return schemas
