"""The prompt of the terminal's chat: editing, pasted text, several lines, history, completion.

Imported only where a person types: prompt_toolkit takes a while to import."""

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from webgemma.cli.history import HistoryFile
from webgemma.cli.reading import CONTINUED, PROMPT, Typed, is_open, unquoted

FILE_COMMANDS = ("/image", "/audio", "/load", "/save")


class UnusableTerminalError(Exception):
    """The terminal cannot move its cursor, as some of Windows."""


class PromptReader:
    """Reads messages with an editor of several lines.

    Enter sends, also pasted text with line breaks; Alt+Enter or Esc Enter begins a line."""

    def __init__(
        self,
        terminal: TextIO,
        commands: Sequence[str],
        settings: Sequence[str],
        history: HistoryFile,
    ) -> None:
        try:
            self._session: PromptSession[str] = PromptSession(
                PROMPT,
                output=_output(terminal),
                multiline=True,
                prompt_continuation=_continuation,
                placeholder=[("fg:ansibrightblack", "Send a message (/help for help)")],
                key_bindings=_key_bindings(),
                history=_KeptHistory(history),
                completer=CommandCompleter(commands, settings),
                complete_style=CompleteStyle.READLINE_LIKE,
                complete_while_typing=False,
                enable_suspend=True,
            )
        except Exception as error:  # prompt_toolkit's class for it exists on Windows only
            if sys.platform == "win32":
                raise UnusableTerminalError from error
            raise

    def read(self) -> Typed | None:
        """Return what was typed; None for Ctrl-D."""
        try:
            return unquoted(self._session.prompt())
        except EOFError:
            return None


def _output(terminal: TextIO) -> Output:
    """Return the terminal. It is not asked for its cursor's position: some never answer."""
    output = create_output(terminal)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False
    return output


def _continuation(_width: int, _line: int, wrapped: int | bool) -> str:
    return "" if wrapped else CONTINUED


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _KeptHistory(History):
    """prompt_toolkit's view of the file."""

    def __init__(self, file: HistoryFile) -> None:
        super().__init__()
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._file.load())

    def store_string(self, string: str) -> None:
        self._file.append(string)


class CommandCompleter(Completer):
    """Completes commands, names of settings after /set, and names of files."""

    def __init__(self, commands: Sequence[str], settings: Sequence[str]) -> None:
        self._commands = WordCompleter([f"/{name}" for name in commands], WORD=True)
        self._settings = WordCompleter(settings, WORD=True)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, space, rest = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return ()
        if not space:
            return self._commands.get_completions(document, event)
        rest = rest.lstrip()
        if command in FILE_COMMANDS:
            return map(_with_slash, self._paths.get_completions(Document(rest), event))
        if command == "/set":
            last = rest.removeprefix("parameter ").lstrip()
            return self._settings.get_completions(Document(last), event)
        return ()


def _with_slash(path: Completion) -> Completion:
    """Return a folder with the slash that its list entry has, so that its files come next."""
    slash = "/" if path.display_text.endswith("/") else ""
    return Completion(path.text + slash, path.start_position, display=path.display)
