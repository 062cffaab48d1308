"""All commands, and how each of them ends: its exit code, and its errors as one sentence."""

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from webgemma import __version__
from webgemma.cli import (
    batch,
    bench,
    check,
    convert,
    embed,
    fetch,
    files,
    gpus,
    kernels,
    merge,
    run,
    search,
    serve,
    tokens,
    train,
    web,
)
from webgemma.cli.interrupts import EXIT_CODE
from webgemma.cli.terminal import discard, prepare_output, print_error, sentence

ClickError: type[Exception] = typer.BadParameter.__mro__[2]  # typer exports only those below it

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
app.command("fetch")(fetch.fetch)
app.command("show")(files.show)
app.command("verify")(files.verify)
app.command("tokenize")(tokens.tokenize)
app.command("render")(tokens.render)
app.command("logits")(tokens.logits)
app.command("embed")(embed.embed)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("convert")(convert.convert)
app.command("train")(train.train)
app.command("merge")(merge.merge_command)
app.command("gpus")(gpus.gpus)
app.command("kernels")(kernels.kernels)
app.command("serve")(serve.serve)
app.command("batch")(batch.batch)
app.command("index")(search.index)
app.command("ask")(search.ask)
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


def run_command() -> int:
    """Run the command that the arguments name; return its exit code."""
    prepare_output()
    code, problem = _run()
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, unless the reader is gone, as in `… | head -1`
        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            code, problem = 1, problem or sentence(error)
    if problem:
        with suppress(OSError):
            print_error(problem)
    return code


def _run() -> tuple[int, str | None]:
    """Run it; return its exit code and what it has not yet said of an error."""
    try:
        code = app(standalone_mode=False, prog_name="webgemma")
        return (code if isinstance(code, int) else 0), None
    except ClickError as error:
        problem = _usage(error)
        return (1 if problem else 0), problem
    except OSError as error:
        return 1, sentence(error)
    except typer.Abort:
        return EXIT_CODE, None
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        return 0, None  # rich and typer leave with 1 where the reader of a pipe is gone


def _usage(error: Any) -> str | None:
    """Return a mistake in the arguments as one sentence; None where the help was printed."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "webgemma"
    return f"{message}; see {command} --help." if message else None
