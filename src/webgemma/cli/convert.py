"""`webgemma convert`: a model in Hugging Face's layout becomes a GGUF file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from webgemma.cli.terminal import human_nbytes, out, progress, sentences
from webgemma.convert import convert as convert_folder
from webgemma.errors import InputError


class Format(StrEnum):
    """How to store matrices."""

    stored = "stored"
    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"


def convert(
    folder: Annotated[Path, typer.Argument(help="The folder with config.json and safetensors.")],
    to: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    format: Annotated[
        Format, typer.Option(help="How to store matrices; stored: as they are.")
    ] = Format.stored,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Turn a DiffusionGemma or Gemma 4 of Hugging Face's layout into a GGUF file.

    Only the text model is converted. Without a tokenizer.json the file has no words and takes ids.

    Example: webgemma convert ./diffusiongemma-26B-A4B-it diffusiongemma.gguf
    """
    with sentences():
        if to.exists() and not force:
            raise InputError(f"{to} is there already; --force replaces it.")
        with progress("converting") as show:
            convert_folder(folder, to, format=format.value, progress=show)
        out.print(f"{to}: {human_nbytes(to.stat().st_size)}", markup=False, soft_wrap=True)
