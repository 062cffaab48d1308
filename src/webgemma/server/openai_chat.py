"""OpenAI's Chat Completions API: `/v1/chat/completions`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from webgemma.replies import Piece, Usage
from webgemma.server.openai_chunks import ChunkStream
from webgemma.server.openai_common import (
    ContentTokens,
    Event,
    TokenBytes,
    call_arguments,
    call_id,
    check_tools,
    checked,
    chosen,
    content_tokens,
    flag,
    function_tool,
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
from webgemma.server.openai_structures import read_structure
from webgemma.server.protocol import Reply, Request, RequestError, Stage
from webgemma.text import inputs
from webgemma.text.calls import ToolCall
from webgemma.values import shown

LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")


def parse(body: Any) -> Request:
    """Return what a body asks for; RequestError if it cannot be served."""
    body = read_body(body, {})
    messages = read_messages(body.get("messages"))
    settings = read_settings(body, LIMITS)
    if flag(body.get("watch"), "watch"):
        settings["watch"] = True
    logprobs = flag(body.get("logprobs"), "logprobs")
    top = read_top_logprobs(body)
    if top and not logprobs:
        raise RequestError(
            f"top_logprobs is {top}, which needs logprobs to be true.", param="top_logprobs"
        )
    if top:
        settings["top_logprobs"] = top
    _check_modalities(body.get("modalities"))
    _check_functions(body)
    declared = _tools(body.get("tools"))
    choice, tools = read_tool_choice(body.get("tool_choice"), check_tools(list(declared.values())))
    stream = flag(body.get("stream"), "stream")
    progress, timings = (flag(body.get(name), name) for name in ("progress", "timings_per_token"))
    return Request(
        read_model(body),
        settings,
        messages,
        choices=read_choices(body),
        stream=stream,
        tools=tools,
        tool_places={tool["function"]["name"]: place for place, tool in declared.items()},
        tool_choice=choice,
        parallel=flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
        structure=read_structure(body, body.get("response_format")),
        think=read_think(body),
        continue_last=_continues(body, messages),
        logprobs=logprobs,
        progress=stream and progress,
        own={"timings": stream and timings, "include_usage": read_include_usage(body)},
    )


def _continues(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is to be continued, in vLLM's words."""
    continues = flag(body.get("continue_final_message"), "continue_final_message")
    last = messages[-1]
    if continues and (last["role"] != "assistant" or "tool_calls" in last):
        raise RequestError(
            "continue_final_message is true, but the last message is no text of the assistant's.",
            param="continue_final_message",
        )
    return continues


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


def _tools(given: Any) -> dict[str, dict[str, Any]]:
    """Return the tools by the places of their schemas."""
    tools = {}
    for at, each in enumerate(checked(inputs.as_list, given, "tools")):
        where = f"tools[{at}]"
        tool = checked(inputs.as_mapping, each, where)
        if tool.get("type", "function") != "function":
            raise RequestError(
                f"{where}.type is {shown(tool['type'])}; only functions can be called.",
                param=f"{where}.type",
            )
        function = f"{where}.function"
        tools[f"{function}.parameters"] = function_tool(tool.get("function"), function)
    return tools


def finish_reason(reply: Reply) -> str:
    """Return why a reply ended; one without tokens was not allowed any."""
    if reply.finish != "stop":
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


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
        calls = reply.tool_calls
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
                "finish_reason": finish_reason(reply),
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


def timings(usage: Usage, prompt_seconds: float, reply_seconds: float) -> Event:
    """Return tokens and times in llama.cpp's words, and what of the context is taken."""
    read, written = usage.prompt - usage.cached, usage.reply
    drafts = {"draft_n": usage.drafted, "draft_n_accepted": usage.accepted}
    return {
        "cache_n": usage.cached,
        "prompt_n": read,
        "prompt_ms": 1000 * prompt_seconds,
        "prompt_per_second": _speed(read, prompt_seconds),
        "predicted_n": written,
        "predicted_ms": 1000 * reply_seconds,
        "predicted_per_second": _speed(written - 1, reply_seconds),  # the first one is the prompt's
        "n_ctx": usage.context,
        "left_out": usage.left_out,
        **(drafts if usage.drafted else {}),
    }


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0


def _reasoning(text: str) -> Event:
    """Return thinking under both of the names that clients know."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall, identity: str) -> Event:
    function = {"name": call.name, "arguments": call_arguments(call)}
    return {"id": identity, "type": "function", "function": function}


def _logprobs(tokens: list[Event] | None) -> Event | None:
    return None if tokens is None else {"content": tokens, "refusal": None}


class ChatStream(ChunkStream):
    """Turns the pieces of an answer's replies into its chunks."""

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        model: str = "",
        token_bytes: TokenBytes | None = None,
    ) -> None:
        kind = "chat.completion.chunk"
        super().__init__(request, kind, request.choices, id=id, created=created, model=model)
        self.id = id
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
        for at, call in enumerate(piece.tool_calls, before):
            written = {"index": at} | _call(call, call_id(self.id, index, at))
            yield self._chunk(index, {"tool_calls": [written]})
        if piece.finish:
            yield self._last(index)

    def stage(self, stage: Stage) -> Event:
        """Return the chunk that says what the answer waits for."""
        progress: Event = {"stage": stage.name}
        if stage.total:
            progress |= {"done": stage.done, "total": stage.total}
        return self.head | {"choices": [], "progress": progress}

    def canvas(self, index: int, facts: Event) -> Event:
        """Return the chunk of a canvas after a step."""
        return self._chunk(index, {"canvas": facts})

    def _end_of(self, index: int) -> Event:
        return self._chunk(index, {}, finish=finish_reason(self.replies[index]))

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
        return self._with_head(choice)
