"""Plug-in of the `llm` command line tool and library: models that run in its own process.

`webgemma` is the bundled model; `webgemma/NAME` is one of Ollama's store. Options derive from the
settings, and models are loaded when they are first used."""

import asyncio
import atexit
import json
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from functools import cached_property
from typing import Annotated, Any, Literal

import llm
from llm.parts import (
    AttachmentPart,
    Message,
    ReasoningPart,
    StreamEvent,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from pydantic import AfterValidator, BeforeValidator, Field, create_model

from webgemma.api import Gemma
from webgemma.constraints.specifications import Json
from webgemma.errors import InputError, WebgemmaError
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gguf.ollama import OllamaModel, OllamaStore
from webgemma.models import find_model
from webgemma.replies import Piece
from webgemma.settings import SETTINGS, Setting

PREFIX = "webgemma"
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"})
AUDIO_TYPES = frozenset(
    {
        *("audio/wav", "audio/wave", "audio/x-wav", "audio/vnd.wave", "audio/mpeg", "audio/mp3"),
        *("audio/flac", "audio/x-flac", "audio/ogg", "application/ogg"),
    }
)
REPORTED = ("top_logprobs", "watch")  # settings of what pieces report, which `llm` does not show


# Options


def _from_text(value: Any) -> Any:
    """Return the value of an option that the command line gives as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _declared(setting: Setting) -> Any:
    """Return the type and the field of an option, which the setting itself checks."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        if setting.name == "logit_bias" and isinstance(value, Mapping):  # keys of JSON are text
            value = {int(key) if str(key).isdecimal() else key: bias for key, bias in value.items()}
        try:
            return setting.check(value)
        except InputError as error:
            raise ValueError(str(error)) from None

    plain: Any = setting.type if setting.type in (int, float, bool) else Any
    option = Annotated[plain | None, BeforeValidator(_from_text), AfterValidator(check)]
    return option, Field(default=None, description=setting.help)


def _options() -> Any:
    """Return the class of options: the settings, and how to load and prompt the model."""
    fields: dict[str, Any] = {
        name: _declared(setting) for name, setting in SETTINGS.items() if name not in REPORTED
    }
    loading = {
        "device": (Literal["auto", "gpu", "cpu"], "auto", "Where to compute."),
        "gpu": (str | None, None, "A part of the name of the GPU to use."),
        "context": (int | None, None, "Positions of prompt and reply together, at most."),
        "think": (bool, False, "Let the model think first."),
    }
    for name, (kind, default, text) in loading.items():
        fields[name] = kind, Field(default=default, description=text)
    return create_model("Options", __base__=llm.Options, **fields)


# The loaded model


class _Loaded:
    """The model that this process holds: one, which another one replaces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object = None
        self._model: Gemma | None = None

    def get(self, name: str | None, **options: Any) -> Gemma:
        """Return a model, loaded; None is the bundled one."""
        key = name, *options.items()
        with self._lock:
            if self._key != key or self._model is None:
                self._close()
                self._model, self._key = Gemma.load(name, **options), key
            return self._model

    def close(self) -> None:
        """Free what is loaded."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.close()


LOADED = _Loaded()
atexit.register(LOADED.close)


# Messages and replies


def _attachment(attachment: Any) -> dict[str, Any]:
    kind = "image" if attachment.resolve_type() in IMAGE_TYPES else "audio"
    return {"type": kind, kind: attachment.content_bytes()}


def _messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation as `Gemma.chat` takes it: a tool's result is a message of its own."""
    messages: list[dict[str, Any]] = []
    for message in given:
        content: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thinking = ""
        for part in message.parts:
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
            elif isinstance(part, AttachmentPart) and part.attachment:
                content.append(_attachment(part.attachment))
            elif isinstance(part, ReasoningPart):
                thinking += part.text
            elif isinstance(part, ToolCallPart):
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.tool_call_id or part.name, "function": function})
            elif isinstance(part, ToolResultPart):
                messages.append(_tool_result(part))
        if content or calls:
            written: dict[str, Any] = {"role": message.role, "content": content}
            written |= {"thinking": thinking} if thinking else {}
            messages.append(written | ({"tool_calls": calls} if calls else {}))
    return messages


def _tool_result(part: ToolResultPart) -> dict[str, Any]:
    parts = [_attachment(each) for each in part.attachments]
    content = [{"type": "text", "text": part.output}, *parts] if parts else part.output
    identity = part.tool_call_id or part.name
    return {"role": "tool", "name": part.name, "tool_call_id": identity, "content": content}


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


