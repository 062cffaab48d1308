"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`, as bodies, answers and events.

An event of a stream is its name and its data, as in server-sent events."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from webgemma.replies import Piece, Usage
from webgemma.server.bodies import Body, check_conversation, decode_media, json_text, text_length
from webgemma.server.protocol import Reply, Request, RequestError, Structure
from webgemma.text.parser import ToolCall

Event = tuple[str, dict[str, Any]]

# Fields that are accepted and change nothing, with why. Unknown fields are ignored, too: clients
# send those of betas.
IGNORED = {
    "metadata, user_profile_id, workspace_id": "requests are not distinguished by user",
    "service_tier, speed, inference_geo": "there is one machine",
    "cache_control": "what the model has read is always reused",
    "context_management": "a conversation that does not fit loses its oldest turns",
    "diagnostics": "there is nothing to report",
    "thinking.budget_tokens, output_config.effort": "Gemma has no levels of thinking",
    "signature of a thinking block": "thoughts are not signed",
    "citations": "Gemma does not cite",
    "tools[].eager_input_streaming, input_examples, defer_loading": "calls come as a whole",
}

MAX_COUNTED = 2_000_000  # characters

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


# Requests


def parse(given: object) -> Request:
    """Return what a body of `/v1/messages` asks for."""
    body = Body(given)
    _refuse(body)
    settings: dict[str, Any] = {"max_tokens": body.whole("max_tokens", 0)}
    if settings["max_tokens"] is None:
        raise body.wrong("max_tokens", "a whole number of at least 0")
    for name in ("temperature", "top_k", "top_p"):
        if body.has(name):
            settings[name] = body.setting(name, name)
    if body.has("stop_sequences"):
        body.items("stop_sequences")
        settings["stop"] = body.setting("stop_sequences", "stop")
    request, structure = _request(body, settings), _structure(body)
    if request.continue_last and structure:
        raise RequestError(
            f"{structure.where} asks for JSON, which cannot continue the assistant's last message: "
            "leave that out.",
            param=structure.where,
        )
    return replace(request, structure=structure)


def parse_count(given: object) -> Request:
    """Return what a body of `/v1/messages/count_tokens` asks to count.

    Nothing is refused that only a reply would have to honour."""
    request = _request(Body(given), {})
    if text_length(request.messages) > MAX_COUNTED:  # unlike a reply's, it has no context to fit
        raise RequestError(
            f"The text has more than {MAX_COUNTED} characters, more than any context holds.", 413
        )
    return request


def _request(body: Body, settings: Mapping[str, Any]) -> Request:
    tools = [_tool(tool) for tool in body.objects("tools")]
    messages = _messages(body)
    check_conversation(messages, tools)
    think, shows_thinking = _thinking(body.object("thinking"))
    choice = body.object("tool_choice")
    last = messages[-1]
    return Request(
        model=body.name("model"),
        settings=settings,
        messages=messages,
        stream=body.flag("stream"),
        tools=tools,
        tool_places={
            tool["function"]["name"]: f"tools[{at}].input_schema" for at, tool in enumerate(tools)
        },
        tool_choice=_tool_choice(choice, tools),
        parallel=not choice.flag("disable_parallel_tool_use"),
        think=think,
        continue_last=last["role"] == "assistant" and "tool_calls" not in last,
        own={"shows_thinking": shows_thinking},
    )


def _refuse(body: Body) -> None:
    """Raise RequestError for what cannot be honoured."""
    if body.has("container"):
        raise body.refused("container", "this server runs no code.")
    if body.items("mcp_servers"):
        raise body.refused("mcp_servers", "this server connects to no others; send tools.")


def _structure(body: Body) -> Structure | None:
    """Return what the reply has to be, by the present field or the older one."""
    found = None
    for place, name in ((body, "output_format"), (body.object("output_config"), "format")):
        if not place.has(name):
            continue
        format = place.object(name)
        format.choice("type", ("json_schema",))
        if not format.has("schema"):
            raise format.wrong("schema", "a JSON schema")
        found = Structure("schema", format.object("schema").given, format.path("schema"))
    return found


def _thinking(thinking: Body) -> tuple[bool, bool]:
    """Return whether the model thinks, and whether the client gets that. Off unless requested."""
    if not thinking.given:
        return False, False
    kind = thinking.choice("type", ("enabled", "adaptive", "disabled"))
    thinking.whole("budget_tokens", 0)
    hidden = thinking.has("display") and (
        thinking.choice("display", ("summarized", "omitted")) == "omitted"
    )
    return kind != "disabled", kind != "disabled" and not hidden


