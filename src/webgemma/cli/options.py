"""Arguments and options that several commands share."""

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from webgemma.errors import InputError
from webgemma.settings import SETTINGS, Setting

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="An Ollama name, a path to a .gguf, or - for the bundled model.",
        callback=lambda name: None if name == "-" else name,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    gpu = "gpu"
    cpu = "cpu"


class Kv(StrEnum):
    """How the GPU stores keys and values."""

    f16 = "f16"
    f32 = "f32"


class Precision(StrEnum):
    """The precision of activations on the GPU."""

    auto = "auto"
    exact = "exact"
    int16 = "int16"
    int8 = "int8"
    f16 = "f16"


ContextOption = Annotated[
    int | None,
    typer.Option("--context", help="Positions of prompt and reply together, at most."),
]
ThinkOption = Annotated[
    bool, typer.Option("--think", help="Let the model think before it replies.")
]
MmprojOption = Annotated[
    Path | None, typer.Option("--mmproj", help="The file of the vision and audio encoders.")
]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to compute.")]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="Use the GPU whose name contains this; dawn, wgpu, dawn:NAME and wgpu:NAME choose "
        "the WebGPU library.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="PATH[:SCALE]",
        help="Apply a LoRA adapter: a PEFT folder or a GGUF file; may repeat.",
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        metavar="FILE",
        help="The model's drafter (gemma4-assistant), if it is not in Ollama's store.",
    ),
]
NoDraftOption = Annotated[
    bool, typer.Option("--no-draft", help="Leave the drafter out that Ollama's store has.")
]
KvOption = Annotated[Kv, typer.Option("--kv", help="How the GPU stores keys and values.")]
PrecisionOption = Annotated[
    Precision, typer.Option("--precision", help="The precision of activations on the GPU.")
]

F = TypeVar("F", bound=Callable[..., Any])


def chosen_draft(file: Path | None, no_draft: bool) -> Path | Literal[False] | None:
    """Return the drafter as `Gemma.load` takes it; InputError if there is one and is to be none."""
    if file is not None and no_draft:
        raise InputError("--draft names a drafter and --no-draft leaves it out; choose one.")
    return False if no_draft else file


def with_settings(command: F) -> F:
    """Give a command an option for every generation setting that one value can express.

    The command receives them as one dictionary, `settings`, of those that were given."""
    own = inspect.signature(command)
    options = [_option(setting) for setting in SETTINGS.values() if _has_option(setting)]

    @wraps(command)
    def run(**arguments: Any) -> Any:
        settings = {option.name: arguments.pop(option.name) for option in options}
        given = {
            n: str(value) if isinstance(value, StrEnum) else value
            for n, value in settings.items()
            if value is not None and value is not False
        }
        return command(**arguments, settings=given)

    kept = [p for p in own.parameters.values() if p.name != "settings"]
    parameters = [*kept, *options]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run  # type: ignore[return-value]


def _has_option(setting: Setting) -> bool:
    return setting.type in (int, float, bool, str) or setting.name == "stop"


def _option(setting: Setting) -> inspect.Parameter:
    help = setting.help
    if setting.applies == "diffusion":
        help = f"DiffusionGemma: {help[0].lower()}{help[1:]}"
    type_: Any = (setting.type if setting.type in (int, float) else list[str]) | None
    option, default = typer.Option(help=help), None
    if setting.choices:
        values: Any = StrEnum("values", list(setting.choices))  # type: ignore[misc]
        type_ = values | None
    if setting.type is bool:  # --watch, without --no-watch
        type_, option, default = bool, typer.Option(f"--{setting.name}", help=help), False
    annotation = Annotated[type_, option]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(setting.name, kind, default=default, annotation=annotation)