class _Writer:
    """Turns pieces into events of `llm`, and keeps what a response says about itself."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._calls = 0

    def events(self, piece: Piece) -> Iterator[StreamEvent]:
        """Yield the events of a piece."""
        if piece.thinking:
            yield StreamEvent(type="reasoning", chunk=piece.thinking)
        if piece.text:
            yield StreamEvent(type="text", chunk=piece.text)
        for call in piece.tool_calls:
            identity, arguments = f"call_{self._calls}", dict(call.arguments)
            self._calls += 1
            yield StreamEvent(type="tool_call_name", chunk=call.name, tool_call_id=identity)
            written = json.dumps(arguments)
            yield StreamEvent(type="tool_call_args", chunk=written, tool_call_id=identity)
            made = llm.ToolCall(name=call.name, arguments=arguments, tool_call_id=identity)
            self._response.add_tool_call(made)
        if piece.usage:
            self._response.set_usage(input=piece.usage.prompt, output=piece.usage.reply)


# Models


class _Shared:
    """What both kinds of model have: who they are, and what they take."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    needs_key = None
    Options: Any = _options()

    def __init__(self, name: str | None) -> None:
        self.name = name  # of Ollama's store; None: the bundled model
        self.model_id = PREFIX if name is None else f"{PREFIX}/{name}"

    def __str__(self) -> str:
        return f"webgemma: {self.model_id}"

    @cached_property
    def attachment_types(self) -> frozenset[str]:
        """The types of files for which the model has encoders; this opens its files."""
        found = find_model(self.name)
        types: frozenset[str] = frozenset()
        for file in (found, *found.projectors()):
            with closing(file.open()) as gguf:
                encoders = EncoderConfigs.from_gguf(gguf)
            types |= IMAGE_TYPES if encoders.vision else frozenset()
            types |= AUDIO_TYPES if encoders.audio else frozenset()
        return types

    def load(self, prompt: Any) -> Gemma:
        """Return the model, loaded as the options have it."""
        options = prompt.options
        return LOADED.get(
            self.name, device=options.device, gpu=options.gpu, context=options.context
        )

    def arguments(self, prompt: Any) -> dict[str, Any]:
        """Return the arguments of `chat`."""
        given = {name: getattr(prompt.options, name) for name in SETTINGS if name not in REPORTED}
        return {
            "messages": _messages(prompt.messages),
            "tools": _tools(prompt.tools) or None,
            "schema": Json(prompt.schema, closed=True) if prompt.schema else None,
            "think": prompt.options.think,
            **{name: value for name, value in given.items() if value is not None},
        }


class WebGemma(_Shared, llm.Model):  # type: ignore[misc]  # a property for a variable
    """A model for `llm`."""

    def execute(
        self,
        prompt: Any,
        stream: bool,  # noqa: ARG002
        response: Any,
        conversation: Any = None,  # noqa: ARG002
    ) -> Iterator[StreamEvent]:
        """Yield the reply as it is written; `llm` itself waits for its end if asked to."""
        writer = _Writer(response)
        pieces: Any = self.load(prompt).chat(**self.arguments(prompt))
        with closing(pieces):
            for piece in pieces:
                yield from writer.events(piece)


class AsyncWebGemma(_Shared, llm.AsyncModel):  # type: ignore[misc]
    """A model for `llm`'s asynchronous calls, which never block the event loop."""

    async def execute(
        self,
        prompt: Any,
        stream: bool,  # noqa: ARG002
        response: Any,
        conversation: Any = None,  # noqa: ARG002
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield the reply."""
        writer = _Writer(response)
        model = await asyncio.to_thread(self.load, prompt)
        async with aclosing(model.achat(**self.arguments(prompt))) as pieces:
            async for piece in pieces:
                for event in writer.events(piece):
                    yield event


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register the bundled model and the Gemma models of Ollama's store."""
    register(WebGemma(None), AsyncWebGemma(None))
    names = []
    with suppress(WebgemmaError, OSError):  # a store that cannot be read must not break `llm`
        names = [str(model.name) for model in OllamaStore().list() if _is_gemma(model)]
    for name in names:
        short = name.removesuffix(":latest")
        aliases = (f"{PREFIX}/{short}",) if short != name else ()
        register(WebGemma(name), AsyncWebGemma(name), aliases=aliases)


def _is_gemma(model: OllamaModel) -> bool:
    """Return whether a model may be one that runs here, by what Ollama says of its family."""
    family = model.config.get("model_family")
    return not family or str(family).replace("-", "").startswith(("gemma4", "diffusiongemma"))
