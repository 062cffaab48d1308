"""`webgemma run`: one answer, or a chat that goes on until the user leaves."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from webgemma.api import Gemma
from webgemma.cli.terminal import err, out, progress, sentences, write_json
from webgemma.cli.watch import watched
from webgemma.cli.words import (
    AdapterOption,
    Device,
    DeviceOption,
    JsonOption,
    Kv,
    KvOption,
    ModelArgument,
    Precision,
    PrecisionOption,
    read_stdin,
)
from webgemma.defaults import Settings
from webgemma.errors import InputError
from webgemma.pieces import Piece, TopToken

HELP = """/clear    forget the conversation
/think    let the model think before it answers, or not
/bye      leave (also Ctrl-D)
\"\"\"       begin and end a message of several lines
Ctrl-C    stop the answer"""


def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; without it a chat begins.")
    ] = None,
    device: DeviceOption = Device.auto,
    adapter: AdapterOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    system: Annotated[str | None, typer.Option(help="What the model should be or know.")] = None,
    think: Annotated[
        bool, typer.Option("--think", help="Let the model think before it answers.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the likeliest token.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest; 0: all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among those that hold this share.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop what is less likely than this share of the best.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: avoid recent tokens.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Above 0: avoid recent tokens.")
    ] = None,
    top_logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: report the n likeliest tokens of each step, 20 at most."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="DiffusionGemma: denoising steps of a block, at most.")
    ] = None,
    entropy_bound: Annotated[
        float | None, typer.Option(help="DiffusionGemma: how much doubt a step may settle.")
    ] = None,
    t_min: Annotated[
        float | None, typer.Option(help="DiffusionGemma: temperature of a block's end.")
    ] = None,
    t_max: Annotated[
        float | None, typer.Option(help="DiffusionGemma: temperature of a block's beginning.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="DiffusionGemma: show blocks coming into focus.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may repeat.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Positions at most, prompt and answer together.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture to ask about; may repeat.")
    ] = None,
    mmproj: Annotated[
        Path | None, typer.Option(help="The file of the model's eyes, where that is another one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model, or get one answer.

    Examples:
      webgemma run
      webgemma run gemma4:e2b "Why is the sky blue?"
      webgemma run gemma4:e2b "What is this?" --image cat.jpg
      webgemma run diffusiongemma:26b "Write a poem." --watch
      cat letter.txt | webgemma run gemma4:e2b "Summarise this:"
      webgemma run gemma4:e2b "Is ice cold? Yes or no." --max-tokens 1 --top-logprobs 5 --json
    """
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "top_logprobs": top_logprobs,
        "seed": seed,
        "steps": steps,
        "entropy_bound": entropy_bound,
        "t_min": t_min,
        "t_max": t_max,
        "watch": watch or None,
        "stop": stop or None,
    }
    settings: Any = {name: value for name, value in given.items() if value is not None}
    with sentences():
        if top_logprobs and not as_json:
            raise InputError("--top-logprobs needs --json, which is where they are printed.")
        _check_images(image or [], raw)
        question = _question(prompt)
        with progress("loading") as show:
            gemma = Gemma.load(
                model,
                device.value,
                context=context,
                kv=kv.value,
                precision=precision.value,
                adapter=adapter,
                progress=show,
                mmproj=mmproj,
            )
        with gemma:
            if device == Device.auto and gemma.device.startswith("CPU") and err.is_terminal:
                err.print("No GPU found: computing on the CPU, in numpy.", style="dim")
            talk = Talk(gemma, settings, system, think, image or [])
            if question is None and not as_json:
                talk.go_on()
            elif question is None:
                raise InputError("--json needs a prompt, as an argument or on standard input.")
            elif raw:
                _print_reply(watched(gemma.generate(question, **settings), gemma), as_json)
            else:
                _print_reply(talk.ask(question), as_json)


def _check_images(images: list[Path], raw: bool) -> None:
    """What is wrong is said before a model is loaded."""
    if images and raw:
        raise InputError("--image needs a chat, and --raw is none: leave one of them out.")
    for path in images:
        if not path.is_file():
            raise InputError(f"There is no picture {path}.")


def _question(prompt: str | None) -> str | None:
    """The prompt and, when it is no terminal, standard input; None begins a chat."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = read_stdin()
    parts = [part for part in (prompt, piped.strip("\n")) if part]
    if not parts:
        raise InputError(
            "There is nothing to answer: standard input is empty and no prompt was given."
        )
    return "\n\n".join(parts)


class Talk:
    """A conversation in the terminal."""

    def __init__(
        self,
        gemma: Gemma,
        settings: Settings,
        system: str | None,
        think: bool,
        images: Sequence[Path] = (),
    ) -> None:
        self.gemma = gemma
        self.settings = settings
        self.think = think
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self.system)
        self.images = [{"type": "image", "path": path} for path in images]  # of the next question

    def ask(self, question: str) -> Iterator[Piece]:
        """The answer's pieces; question and answer become part of the conversation."""
        parts = [*self.images, {"type": "text", "text": question}]
        self.messages.append({"role": "user", "content": parts if self.images else question})
        self.images = []
        answer = ""
        try:
            pieces = self.gemma.chat(self.messages, think=self.think, **self.settings)
            for piece in watched(pieces, self.gemma):
                answer += piece.text
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": answer})

    def go_on(self) -> None:
        """Read, answer, again, until the user leaves."""
        _enable_line_editing()
        out.print(f"{self.gemma.name} · /help for help, Ctrl-D to leave", style="dim", markup=False)
        while (line := _read_message()) is not None:
            if line in ("/bye", "/exit", "/quit"):
                return
            if not line.startswith("/"):
                if line:
                    self._answer(line)
            elif line == "/clear":
                self.messages = list(self.system)
                out.print("The conversation is forgotten.", style="dim")
            elif line == "/think":
                self.think = not self.think
                out.print(f"Thinking is {'on' if self.think else 'off'}.", style="dim")
            else:
                out.print(HELP, style="dim", markup=False)

    def _answer(self, question: str) -> None:
        before = len(self.messages)
        try:
            _print_reply(self.ask(question), as_json=False)
        except KeyboardInterrupt:
            out.print()
        except InputError as error:  # the conversation has outgrown the context, say
            del self.messages[before:]
            err.print(f"[bold red]error:[/] {error}", soft_wrap=True)


def _read_message() -> str | None:
    """A line, or several between triple quotes; None at the end of input."""
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


def _print_reply(pieces: Iterator[Piece], as_json: bool) -> None:
    """Show an answer as it comes, or all of it as JSON at the end."""
    start = time.perf_counter()
    got: list[Piece] = []
    thinking = False
    for piece in pieces:
        got.append(piece)
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
        write_json(_reply_facts(got, time.perf_counter() - start))
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
