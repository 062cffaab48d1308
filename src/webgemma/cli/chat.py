"""A chat in the terminal: messages with images and audio, replies as they are generated."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from webgemma.api import Gemma
from webgemma.cli.terminal import StepsBar, out, print_error, steps_bar, write_json
from webgemma.cli.watch import watched
from webgemma.errors import InputError
from webgemma.replies import Piece, TopToken
from webgemma.settings import Settings

HELP = """/clear    start a new conversation
/image    attach an image to the next message: /image cat.jpg
/audio    attach audio to the next message: /audio note.wav
/think    let the model think before it replies, or not
/bye      leave (also Ctrl-D)
\"\"\"       begin and end a message of several lines
Ctrl-C    stop the reply"""


class TerminalChat:
    """A conversation in the terminal."""

    def __init__(
        self,
        gemma: Gemma,
        settings: Settings,
        system: str | None,
        think: bool,
        media: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.gemma = gemma
        self.settings = settings
        self.think = think
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self.system)
        self.media = list(media)  # parts of the next message

    def reply(self, message: str) -> Iterator[Piece]:
        """Yield the reply to a message; both become part of the conversation."""
        parts = [*self.media, {"type": "text", "text": message}]
        self.messages.append({"role": "user", "content": parts if self.media else message})
        self.media = []
        text = ""
        try:
            with steps_bar("encoding images and audio") as bar:
                pieces = self.gemma.chat(
                    self.messages, think=self.think, progress=bar.show, **self.settings
                )
                for piece in watched(_hiding(bar, pieces), self.gemma):
                    text += piece.text
                    yield piece
        finally:
            self.messages.append({"role": "assistant", "content": text})

    def loop(self) -> None:
        """Read messages and print replies until the user leaves."""
        _enable_line_editing()
        out.print(f"{self.gemma.name} · /help for help, Ctrl-D to leave", style="dim", markup=False)
        while (line := _read_message()) is not None:
            if line in ("/bye", "/exit", "/quit"):
                return
            command, _, rest = line.partition(" ")
            if not line.startswith("/"):
                if line:
                    self._print_reply(line)
            elif command in ("/image", "/audio"):
                self._attach(command[1:], rest.strip().strip("'\""))
            elif line == "/clear":
                self.messages, self.media = list(self.system), []
                out.print("This is a new conversation.", style="dim")
            elif line == "/think":
                self.think = not self.think
                out.print(f"Thinking is {'on' if self.think else 'off'}.", style="dim")
            else:
                out.print(HELP, style="dim", markup=False)

    def _attach(self, kind: str, path: str) -> None:
        if not Path(path).expanduser().is_file():
            print_error(f"There is no file {path!r}.")
            return
        self.media.append({"type": kind, "path": Path(path).expanduser()})
        out.print(f"{path} is attached to your next message.", style="dim", markup=False)

    def _print_reply(self, message: str) -> None:
        before = len(self.messages)
        try:
            print_reply(self.reply(message), as_json=False)
        except KeyboardInterrupt:
            out.print()
        except InputError as error:  # such as a conversation that is longer than the context
            del self.messages[before:]
            print_error(str(error))


def _hiding(bar: StepsBar, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces; the bar disappears with the first one."""
    for piece in pieces:
        bar.hide()
        yield piece


def _read_message() -> str | None:
    """Read a line, or several between triple quotes; None at the end of input."""
    try:
        line = input(">>> ").strip()
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input("... "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip()
    except EOFError:
        out.print()
        return None
    except KeyboardInterrupt:
        out.print()
        return ""


def _enable_line_editing() -> None:
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  (importing it gives input() history and editing)


def print_reply(pieces: Iterator[Piece], as_json: bool) -> None:
    """Print a reply as it is generated, or all of it as JSON at the end."""
    start = time.perf_counter()
    received: list[Piece] = []
    thinking = False
    for piece in pieces:
        received.append(piece)
        if as_json:
            continue
        if piece.thinking:
            out.print(piece.thinking, end="", style="dim italic", markup=False, soft_wrap=True)
            thinking = True
        if piece.text:
            out.print("\n\n" * thinking + piece.text, end="", markup=False, soft_wrap=True)
            thinking = False
        for call in piece.tool_calls:
            out.print(
                f"[calls {call.name} {call.arguments}]", style="cyan", markup=False, soft_wrap=True
            )
        out.file.flush()
    if as_json:
        write_json(_reply_facts(received, time.perf_counter() - start))
    else:
        out.print()


def _reply_facts(pieces: list[Piece], seconds: float) -> dict[str, Any]:
    facts = {
        "text": "".join(piece.text for piece in pieces),
        "thinking": "".join(piece.thinking for piece in pieces),
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments}
            for p in pieces
            for call in p.tool_calls
        ],
        "finish": pieces[-1].finish if pieces else "length",
        "tokens": [piece.token for piece in pieces],
        "logprobs": [round(piece.logprob, 6) for piece in pieces],
        "seconds": round(seconds, 3),
    }
    if any(piece.top for piece in pieces):
        facts["top_logprobs"] = [[_top_facts(top) for top in piece.top] for piece in pieces]
    return facts


def _top_facts(top: TopToken) -> dict[str, Any]:
    return {"token": top.token, "text": top.text, "logprob": round(top.logprob, 6)}
