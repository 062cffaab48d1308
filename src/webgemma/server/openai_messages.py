"""Messages of OpenAI's APIs, written anew as `Gemma.chat` takes them.

Only known fields are copied: `Gemma.chat` also reads files by their paths, which no client of a
server may name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from webgemma.server.openai_common import checked, chosen
from webgemma.server.protocol import RequestError
from webgemma.text import inputs
from webgemma.values import shown

Message = dict[str, Any]

ROLES = {  # of OpenAI's messages, and what they are to Gemma
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
WITH_MEDIA = ("user", "tool")
TEXTS = {  # types of content parts that are text, and the field that holds it
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
URLS = {  # types of content parts that are media at a URL, and the field that holds it
    "image_url": "image_url",
    "input_image": "image_url",
    "audio_url": "audio_url",
    "video_url": "video_url",
}
PARTS = (*TEXTS, *URLS, "input_audio")
FILES = ("file", "input_file")
REASONING = ("reasoning", "reasoning_content", "thinking")


def read_messages(given: Any) -> list[Message]:
    """Return the messages of a chat."""
    listed = checked(inputs.as_list, given, "messages")
    if not listed:
        raise RequestError(
            "messages is missing or empty: there is nothing to reply to.", param="messages"
        )
    return check_messages([_message(each, f"messages[{at}]") for at, each in enumerate(listed)])


def check_messages(messages: list[Message], param: str = "messages") -> list[Message]:
    """Return the messages, if each tool's result follows its call and no context is too short."""
    calls: set[str] | None = None  # ids of the assistant's last ones, which may be answered now
    for at, message in enumerate(messages):
        where = f"{param}[{at}]" if param == "messages" else param  # several items may be one
        if message["role"] == "assistant":
            made = message.get("tool_calls", ())
            calls = {call["id"] for call in made} if made else None
        elif message["role"] != "tool":
            calls = None
        elif calls is None:
            raise RequestError(
                f"{where} holds a tool's result, but no call of a tool comes before it.",
                param=where,
            )
        elif "name" not in message and message["tool_call_id"] not in calls:
            raise RequestError(
                f"{where} holds the result of the call {shown(message['tool_call_id'])}, which is "
                "none of those before it.",
                param=where,
            )
    checked(lambda value, _: inputs.read_messages(value), messages, param)
    return messages


def _message(given: Any, where: str) -> Message:
    message = checked(inputs.as_mapping, given, where)
    role = ROLES[chosen(message.get("role"), f"{where}.role", tuple(ROLES))]
    name = checked(inputs.as_text, message.get("name"), f"{where}.name")
    content = message.get("content")
    if content is None and role in ("system", "user"):
        raise RequestError(
            f"{where}.content is missing: it must be a string or a list of parts.",
            param=f"{where}.content",
        )
    result: Message = {"role": role, "content": read_content(content, f"{where}.content", role)}
    if role == "tool":
        identity = checked(inputs.as_text, message.get("tool_call_id"), f"{where}.tool_call_id")
        if not (identity or name):
            raise RequestError(
                f"{where}.tool_call_id is missing: it must be the id of the call whose result "
                "this is.",
                param=f"{where}.tool_call_id",
            )
        result |= {"tool_call_id": identity} if identity else {"name": name}
    elif role == "assistant":
        result |= _assistant_fields(message, where)
    return result


def _assistant_fields(message: Mapping[str, Any], where: str) -> Message:
    """Return what only an assistant's message has: reasoning and calls."""
    fields: Message = {}
    if message.get("audio") is not None:
        raise RequestError(
            f"{where}.audio names a spoken reply, but there are none: send its text as content.",
            param=f"{where}.audio",
        )
    thoughts = [checked(inputs.as_text, message.get(at), f"{where}.{at}") for at in REASONING]
    if any(thoughts):
        fields["reasoning"] = next(filter(None, thoughts))
    listed = checked(inputs.as_list, message.get("tool_calls"), f"{where}.tool_calls")
    calls = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(listed)]
    if message.get("function_call") is not None:  # the old form of a single call
        calls.append(read_call(message["function_call"], "", f"{where}.function_call"))
    if calls:
        fields["tool_calls"] = calls
    return fields


def _call(given: Any, where: str) -> Message:
    call = checked(inputs.as_mapping, given, where)
    kind = call.get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{where}.type is {shown(kind)}; only calls of functions are known.",
            param=f"{where}.type",
        )
    identity = checked(inputs.as_text, call.get("id"), f"{where}.id")
    return read_call(call.get("function"), identity, f"{where}.function")


def read_call(function: Any, identity: str, where: str) -> Message:
    """Return a call of a function with a name and arguments, which are JSON text or an object."""
    given = checked(inputs.as_mapping, function, where)
    name = checked(inputs.as_name, given.get("name"), f"{where}.name")
    arguments = given.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RequestError(
                f"{where}.arguments cannot be read as JSON.", param=f"{where}.arguments"
            ) from None
    arguments = checked(inputs.as_mapping, arguments or {}, f"{where}.arguments")
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read_content(given: Any, where: str, role: str) -> str | list[Message]:
    """Return a message's content: a text or parts, of which some roles may have only text."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list | tuple):
        raise RequestError(
            f"{where} is {shown(given)}; it must be a string or a list of parts.", param=where
        )
    return [_part(part, f"{where}[{at}]", role) for at, part in enumerate(given)]


def _part(given: Any, where: str, role: str) -> Message:
    part = checked(inputs.as_mapping, given, where)
    kind = part.get("type")
    if kind in FILES:
        raise RequestError(
            f"{where} is a file, which is not read: send its text, or its pages as images.",
            param=where,
        )
    kind = chosen(kind, f"{where}.type", PARTS)
    if kind in TEXTS:
        field = TEXTS[kind]
        if not isinstance(part.get(field), str):
            raise RequestError(f"{where}.{field} must be a string.", param=f"{where}.{field}")
        return {"type": "text", "text": part[field]}
    if role not in WITH_MEDIA:
        raise RequestError(
            f"{where} has the type {shown(kind)}, but the role {role} has only text: send it as "
            "the user's.",
            param=where,
        )
    if kind == "input_audio":
        audio = checked(inputs.as_mapping, part.get("input_audio"), f"{where}.input_audio")
        data = checked(inputs.as_name, audio.get("data"), f"{where}.input_audio.data")
        return {"type": "input_audio", "input_audio": {"data": data}}
    field = URLS[kind]
    return {"type": field, field: {"url": _data_url(part.get(field), f"{where}.{field}")}}


def _data_url(given: Any, where: str) -> str:
    """Return a data URL: requests fetch nothing, and name no files."""
    if isinstance(given, Mapping):
        given, where = given.get("url"), f"{where}.url"
    url = checked(inputs.as_name, given, where)
    if url[:5].lower() != "data:" or "," not in url:
        raise RequestError(
            f"{where} is {shown(url)}; images, audio and videos are taken as data URLs only, "
            "nothing is fetched.",
            param=where,
        )
    return url


def joined_text(parts: str | Sequence[Message]) -> str:
    """Return the text of a content that has only text."""
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
