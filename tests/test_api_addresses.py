"""Models at an address, natively: read from there by whoever can wait, refused by plain code."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import SMALL, tiny_gguf

from tests.gguf.server import serve
from webgemma import Gemma, GgufError, InputError, ModelNotFoundError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
IDS = [2, 30, 40, 50]


async def written(model: str, device: Any) -> tuple[str, list[int]]:
    with await Gemma.aload(model, device) as gemma:
        return gemma.name, [p.token async for p in gemma.agenerate(IDS, **GREEDY)]


def test_a_model_is_read_where_it_is(tmp_path: Path) -> None:
    data = tiny_gguf(SMALL)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    with Gemma.load(path, "gpu") as gemma:
        wanted = [piece.token for piece in gemma.generate(IDS, **GREEDY)]
    with serve({"/my model.gguf": data}) as site:
        name, found = asyncio.run(written(f"{site.url}/my%20model.gguf", "gpu"))
        assert (name, found) == ("my model.gguf", wanted)
        with pytest.raises(GgufError, match="is not on this machine: load it on a GPU"):
            asyncio.run(written(f"{site.url}/my%20model.gguf", "cpu"))
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            asyncio.run(written(f"{site.url}/other.gguf", "gpu"))


def test_plain_code_cannot_wait_for_a_server() -> None:
    with pytest.raises(
        InputError, match=r"is on a server: `await Gemma.aload\(…\)` reads it there"
    ):
        Gemma.load("https://example.org/gemma.gguf")
