"""Ollama's API for text: `/api/chat` and `/api/generate`, as bodies, answers and streamed lines.

A stream is lines of JSON; both routes stream unless `stream` is false. `template` cannot be
honoured and is refused; levels of `think` all mean that the model thinks."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from webgemma.constraints.specifications import ANY_OBJECT
from webgemma.models import OLLAMA_NAMES
from webgemma.replies import Piece, Usage
from webgemma.server.bodies import Body, check_conversation, finite_logprob, json_text
from webgemma.server.protocol import Reply, Request, RequestError, Structure
from webgemma.settings import MAX_TOP_LOGPROBS
from webgemma.text.parser import ToolCall
from webgemma.values import real_number

ROLES = ("system", "user", "assistant", "tool")
THINK_LEVELS = ("low", "medium", "high", "max")
FOREVER = math.inf  # a model that stays loaded

# Fields that are accepted and change nothing, with why. Other unknown fields and options are
# ignored, too, as Ollama does.
IGNORED = {
    "shift": "when the context is full, a reply ends",
    "runner": "there is one",
    "width, height, steps": "no model here draws images",
    "options.num_keep": "system messages are always kept",
    "options.num_batch, num_gpu, main_gpu, num_thread, numa, use_mmap, use_mlock, low_vram": (
        "how a model is computed is chosen when the server starts"
    ),
    "options.mirostat, mirostat_tau, mirostat_eta, tfs_z, penalize_newline": (
        "Ollama has them no longer"
    ),
}

# The options that are settings, by Ollama's names; those of drafts are our own.
OPTIONS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "seed", "stop")},
    **{name: name for name in ("speculate", "max_drafts")},
    **OLLAMA_NAMES,
}

TokenBytes = Callable[[int], bytes]  # the text of a token, or a part of a character; b"" if special


@dataclass(frozen=True, slots=True)
class Durations:
    """How long an answer took, in nanoseconds."""

    total: int
    load: int = 0  # of the model
    prompt: int = 0  # reading it
    reply: int = 0  # writing it


# Requests


def parse_chat(given: object) -> Request:
    """Return what a body of `/api/chat` asks for."""
    body = Body(given)
    common = _common(body)
    messages = [_message(message) for message in body.objects("messages")]
    _name_results(messages)
    tools = [dict(tool.given) for tool in body.objects("tools")]
    check_conversation(messages, tools)
    last = messages[-1] if messages else {}
    return Request(
        **_with_own(common, body, is_empty=not messages),
        messages=messages,
        tools=tools,
        continue_last=last.get("role") == "assistant" and "tool_calls" not in last,
    )


def parse_generate(given: object) -> Request:
    """Return what a body of `/api/generate` asks for."""
    body = Body(given)
    common = _common(body)
    prompt, system = body.text("prompt"), body.text("system")
    images, context = body.media("images"), _context(body)
    if body.text("suffix"):
        raise body.refused("suffix", "Gemma cannot fill in the middle of a text; send a prompt.")
    if body.text("template"):
        raise body.refused("template", "Gemma has its own; send raw: true for a finished prompt.")
    common = _with_own(common, body, is_empty=not prompt, context=context)
    if body.flag("raw"):
        if system or images or context:
            raise RequestError(
                "raw is true: the prompt is read as it is, so that system, images and context "
                "have no place; leave them out.",
                param="raw",
            )
        return Request(**common, prompts=[prompt] if prompt else [], special=True)
    message = {"role": "user", "content": prompt} | ({"images": images} if images else {})
    opening = [{"role": "system", "content": system}] if system else []
    return Request(**common, messages=[*opening, message] if prompt else [])


def parse_name(given: object) -> str:
    """Return the model's name in a body, by its present or its old key."""
    body = Body(given)
    return body.name("model" if body.has("model") or not body.has("name") else "name")


def _common(body: Body) -> dict[str, Any]:
    """Return the arguments of a Request that both routes have."""
    logprobs = body.flag("logprobs")
    top = body.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    settings = _settings(body.object("options"))
    if logprobs and top:
        settings["top_logprobs"] = top
    return {
        "model": parse_name(body.given),
        "settings": settings,
        "stream": body.flag("stream", True),
        "structure": _structure(body),
        "think": _think(body),
        "logprobs": logprobs,
        "overflow": "drop" if body.flag("truncate", True) else "error",
    }


def _structure(body: Body) -> Structure | None:
    """Return what the reply has to be: "json" is any object."""
    given = body.given.get("format")
    if given is None or given == "":
        return None
    if given != "json" and not isinstance(given, Mapping):
        raise body.wrong("format", '"json" or a JSON schema')
    return Structure("schema", ANY_OBJECT if given == "json" else given, "format")


