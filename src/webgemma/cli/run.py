"""`webgemma run`: one reply, or a chat until the user leaves."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from webgemma.api import Gemma
from webgemma.cli.chat import TerminalChat
from webgemma.cli.conversation import attachment
from webgemma.cli.options import (
    ContextOption,
    Device,
    DeviceOption,
    DraftOption,
    GpuOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    MmprojOption,
    ModelArgument,
    NoDraftOption,
    Precision,
    PrecisionOption,
    ThinkOption,
    chosen_draft,
    with_settings,
)
from webgemma.cli.preflight import check_order, check_request, check_settings
from webgemma.cli.reply import note
from webgemma.cli.structure import read_structure
from webgemma.cli.terminal import bytes_bar, err, reported_errors
from webgemma.cli.tokens import read_stdin
from webgemma.cli.tools import agree, agree_quietly, ask, check_confirmable, load_tools
from webgemma.errors import InputError
from webgemma.images import BUDGET, check_budget
from webgemma.models import find_model
from webgemma.packages import fetched_model


@with_settings
def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The message; without it a chat begins.")
    ] = None,
    *,
    device: DeviceOption = Device.auto,
    gpu: GpuOption = None,
    lora: LoraOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    context: ContextOption = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    think: ThinkOption = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image for the message; may repeat.")
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(help="Audio for the message; may repeat.")
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(help="A video for the message: an animated GIF, WebP or PNG; may repeat."),
    ] = None,
    image_budget: Annotated[
        int, typer.Option(help="Soft tokens of an image, at most: 70, 140, 280, 560 or 1120.")
    ] = BUDGET,
    mmproj: MmprojOption = None,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Reply in JSON of the JSON Schema in this file."),
    ] = None,
    choices: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Reply with one of these texts.")
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Reply with a text that matches this pattern as a whole."
        ),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Reply with a text of the grammar in this file, in GBNF or Lark."
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Let the model call the public functions of this file; you are asked before each "
            "call.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Make the calls of --tools without a question.")
    ] = False,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print replies and errors, nothing else.")
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            "--verbose",
            help="Print tokens, tokens/s, drafts and context after each reply.",
        ),
    ] = False,
    nowordwrap: Annotated[
        bool, typer.Option("--nowordwrap", help="Leave long lines to the terminal.")
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option("--no-history", help="Do not keep what is typed for the next chat."),
    ] = False,
    as_json: JsonOption = False,
    settings: Any,
) -> None:
    """Chat with a model, or get one reply.

    Examples:
      webgemma run
      webgemma run gemma4:e2b "Why is the sky blue?"
      webgemma run gemma4:e2b "What is this?" --image cat.jpg --audio note.wav
      webgemma run diffusiongemma:26b "Write a poem." --watch
      webgemma run gemma4:e2b "Is ice cold?" --choices yes,no
      webgemma run gemma4:e2b "Rome has 2.8 million people." --schema city.json --json
      webgemma run gemma4:e2b "Is it warm in Oslo?" --tools weather.py
      cat letter.txt | webgemma run gemma4:e2b "Summarise this:"
      webgemma run gemma4:e2b "Is ice cold? Yes or no." --max-tokens 1 --top-logprobs 5 --json
    """
    with reported_errors():
        check_order(model, prompt)
        check_settings(settings)
        if settings.get("top_logprobs") and not as_json:
            raise InputError("--top-logprobs needs --json, which prints them.")
        if quiet and stats:
            raise InputError("--quiet prints less and --stats prints more; choose one.")
        if yes and tools is None:
            raise InputError("--yes agrees to calls of functions: --tools names their file.")
        attached = _attachments(image, audio, video, image_budget)
        if attached and raw:
            raise InputError("Images and audio need the chat template; leave --raw out.")
        if tools and raw:
            raise InputError("Tools need the chat template; leave --raw out.")
        structure = read_structure(schema, choices, regex, grammar)
        drafter = chosen_draft(draft, no_draft)
        message = _message(prompt)
        if message is None and (as_json or raw):
            option = "--json" if as_json else "--raw"
            raise InputError(f"{option} needs a prompt, as an argument or on standard input.")
        check_request(
            model,
            message,
            settings,
            system=system,
            context=context,
            raw=raw,
            structure=structure,
            draft=drafter,
        )
        functions, confirm = [], None
        if tools is not None:
            check_confirmable(yes)
            functions = load_tools(tools)
            confirm = ask if not yes else agree_quietly if quiet or as_json else agree
        with nullcontext() if quiet else bytes_bar("loading") as show:
            gemma = Gemma.load(
                model,
                device.value,
                context=context,
                kv=kv.value,
                precision=precision.value,
                gpu=gpu,
                progress=show,
                mmproj=mmproj,
                draft=drafter,
                lora=lora,
            )
        found = find_model(model)
        base = None if raw or quiet else fetched_model(found.label, found.path)
        with gemma:
            if base is not None:
                note(base.note)
            on_cpu = device == Device.auto and gemma.device.startswith("CPU")
            if on_cpu and err.is_terminal and not quiet:
                err.print("No GPU found: computing on the CPU, in numpy.", style="dim")
            chat = TerminalChat(
                gemma,
                settings,
                system=system,
                think=think,
                attached=attached,
                structure=structure,
                tools=functions,
                confirm=confirm,
                quiet=quiet,
                verbose=stats,
                wrap=not nowordwrap,
                history=not no_history,
            )
            if message is None:
                chat.loop()
            else:
                chat.reply_once(message, raw=raw, as_json=as_json)


def _attachments(
    images: list[Path] | None, audio: list[Path] | None, videos: list[Path] | None, budget: int
) -> list[dict[str, Any]]:
    """Return the files as parts of a message; InputError before a model is loaded."""
    check_budget(budget)
    kinds = {"image": images or [], "audio": audio or [], "video": videos or []}
    return [
        attachment(kind, path, budget=budget) for kind, paths in kinds.items() for path in paths
    ]


def _message(prompt: str | None) -> str | None:
    """Return the prompt and, unless that is a terminal, standard input; None begins a chat."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = read_stdin()
    parts = [part for part in (prompt, piped.strip("\n")) if part]
    if not parts:
        raise InputError("There is no prompt: none was given, and standard input is empty.")
    return "\n\n".join(parts)
