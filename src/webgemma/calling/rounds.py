"""Replies that call Python functions, whose results go to the model until it answers."""

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

from webgemma.calling.functions import Function
from webgemma.errors import InputError
from webgemma.replies import Piece, ToolResult
from webgemma.sync import Aside, Deferred, Detached, ForDriver, Worker, for_caller, may_suspend
from webgemma.text.calls import ToolCall

DECLINED = "The user declined this call."

Message = Mapping[str, Any]
Confirm = Callable[[ToolCall], bool]


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions that a model may call, and who is asked before."""

    by_name: Mapping[str, Function]
    confirm: Confirm | None = None

    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Call functions one after the other; what one raises is its result."""
        return [await self._result(call) for call in calls]

    async def _result(self, call: ToolCall) -> ToolResult:
        function = self.by_name[call.name]
        try:
            arguments = function.arguments(call)
            if self.confirm is not None and not for_caller(self.confirm)(call):
                return ToolResult(call, {"error": DECLINED}, failed=True)
            value = for_caller(lambda: function.function(**arguments))()
            if inspect.isawaitable(value):
                value = await value if may_suspend() else _waited_for(value)
            return ToolResult(call, as_json(value))
        except Exception as error:  # the model may try something else
            return ToolResult(call, {"error": f"{type(error).__name__}: {error}"}, failed=True)


def _waited_for(value: Awaitable[Any]) -> Any:
    """Return what is awaited in a thread of its own: the caller's may have an event loop."""

    async def awaited() -> Any:
        return await value

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, asyncio.run, awaited()).result()


def as_json(value: Any) -> Any:
    """Return a value as JSON has it; what JSON does not have becomes text."""
    return json.loads(json.dumps(value, default=str, allow_nan=False))


async def replies_with_functions(
    worker: Worker,
    begin: Callable[[Sequence[Message], str | None, bool], AsyncGenerator[Any, None]],
    messages: Sequence[Message],
    tool_choice: str | None,
    functions: Functions,
    most: int,
) -> AsyncGenerator[Any, None]:
    """Yield the pieces of replies, and of results between them, until one calls no function.

    `begin` begins the reply to messages with a choice of tools: the first that which is given, the
    others may call functions, and after `most` rounds none. Its last argument says whether
    the messages end with results. Only the last reply has a `finish`."""
    said, chosen = list(messages), tool_choice
    yield Detached()  # each reply is driven as its own stream says
    for round in range(most + 1):
        if round:
            chosen = "auto" if round < most else "none"
        reply = _Reply(functions.by_name if round < most else {})
        stream, detached = begin(said, chosen, round > 0), False
        try:
            while True:
                try:
                    item = await worker.next_item(stream, detached=detached)
                except StopAsyncIteration:
                    break
                if isinstance(item, Detached):
                    detached = True
                elif isinstance(item, Aside | Deferred) or not isinstance(item, ForDriver):
                    yield reply.add(item) if isinstance(item, Piece) else item
        finally:
            await worker.close_stream(stream)
        if not reply.goes_on:
            return
        with worker.released():
            results = await functions.results(reply.calls)
        yield Piece(-1, "", 0.0, tool_results=tuple(results))
        said += reply.messages(results, round)


class _Reply:
    """A reply as far as it is written."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        """`functions` are those that it may call."""
        self.functions = functions
        self.text = ""
        self.thinking = ""
        self.calls: list[ToolCall] = []
        self.finish = ""

    def add(self, piece: Piece) -> Piece:
        """Add a piece; return what the caller gets of it."""
        self.text += piece.text
        self.thinking += piece.thinking
        self.calls += piece.tool_calls
        self.finish = piece.finish
        return replace(piece, finish="") if self.goes_on else piece

    @property
    def goes_on(self) -> bool:
        """Whether all that it calls are functions, whose results the model gets."""
        called = self.calls and all(call.name in self.functions for call in self.calls)
        return self.finish == "stop" and bool(called)

    def messages(self, results: Sequence[ToolResult], round: int) -> list[Message]:
        """Return the reply and the results of its calls, as the conversation continues."""
        ids = [f"call_{round}_{at}" for at in range(len(results))]
        calls = [
            {"id": id, "function": {"name": result.call.name, "arguments": result.call.arguments}}
            for id, result in zip(ids, results, strict=True)
        ]
        said: Message = {"role": "assistant", "content": self.text, "tool_calls": calls}
        if self.thinking:
            said = {**said, "reasoning": self.thinking}
        answers: list[Message] = [
            {
                "role": "tool",
                "tool_call_id": id,
                "name": result.call.name,
                "content": _content(result),
            }
            for id, result in zip(ids, results, strict=True)
        ]
        return [said, *answers]


def _content(result: ToolResult) -> Any:
    """Return a result as the content of a message, in which a list would have media and texts."""
    is_list = isinstance(result.value, list)
    return {"value": result.value} if is_list else result.value


def check_rounds(most: object) -> int:
    """Return how many rounds of calls there may be; InputError if it is no such number."""
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 1000:
        raise InputError(f"max_rounds is {most!r}; it must be a whole number from 1 to 1000.")
    return most
