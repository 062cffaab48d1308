"""Input items of OpenAI's Responses API, as the messages of a chat."""

from collections.abc import Mapping
from typing import Any

from webgemma.server.openai_common import checked, chosen
from webgemma.server.openai_messages import (
    ROLES,
    Message,
    check_messages,
    joined_text,
    read_call,
    read_content,
)
from webgemma.server.protocol import RequestError
from webgemma.text import inputs
from webgemma.values import shown

MESSAGE_ROLES = ("system", "developer", "user", "assistant")
REASONING_PARTS = ("summary_text", "reasoning_text", "text")


def read_input(given: Any, instructions: Any) -> list[Message]:
    """Return the messages of an input, a text or items; no input is the empty text."""
    messages: list[Message] = []
    if instructions is not None:
        text = checked(inputs.as_text, instructions, "instructions")
        messages.append({"role": "system", "content": text})
    if given is None or isinstance(given, str):
        messages.append({"role": "user", "content": given or ""})
    elif not isinstance(given, list | tuple):
        raise RequestError(
            f"input is {shown(given)}; it must be a text or a list of items.", param="input"
        )
    elif not given:
        raise RequestError("input is an empty list: there is nothing to reply to.", param="input")
    else:
        for at, each in enumerate(given):
            where = f"input[{at}]"
            _add(messages, checked(inputs.as_mapping, each, where), where)
    return check_messages(messages, "input")


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Add an item: reasoning, text and calls that follow each other are one message to Gemma.

    So a call's result may come after text and other calls."""
    kind = item.get("type", "message")
    if kind == "message":
        role = ROLES[chosen(item.get("role"), f"{where}.role", MESSAGE_ROLES)]
        if item.get("content") is None:
            raise RequestError(f"{where}.content is missing.", param=f"{where}.content")
        content = read_content(item["content"], f"{where}.content", role)
        if role == "assistant":
            _assistant(messages)["content"] += joined_text(content)
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        message = _assistant(messages)
        thoughts = (message.get("reasoning"), _reasoning(item, where))
        message["reasoning"] = "\n".join(filter(None, thoughts))
    elif kind == "function_call":
        identity = checked(inputs.as_name, item.get("call_id"), f"{where}.call_id")
        message = _assistant(messages)
        message.setdefault("tool_calls", []).append(read_call(item, identity, where))
    elif kind == "function_call_output":
        identity = checked(inputs.as_name, item.get("call_id"), f"{where}.call_id")
        output = read_content(item.get("output"), f"{where}.output", "tool")
        messages.append({"role": "tool", "tool_call_id": identity, "content": output})
    elif kind == "item_reference":
        raise RequestError(
            f"{where} refers to an item, but nothing is stored between requests: send the item.",
            param=where,
        )
    else:
        known = "message, reasoning, function_call or function_call_output"
        raise RequestError(
            f"{where}.type is {shown(kind)}; it must be {known}.", param=f"{where}.type"
        )


def _assistant(messages: list[Message]) -> Message:
    """Return the assistant's message at the end, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the thoughts of an item: all of them, or else their summary."""
    for field in ("content", "summary"):
        texts = []
        for at, each in enumerate(checked(inputs.as_list, item.get(field), f"{where}.{field}")):
            inner = f"{where}.{field}[{at}]"
            part = checked(inputs.as_mapping, each, inner)
            chosen(part.get("type"), f"{inner}.type", REASONING_PARTS)
            texts.append(checked(inputs.as_text, part.get("text"), f"{inner}.text"))
        if any(texts):
            return "\n".join(texts)
    return ""
