"""Replies that keep to a structure and replies with drafts, inside the tab."""

import asyncio
from typing import Any

import js
from inside import load
from pyodide.http import pyfetch

from webgemma import Gemma, InputError

LIBRARY = "xgrammar.js"  # on the test's server
MESSAGE = "Tell me about the sea."


async def structured(cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Return (text, tool calls, finish) of the bundled model's replies, side by side."""
    js.webgemmaXgrammarUrl = LIBRARY
    with await Gemma.aload() as gemma:

        async def one(case: dict[str, Any]) -> list[Any]:
            pieces = [piece async for piece in gemma.achat(MESSAGE, **case)]
            calls = [[call.name, call.arguments] for piece in pieces for call in piece.tool_calls]
            return ["".join(piece.text for piece in pieces), calls, pieces[-1].finish]

        return await asyncio.gather(*map(one, cases))


async def unsupported(schema: dict[str, Any]) -> str:
    """Return why no reply can keep to a schema."""
    js.webgemmaXgrammarUrl = LIBRARY
    with await Gemma.aload() as gemma:
        try:
            async for _ in gemma.achat(MESSAGE, schema=schema):
                raise AssertionError("there is no constraint")
        except InputError as error:
            return str(error)
    raise AssertionError("nothing was raised")


async def drafted(kind: str, ids: list[int], settings: dict[str, Any], ways: list[str]) -> Any:
    """Return the tokens, and the numbers of drafts and of accepted ones, for ways to speculate."""
    with open("/drafter.gguf", "wb") as file:
        file.write(await (await pyfetch(f"{kind}-drafter.gguf")).bytes())
    found = []
    with await load(kind, kv="f32", draft="/drafter.gguf") as gemma:
        for way in ways:
            pieces = [p async for p in gemma.agenerate(ids, speculate=way, **settings)]
            usage = pieces[-1].usage
            assert usage is not None
            found.append([[p.token for p in pieces], usage.drafted, usage.accepted])
    return found
