"""What OpenAI's APIs share: errors, settings, tools, usage, log-probabilities, events, models."""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from webgemma.errors import InputError
from webgemma.replies import Piece
from webgemma.server.bodies import check_stops
from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.settings import MAX_TOP_LOGPROBS, SETTINGS
from webgemma.text import inputs
from webgemma.text.calls import ToolCall
from webgemma.values import shown, whole_number

MAX_CHOICES = 16  # replies to one prompt
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this

Event = dict[str, Any]
TokenBytes = Callable[[int], bytes]  # `Tokenizer.token_bytes`
T = TypeVar("T")

# Settings that OpenAI's APIs have too, those that clients of llama.cpp and vLLM send besides, and
# our own.
OPENAI_SETTINGS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
OTHER_SETTINGS = {
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "repetition_penalty": "repetition_penalty",
    "repeat_last_n": "recent",
    "speculate": "speculate",
    "max_drafts": "max_drafts",
}

# Accepted, and why nothing comes of them. Fields that are named nowhere here are ignored, too, as
# other servers do.
IGNORED: Mapping[str, str] = {
    "audio": "how a spoken answer would sound; answers are text",
    "best_of": "up to `n`, there is nothing to choose from",
    "cache_prompt": "prompts are always cached",
    "context_management": "the whole conversation is in the request",
    "detail": "of an image: all are read at the same resolution",
    "functions": "the old form of `tools`, with `function_call` 'none'",
    "include": "results of tools that are not here; log-probabilities are taken from it",
    "include_obfuscation": "padding against eavesdroppers",
    "max_tool_calls": "of tools that run on a server; there are none",
    "metadata": "nothing is stored; the Responses API returns it",
    "moderation": "nothing is sent to another service",
    "name": "of who wrote a message: Gemma's template has no names",
    "prediction": "it changes only the speed",
    "prompt_cache_key": "prompts are cached by what they are",
    "prompt_cache_options": "prompts are cached by what they are",
    "prompt_cache_retention": "prompts are cached by what they are",
    "safety_identifier": "there are no accounts",
    "service_tier": "there is one",
    "store": "nothing is stored",
    "summary": "of reasoning: all of it is returned",
    "user": "there are no accounts",
    "verbosity": "Gemma has no such control",
    "web_search_options": "nothing is fetched; the model answers on its own",
}

# Refused unless empty, zero or false: the reply would not be what was asked for.
REFUSED: Mapping[str, str] = {
    "guided_whitespace_pattern": "blanks between the parts of JSON are the model's choice",
    "ignore_eos": "a reply ends where the model ends it: leave it out",
    "min_tokens": "a reply ends where the model ends it: leave it out",
    "structural_tag": "only a whole reply can keep to a structure",
    "use_beam_search": "replies are sampled: leave it out",
}

TOOL_CHOICES = ("auto", "none", "required")  # or a tool's name
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_EFFORT = EFFORTS[:2]  # for which the model does not think first

SEEDS = range(-(2**63), 2**64)


# Errors

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


def error_body(error: RequestError) -> Event:
    """Return the body of an answer that says what is wrong; also an event of a stream."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": ERROR_TYPES.get(error.status, kind),
            "param": error.param,
            "code": "model_not_found" if (error.status, error.param) == (404, "model") else None,
        }
    }


def checked(read: Callable[[Any, str], T], value: Any, where: str) -> T:
    """Read a value that stands somewhere in the body; RequestError if it cannot be."""
    try:
        return read(value, where)
    except InputError as error:
        raise RequestError(str(error), param=where) from None


def flag(value: Any, where: str, default: bool = False) -> bool:
    """Return true or false; the default for nothing."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{where} is {shown(value)}; it must be true or false.", param=where)
    return value


def chosen(value: Any, where: str, options: Sequence[str]) -> str:
    """Return one of the options."""
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(f"'{option}'" for option in options)
        raise RequestError(f"{where} is {shown(value)}; it must be one of {listed}.", param=where)
    return value


def whole(value: Any, where: str, low: int, high: int) -> int:
    """Return a whole number in a range."""
    number = int(value) if isinstance(value, float) and value.is_integer() else whole_number(value)
    if number is None or not low <= number <= high:
        raise RequestError(
            f"{where} is {shown(value)}; it must be a whole number between {low} and {high}.",
            param=where,
        )
    return number


