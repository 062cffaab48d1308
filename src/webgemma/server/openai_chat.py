"""OpenAI's Chat Completions API: `/v1/chat/completions`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from webgemma.replies import Piece
from webgemma.server.openai_common import (
    ContentTokens,
    Event,
    TokenBytes,
    call_arguments,
    call_id,
    check_text_format,
    check_tools,
    checked,
    chosen,
    content_tokens,
    error_body,
    flag,
    function_tool,
    kept_calls,
    read_body,
    read_choices,
    read_include_usage,
    read_model,
    read_settings,
    read_think,
    read_tool_choice,
    read_top_logprobs,
    usage,
)
from webgemma.server.openai_messages import read_messages
from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.text import inputs
from webgemma.text.calls import ToolCall
from webgemma.values import shown

LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
REFUSED = {"continue_final_message": "a reply is always a new message"}


def parse(body: Any) -> Request:
    """Return what a body asks for; RequestError if it cannot be served."""
    body = read_body(body, REFUSED)
    messages = read_messages(body.get("messages"))
    settings = read_settings(body, LIMITS)
    logprobs = flag(body.get("logprobs"), "logprobs")
    top = read_top_logprobs(body)
    if top and not logprobs:
        raise RequestError(
            f"top_logprobs is {top}, which needs logprobs to be true.", param="top_logprobs"
        )
    if top:
        settings["top_logprobs"] = top
    _check_modalities(body.get("modalities"))
    check_text_format(body.get("response_format"), "response_format")
    _check_functions(body)
    choice, tools = read_tool_choice(body.get("tool_choice"), _tools(body.get("tools")))
    return Request(
        read_model(body),
        settings,
        messages,
        choices=read_choices(body),
        stream=flag(body.get("stream"), "stream"),
        tools=tools,
        tool_choice=choice,
        think=read_think(body),
        logprobs=logprobs,
        own={
            "include_usage": read_include_usage(body),
            "parallel": flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
        },
    )


def _check_modalities(given: Any) -> None:
    listed = checked(inputs.as_list, given, "modalities")
    for at, kind in enumerate(listed):
        chosen(kind, f"modalities[{at}]", ("text", "audio"))
    if listed and "text" not in listed:
        raise RequestError("modalities must include 'text': answers are text.", param="modalities")


def _check_functions(body: Mapping[str, Any]) -> None:
    """Refuse the old form of tools, which has answers of its own, unless no call is wanted."""
    call = body.get("function_call")
    if (body.get("functions") and call != "none") or call not in (None, "none", "auto"):
        raise RequestError(
            "functions and function_call are an old form: send tools and tool_choice.",
            param="functions" if body.get("functions") else "function_call",
        )


def _tools(given: Any) -> list[dict[str, Any]]:
    tools = []
    for at, each in enumerate(checked(inputs.as_list, given, "tools")):
        where = f"tools[{at}]"
        tool = checked(inputs.as_mapping, each, where)
        if tool.get("type", "function") != "function":
            raise RequestError(
                f"{where}.type is {shown(tool['type'])}; only functions can be called.",
                param=f"{where}.type",
            )
        tools.append(function_tool(tool.get("function"), f"{where}.function"))
    return check_tools(tools)


def finish_reason(request: Request, reply: Reply) -> str:
    """Return why a reply ended; one without tokens was not allowed any."""
    if reply.finish != "stop":
        return "length"
    return "tool_calls" if kept_calls(request, reply.tool_calls) else "stop"


def answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    id: str,
    created: int,
    model: str = "",
    token_bytes: TokenBytes | None = None,
) -> Event:
    """Return the whole answer; `Tokenizer.token_bytes` is needed for log-probabilities."""
    choices = []
    for index, reply in enumerate(replies):
        calls = kept_calls(request, reply.tool_calls)
        message: Event = {
            "role": "assistant",
            "content": None if calls and not reply.text else reply.text,
            "refusal": None,
        }
        if reply.thinking:
            message |= _reasoning(reply.thinking)
        if calls:
            message["tool_calls"] = [
                _call(call, call_id(id, index, at)) for at, call in enumerate(calls)
            ]
        tokens = content_tokens(reply, token_bytes) if request.logprobs else None
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": _logprobs(tokens),
                "finish_reason": finish_reason(request, reply),
            }
        )
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model or request.model,
        "choices": choices,
        "usage": usage(request, replies),
    }


def _reasoning(text: str) -> Event:
    """Return thinking under both of the names that clients know."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall, identity: str) -> Event:
    function = {"name": call.name, "arguments": call_arguments(call)}
    return {"id": identity, "type": "function", "function": function}


def _logprobs(tokens: list[Event] | None) -> Event | None:
    return None if tokens is None else {"content": tokens, "refusal": None}


class ChatStream:
    """Turns the pieces of an answer's replies into its chunks; `DONE` follows the last."""

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        model: str = "",
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self.request = request
        self.id = id
        self.head = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model or request.model,
        }
        self.replies = [Reply() for _ in range(request.choices)]
        self._ended = [False] * request.choices
        self._tokens = [ContentTokens(token_bytes) for _ in range(request.choices)]

    def begin(self) -> Iterator[Event]:
        """Yield the first chunk of each choice, which names the role."""
        for index in range(self.request.choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        """Yield the chunks for a piece of a choice."""
        reply = self.replies[index]
        before = len(reply.tool_calls)
        reply.add(piece)
        tokens = self._tokens[index].feed(piece) if self.request.logprobs else None
        if piece.thinking:
            yield self._chunk(index, _reasoning(piece.thinking))
        if piece.text:
            yield self._chunk(index, {"content": piece.text}, tokens)
        for at, call in enumerate(kept_calls(self.request, piece.tool_calls, before), before):
            written = {"index": at} | _call(call, call_id(self.id, index, at))
            yield self._chunk(index, {"tool_calls": [written]})
        if piece.finish:
            yield self._last(index)

    def end(self) -> Iterator[Event]:
        """Yield the last chunks: of choices that had no tokens, and the usage if it is wanted."""
        for index, ended in enumerate(self._ended):
            if not ended:
                yield self._last(index)
        if self.request.own["include_usage"]:
            used = usage(self.request, self.replies)
            yield self.head | {"choices": [], "usage": used}

    def error(self, error: RequestError) -> Iterator[Event]:
        """Yield what says that the answer cannot be continued."""
        yield error_body(error)

    def _last(self, index: int) -> Event:
        self._ended[index] = True
        return self._chunk(index, {}, finish=finish_reason(self.request, self.replies[index]))

    def _chunk(
        self,
        index: int,
        delta: Event,
        tokens: list[Event] | None = None,
        finish: str | None = None,
    ) -> Event:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(tokens),
            "finish_reason": finish,
        }
        usage = {"usage": None} if self.request.own["include_usage"] else {}
        return self.head | {"choices": [choice]} | usage
