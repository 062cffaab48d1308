"""The command line: `webgemma run`, `list`, `show`, `check`, `bench` and others."""

import os
import sys
import tempfile
from typing import Annotated

import typer

from webgemma import __version__
from webgemma.cli import (
    bench,
    check,
    convert,
    files,
    gpus,
    kernels,
    merge,
    run,
    tokens,
    train,
    web,
)

app = typer.Typer(
    name="webgemma",
    help="Run Gemma 4 straight from Ollama's files. Nothing leaves this machine.",
    epilog="Start with: webgemma run · webgemma list · webgemma run gemma4:e2b 'Why is it dark?'",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("run")(run.run)
app.command("list")(files.list_models)
app.command("ls", hidden=True)(files.list_models)
app.command("show")(files.show)
app.command("verify")(files.verify)
app.command("tokenize")(tokens.tokenize)
app.command("render")(tokens.render)
app.command("logits")(tokens.logits)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("convert")(convert.convert)
app.command("train")(train.train)
app.command("merge")(merge.merge_command)
app.command("gpus")(gpus.gpus)
app.command("kernels")(kernels.kernels)
app.command("web")(web.web)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"webgemma {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version  # its callback prints it


def main() -> None:
    """Run the `webgemma` command."""
    if sys.platform == "linux":  # without one, Vulkan prints an error
        os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    app()