def read_body(body: Any, refused: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a body that is an object and asks for nothing that is refused."""
    if not isinstance(body, Mapping) or not all(isinstance(key, str) for key in body):
        raise RequestError(f"The body is {shown(body)}; it must be a JSON object.")
    for name, why in {**REFUSED, **refused}.items():
        if body.get(name):
            raise RequestError(f"{name} cannot be used here: {why}.", param=name)
    return body


def read_model(body: Mapping[str, Any]) -> str:
    """Return the name of the model; empty for whichever is served."""
    return checked(inputs.as_text, body.get("model"), "model")


# Settings


def read_settings(body: Mapping[str, Any], limits: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a body, whose limit of tokens is the first of `limits` it has."""
    settings: dict[str, Any] = {}
    for name, setting_name in OTHER_SETTINGS.items():
        if body.get(name) is not None:
            setting = replace(SETTINGS[setting_name], name=name)
            settings[setting_name] = _value(setting.nearest, body[name], name)
    for name in OPENAI_SETTINGS:
        if body.get(name) is not None:
            settings[name] = _value(SETTINGS[name].check, body[name], name)
    if body.get("seed") is not None:
        seed = whole(body["seed"], "seed", SEEDS.start, SEEDS.stop - 1)
        settings["seed"] = seed % 2**64
    for name in reversed(limits):
        if body.get(name) is not None:
            most = whole(body[name], name, -1, 2**63 - 1)
            settings["max_tokens"] = None if most < 0 else most  # llama.cpp's -1 is no limit
    if body.get("stop") is not None:
        settings["stop"] = read_stop(body["stop"])
    if body.get("logit_bias") is not None:
        settings["logit_bias"] = read_biases(body["logit_bias"])
    return settings


def _value(check: Callable[[Any], Any], value: Any, name: str) -> Any:
    return checked(lambda given, _: check(given), value, name)


def read_stop(given: Any) -> Sequence[str]:
    """Return the texts that end a reply."""
    return check_stops(_value(SETTINGS["stop"].check, given, "stop"), "stop")


def read_biases(given: Any) -> dict[int, float]:
    """Return the biases by token id; keys in JSON are strings, and a bias of 0 changes nothing."""
    biases: dict[int, float] = {}
    for key, bias in checked(inputs.as_mapping, given, "logit_bias").items():
        if bias == 0 and not isinstance(bias, bool):
            continue
        # Python reads more digits than ASCII's, and refuses thousands of them.
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise RequestError(
                f"logit_bias has the key {shown(key)}; its keys must be token ids.",
                param="logit_bias",
            )
        biases |= _value(SETTINGS["logit_bias"].check, {int(key): bias}, "logit_bias")
    return biases


def read_choices(body: Mapping[str, Any]) -> int:
    """Return how many replies to each prompt are wanted."""
    choices = 1 if body.get("n") is None else whole(body["n"], "n", 1, MAX_CHOICES)
    if body.get("best_of") is not None and whole(body["best_of"], "best_of", 0, 2**31) > choices:
        raise RequestError(
            f"best_of is {body['best_of']}, but every reply is returned: ask for as many with n.",
            param="best_of",
        )
    return choices


def read_top_logprobs(body: Mapping[str, Any], name: str = "top_logprobs") -> int:
    """Return how many of the likeliest tokens are wanted with each token."""
    return 0 if body.get(name) is None else whole(body[name], name, 0, MAX_TOP_LOGPROBS)


def read_include_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with the usage."""
    options = body.get("stream_options")
    if options is None:
        return False
    given = checked(inputs.as_mapping, options, "stream_options")
    return flag(given.get("include_usage"), "stream_options.include_usage")


def read_effort(given: Any, where: str) -> bool | None:
    """Return whether an effort of reasoning means thinking; None for nothing."""
    return None if given is None else chosen(given, where, EFFORTS) not in NO_EFFORT


def read_think(body: Mapping[str, Any]) -> bool | None:
    """Return whether the model is to think first: by our `think`, OpenAI's or vLLM's field."""
    think = body.get("think")
    if isinstance(think, str):
        return read_effort(think, "think")
    if think is not None:
        return flag(think, "think")
    template = body.get("chat_template_kwargs")
    if template is not None:
        where = "chat_template_kwargs"
        enabled = checked(inputs.as_mapping, template, where).get("enable_thinking")
        if enabled is not None:
            return flag(enabled, f"{where}.enable_thinking")
    return read_effort(body.get("reasoning_effort"), "reasoning_effort")


# Tools


def function_tool(function: Any, where: str) -> dict[str, Any]:
    """Return a function that the model may call, as `Gemma.chat` takes it."""
    given = checked(inputs.as_mapping, function, where)
    tool: Event = {"name": checked(inputs.as_name, given.get("name"), f"{where}.name")}
    if given.get("description") is not None:
        description = checked(inputs.as_text, given["description"], f"{where}.description")
        tool["description"] = description
    if given.get("parameters") is not None:
        tool["parameters"] = checked(inputs.as_mapping, given["parameters"], f"{where}.parameters")
    if flag(given.get("strict"), f"{where}.strict"):
        tool["strict"] = True
    return {"type": "function", "function": tool}


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools, if they are not more than any context holds."""
    checked(lambda given, _: inputs.read_tools(given), tools, "tools")
    return tools


def read_tool_choice(
    given: Any, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return "auto", "none", "required" or a tool's name, and the tools that may be called."""
    if given is None:
        return "auto", tools
    if not isinstance(given, Mapping):
        choice = chosen(given, "tool_choice", TOOL_CHOICES)
        if choice == "required" and not tools:
            raise RequestError("tool_choice is 'required', but there are no tools.", param="tools")
        return choice, tools
    kind = chosen(given.get("type"), "tool_choice.type", ("function", "allowed_tools"))
    where = "tool_choice"
    if kind in given:  # Chat Completions has one more level than Responses
        where, given = f"tool_choice.{kind}", given[kind]
    if kind == "function":
        name = _tool_name(given, where, tools)
        if name in TOOL_CHOICES:
            raise RequestError(f"{where}.name is {name!r}: rename the tool.", param=f"{where}.name")
        return name, tools
    allowed = checked(inputs.as_mapping, given, where)
    mode = chosen(allowed.get("mode", "auto"), f"{where}.mode", ("auto", "required"))
    named = checked(inputs.as_list, allowed.get("tools"), f"{where}.tools")
    names = set()
    for at, tool in enumerate(named):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        names.add(_tool_name(inner, f"{where}.tools[{at}]", tools))
    kept = [tool for tool in tools if tool["function"]["name"] in names]
    if not kept:
        raise RequestError(f"{where}.tools is empty: name the tools.", param=f"{where}.tools")
    return mode, kept


def _tool_name(given: Any, where: str, tools: Sequence[Mapping[str, Any]]) -> str:
    mapping = checked(inputs.as_mapping, given, where)
    name = checked(inputs.as_name, mapping.get("name"), f"{where}.name")
    if name not in {tool["function"]["name"] for tool in tools}:
        raise RequestError(
            f"{where}.name is {shown(name)}, but no tool has that name.", param=f"{where}.name"
        )
    return name


def call_id(answer_id: str, choice: int, call: int) -> str:
    """Return the id of a tool call, which no other call of any answer has."""
    return f"call_{id_end(answer_id)}_{choice}_{call}"


def id_end(answer_id: str) -> str:
    """Return an answer's id without what it begins with, such as "chatcmpl-" or "resp_"."""
    return answer_id.replace("-", "_").partition("_")[2] or answer_id


def call_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as OpenAI's APIs give them: JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


# Usage


def prompt_tokens(replies: Sequence[Reply], choices: int) -> int:
    """Return the tokens of all prompts: several replies to one prompt read it once."""
    return sum(reply.usage.prompt for reply in replies[::choices] if reply.usage)


def reply_tokens(replies: Sequence[Reply]) -> int:
    """Return the tokens of all replies."""
    return sum(reply.usage.reply for reply in replies if reply.usage)


def cached_tokens(replies: Sequence[Reply], choices: int) -> int:
    """Return the tokens of all prompts that had been read before the first replies to them."""
    return sum(reply.usage.cached for reply in replies[::choices] if reply.usage)


def usage(request: Request, replies: Sequence[Reply]) -> Event:
    """Return the usage of a completion."""
    read, written = prompt_tokens(replies, request.choices), reply_tokens(replies)
    thought = sum(reply.thinking_tokens for reply in replies)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(replies, request.choices)},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


# Log-probabilities


class ContentTokens:
    """Finds the tokens that a reply's text consists of, as pieces come.

    A piece's text may have been held back until its token; thoughts, tool calls and special tokens
    are no part of the text."""

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        self._token_bytes = token_bytes or (lambda _: b"")
        self._held: list[Piece] = []

    def feed(self, piece: Piece) -> list[Event]:
        """Return the tokens of this piece's text as OpenAI's APIs write them."""
        if piece.token >= 0:
            self._held.append(piece)
        taken: list[Piece] = []
        if piece.text:
            taken, self._held = self._held, []
        elif piece.thinking or piece.tool_calls:
            self._held = []
        return [self._entry(each) for each in taken if self._token_bytes(each.token)]

    def _entry(self, piece: Piece) -> Event:
        tops = [
            _token(self._token_bytes(top.token) or top.text.encode("utf-8", "replace"), top.logprob)
            for top in piece.top
        ]
        token = _token(self._token_bytes(piece.token), piece.logprob)
        return token | {"top_logprobs": tops}


def _token(data: bytes, logprob: float) -> Event:
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }


