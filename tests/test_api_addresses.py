"""Models at an address, natively: read from there by `aload`, an error of `load`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import SMALL, tiny_gguf

from tests.gguf.server import serve
from webgemma import Gemma, GgufError, InputError, ModelNotFoundError
from webgemma.models import find_model

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
IDS = [2, 30, 40, 50]


async def generated(model: str, device: Any) -> tuple[str, list[int]]:
    with await Gemma.aload(model, device) as gemma:
        return gemma.name, [p.token async for p in gemma.agenerate(IDS, **GREEDY)]


def test_aload_reads_a_model_at_its_address(tmp_path: Path) -> None:
    data = tiny_gguf(SMALL)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    with Gemma.load(path, "gpu") as gemma:
        expected = [piece.token for piece in gemma.generate(IDS, **GREEDY)]
    with serve({"/my model.gguf": data}) as site:
        name, tokens = asyncio.run(generated(f"{site.url}/my%20model.gguf", "gpu"))
        assert (name, tokens) == ("my model.gguf", expected)
        with pytest.raises(GgufError, match="is not on this machine: load it on a GPU"):
            asyncio.run(generated(f"{site.url}/my%20model.gguf", "cpu"))
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            asyncio.run(generated(f"{site.url}/other.gguf", "gpu"))


def test_load_of_an_address_raises_an_error() -> None:
    with pytest.raises(
        InputError, match=r"is on a server: `await Gemma.aload\(…\)` reads it there"
    ):
        Gemma.load("https://example.org/gemma.gguf")
    with pytest.raises(InputError, match=r"'https://\[x/gemma.gguf' is not an address: "):
        find_model("https://[x/gemma.gguf")
