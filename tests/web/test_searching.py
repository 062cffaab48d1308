"""Search in documents in the page's worker, without a browser: embedded beside the chat model."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from helpers.pretend_files import Bytes
from helpers.tiny import EMBEDDING, SMALL, tiny_gguf
from web.test_tab import DATA, GREEDY, HELLO, file_spec, messages_of

from webgemma import Gemma
from webgemma.engine.nearest import Vectors
from webgemma.errors import DeviceLostError
from webgemma.gguf.sources import BytesSource
from webgemma.web import searching
from webgemma.web.tab import Tab

EMBEDDER = tiny_gguf(EMBEDDING)
TEXTS = ["The lease of the flat", "Bake the bread", "A zebra at night", "The lease of the house"]


def vectors_in(message: dict[str, Any], size: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(message["vectors"]), np.float32).reshape(-1, size)


def test_passages_are_embedded_and_found_beside_a_chat() -> None:
    async def act(tab: Tab) -> None:
        await tab.load(file_spec(DATA), None, "auto")
        handle = tab.searching.handle
        await handle("a", "load", file_spec(EMBEDDER))
        await handle("b", "embed", json.dumps(TEXTS), "document")
        await tab.chat(1, HELLO, GREEDY)
        await handle("c", "vectors", Bytes(natively("document").tobytes()), size)
        await handle("d", "nearest", TEXTS[1], 3)
        await handle("e", "free")
        await handle("f", "nearest", TEXTS[1], 3)

    with Gemma.load(BytesSource(EMBEDDER), "cpu") as model:
        size = min(searching.SIZE, model.texts.embedding.size)

        def natively(task: Any) -> np.ndarray:
            return np.asarray(model.embed(TEXTS, task=task, size=size))

        messages = messages_of(act)
        found = {m["search"]: m for m in messages if "search" in m}
        assert found["a"]["size"] == size
        assert found["a"]["nbytes"] > 0
        assert np.abs(vectors_in(found["b"], size) - natively("document")).max() < 1e-4
        scores = natively("document") @ natively("query")[1]
    assert found["c"]["count"] == len(TEXTS)
    assert found["d"]["numbers"] == list(np.argsort(-scores)[:3])
    assert "There are no vectors" in found["f"]["message"]
    assert [m["type"] for m in messages if m.get("id") == 1][-1] == "done"


def test_what_cannot_be_used_leaves_the_chat_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any) -> int:
        return 5_000_000

    async def act(tab: Tab) -> None:
        await tab.load(file_spec(DATA), None, "auto")
        handle = tab.searching.handle
        await handle("embeds", "embed", json.dumps(TEXTS), "document")
        await handle("writes", "load", file_spec(tiny_gguf(SMALL)))
        await handle("damaged", "load", file_spec(b"GGUF"))
        monkeypatch.setattr(searching, "free_nbytes", full)
        monkeypatch.setattr(searching, "gpu_nbytes", lambda _: (600_000_000, 0))
        await handle("large", "load", file_spec(EMBEDDER))
        await tab.chat(1, HELLO, GREEDY)

    messages = messages_of(act)
    errors = {m["search"]: (m["kind"], m["message"]) for m in messages if "search" in m}
    assert errors["embeds"] == ("other", "No embedding model is loaded: choose one.")
    assert "writes text and does not embed" in errors["writes"][1]
    assert errors["damaged"][0] == "file"
    assert errors["large"][0] == "memory"
    assert "needs 0.6 GB of GPU memory beside the chat's model, but 0.0 GB" in errors["large"][1]
    assert messages[-1]["type"] == "done"


def test_after_a_lost_gpu_the_next_request_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: Any) -> list[int]:
        raise DeviceLostError("The GPU was lost.")

    async def act(tab: Tab) -> None:
        handle = tab.searching.handle
        await handle("a", "load", file_spec(EMBEDDER))
        await handle("b", "vectors", Bytes(np.zeros((2, 8), np.float32).tobytes()), 8)
        with monkeypatch.context() as patch:
            patch.setattr(Vectors, "nearest", lost)
            await handle("c", "nearest", "lease", 1)
        await handle("d", "embed", json.dumps(TEXTS), "document")
        await handle("e", "load", file_spec(EMBEDDER))
        await handle("f", "embed", json.dumps(TEXTS), "document")
        await handle("g", "free")

    found = {m["search"]: m for m in messages_of(act) if "search" in m}
    assert found["c"]["kind"] == "device-lost"
    assert found["d"]["message"] == "No embedding model is loaded: choose one."
    assert "vectors" in found["f"]
