"""What clients ask replies to keep to, checked before a model is loaded for them.

Schemas and grammars come from strangers: the checks run in a thread, a few at once and within a
time, so that streams go on; what passes compiles as fast as it was checked."""

import asyncio
from typing import Any

from webgemma.constraints.grammar import Grammar
from webgemma.constraints.native import check_lark
from webgemma.constraints.specifications import Lark, specification
from webgemma.constraints.syntax import CALL
from webgemma.constraints.values import add_values
from webgemma.errors import InputError, MissingPackageError
from webgemma.server.protocol import Request, RequestError, Structure
from webgemma.sync import drive_aside

CHECK_SECONDS = 10.0
MAX_CHECKS = 4  # at once


class Structures:
    """Checks what requests ask for."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_CHECKS)

    async def check(self, request: Request) -> None:
        """Raise RequestError for a structure that cannot be, or a strict tool that cannot."""
        strict = _strict_schemas(request)
        if request.structure is None and not strict:
            return
        async with self._room:
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await drive_aside(_check(request.structure, strict))
            except TimeoutError:
                place = request.structure.where if request.structure else "tools"
                raise RequestError(
                    f"{place} takes more than {CHECK_SECONDS:.0f} seconds to check: ask for less.",
                    param=place,
                ) from None


def _strict_schemas(request: Request) -> dict[str, Any]:
    """Return the schemas of strict tools, which have been read, by their places in the body."""
    schemas = {}
    for at, tool in enumerate(request.tools):
        function = tool.get("function", tool)
        if function.get("strict") is True and function.get("parameters"):
            usual = f"tools[{at}].function.parameters"
            schemas[request.tool_places.get(function["name"], usual)] = function["parameters"]
    return schemas


async def _check(structure: Structure | None, schemas: dict[str, Any]) -> None:
    for place, schema in schemas.items():
        try:
            add_values(Grammar(), schema, CALL, place, objects_only=True, closed=True)
        except InputError as error:
            raise RequestError(str(error), param=place) from None
    if structure is None:
        return
    try:
        _check_structure(structure)
    except MissingPackageError:
        raise
    except InputError as error:
        sentence, kind, place = str(error), structure.kind, structure.where
        if sentence.startswith(kind):
            sentence = place + sentence.removeprefix(kind)
        elif not sentence.startswith(place):
            sentence = f"{place}: {sentence}"
        raise RequestError(sentence, param=place) from None


def _check_structure(structure: Structure) -> None:
    asked = specification(**structure.arguments())
    if isinstance(asked, Lark):
        check_lark(asked.text)
    elif asked is not None:
        asked.grammar()
