"""Validation of messages and tools: untrusted input becomes typed values or an InputError.

Messages may be in OpenAI's form (content parts, `tool_call_id`, arguments as JSON text), in
Ollama's form (`images`, `thinking`, `tool_name`) or in an older form of the template
(`tool_responses`). The strings called `where` are paths such as `messages[0].content`, for errors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from webgemma.errors import InputError
from webgemma.text.markup import AUDIO, IMAGE, VIDEO, Markup, Media, Part
from webgemma.text.sizes import ROLES, Sizes

MEDIA = {
    "image": IMAGE,
    "image_url": IMAGE,
    "audio": AUDIO,
    "audio_url": AUDIO,
    "input_audio": AUDIO,
    "video": VIDEO,
    "video_url": VIDEO,
}
SOURCE_FIELDS = {  # fields of a content part that may contain the source of its media
    IMAGE: ("image", "path", "url", "image_url"),
    AUDIO: ("audio", "path", "url", "audio_url", "input_audio"),
    VIDEO: ("video", "path", "url", "video_url"),
}
THINKING_FIELDS = ("reasoning", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, as declared by the caller."""

    where: str
    name: str
    function: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model made earlier in the conversation."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """The result of a tool: any JSON value, and media."""

    name: str
    value: object
    where: str
    media: Sequence[Part] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One validated message of the conversation; its text is unchanged."""

    where: str
    role: str
    content: Sequence[Part]
    in_parts: bool  # the content was a list of parts, not one string
    thinking: str = ""
    calls: Sequence[Call] = ()
    responses: Sequence[Response] = ()
    result: object = None  # of a tool, in a tool message
    call_id: str = ""
    tool_name: str = ""


def wrong_type(value: object, where: str, expected: str) -> InputError:
    """Return the error for a value of the wrong type."""
    actual = "nothing" if value is None else type(value).__name__
    return InputError(f"{where} must be {expected}, not {actual}.")


def as_text(value: object, where: str) -> str:
    """Return a string; None counts as empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_type(value, where, "a string")
    return value


def as_name(value: object, where: str) -> str:
    """Return a string that is neither missing nor empty."""
    if not isinstance(value, str):
        raise wrong_type(value, where, "a string")
    if not value:
        raise InputError(f"{where} must not be empty.")
    return value


def as_list(value: object, where: str) -> Sequence[Any]:
    """Return a list or tuple; None counts as empty."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise wrong_type(value, where, "a list")
    return value


def as_mapping(value: object, where: str) -> Mapping[str, Any]:
    """Return a mapping whose keys are strings."""
    if not isinstance(value, Mapping):
        raise wrong_type(value, where, "an object (a mapping)")
    for key in value:
        if not isinstance(key, str):
            raise wrong_type(key, f"A key of {where}", "a string")
    return value


def read_tools(tools: object) -> list[Tool]:
    """Return the tools, given as bare functions or as `{"type": "function", "function": …}`."""
    result, sizes = [], Sizes()
    for index, given in enumerate(as_list(tools, "tools")):
        where = f"tools[{index}]"
        function = as_mapping(given, where)
        if "function" in function:
            where += ".function"
            function = as_mapping(function["function"], where)
        sizes.add(function, where)
        result.append(Tool(where, as_name(function.get("name"), f"{where}.name"), function))
    return result


def read_messages(messages: object) -> list[Message]:
    """Return the messages after checking every field that is used."""
    if not isinstance(messages, list | tuple):
        raise wrong_type(messages, "messages", "a list of messages")
    sizes = Sizes()
    return [_message(given, f"messages[{index}]", sizes) for index, given in enumerate(messages)]


def read_content(content: object, where: str) -> list[Part]:
    """Return the parts of one content, as that of a message: a string, or a list of parts."""
    return _content(content, where, Sizes())


