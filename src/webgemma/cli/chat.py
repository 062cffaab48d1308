"""A chat in the terminal: messages with images and audio, commands, and replies."""

import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

from webgemma.api import Gemma
from webgemma.calling.rounds import Confirm
from webgemma.cli.commands import (
    COMMANDS,
    SWITCHES,
    Command,
    help_text,
    parse_value,
    read_command,
    set_help,
    setting_named,
    shown,
)
from webgemma.cli.conversation import Conversation, attachment, load
from webgemma.cli.history import HistoryFile, history_path
from webgemma.cli.reading import LineReader, Reader, Typed, is_tty
from webgemma.cli.reply import Received, note, print_json, print_reply
from webgemma.cli.terminal import StepsBar, print_error, steps_bar
from webgemma.cli.watch import watched
from webgemma.errors import InputError, WebgemmaError
from webgemma.replies import Piece
from webgemma.settings import Setting, Settings, applicable, resolve

DUMB = ("dumb", "unknown")  # terminals that cannot move their cursor


class TerminalChat:
    """A conversation in the terminal."""

    def __init__(
        self,
        gemma: Gemma,
        settings: Settings,
        *,
        system: str | None = None,
        think: bool = False,
        attached: Sequence[dict[str, Any]] = (),
        structure: Mapping[str, Any] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        confirm: Confirm | None = None,
        quiet: bool = False,
        verbose: bool = False,
        wrap: bool = True,
        history: bool = True,
    ) -> None:
        """`structure` is a keyword of `Gemma.chat` that says what replies have to be, such as
        `schema`; `tools` and `confirm` are those of `Gemma.chat`."""
        self.gemma = gemma
        self.settings = settings
        self.structure = structure or {}
        self.tools, self.confirm = tools, confirm
        self.conversation = Conversation(system, attached=list(attached))
        self.think = think
        self.quiet = quiet  # only replies and errors
        self.verbose = verbose
        self.wrap = wrap
        self.last: Received | None = None  # the last reply
        self._history = HistoryFile(history_path() if history else None)
        self._told = False  # that messages are left out

    @property
    def history(self) -> bool:
        """Whether what is typed is kept for the next chat."""
        return self._history.path is not None

    @history.setter
    def history(self, keep: bool) -> None:
        self._history.path = history_path() if keep else None

    # One reply

    def reply_once(self, message: str, *, raw: bool = False, as_json: bool = False) -> None:
        """Print the reply to one message, or the text that continues it."""
        received = self._received()
        if not raw:
            self.conversation.ask(message)
        with self._completion(message) if raw else self._reply() as pieces:
            if as_json:
                print_json(pieces, received)
                return
            print_reply(pieces, received, self.wrap, quiet=self.quiet)
        self._tell(received, "--max-tokens allows no more.", "a larger --context has more room.")

    # The chat

    def loop(self, reader: Reader | None = None) -> None:
        """Read messages and commands until the user leaves."""
        if reader is None:
            reader = self._open_reader()
        self._note(f"{self.gemma.name} · /help for help, Ctrl-D to leave")
        while True:
            try:
                typed = reader.read()
                if typed is None or not self._obey(typed):
                    return
            except KeyboardInterrupt:
                self._note("Ctrl-D or /bye leaves.")
            except WebgemmaError as error:  # the conversation is as it was before
                print_error(str(error))
            except MemoryError:
                print_error("The memory of this machine is full; /clear, or write less at a time.")

    def _open_reader(self) -> Reader:
        """Return an editor with history where the terminal can have one."""
        terminal = next((stream for stream in (sys.stdout, sys.stderr) if is_tty(stream)), None)
        if terminal is not None and is_tty(sys.stdin) and os.environ.get("TERM") not in DUMB:
            from webgemma.cli.prompt import PromptReader, UnusableTerminalError  # slow to import

            names = [*self._settable(), *SWITCHES, "system"]
            with suppress(UnusableTerminalError):
                return PromptReader(terminal, list(COMMANDS), names, self._history)
        return LineReader()

    def _obey(self, typed: Typed) -> bool:
        """Do what was typed; return whether to go on."""
        command = read_command(typed)
        if command is not None:
            return self._run(command)
        if typed.text:
            attached = self.conversation.attached
            before = list(self.conversation.messages)
            self.conversation.ask(typed.text)
            try:
                self._respond(before)
            except WebgemmaError:
                if attached:
                    self._note("Nothing was sent, and nothing is attached any more.")
                raise
        return True

    def _run(self, command: Command) -> bool:
        actions: dict[str, Callable[[Command], None]] = {
            "image": self._attach,
            "audio": self._attach,
            "regenerate": self._regenerate,
            "continue": self._continue,
            "clear": self._clear,
            "save": self._save,
            "load": self._load,
            "set": self._set,
            "think": self._toggle_thinking,
            "stats": self._show_statistics,
            "help": lambda _: note(help_text()),
        }
        if command.name == "bye":
            return False
        try:
            actions[command.name](command)
        except BrokenPipeError:  # nobody reads the replies any more
            raise
        except OSError as error:
            raise InputError(f"{command.rest}: {error.strerror or error}.") from None
        return True

    # Replies

    def _respond(self, before: list[dict[str, Any]], *, continue_last: bool = False) -> None:
        """Print and keep a reply, also a stopped one; after an error, restore the messages."""
        received = self._received()
        try:
            with self._reply(continue_last) as pieces:
                print_reply(pieces, received, self.wrap, quiet=self.quiet)
        except KeyboardInterrupt:
            received.stopped = True
        except BaseException:
            self.conversation.messages = before
            raise
        self.last = received
        keep = self.conversation.extend if continue_last else self.conversation.answer
        for part in received.rounds:
            keep(part.text, part.thinking, part.results)
            keep = self.conversation.answer
        goes_on = "" if self.structure else "/continue goes on, "
        self._tell(
            received,
            f"{goes_on}/set max_tokens changes that.",
            f"{goes_on}/clear starts a new conversation.",
        )

    @contextmanager
    def _reply(self, continue_last: bool = False) -> Iterator[Iterator[Piece]]:
        """Give the pieces of the reply to the conversation."""
        bars = nullcontext() if self.quiet else steps_bar("encoding images and audio")
        with bars as bar:
            pieces = self.gemma.chat(
                self.conversation.all(),
                tools=self.tools or None,
                confirm=self.confirm,
                think=self.think,
                continue_last=continue_last,
                overflow="drop",
                progress=bar.show if bar else None,
                **self.structure,
                **self.settings,
            )
            with _closing(pieces), _closing(watched(_hiding(bar, pieces), self.gemma)) as shown:
                yield shown

    @contextmanager
    def _completion(self, text: str) -> Iterator[Iterator[Piece]]:
        """Give the pieces that continue a text."""
        pieces = self.gemma.generate(text, **self.structure, **self.settings)
        with _closing(pieces), _closing(watched(pieces, self.gemma)) as shown:
            yield shown

    def _received(self) -> Received:
        by_canvas = self.gemma.config.diffusion is not None
        return Received(by_canvas, has_schema="schema" in self.structure)

    def _tell(self, received: Received, of_limit: str, of_context: str) -> None:
        """Say that a reply was cut or messages left out and, on request, what it took."""
        usage = received.usage
        if received.finish == "length":
            limit = self._resolved(self.settings)["max_tokens"]
            if limit is not None and (usage is None or usage.reply >= limit):
                self._note(f"The reply was cut at {limit} tokens: {of_limit}")
            else:
                full = f"the context of {self.gemma.context} tokens is full"
                self._note(f"The reply was cut, because {full}: {of_context}")
        if usage is not None and usage.left_out and not self._told:
            self._told = True
            self._note(
                "The context is full: from here on the oldest messages are left out; "
                "/clear starts a new conversation."
            )
        if self.verbose:
            note(received.statistics())

    def _regenerate(self, _: Command) -> None:
        before = list(self.conversation.messages)
        if not any(message["role"] == "user" for message in before):
            raise InputError("There is no message yet to reply to.")
        while self.conversation.messages[-1]["role"] != "user":
            self.conversation.messages.pop()
        self._respond(before)
        if self.last is not None and self.last.stopped and not self.last.pieces:
            self.conversation.messages = before

    def _continue(self, _: Command) -> None:
        if not self.conversation.has_reply():
            raise InputError("There is no reply to continue.")
        if self.last is not None and self.last.finish == "stop":
            raise InputError("The last reply is complete; /regenerate makes another one.")
        if self.structure:
            (name,) = self.structure
            raise InputError(
                f"A reply that keeps to --{name} is written as a whole; /regenerate makes another."
            )
        self._respond(list(self.conversation.messages), continue_last=True)

    # Commands

    def _attach(self, command: Command) -> None:
        path = _path(command)
        self.conversation.attached.append(attachment(command.name, path))
        self._note(f"{path} is attached to your next message.")

    def _clear(self, _: Command) -> None:
        self._begin(Conversation(self.conversation.system))
        self._note("This is a new conversation.")

    def _begin(self, conversation: Conversation) -> None:
        self.conversation, self.last, self._told = conversation, None, False

    def _save(self, command: Command) -> None:
        if not self.conversation.messages:
            raise InputError("There is nothing to save yet.")
        path = _path(command)
        self.conversation.save(path)
        self._note(f"{len(self.conversation.messages)} messages are saved in {path}.")

    def _load(self, command: Command) -> None:
        path = _path(command)
        loaded = load(path)
        loaded.system = loaded.system or self.conversation.system
        self._begin(loaded)
        hint = "" if loaded.has_reply() else "; /regenerate replies to the last one"
        self._note(f"{len(loaded.messages)} messages of {path} are loaded{hint}.")

    def _toggle_thinking(self, _: Command) -> None:
        self._switch("think", not self.think)

    def _show_statistics(self, _: Command) -> None:
        nothing = f"no reply yet · context of {self.gemma.context} tokens"
        note(self.last.statistics() if self.last else nothing)

    def _set(self, command: Command) -> None:
        words = command.rest.removeprefix("parameter ").lstrip()
        name, _, text = words.partition(" ")
        text = text.strip()
        if not name:
            note(set_help(self._settable(), {**self._resolved(self.settings)}))
        elif name in SWITCHES and not text:
            self._switch(*SWITCHES[name])
        elif name == "system":
            self.conversation.system = text.strip('"') or None
            self._note("The system message is set." if text else "There is no system message now.")
        elif not text:
            raise InputError(f"/set {name} needs a value; /set lists what there is.")
        else:
            self._set_setting(name, text)

    def _set_setting(self, name: str, text: str) -> None:
        setting = setting_named(name, self._settable())
        settings: dict[str, Any] = {**self.settings}
        if text == "default":
            settings.pop(setting.name, None)
        else:
            settings[setting.name] = parse_value(setting, text)
        resolved = self._resolved(cast(Settings, settings))
        self.settings = cast(Settings, settings)
        self._note(f"{setting.name} is {shown({**resolved}[setting.name])}.")

    def _switch(self, name: str, value: bool) -> None:
        setattr(self, name, value)
        words = {"think": "Thinking", "wrap": "Word wrap", "history": "History"}
        self._note(f"{words.get(name, name.capitalize())} is {shown(getattr(self, name))}.")

    def _settable(self) -> dict[str, Setting]:
        """Return the settings that a chat has: likeliest tokens are printed as JSON only."""
        settings = applicable(self.gemma.config.diffusion is not None)
        return {name: setting for name, setting in settings.items() if name != "top_logprobs"}

    def _resolved(self, settings: Settings) -> Settings:
        return resolve(
            settings, self.gemma.defaults, diffusion=self.gemma.config.diffusion is not None
        )

    def _note(self, text: str) -> None:
        if not self.quiet:
            note(text)


def _path(command: Command) -> Path:
    """Return the file that a command names, also as a terminal writes one that is dropped on it."""
    path = Path(os.path.expanduser(command.rest.strip("'\"")))
    if os.name != "nt" and "\\" in command.rest and not path.exists():
        with suppress(ValueError):  # my\\ cat.jpg
            return Path(os.path.expanduser("".join(shlex.split(command.rest))))
    return path


def _closing(pieces: Iterator[Piece]) -> AbstractContextManager[Iterator[Piece]]:
    """Close a stream that is left early, at once: what computes for it stops."""
    return closing(cast("Generator[Piece, None, None]", pieces))


def _hiding(bar: StepsBar | None, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces; the bar disappears with the first one."""
    for piece in pieces:
        if bar:
            bar.hide()
        yield piece