def _with_own(
    common: dict[str, Any], body: Body, *, is_empty: bool, context: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the arguments with what only Ollama's answers need.

    `keep_alive`: seconds that the model stays loaded, FOREVER, or None (as the server has it);
    `task`: "reply", or for an empty prompt "load" or "unload"; `context`: the ids that an earlier
    answer gave, which come before the messages; `num_ctx`: positions, or None."""
    seconds = keep_alive(body)
    task = "reply" if not is_empty else "unload" if seconds == 0 else "load"
    num_ctx = _positions(body.object("options"))
    own = {"keep_alive": seconds, "task": task, "context": context, "num_ctx": num_ctx}
    return common | {"own": own}


def _settings(options: Body) -> dict[str, Any]:
    """Return the settings that options mean; numbers out of range are moved, as Ollama does."""
    settings: dict[str, Any] = {}
    for name, setting in OPTIONS.items():
        if not options.has(name):
            continue
        number = real_number(options.given[name])
        if setting in ("seed", "max_tokens") and number is not None and number < 0:
            settings[setting] = None  # any seed; no limit (-1), or as the context holds (-2)
        else:
            settings[setting] = options.setting(name, setting, nearest=True)
    return settings


def _positions(options: Body) -> int | None:
    if not options.has("num_ctx"):
        return None
    number = real_number(options.given["num_ctx"])  # Ollama reads 4096.0, too
    if number is None:
        raise options.wrong("num_ctx", "a whole number")
    return int(number) if number >= 1 else None


def _think(body: Body) -> bool | None:
    value = body.given.get("think")
    if value is None or isinstance(value, bool):
        return value
    if value not in THINK_LEVELS:
        raise body.wrong("think", f"true, false, or one of {', '.join(THINK_LEVELS)}")
    return True


_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_SPAN = re.compile(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{0,18})?", re.ASCII)


def keep_alive(body: Body) -> float | None:
    """Return seconds: of a number, or of a text such as "5m", "1h30m" or "-1" (for ever)."""
    value = body.given.get("keep_alive")
    if value is None:
        return None
    seconds = _duration(value) if isinstance(value, str) else real_number(value)
    if seconds is None:
        raise body.wrong("keep_alive", 'a number of seconds or a text such as "5m"')
    return FOREVER if seconds < 0 else seconds


def _duration(text: str) -> float | None:
    sign = -1.0 if text.startswith("-") else 1.0
    rest = text[1:] if text.startswith(("-", "+")) else text
    if _NUMBER.fullmatch(rest):
        return sign * float(rest)
    seconds, at = 0.0, 0
    while span := _SPAN.match(rest, at):
        seconds, at = seconds + float(span[1]) * _SECONDS[span[2]], span.end()
    return sign * seconds if rest and at == len(rest) else None


def _context(body: Body) -> list[int]:
    ids = body.items("context")
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise body.wrong("context", "the list of token ids of an earlier answer")
    return list(ids)


def _message(message: Body) -> dict[str, Any]:
    """Return a message as `Gemma.chat` takes it, its images as bytes."""
    role = message.choice("role", ROLES)
    result: dict[str, Any] = {"role": role, "content": message.text("content")}
    if images := message.media("images"):
        result["images"] = images
    if role == "assistant":
        if thinking := message.text("thinking"):
            result["thinking"] = thinking
        if calls := [_call(call) for call in message.objects("tool_calls")]:
            result["tool_calls"] = calls
    if role == "tool":
        result["tool_name"] = message.text("tool_name") or message.text("name")
        result["tool_call_id"] = message.text("tool_call_id")
    return result


def _name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Name the tools of results that have neither a name nor a known id: they follow the calls.

    LiteLLM sends the id with a result but not with its call."""
    calls: list[Mapping[str, Any]] = []  # that wait for their results
    for message in messages:
        if message["role"] != "tool":
            calls = list(message.get("tool_calls", ()))
            continue
        name, identity = message["tool_name"], message["tool_call_id"]
        own = [call for call in calls if identity and call["id"] == identity]
        own = own or [call for call in calls if name in ("", call["function"]["name"])]
        if own:
            calls.remove(own[0])
            message["tool_name"] = name or own[0]["function"]["name"]


def _call(call: Body) -> dict[str, Any]:
    function = call.object("function")
    arguments = function.given.get("arguments")
    if not isinstance(arguments, str):  # an object; some clients send its text
        arguments = function.object("arguments").given
    written = {"name": function.name("name"), "arguments": arguments}
    return {"id": call.text("id"), "function": written}


# Answers


def chat_answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    created: float,
    durations: Durations,
    call_ids: Callable[[], str] | None = None,
    token_bytes: TokenBytes | None = None,
) -> dict[str, Any]:
    """Return the whole answer of `/api/chat`; `created` is in seconds since 1970."""
    reply = replies[0]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.thinking:
        message["thinking"] = reply.thinking
    if reply.tool_calls:
        message["tool_calls"] = _tool_calls(reply.tool_calls, call_ids)
    answer = _head(request, created) | {"message": message}
    return answer | _logprobs(request, reply.tokens, token_bytes) | _last(reply, durations)


def generate_answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    created: float,
    durations: Durations,
    context: Sequence[int] = (),
    token_bytes: TokenBytes | None = None,
) -> dict[str, Any]:
    """Return the whole answer of `/api/generate`; `context` holds the ids of prompt and reply."""
    reply = replies[0]
    answer = _head(request, created) | {"response": reply.text}
    if reply.thinking:
        answer["thinking"] = reply.thinking
    answer |= _logprobs(request, reply.tokens, token_bytes) | _last(reply, durations)
    return answer | _context_out(request, context)