def _tool(tool: Body) -> dict[str, Any]:
    """Return a tool as `Gemma.chat` takes it."""
    if tool.text("type", "custom") != "custom":
        raise tool.wrong("type", "custom: only tools that the client runs are supported")
    function: dict[str, Any] = {"name": tool.name("name")}
    if description := tool.text("description"):
        function["description"] = description
    if not tool.has("input_schema"):
        raise tool.wrong("input_schema", "a JSON schema")
    function["parameters"] = tool.object("input_schema").given
    if tool.flag("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(choice: Body, tools: Sequence[Mapping[str, Any]]) -> str:
    if not choice.given:
        return "auto"
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind in ("any", "tool") and not tools:
        raise choice.wrong("type", "auto or none: there are no tools")
    if kind != "tool":
        return "required" if kind == "any" else kind
    name = choice.name("name")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise choice.wrong("name", f"the name of a tool: {', '.join(names)}")
    if name in ("auto", "none", "required"):
        raise choice.refused("name", "rename the tool.")
    return name


def _messages(body: Body) -> list[dict[str, Any]]:
    """Return the conversation as `Gemma.chat` takes it, results of tools as messages of their own.

    A result must answer a call of the message before it: others would not reach the model."""
    messages: list[dict[str, Any]] = []
    if system := _system(body):
        messages.append({"role": "system", "content": system})
    called: set[str] = set()  # ids of the calls that can be answered now
    for message in body.objects("messages"):
        role = message.choice("role", ("user", "assistant", "system"))
        if role == "assistant":
            messages.append(_assistant(message))
            called = {call["id"] for call in messages[-1].get("tool_calls", ())}
            continue
        if role == "system":
            texts = [_text_block(block) for block in _blocks(message)]
            messages.append({"role": role, "content": "\n".join(texts)})
            called = set()
            continue
        results, parts = [], []
        for block in _blocks(message):
            kind = block.choice("type", ("text", "image", "document", "tool_result"))
            if kind == "tool_result":
                results.append(_tool_result(block, called))
            else:
                parts.append(_part(block, kind))
        messages += results
        if parts or not results:
            messages.append({"role": role, "content": parts})
            called = set()
    if not body.items("messages"):
        raise body.wrong("messages", "a list of at least one message")
    return messages


def _system(body: Body) -> str:
    given = body.given.get("system")
    if isinstance(given, list | tuple):
        return "\n".join(_text_block(block) for block in body.objects("system"))
    return body.text("system")


def _blocks(message: Body, name: str = "content") -> Iterator[Body]:
    """Yield the blocks of a content; a string is one of text."""
    given = message.given.get(name)
    if isinstance(given, str):
        yield Body({"type": "text", "text": given}, message.path(name))
    elif isinstance(given, list | tuple):
        yield from message.objects(name)
    else:
        raise message.wrong(name, "a string or a list of blocks")


def _text_block(block: Body) -> str:
    block.choice("type", ("text",))
    if not block.has("text"):
        raise block.wrong("text", "a string")
    return block.text("text")


def _part(block: Body, kind: str) -> dict[str, Any]:
    """Return a user's text, image or document as a part of a content."""
    if kind == "text":
        return {"type": "text", "text": _text_block(block)}
    source = block.object("source")
    if kind == "image":
        return {"type": "image", "image": _image(source)}
    if source.given.get("type") != "text":
        raise source.wrong("type", "text: documents are taken as plain text only")
    return {"type": "text", "text": source.text("data")}


def _image(source: Body) -> bytes:
    if source.given.get("type") != "base64":
        raise source.wrong("type", "base64: images are taken as data only, nothing is fetched")
    return decode_media(source.given.get("data"), source.path("data"))


def _tool_result(block: Body, called: set[str]) -> dict[str, Any]:
    """Return the result of a tool as a message; that of one that failed says so."""
    call_id = block.name("tool_use_id")
    if call_id not in called:
        raise block.wrong("tool_use_id", "the id of a tool_use block in the message before")
    text, images = "", []
    for part in _blocks(block) if block.has("content") else ():
        if part.choice("type", ("text", "image")) == "text":
            text += _text_block(part)
        else:
            images.append(_image(part.object("source")))
    content = {"error": text} if block.flag("is_error") else text
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return message | ({"images": images} if images else {})


def _assistant(message: Body) -> dict[str, Any]:
    text, thinking, calls = "", "", []
    for block in _blocks(message):
        kind = block.choice("type", ("text", "thinking", "redacted_thinking", "tool_use"))
        if kind == "text":
            text += _text_block(block)
        elif kind == "thinking":
            thinking += block.text("thinking")
        elif kind == "tool_use":
            function = {"name": block.name("name"), "arguments": block.object("input").given}
            calls.append({"id": block.name("id"), "function": function})
    result: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        result["thinking"] = thinking
    if calls:
        result["tool_calls"] = calls
    return result


# Answers


def answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    id: str,
    call_ids: Callable[[], str],
) -> dict[str, Any]:
    """Return the whole answer of `/v1/messages`; `call_ids` gives the id of each tool call."""
    reply = replies[0]
    content: list[dict[str, Any]] = []
    if reply.thinking and request.own["shows_thinking"]:
        content.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    content += [_tool_use(call, call_ids(), call.arguments) for call in reply.tool_calls]
    usage = _usage(reply.usage)
    end = _end(request, reply)
    return _message(request, id, content) | end | {"usage": usage}


