"""What a reply has to keep to, as the command line says it, checked before a model is loaded."""

import json
from pathlib import Path
from typing import Any

from webgemma.constraints.native import check_installed, check_lark
from webgemma.constraints.specifications import Json, Lark, specification
from webgemma.errors import InputError

MAX_FILE_NBYTES = 10_000_000


def read_structure(
    schema: Path | None, choices: str | None, regex: str | None, grammar: Path | None
) -> dict[str, Any]:
    """Return the keyword of `Gemma.chat` that says what a reply has to be, or nothing.

    InputError for what cannot be used, and where what keeps replies to it is not installed."""
    options = {"--schema": schema, "--choices": choices, "--regex": regex, "--grammar": grammar}
    names = [name for name, value in options.items() if value is not None]
    if not names:
        return {}
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} say what a reply has to be; choose one.")
    check_installed()
    given: dict[str, Any] = {}
    if schema is not None:
        given["schema"] = _read_schema(schema)
    elif grammar is not None:
        given["grammar"] = _read(grammar)
    elif choices is not None:
        given["choices"] = [choice.strip() for choice in choices.split(",")]
    else:
        given["regex"] = regex
    try:
        asked = specification(**given)
        if isinstance(asked, Lark):
            check_lark(asked.text)
        elif asked is not None:
            asked.grammar()
    except InputError as error:
        before = "" if schema else f"{grammar}: " if grammar else "--"
        raise InputError(f"{before}{error}") from None
    return given


def _read_schema(path: Path) -> Json:
    """Return the JSON Schema of a file.

    Objects have the properties that it declares, unless it allows others, as at Ollama's."""
    try:
        schema = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if not isinstance(schema, dict | bool):
        raise InputError(f"{path} is no JSON Schema, which is an object: {{ and }} are around it.")
    return Json(schema, closed=True, where=str(path))


def _read(path: Path) -> str:
    """Return the text of a file."""
    if not path.is_file():
        is_there = f"{path} is {'a folder' if path.is_dir() else 'no regular file'}"
        raise InputError(f"{is_there if path.exists() else f'There is no file {path}'}.")
    if path.stat().st_size > MAX_FILE_NBYTES:
        raise InputError(f"{path} has more than {MAX_FILE_NBYTES} bytes.")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None
