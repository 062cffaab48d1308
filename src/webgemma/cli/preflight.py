"""What can be refused before a model is loaded: settings, the prompt's length, a wrong model."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from webgemma.errors import InputError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gguf.ollama import OllamaStore
from webgemma.models import FoundModel, find_model, is_address, with_draft
from webgemma.replies import StopText, too_long
from webgemma.settings import SETTINGS, Settings, resolve
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

TEMPLATE = 256  # more tokens than the chat template adds to a message
SHOWN = 200  # characters of a message that a hint repeats


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InputError for a value that no model accepts."""
    for name, value in settings.items():
        SETTINGS[name].check(value)
    StopText(settings.get("stop", ()))


def check_order(model: str | None, prompt: str | None) -> None:
    """Raise InputError if the message stands where the model should: it says what to type."""
    if model is None or not _reads_like_a_message(model):
        return
    named = prompt if prompt and not _reads_like_a_message(prompt) else None
    message = model if len(model) <= SHOWN and model.isprintable() else "…"
    words = ["webgemma", "run", named or "-", message]
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    if named:
        raise InputError(f"The model comes before the message: {command}")
    installed = _installed()
    others = f", {installed[0]} in place of - another one" if installed else ""
    raise InputError(
        f"The model comes before the message: {command} asks the bundled model{others}."
    )


def check_question_order(question: str, model: str | None) -> None:
    """Raise InputError if the question stands where the model should, as it does for `run`."""
    if model and _reads_like_a_message(model) and not _reads_like_a_message(question):
        raise InputError(
            f"The question comes before the model: webgemma ask {_asked(model)} {question}"
        )


def _asked(question: str) -> str:
    words = [question if len(question) <= SHOWN and question.isprintable() else "…"]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def _reads_like_a_message(text: str) -> bool:
    is_path = text.endswith(".gguf") or text.startswith((".", "/", "~")) or "\\" in text
    return (
        any(char.isspace() or char in "?？" for char in text)
        and not is_address(text)
        and not is_path
        and not os.path.exists(text)
    )


def _installed() -> list[str]:
    try:
        return [str(model.name) for model in OllamaStore().list()]
    except (WebgemmaError, OSError):
        return []


def check_request(
    model: str | None,
    message: str | None,
    settings: Mapping[str, Any],
    *,
    system: str | None,
    context: int | None,
    raw: bool,
    structure: Mapping[str, Any],
    draft: Path | Literal[False] | None,
) -> None:
    """Raise an error if the model's header shows that it cannot do what is asked.

    Or if that of its drafter, where one is named, shows that it belongs to another model."""
    found = with_draft(find_model(model), draft)
    defaults = found.defaults()
    with found.open() as gguf:
        config = Config.from_gguf(gguf)
        config.check_writes(found.label)
        given = cast(Settings, settings)
        resolve(given, defaults.settings, diffusion=config.diffusion is not None)
        positions = defaults.choose_context(config, context)
        if structure and config.diffusion:
            (name,) = structure
            raise InputError(
                f"{found.label} denoises whole canvases: it cannot keep to --{name}; ask another "
                "Gemma 4."
            )
        if found.drafter is not None:
            with found.drafter.open() as drafter:
                drafter_config(drafter, config)
        text = (message or "") + ("" if raw else system or "")
        if len(text.encode("utf-8", "replace")) + TEMPLATE <= positions:
            return  # a token is at least a byte
        if "tokenizer.ggml.tokens" in gguf.metadata:
            tokenizer = Tokenizer.from_gguf(gguf)
            length = _length(tokenizer, found, config, message, system, raw)
            if length > positions or (length == positions and not raw):  # a reply needs room
                raise too_long(length, positions)


def _length(
    tokenizer: Tokenizer,
    found: FoundModel,
    config: Config,
    message: str | None,
    system: str | None,
    raw: bool,
) -> int:
    """Return the tokens of a request, without its media."""
    if raw:
        return 1 + len(tokenizer.encode(message or ""))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message or ""})
    return len(Chat(found.chat_size(config)).encode(tokenizer, messages))