def _message(given: object, where: str, sizes: Sizes) -> Message:
    message = as_mapping(given, where)
    role = as_name(message.get("role"), f"{where}.role")
    if role not in ROLES:
        raise InputError(f"{where}.role must be one of {', '.join(ROLES)}, not {role[:40]!r}.")
    images: list[Part] = [
        Media(IMAGE, image, "images", f"{where}.images[{at}]")
        for at, image in enumerate(as_list(message.get("images"), f"{where}.images"))
    ]
    content = message.get("content")
    if role == "tool":
        return _tool_message(message, where, content, images, sizes)
    parts = images + _content(content, f"{where}.content", sizes)
    in_parts = not isinstance(content, str)
    if role != "assistant":
        return Message(where, role, parts, in_parts)
    thoughts = [as_text(message.get(field), f"{where}.{field}") for field in THINKING_FIELDS]
    calls = as_list(message.get("tool_calls"), f"{where}.tool_calls")
    responses = as_list(message.get("tool_responses"), f"{where}.tool_responses")
    return Message(
        where,
        role,
        parts,
        in_parts,
        thinking=next(filter(None, thoughts), ""),
        calls=[_call(call, f"{where}.tool_calls[{at}]", sizes) for at, call in enumerate(calls)],
        responses=[
            _response(response, f"{where}.tool_responses[{at}]", sizes)
            for at, response in enumerate(responses)
        ],
    )


def _tool_message(
    message: Mapping[str, Any], where: str, content: object, images: list[Part], sizes: Sizes
) -> Message:
    """Return a tool's message: its content is a list of content parts or any other JSON value."""
    result, media = content, images
    if isinstance(content, list | tuple):
        parts = _content(content, f"{where}.content", sizes)
        result = "".join(part for part in parts if not isinstance(part, Markup))
        media = images + [part for part in parts if isinstance(part, Markup)]
    else:
        sizes.add(content, f"{where}.content")
    names = [as_text(message.get(field), f"{where}.{field}") for field in ("name", "tool_name")]
    return Message(
        where,
        "tool",
        media,
        in_parts=False,
        result=result,
        call_id=as_text(message.get("tool_call_id"), f"{where}.tool_call_id"),
        tool_name=names[0] or names[1],
    )


def _content(content: object, where: str, sizes: Sizes) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise wrong_type(content, where, "a string or a list of parts")
    sizes.add_parts(len(content), where)
    return [part for at, given in enumerate(content) for part in _part(given, f"{where}[{at}]")]


def _part(given: object, where: str) -> list[Part]:
    part = as_mapping(given, where)
    kind = as_name(part.get("type"), f"{where}.type")
    if kind == "text":
        return [as_text(part.get("text"), f"{where}.text")]
    if kind not in MEDIA:
        return []  # the template ignores parts of other types
    names = SOURCE_FIELDS[MEDIA[kind]]
    field = next((name for name in names if part.get(name) is not None), "")
    source = part.get(field)
    if field.endswith("_url") and isinstance(source, Mapping):  # as in OpenAI's API
        source = source.get("url")
    return [Media(MEDIA[kind], source, field, f"{where}.{field}" if field else where, part)]


def _call(given: object, where: str, sizes: Sizes) -> Call:
    call = as_mapping(given, where)
    function = as_mapping(call.get("function"), f"{where}.function")
    name = as_name(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    sizes.add(arguments, f"{where}.function.arguments")
    return Call(as_text(call.get("id"), f"{where}.id"), name, arguments)


def _arguments(arguments: object, where: str) -> Mapping[str, Any]:
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InputError(
                f"{where} cannot be read as JSON; send an object or its JSON text."
            ) from None
    return as_mapping(arguments, where)


def _response(given: object, where: str, sizes: Sizes) -> Response:
    response = as_mapping(given, where)
    sizes.add(response.get("response"), f"{where}.response")
    name = as_text(response.get("name"), f"{where}.name")
    return Response(name or "unknown", response.get("response"), f"{where}.response")
