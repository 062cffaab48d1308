"""OpenAI's Responses API: `/v1/responses`. Nothing is stored between requests."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from webgemma.replies import Piece
from webgemma.server.openai_common import (
    ContentTokens,
    Event,
    TokenBytes,
    cached_tokens,
    call_arguments,
    call_id,
    check_tools,
    checked,
    chosen,
    content_tokens,
    flag,
    function_tool,
    id_end,
    prompt_tokens,
    read_body,
    read_effort,
    read_model,
    read_settings,
    read_think,
    read_tool_choice,
    read_top_logprobs,
    reply_tokens,
)
from webgemma.server.openai_items import read_input
from webgemma.server.openai_structures import read_structure
from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.settings import SETTINGS
from webgemma.text import inputs
from webgemma.text.calls import ToolCall
from webgemma.values import shown

LIMITS = ("max_output_tokens", "max_tokens")
LOGPROBS = "message.output_text.logprobs"  # in `include`
STATELESS = "nothing is stored between requests: send the whole conversation as input"
REFUSED = {
    "background": "nothing is stored between requests: wait for the answer, or stream it",
    "conversation": STATELESS,
    "previous_response_id": STATELESS,
    "prompt": "no prompts are stored: send instructions and input",
}
# Tools that run at OpenAI, or whose calls hold no JSON. They are not in the prompt, so that
# programs that always offer them work with it.
LEFT_OUT = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)


def parse(body: Any) -> Request:
    """Return what a body asks for; RequestError if it cannot be served."""
    body = read_body(body, REFUSED)
    messages = read_input(body.get("input"), body.get("instructions"))
    settings = read_settings(body, LIMITS)
    include = checked(inputs.as_list, body.get("include"), "include")
    for at, each in enumerate(include):
        checked(inputs.as_text, each, f"include[{at}]")
    top = read_top_logprobs(body)
    if top:
        settings["top_logprobs"] = top
    declared = list(_functions(body.get("tools"), "tools"))
    tools = [function_tool(tool, where) for where, tool in declared]
    choice, callable_tools = read_tool_choice(body.get("tool_choice"), check_tools(tools))
    parallel = flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True)
    reasoning = _reasoning(body.get("reasoning"))
    text = checked(inputs.as_mapping, _or(body.get("text"), {}), "text")
    format = text.get("format")
    structure = read_structure(body, format, "text.format")
    truncation = chosen(_or(body.get("truncation"), "disabled"), "truncation", ("auto", "disabled"))
    think = read_think(body)
    return Request(
        read_model(body),
        settings,
        messages,
        stream=flag(body.get("stream"), "stream"),
        tools=callable_tools,
        tool_places={tool["name"]: f"{where}.parameters" for where, tool in declared},
        tool_choice=choice,
        parallel=parallel,
        structure=structure,
        think=think if think is not None else read_effort(reasoning["effort"], "reasoning.effort"),
        logprobs=bool(top) or LOGPROBS in include,
        own={
            "namespaces": _namespaces(body.get("tools")),
            "returned": {  # as parts of the answer
                "instructions": body.get("instructions"),
                "max_output_tokens": settings.get("max_tokens"),
                "metadata": _metadata(body.get("metadata")),
                "parallel_tool_calls": parallel,
                "reasoning": reasoning,
                "text": {"format": _returned_format(format)},
                "tool_choice": _or(body.get("tool_choice"), "auto"),
                "tools": [_returned_tool(tool) for _, tool in declared],
                "top_logprobs": top,
                "truncation": truncation,
            },
        },
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _functions(given: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the functions among the tools, those in namespaces too, and where they stand."""
    for at, each in enumerate(checked(inputs.as_list, given, where)):
        place = f"{where}[{at}]"
        tool = checked(inputs.as_mapping, each, place)
        kind = tool.get("type")
        if kind == "function":
            yield place, tool
        elif kind == "namespace" and where == "tools":
            yield from _functions(tool.get("tools"), f"{place}.tools")
        elif kind not in LEFT_OUT:
            raise RequestError(
                f"{place}.type is {shown(kind)}; only functions can be called.",
                param=f"{place}.type",
            )


def _namespaces(given: Any) -> dict[str, str]:
    """Return the namespaces of functions by their names; the tools have been checked."""
    found: dict[str, str] = {}
    for at, tool in enumerate(given or ()):
        if tool["type"] == "namespace":
            space = checked(inputs.as_name, tool.get("name"), f"tools[{at}].name")
            found |= {each["name"]: space for _, each in _functions(tool.get("tools"), "tools.")}
    return found


