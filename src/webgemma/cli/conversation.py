"""A conversation: its messages and attachments, and the JSON file that holds them.

A file is a list of messages as OpenAI and Ollama write them, with images and audio inside as data:
URLs. It may come from a stranger, so it is checked as a whole, and it cannot name other files."""

import base64
import json
import mimetypes
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from webgemma.errors import InputError
from webgemma.media.prompt import items_of
from webgemma.replies import ToolResult
from webgemma.sync import run_sync
from webgemma.text.calls import ToolCall
from webgemma.text.chat import Chat
from webgemma.text.inputs import read_messages
from webgemma.text.markup import Media, Part
from webgemma.text.sizes import SYSTEM_ROLES

MAX_FILE_NBYTES = 500_000_000

Message = dict[str, Any]


@dataclass
class Conversation:
    """The messages so far, and what is attached to the next one."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)  # without the system message
    attached: list[dict[str, Any]] = field(default_factory=list)  # parts of the next message

    def all(self) -> list[Message]:
        """Return the messages, the system message first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str) -> None:
        """Add a user's message, with what is attached."""
        parts = [*self.attached, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if self.attached else text})
        self.attached = []

    def answer(self, text: str, thinking: str = "", results: Sequence[ToolResult] = ()) -> None:
        """Add a reply, or a part of one: the calls that it ends with, and their results."""
        message: Message = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        ids = [f"call_{len(self.messages)}_{at}" for at in range(len(results))]
        if results:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": _function(result.call)}
                for id, result in zip(ids, results, strict=True)
            ]
        self.messages.append(message)
        self.messages += [
            {"role": "tool", "tool_call_id": id, "name": result.call.name, "content": result.value}
            for id, result in zip(ids, results, strict=True)
        ]

    def extend(self, text: str, thinking: str = "", results: Sequence[ToolResult] = ()) -> None:
        """Add to the last reply."""
        last = self.messages.pop()
        thinking = last.get("thinking", "") + thinking
        self.answer(last["content"] + text, thinking, results)

    def has_reply(self) -> bool:
        """Return whether the last message is a reply that can go on: one of text."""
        last = self.messages[-1] if self.messages else {}
        is_text = isinstance(last.get("content"), str) and not last.get("tool_calls")
        return last.get("role") == "assistant" and is_text

    def save(self, path: Path) -> None:
        """Write the conversation; a file that exists must be a conversation, too."""
        if path.exists():
            try:
                load(path)
            except InputError:
                raise InputError(
                    f"{path} exists and is not a conversation; choose another name."
                ) from None
        _write(path, _json(self.all()))


def _function(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def load(path: Path) -> Conversation:
    """Return the conversation of a file; InputError if it is not one."""
    messages = [_inline(message) for message in _read(path)]
    try:
        if not messages:
            raise InputError("it has no messages.")
        checked = read_messages(messages)
        for message in checked:
            for part in message.content:
                _check_embedded(part)
        for part in Chat().parts(messages):
            run_sync(items_of(part))
    except InputError as error:
        raise InputError(f"{path} is not a conversation: {error}") from None
    system = None
    if checked[0].role in SYSTEM_ROLES:
        system = "\n".join(str(part) for part in checked[0].content)
        messages = messages[1:]
    return Conversation(system, messages)


def attachment(kind: str, path: Path, **options: Any) -> dict[str, Any]:
    """Return a file as a part of a message that holds it; InputError if it cannot be read.

    Later changes of the file do not change the conversation."""
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    given = {"role": "user", "content": [{"type": kind, "path": path}]}
    for part in read_messages([given])[0].content:
        run_sync(items_of(part))
    mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": kind, "url": f"data:{mime};base64,{data}", **options}


def _read(path: Path) -> Sequence[Mapping[str, Any]]:
    """Return the list of objects in a file."""
    if path.is_dir():
        raise InputError(f"{path} is a folder.")
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    if path.stat().st_size > MAX_FILE_NBYTES:
        raise InputError(f"{path} is too large to be a conversation.")
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if isinstance(data, Mapping):  # a row of training data
        data = data.get("messages")
    if not (isinstance(data, list) and all(isinstance(entry, Mapping) for entry in data)):
        raise InputError(f"{path} is not a conversation: a list of messages is expected.")
    return data


def _inline(message: Mapping[str, Any]) -> Message:
    """Return a message whose `images`, base64 that may look like a path, are data: URLs."""
    images = message.get("images")
    if not isinstance(images, list):
        return dict(message)
    return {**message, "images": [_data_url(image) for image in images]}


def _data_url(image: object) -> object:
    is_url = not isinstance(image, str) or image[:5].lower() == "data:"
    return image if is_url else f"data:;base64,{image}"


def _check_embedded(part: Part) -> None:
    """Raise InputError if a part would be read from another file."""
    if isinstance(part, Media):
        for source in _sources(part.source):
            if isinstance(source, str) and source[:5].lower() != "data:":
                raise InputError(
                    f"{part.where} names another file; only what is embedded (as a data: URL) "
                    "is read."
                )


def _sources(source: object) -> Iterator[object]:
    if isinstance(source, list):  # the frames of a video
        for frame in source:
            yield from _sources(frame)
    elif not isinstance(source, Mapping):  # OpenAI's input_audio is base64
        yield source


def _json(messages: list[Message]) -> bytes:
    text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(messages, indent=1).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None