def content_tokens(reply: Reply, token_bytes: TokenBytes | None) -> list[Event]:
    """Return the tokens of a whole reply's text."""
    tokens = ContentTokens(token_bytes)
    return [entry for piece in reply.tokens for entry in tokens.feed(piece)]


class TextOffsets:
    """Writes tokens as the older API does: lists beside each other, with places in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def columns(self, entries: Sequence[Event]) -> Event:
        """Return the next tokens."""
        places = []
        for entry in entries:
            places.append(self._place)
            self._place += len(self._decoder.decode(bytes(entry["bytes"])))
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in [*entry["top_logprobs"], entry]}
                for entry in entries
            ],
            "text_offset": places,
        }


# Events and models

DONE = b"data: [DONE]\n\n"  # the end of a stream of completions
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # to Python's `splitlines`


def sse(event: Event, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    data = json.dumps(event, ensure_ascii=False).translate(_LINE_ENDS)
    # A name or a tool may hold half a surrogate pair.
    return f"{head}data: {data}\n\n".encode("utf-8", "replace")


def model_entry(name: str, created: int) -> Event:
    """Return what `/v1/models/NAME` answers."""
    return {"id": name, "object": "model", "created": created, "owned_by": "webgemma"}


def model_list(models: Sequence[Event]) -> Event:
    """Return what `/v1/models` answers."""
    return {"object": "list", "data": list(models)}