def loaded(request: Request, *, created: float, chat: bool) -> dict[str, Any]:
    """Return the answer to an empty prompt: that the model was loaded or unloaded."""
    empty: dict[str, Any] = {"response": ""}
    if chat:
        empty = {"message": {"role": "assistant", "content": ""}}
    done = {"done": True, "done_reason": request.own["task"]}
    return _head(request, created) | empty | done


def error(given: RequestError) -> dict[str, Any]:
    """Return an error as a body, or as a line of a stream that has begun."""
    return {"error": str(given)}


def line(event: Mapping[str, Any]) -> bytes:
    """Return a line of a stream."""
    return json_text(event).encode() + b"\n"


class Stream:
    """Turns the pieces of one reply into lines; `route` is the API's "chat" or "generate".

    `call_ids` gives the id of each tool call."""

    def __init__(
        self,
        request: Request,
        route: Literal["chat", "generate"],
        *,
        created: float,
        call_ids: Callable[[], str] | None = None,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self.request = request
        self.route = route
        self.reply = Reply()
        self._head = _head(request, created)
        self._call_ids = call_ids
        self._token_bytes = token_bytes

    def begin(self) -> list[dict[str, Any]]:
        """Return the lines before the first piece: none."""
        return []

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Return a line if the piece has something to say."""
        if index:
            raise ValueError("Ollama's API has one reply.")
        first_call = len(self.reply.tool_calls)
        self.reply.add(piece)
        logprobs = _logprobs(self.request, [piece] if piece.token >= 0 else [], self._token_bytes)
        if not (piece.text or piece.thinking or piece.tool_calls or logprobs):
            return []
        parts: dict[str, Any] = {"thinking": piece.thinking} if piece.thinking else {}
        if self.route == "generate":
            written: dict[str, Any] = {"response": piece.text, **parts}
        else:
            message = {"role": "assistant", "content": piece.text, **parts}
            if piece.tool_calls:
                calls = _tool_calls(piece.tool_calls, self._call_ids, first_call)
                message["tool_calls"] = calls
            written = {"message": message}
        return [self._head | written | {"done": False} | logprobs]

    def end(self, durations: Durations, context: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the last line, with counts and durations."""
        last = _last(self.reply, durations)
        if self.route == "generate":
            return [self._head | {"response": ""} | last | _context_out(self.request, context)]
        return [self._head | {"message": {"role": "assistant", "content": ""}} | last]

    def error(self, given: RequestError) -> dict[str, Any]:
        """Return the line that ends a stream with an error."""
        return error(given)


def timestamp(seconds: float) -> str:
    """Return a time as Ollama writes it; FOREVER is the last one there is."""
    if seconds == FOREVER:
        return "9999-12-31T23:59:59Z"
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _head(request: Request, created: float) -> dict[str, Any]:
    return {"model": request.model, "created_at": timestamp(created)}


def _last(reply: Reply, durations: Durations) -> dict[str, Any]:
    usage = reply.usage or Usage(0, 0, 0)
    return {
        "done": True,
        "done_reason": reply.finish or "length",  # there was no room for a single token
        "total_duration": durations.total,
        "load_duration": durations.load,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": durations.prompt,
        "eval_count": usage.reply,
        "eval_duration": durations.reply,
    }


def _context_out(request: Request, context: Sequence[int]) -> dict[str, Any]:
    return {} if request.special else {"context": list(context)}  # Ollama has none for raw


def _tool_calls(
    calls: Sequence[ToolCall], call_ids: Callable[[], str] | None, first: int = 0
) -> list[dict[str, Any]]:
    written = []
    for index, call in enumerate(calls, first):
        function = {"index": index, "name": call.name, "arguments": call.arguments}
        written.append(({"id": call_ids()} if call_ids else {}) | {"function": function})
    return written


def _logprobs(
    request: Request, pieces: Sequence[Piece], token_bytes: TokenBytes | None
) -> dict[str, Any]:
    """Return the tokens of a text, special ones left out."""
    if not request.logprobs:
        return {}
    wants_top = bool(request.settings.get("top_logprobs"))
    entries = []
    for piece in pieces:
        data = _bytes(piece.token, piece.text, token_bytes)
        if not data:
            continue
        entry = _token(data, piece.logprob)
        if wants_top:
            tops = [(_bytes(top.token, "", token_bytes), top) for top in piece.top]
            entry["top_logprobs"] = [
                _token(known or top.text.encode("utf-8", "replace"), top.logprob)
                for known, top in tops
            ]
        entries.append(entry)
    return {"logprobs": entries} if entries else {}


def _bytes(token: int, text: str, token_bytes: TokenBytes | None) -> bytes:
    """Return a token's own text; without `token_bytes`, what became certain with it."""
    return token_bytes(token) if token_bytes else text.encode("utf-8", "replace")


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": finite_logprob(logprob), "bytes": list(data)}
