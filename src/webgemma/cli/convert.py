"""`webgemma convert`: a Hugging Face folder becomes a GGUF file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from webgemma.cli.options import JsonOption
from webgemma.cli.terminal import bytes_bar, format_nbytes, out, reported_errors, write_json
from webgemma.convert import convert as convert_folder
from webgemma.errors import InputError


class Format(StrEnum):
    """How to store matrices."""

    stored = "stored"
    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"


def convert(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder with config.json and safetensors."),
    ],
    to: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    format: Annotated[
        Format, typer.Option(help="How to store matrices; stored: as they are.")
    ] = Format.stored,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a Hugging Face folder to GGUF: Gemma 4 or 3, DiffusionGemma, EmbeddingGemma, drafter.

    Only the text model is converted, of EmbeddingGemma with its dense layers. Without a
    tokenizer.json the file has no vocabulary.

    Examples:
      webgemma convert ./diffusiongemma-26B-A4B-it diffusiongemma.gguf
      webgemma convert ./gemma-4-E2B-it-assistant drafter.gguf
      webgemma convert ./embeddinggemma-300m embeddinggemma.gguf
    """
    with reported_errors():
        if to.exists() and not force:
            raise InputError(f"{to} already exists; --force replaces it.")
        with bytes_bar("converting") as show:
            convert_folder(folder, to, format=format.value, progress=show)
        if as_json:
            write_json({"out": str(to), "nbytes": to.stat().st_size, "format": format.value})
            return
        out.print(f"{to}: {format_nbytes(to.stat().st_size)}", markup=False, soft_wrap=True)