def _returned_tool(tool: Mapping[str, Any]) -> Event:
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": _or(tool.get("parameters"), {}),
        "strict": _or(tool.get("strict"), False),
    }


def _returned_format(given: Any) -> Event:
    """Return the format of the text, which has been checked."""
    if given is None or given["type"] != "json_schema":
        return {"type": "text" if given is None else given["type"]}
    format = given.get("json_schema", given)
    return {
        "type": "json_schema",
        "name": format.get("name") or "",
        "description": format.get("description"),
        "schema": format["schema"],
        "strict": _or(format.get("strict"), False),
    }


def _reasoning(given: Any) -> Event:
    reasoning = checked(inputs.as_mapping, _or(given, {}), "reasoning")
    read_effort(reasoning.get("effort"), "reasoning.effort")
    summary = reasoning.get("summary")
    if summary is not None:
        chosen(summary, "reasoning.summary", ("auto", "concise", "detailed"))
    return {"effort": reasoning.get("effort"), "summary": summary}


def _metadata(given: Any) -> Mapping[str, Any]:
    metadata = checked(inputs.as_mapping, _or(given, {}), "metadata")
    for key, value in metadata.items():
        checked(inputs.as_text, value, f"metadata.{key}")
    return {key: value or "" for key, value in metadata.items()}


def _usage(reply: Reply) -> Event:
    read, written = prompt_tokens([reply], 1), reply_tokens([reply])
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": cached_tokens([reply], 1),
            "cache_write_tokens": 0,
        },
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reply.thinking_tokens},
        "total_tokens": read + written,
    }


def _response(
    request: Request,
    id: str,
    created: int,
    model: str,
    *,
    status: str,
    output: Sequence[Event] = (),
    error: Event | None = None,
    usage: Event | None = None,
    completed: int | None = None,
) -> Event:
    """Return a response in any of its states, with every field that OpenAI's have."""
    cut = status == "incomplete"
    settings = request.settings
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "completed_at": completed,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": model or request.model,
        "output": list(output),
        "usage": usage,
        "temperature": settings.get("temperature", SETTINGS["temperature"].default),
        "top_p": settings.get("top_p", SETTINGS["top_p"].default),
        "presence_penalty": settings.get("presence_penalty", 0.0),
        "frequency_penalty": settings.get("frequency_penalty", 0.0),
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        **request.own["returned"],
    }


def _reasoning_item(id: str, text: str, status: str) -> Event:
    return {
        "id": id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if text else [],
        "status": status,
    }


def _text_part(text: str, tokens: Sequence[Event] = ()) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(tokens)}


def _message_item(id: str, parts: Sequence[Event], status: str) -> Event:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "content": list(parts),
        "status": status,
    }


def _call_item(
    request: Request, id: str, identity: str, name: str, arguments: str, status: str
) -> Event:
    space = request.own.get("namespaces", {}).get(name)
    return {
        "id": id,
        "type": "function_call",
        "call_id": identity,
        "name": name,
        "arguments": arguments,
        "status": status,
        **({"namespace": space} if space else {}),
    }


def answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    id: str,
    created: int,
    model: str = "",
    token_bytes: TokenBytes | None = None,
    completed: int | None = None,
) -> Event:
    """Return the whole answer; `Tokenizer.token_bytes` is needed for log-probabilities."""
    (reply,) = replies
    status = _status(reply)
    calls = reply.tool_calls
    end = id_end(id)
    output: list[Event] = []
    if reply.thinking:
        ended = "completed" if reply.text or calls else status
        output.append(_reasoning_item(f"rs_{end}_0", reply.thinking, ended))
    if reply.text or not calls:
        tokens = content_tokens(reply, token_bytes) if request.logprobs else ()
        part = _text_part(reply.text, tokens)
        output.append(_message_item(f"msg_{end}_{len(output)}", [part], status))
    for at, call in enumerate(calls):
        item_id, arguments = f"fc_{end}_{len(output)}", call_arguments(call)
        identity = call_id(id, 0, at)
        output.append(_call_item(request, item_id, identity, call.name, arguments, "completed"))
    return _response(
        request,
        id,
        created,
        model,
        status=status,
        output=output,
        usage=_usage(reply),
        completed=completed if status == "completed" else None,
    )


def _status(reply: Reply) -> str:
    return "completed" if reply.finish == "stop" else "incomplete"


