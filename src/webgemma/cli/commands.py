"""The commands of the terminal's chat: their names, their help, and values for /set."""

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from webgemma.cli.reading import Typed
from webgemma.errors import InputError
from webgemma.models import OLLAMA_NAMES
from webgemma.replies import StopText
from webgemma.settings import SETTINGS, Setting

COMMANDS = {  # what follows each, and what it does
    "image": ("FILE", "attach an image to the next message"),
    "audio": ("FILE", "attach audio to the next message"),
    "regenerate": ("", "reply to the last message once more"),
    "continue": ("", "go on with a reply that was cut or stopped"),
    "clear": ("", "start a new conversation"),
    "save": ("FILE", "write the conversation, as JSON"),
    "load": ("FILE", "go on with a conversation that was saved"),
    "set": ("NAME VALUE", "change a setting; /set alone lists them"),
    "think": ("", "let the model think before it replies, or not"),
    "stats": ("", "tokens of the last reply, and what is left of the context"),
    "help": ("", "this list"),
    "bye": ("", "leave (also Ctrl-D)"),
}
ALIASES = {"exit": "bye", "quit": "bye", "?": "help"}
KEYS = {
    "Alt+Enter": "begin a new line",
    '"""': "begin and end a message of several lines",
    "Ctrl-C": "stop the reply",
}
SWITCHES = {  # of /set, as Ollama has them
    "think": ("think", True),
    "nothink": ("think", False),
    "verbose": ("verbose", True),
    "quiet": ("verbose", False),
    "wordwrap": ("wrap", True),
    "nowordwrap": ("wrap", False),
    "history": ("history", True),
    "nohistory": ("history", False),
}
_COMMAND = re.compile(r"/([A-Za-z?][\w-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and what follows it."""

    name: str
    rest: str = ""


def read_command(typed: Typed) -> Command | None:
    """Return the command that was typed; None for a message, such as one that begins with a path.

    InputError for a command that does not exist, or that is used wrongly."""
    found = None if typed.quoted else _COMMAND.fullmatch(typed.text)
    if found is None:
        return None
    written, rest = found[1].lower(), (found[2] or "").strip()
    name = ALIASES.get(written, written)
    if name not in COMMANDS:
        if os.path.exists(f"/{found[1]}") or "\n" in typed.text:
            return None
        near = nearest(written, [*COMMANDS, *ALIASES])
        hint = f"did you mean /{near}?" if near else "/help lists them."
        raise InputError(
            f'There is no command /{written}; {hint} To send it as a message, write """ around it.'
        )
    expected = COMMANDS[name][0]
    if expected == "FILE" and not rest:
        raise InputError(f"/{name} needs a file: /{name} {expected}.")
    if not expected and rest:
        raise InputError(f'/{name} stands alone. To send this as a message, write """ around it.')
    return Command(name, rest)


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the name that is most like a word, or nothing."""
    names = list(names)
    begun = [name for name in names if name.startswith(word)]
    return next(iter(begun or get_close_matches(word, names, 1)), "")


def help_text() -> str:
    """Return the list of commands and keys."""
    rows = [(f"/{name} {expected}".rstrip(), help) for name, (expected, help) in COMMANDS.items()]
    rows += KEYS.items()
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"{left:<{width}}  {help}" for left, help in rows)


def set_help(settings: dict[str, Setting], values: dict[str, Any]) -> str:
    """Return the settings with their values, and what else /set changes."""
    width = max(map(len, settings))
    lines = [
        f"{name:<{width}}  {shown(values[name]):<8}  {setting.help}"
        for name, setting in settings.items()
    ]
    switches = " ".join(SWITCHES)
    return "\n".join(
        (
            *lines,
            "",
            "/set NAME VALUE (default: as the model has it) · /set system TEXT",
            f"/set {switches}",
        )
    )


def shown(value: Any) -> str:
    """Return a value as /set shows it."""
    if value is None or value in ((), {}):
        return "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def setting_named(name: str, settings: dict[str, Setting]) -> Setting:
    """Return a setting by its name, or by the one that Ollama has for it."""
    name = OLLAMA_NAMES.get(name, name)
    if name in settings:
        return settings[name]
    if name == "num_ctx":
        raise InputError("The context is chosen when the model is loaded: --context.")
    if name in SETTINGS:
        raise InputError(f"{name} does not apply to this model; /set lists those that do.")
    near = nearest(name, [*settings, *SWITCHES, "system"])
    hint = f"did you mean {near}?" if near else "/set lists them."
    raise InputError(f"There is no setting {name!r}; {hint}")


def parse_value(setting: Setting, text: str) -> Any:
    """Return the value that a text stands for; the range is not checked."""
    if setting.optional and text.lower() == "none":
        return None
    try:
        if setting.name == "stop":
            stops = tuple(shlex.split(text))
            StopText(stops)
            return stops
        if setting.name == "logit_bias":
            pairs = (word.rpartition("=") for word in text.split())
            return {int(token): float(bias) for token, _, bias in pairs}
        if setting.type is bool:
            return {"on": True, "true": True, "off": False, "false": False}[text.lower()]
        return setting.type(text)
    except (ValueError, KeyError):
        raise InputError(f"{setting.name} is {text!r}; it must be {_kind(setting)}.") from None


def _kind(setting: Setting) -> str:
    if setting.name == "stop":
        return "text, in quotes if it has spaces"
    if setting.name == "logit_bias":
        return "token ids with numbers, such as 12=-5 40=2.5"
    kinds = {int: "a whole number", float: "a number", bool: "on or off"}
    return kinds.get(setting.type, " or ".join(setting.choices))
