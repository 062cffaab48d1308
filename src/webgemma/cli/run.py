"""`webgemma run`: one answer, or a chat that goes on until the user leaves."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from webgemma.api import Gemma
from webgemma.cli.chat import Talk, print_reply
from webgemma.cli.options import (
    AdapterOption,
    Device,
    DeviceOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    ModelArgument,
    Precision,
    PrecisionOption,
    gpu_and_lora,
    read_stdin,
)
from webgemma.cli.terminal import err, progress, sentences
from webgemma.cli.watch import watched
from webgemma.errors import InputError
from webgemma.images import BUDGET, check_budget


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
    audio: Annotated[
        list[Path] | None, typer.Option(help="A sound to ask about; may repeat.")
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(help="A film to ask about: an animated GIF, WebP or PNG; may repeat."),
    ] = None,
    image_budget: Annotated[
        int, typer.Option(help="Soft tokens of a picture at most: 70, 140, 280, 560 or 1120.")
    ] = BUDGET,
    mmproj: Annotated[
        Path | None,
        typer.Option(help="The file of the model's eyes and ears, where that is another one."),
    ] = None,
    lora: LoraOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model, or get one answer.

    Examples:
      webgemma run
      webgemma run gemma4:e2b "Why is the sky blue?"
      webgemma run gemma4:e2b "What is this?" --image cat.jpg --audio note.wav
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
        media = _media(image, audio, video, image_budget)
        if media and raw:
            raise InputError("Pictures and sounds need a chat, and --raw is none.")
        question = _question(prompt)
        adapter, lora = gpu_and_lora(adapter, lora)
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
                lora=lora,
            )
        with gemma:
            if device == Device.auto and gemma.device.startswith("CPU") and err.is_terminal:
                err.print("No GPU found: computing on the CPU, in numpy.", style="dim")
            talk = Talk(gemma, settings, system, think, media)
            if question is None and not as_json:
                talk.go_on()
            elif question is None:
                raise InputError("--json needs a prompt, as an argument or on standard input.")
            elif raw:
                print_reply(watched(gemma.generate(question, **settings), gemma), as_json)
            else:
                print_reply(talk.ask(question), as_json)


def _media(
    images: list[Path] | None, sounds: list[Path] | None, films: list[Path] | None, budget: int
) -> list[dict[str, Any]]:
    """Parts of the question; what is wrong is said before a model is loaded."""
    check_budget(budget)
    kinds = {"image": images or [], "audio": sounds or [], "video": films or []}
    for paths in kinds.values():
        for path in paths:
            if not path.is_file():
                raise InputError(f"There is no file {path}.")
    parts = [{"type": kind, "path": path} for kind, some in kinds.items() for path in some]
    return [{**part, "budget": budget} for part in parts]


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