def count_answer(tokens: int) -> dict[str, Any]:
    """Return the answer of `/v1/messages/count_tokens`."""
    return {"input_tokens": tokens}


def model_entry(name: str, created: str) -> dict[str, Any]:
    """Return what `/v1/models/NAME` answers; `created` as RFC 3339 has it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
    }


def model_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `/v1/models` answers: all on one page."""
    ids = [model["id"] for model in models] or [None]
    return {"data": list(models), "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def error(given: RequestError) -> dict[str, Any]:
    """Return an error as a body, or as the data of an event."""
    kind = ERROR_TYPES.get(given.status, "api_error")
    if 400 <= given.status < 500 and given.status not in ERROR_TYPES:
        kind = "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": str(given)}}


def frame(event: Event) -> bytes:
    """Return an event as it is sent."""
    name, data = event
    return f"event: {name}\ndata: {json_text(data)}\n\n".encode()


class Stream:
    """Turns the pieces of one reply into events; `call_ids` gives the id of each tool call."""

    def __init__(self, request: Request, *, id: str, call_ids: Callable[[], str]) -> None:
        self.request = request
        self.id = id
        self.reply = Reply()
        self._call_ids = call_ids
        self._blocks = 0  # begun so far
        self._open = ""  # the type of the block that is being written

    def begin(self, usage: Usage | None = None) -> list[Event]:
        """Return the first events, with the prompt's tokens, if they are counted by now."""
        message = _message(self.request, self.id, [])
        message |= {"stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(usage and replace(usage, reply=0))
        return [_event("message_start", message=message), self.ping()]

    def piece(self, index: int, piece: Piece) -> list[Event]:
        """Return the events of a piece, which may begin and end blocks."""
        if index:
            raise ValueError("Anthropic's API has one reply.")
        self.reply.add(piece)
        events: list[Event] = []
        if piece.thinking and self.request.own["shows_thinking"]:
            events += self._write("thinking", piece.thinking, {"signature": ""})
        if piece.text:
            events += self._write("text", piece.text, {})
        for call in piece.tool_calls:
            events += self._call(call)
        return events

    def end(self) -> list[Event]:
        """Return the last events: why the reply ended, and the usage."""
        delta = _end(self.request, self.reply)
        usage = _usage(self.reply.usage)
        return [
            *self._close(),
            _event("message_delta", delta=delta, usage=usage),
            _event("message_stop"),
        ]

    def ping(self) -> Event:
        """Return the event that only keeps a connection open."""
        return _event("ping")

    def error(self, given: RequestError) -> Event:
        """Return the event that ends a stream with an error."""
        return "error", error(given)

    def _write(self, kind: str, text: str, more: Mapping[str, Any]) -> list[Event]:
        begin = [] if self._open == kind else self._begin(kind, {kind: "", **more})
        return [*begin, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall) -> list[Event]:
        block = _tool_use(call, self._call_ids(), {})
        del block["type"]
        begin = self._begin("tool_use", block)
        written = json_text(call.arguments)
        delta = self._delta({"type": "input_json_delta", "partial_json": written})
        return [*begin, delta, *self._close()]

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> list[Event]:
        closed = self._close()
        self._open = kind
        self._blocks += 1
        block = {"type": kind, **fields}
        return [*closed, _event("content_block_start", index=self._blocks - 1, content_block=block)]

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._blocks - 1)]


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def _message(request: Request, id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
    }


def _tool_use(call: ToolCall, id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": call.name, "input": arguments}


def _end(request: Request, reply: Reply) -> dict[str, Any]:
    """Return why a reply ended; one without a single token had no room."""
    reason = "end_turn"
    if reply.finish != "stop":
        written = reply.usage.reply if reply.usage else 0
        reason = "max_tokens"
        if reply.finish and written < request.settings["max_tokens"]:
            reason = "model_context_window_exceeded"
    elif reply.tool_calls:
        reason = "tool_use"
    elif reply.stop:
        reason = "stop_sequence"
    ended_by = reply.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": ended_by}


def _usage(usage: Usage | None) -> dict[str, Any]:
    """Return the counts; to Anthropic, input tokens are those that were not cached."""
    prompt, reply, cached = (usage.prompt, usage.reply, usage.cached) if usage else (0, 0, 0)
    return {
        "input_tokens": max(0, prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": reply,
    }
