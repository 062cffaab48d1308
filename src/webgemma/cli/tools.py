"""`webgemma run --tools`: the functions of a Python file, which the model may call if you agree."""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from webgemma.calling.functions import declared_tools
from webgemma.cli.reading import is_tty
from webgemma.cli.reply import CALL, call_text, note
from webgemma.cli.terminal import err
from webgemma.errors import InputError
from webgemma.text.calls import ToolCall

MODULE = "webgemma_tools"  # the name of the file's module
QUESTION = "  Make this call? [y/N] "

Function = Callable[..., Any]


def check_confirmable(assume_yes: bool) -> None:
    """Raise InputError if nobody could be asked before a call."""
    if not assume_yes and not (is_tty(sys.stdin) and is_tty(sys.stderr)):
        raise InputError(
            "Nobody can be asked here before the model calls a function: there is no terminal. "
            "--yes makes every call without a question."
        )


def load_tools(path: Path) -> list[Function]:
    """Return the public functions that a Python file defines, in their order.

    The file is run; InputError for one that cannot be, or has no function that can be a tool."""
    if not path.is_file():
        what = f"{path} is a folder" if path.is_dir() else f"There is no file {path}"
        raise InputError(f"{what}.")
    found: dict[str, Function] = {}
    for value in vars(_run(path)).values():
        if inspect.isfunction(value) and value.__module__ == MODULE:
            name = value.__name__
            if name.isidentifier() and not name.startswith("_"):
                found[name] = _plain(value)
    if not found:
        raise InputError(f"{path} defines no function whose name begins with a letter.")
    try:
        declared_tools(list(found.values()))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return list(found.values())


def ask(call: ToolCall) -> bool:
    """Return whether the user lets a call be made; Ctrl-C is a KeyboardInterrupt."""
    note(call_text(call), CALL)
    err.print(QUESTION, end="", markup=False)
    err.file.flush()
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        err.print()
        raise
    if not line.endswith("\n"):  # Ctrl-D
        err.print()
    return line.strip().lower() in ("y", "yes")


def agree(call: ToolCall) -> bool:
    """Say which call is made."""
    note(call_text(call), CALL)
    return True


def agree_quietly(_: ToolCall) -> bool:
    """Let a call be made."""
    return True


def _run(path: Path) -> ModuleType:
    """Return the module of a file; its neighbours can be imported, as those of a script."""
    module = ModuleType(MODULE)
    module.__file__ = str(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[MODULE] = module  # where type hints are looked up
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        with redirect_stdout(sys.stderr):
            exec(code, vars(module))
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise InputError(f"{path}{where}: {error.msg}.") from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}{_line(error, path)}: {_described(error)}.") from None
    return module


def _line(error: BaseException, path: Path) -> str:
    """Return the line of the file in which an error was raised."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            number = trace.tb_lineno
        trace = trace.tb_next
    return f", line {number}" if number else ""


def _described(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _plain(function: Function) -> Function:
    """Return a function that prints to standard error, waits for coroutines, and cannot exit."""

    @functools.wraps(function)
    def called(**arguments: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):
                value = function(**arguments)
                return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
        except SystemExit as error:
            raise RuntimeError(_described(error)) from None

    return called


async def _awaited(value: Any) -> Any:
    return await value