class ResponseStream:
    """Turns the pieces of a reply into events, whose `type` is also the name of the SSE event."""

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
        self.id, self.created, self.model = id, created, model
        self.reply = Reply()
        self._output: list[Event] = []  # finished items
        self._number = 0  # of the next event
        self._tokens = ContentTokens(token_bytes)
        self._open = ""  # "rs" or "msg": the item being written, and what it holds
        self._text = ""
        self._logprobs: list[Event] = []

    def begin(self) -> Iterator[Event]:
        """Yield that the response is being written."""
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def piece(self, _index: int, piece: Piece) -> Iterator[Event]:
        """Yield the events for a piece; there is one reply."""
        before = len(self.reply.tool_calls)
        self.reply.add(piece)
        tokens = self._tokens.feed(piece) if self.request.logprobs else []
        if piece.thinking:
            yield from self._write("rs", piece.thinking)
        if piece.text:
            yield from self._write("msg", piece.text, tokens)
        for at, call in enumerate(piece.tool_calls, before):
            yield from self._close("completed")
            yield from self._call(call, call_id(self.id, 0, at))

    def end(self, completed: int | None = None) -> Iterator[Event]:
        """Yield the last events."""
        status = _status(self.reply)
        yield from self._close(status)
        if all(item["type"] == "reasoning" for item in self._output):
            yield from self._begin("msg")
            yield from self._close(status)
        response = self._response(
            status,
            usage=_usage(self.reply),
            completed=completed if status == "completed" else None,
        )
        yield self._event(f"response.{status}", response=response)

    def error(self, error: RequestError) -> Iterator[Event]:
        """Yield what says that the answer cannot be continued."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        yield self._event("error", code=code, message=str(error), param=error.param)
        failure = {"code": code, "message": str(error)}
        yield self._event("response.failed", response=self._response("failed", error=failure))

    def _response(self, status: str, **rest: Any) -> Event:
        return _response(
            self.request,
            self.id,
            self.created,
            self.model,
            status=status,
            output=self._output,
            **rest,
        )

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"type": type, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _place(self) -> Event:
        """Return where the open item's text stands."""
        part = "summary_index" if self._open == "rs" else "content_index"
        return {"item_id": self._item_id(), "output_index": len(self._output), part: 0}

    def _item_id(self, kind: str = "") -> str:
        return f"{kind or self._open}_{id_end(self.id)}_{len(self._output)}"

    def _begin(self, kind: str) -> Iterator[Event]:
        """Begin an item with an empty part."""
        yield from self._close("completed")
        self._open, self._text, self._logprobs = kind, "", []
        if kind == "rs":
            yield self._added(_reasoning_item(self._item_id(), "", "in_progress"))
            part = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", **self._place(), part=part)
        else:
            yield self._added(_message_item(self._item_id(), [], "in_progress"))
            part = _text_part("")
            yield self._event("response.content_part.added", **self._place(), part=part)

    def _write(self, kind: str, text: str, tokens: Sequence[Event] = ()) -> Iterator[Event]:
        """Write to the open item, or to a new one if that is of another kind."""
        if self._open != kind:
            yield from self._begin(kind)
        self._text += text
        self._logprobs += tokens
        if kind == "rs":
            yield self._event("response.reasoning_summary_text.delta", **self._place(), delta=text)
        else:
            yield self._event(
                "response.output_text.delta", **self._place(), delta=text, logprobs=list(tokens)
            )

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        if not self._open:
            return
        place, text = self._place(), self._text
        if self._open == "rs":
            yield self._event("response.reasoning_summary_text.done", **place, text=text)
            part = {"type": "summary_text", "text": text}
            yield self._event("response.reasoning_summary_part.done", **place, part=part)
            item = _reasoning_item(place["item_id"], text, status)
        else:
            logprobs = self._logprobs
            yield self._event("response.output_text.done", **place, text=text, logprobs=logprobs)
            part = _text_part(text, logprobs)
            yield self._event("response.content_part.done", **place, part=part)
            item = _message_item(place["item_id"], [part], status)
        self._open = ""
        yield self._done(item)

    def _call(self, call: ToolCall, identity: str) -> Iterator[Event]:
        """Yield a whole call, which is known at its end only."""
        item_id, arguments = self._item_id("fc"), call_arguments(call)
        place = {"item_id": item_id, "output_index": len(self._output)}
        yield self._added(_call_item(self.request, item_id, identity, call.name, "", "in_progress"))
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event(
            "response.function_call_arguments.done", **place, name=call.name, arguments=arguments
        )
        yield self._done(
            _call_item(self.request, item_id, identity, call.name, arguments, "completed")
        )

    def _added(self, item: Event) -> Event:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: Event) -> Event:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)
