"""The page's Python without a browser: what it tells for what it is asked."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.pretend_files import PretendFile, PretendFiles
from helpers.standin import standin_gguf
from helpers.tiny import SMALL, tiny_metadata, tiny_tensors
from helpers.tiny_eyes import SMALL_EYES, eyes_gguf, eyes_metadata, eyes_tensors, picture

from webgemma import Gemma, InputError
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.web.tab import BUNDLED_URL, Tab

DATA = standin_gguf()
GREEDY = json.dumps({"temperature": 0, "max_tokens": 5, "seed": None, "think": False})
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
HELLO = json.dumps([{"role": "user", "content": "Hello"}])


BUNDLED = SimpleNamespace(kind="bundled")


def chosen(data: bytes, size: int | None = None) -> SimpleNamespace:
    """A file as the worker hands it over."""
    file = PretendFile("mine.gguf", data, size)
    return SimpleNamespace(kind="file", file=file, name=file.name, nbytes=file.size, digest=None)


def of_ollama(files: PretendFiles, data: bytes, digest: str) -> SimpleNamespace:
    """A model of Ollama's, likewise."""
    files.servers["/models/x"] = PretendFile("x", data)
    facts = {"name": "gemma:x", "nbytes": len(data), "digest": digest}
    return SimpleNamespace(kind="url", url="/models/x", **facts)


def told(
    ask: Callable[[Tab], Coroutine[Any, Any, None]], files: PretendFiles | None = None
) -> list[dict[str, Any]]:
    """All that a tab tells the page while it is asked."""
    messages: list[dict[str, Any]] = []
    files = files or PretendFiles()
    files.servers[BUNDLED_URL] = PretendFile("demo", DATA)  # as quick as can be

    async def run() -> None:
        tab = Tab(lambda text: messages.append(json.loads(text)), files)
        await ask(tab)
        await tab.unload()

    asyncio.run(run())
    return messages


def test_a_file_is_loaded_and_replies() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load(chosen(DATA), None, "auto")
        await tab.chat(7, HELLO, GREEDY)

    messages = told(ask)
    loaded = next(m for m in messages if m["type"] == "loaded")
    assert loaded["name"] == "mine.gguf"
    assert loaded["nbytes"] > len(DATA)
    text = "".join(m["text"] for m in messages if m["type"] == "piece")
    with Gemma.load(BytesSource(DATA), "cpu") as model:
        pieces = model.chat(json.loads(HELLO), temperature=0, max_tokens=5)
        assert text == "".join(piece.text for piece in pieces)
    done = messages[-1]
    assert (done["type"], done["id"], done["tokens"]) == ("done", 7, 5)


def test_pictures_are_handed_over_beside_the_messages() -> None:
    tiny, eyes = replace(SMALL, context=512), replace(SMALL_EYES, positions=96)
    metadata = tiny_metadata(tiny) | eyes_metadata(eyes, "gemma4.")
    data = gguf_bytes(metadata, [*tiny_tensors(tiny), *eyes_tensors(eyes)])
    rgb = picture(eyes, 3, 2)
    settings = {"temperature": 0, "max_tokens": 6}

    def asked(source: Any) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": source}, {"type": "text", "text": "this?"}]
        return [{"role": "user", "content": parts}]

    async def ask(tab: Tab) -> None:
        await tab.load(chosen(data), None, "auto")
        await tab.chat(1, json.dumps(asked(0)), json.dumps(settings), [rgb])
        await tab.chat(2, HELLO, json.dumps(settings))

    messages = [m for m in told(ask) if m.get("id") == 1]
    sensing = [m for m in messages if m["type"] == "sensing"]
    assert sensing[0] == {"type": "sensing", "id": 1, "senses": ["image"], "done": 0, "total": 1}
    assert sensing[-1]["done"] == sensing[-1]["total"] == 100
    text = "".join(m["text"] for m in messages if m["type"] == "piece")
    with Gemma.load(BytesSource(data), "gpu") as model:
        assert text == "".join(p.text for p in model.chat(asked(rgb), **settings))
    assert messages[-1]["tokens"] == 6


def test_a_model_without_eyes_says_so() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        parts = [{"type": "image", "image": 0}]
        asked = json.dumps([{"role": "user", "content": parts}])
        await tab.chat(1, asked, GREEDY, [picture(SMALL_EYES, 3, 2)])

    error = told(ask)[-1]
    assert (error["type"], error["id"], error["kind"]) == ("error", 1, "senses")
    assert "cannot see" in error["sentence"]


def test_a_reply_is_stopped() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        reply = asyncio.ensure_future(tab.chat(1, HELLO, GREEDY))
        await asyncio.sleep(0)
        tab.stop(1)
        await reply
        tab.stop(1)  # too late: nothing happens

    assert told(ask)[-1]["finish"] == "stopped"


@pytest.mark.parametrize(
    ("data", "nbytes", "sentence"),
    [
        (b"GIF89a" * 9, 54, "is not a GGUF file"),
        (DATA[:5000], len(DATA), "became shorter while it was read"),
    ],
)
def test_files_that_are_no_models(data: bytes, nbytes: int, sentence: str) -> None:
    message = told(lambda tab: tab.load(chosen(data, nbytes), None, "auto"))[-1]
    assert (message["type"], message["kind"]) == ("error", "file")
    assert sentence in message["sentence"]


def test_a_setting_that_cannot_be_fails_the_reply_only() -> None:
    async def ask(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.chat(1, HELLO, json.dumps({"temperature": -1}))
        await tab.chat(2, HELLO, GREEDY)

    messages = told(ask)
    errors = [m for m in messages if m["type"] == "error"]
    assert [m["id"] for m in errors] == [1]
    assert "temperature" in errors[0]["sentence"]
    assert messages[-1]["type"] == "done"


def test_without_a_model_there_is_no_reply() -> None:
    assert told(lambda tab: tab.chat(1, HELLO, GREEDY))[-1]["sentence"].startswith("There is no")


def test_kept_then_loaded_from_there() -> None:
    files = PretendFiles()

    async def ask(tab: Tab) -> None:
        await tab.keep(of_ollama(files, DATA, DIGEST))
        id = DIGEST.removeprefix("sha256:")
        await tab.load(SimpleNamespace(kind="stored", id=id, name="gemma:x"), None, "auto")
        await tab.forget(id)

    messages = told(ask, files)
    kept, deleted = [m for m in messages if m["type"] == "stored"]
    (model,) = kept["models"]
    assert (model["name"], model["have"], model["whole"]) == ("gemma:x", len(DATA), True)
    assert 0 < model["gpu_least_nbytes"] <= model["gpu_nbytes"]
    assert [m["name"] for m in messages if m["type"] in ("kept", "loaded")] == ["gemma:x"] * 2
    stages = {m["stage"] for m in messages if m["type"] == "keeping" and m["done"] == m["total"]}
    assert stages == {"copying", "checking"}
    assert deleted["models"] == []


def test_eyes_are_kept_and_deleted_with_their_model() -> None:
    files = PretendFiles()
    eyes = eyes_gguf(SMALL_EYES)
    asked = of_ollama(files, DATA, DIGEST)
    files.servers["/models/eyes"] = PretendFile("eyes", eyes)
    facts = {"name": "eyes", "nbytes": len(eyes), "digest": None}
    asked.eyes = SimpleNamespace(kind="url", url="/models/eyes", **facts)
    id = DIGEST.removeprefix("sha256:")
    opened = []

    async def ask(tab: Tab) -> None:
        await tab.keep(asked)
        source = await tab._eyes(SimpleNamespace(kind="stored", id=id, name="gemma:x"))
        assert source is not None
        opened.append(await source.read(0, source.nbytes))
        await tab.forget(id)

    messages = told(ask, files)
    kept, deleted = [m["models"] for m in messages if m["type"] == "stored"]
    names = {model["id"]: model["name"] for model in kept}
    assert sorted(names.values()) == ["eyes", "gemma:x"]
    (model,) = [model for model in kept if model["name"] == "gemma:x"]
    assert names[model["eyes"]] == "eyes"
    assert opened == [eyes]
    assert deleted == []


def test_a_damaged_download_is_told_and_the_model_stays() -> None:
    files = PretendFiles()

    async def ask(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.keep(of_ollama(files, DATA[:-1] + b"!", DIGEST))
        await tab.chat(1, HELLO, GREEDY)

    messages = told(ask, files)
    (error,) = [m for m in messages if m["type"] == "error"]
    assert (error["kind"], error["keep"]) == ("file", DIGEST.removeprefix("sha256:"))
    assert "is damaged" in error["sentence"]
    assert messages[-1]["type"] == "done"


def test_copying_is_left_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.gguf.opfs.CHUNK_NBYTES", 1 << 12)
    files = PretendFiles()
    asked = of_ollama(files, DATA, DIGEST)

    async def ask(tab: Tab) -> None:
        copy = asyncio.ensure_future(tab.keep(asked))
        while not sum(map(len, files.disk.values())) > 1 << 13:
            await asyncio.sleep(0)
        tab.leave(DIGEST.removeprefix("sha256:"))
        await copy
        await tab.keep(asked)

    messages = told(ask, files)
    cut, whole = [m["models"][0] for m in messages if m["type"] == "stored"]
    assert 0 < cut["have"] < cut["nbytes"]
    assert whole["whole"]
    assert [m["type"] for m in messages if m["type"] in ("left", "kept")] == ["left", "kept"]


@pytest.mark.parametrize(("free", "kind"), [(1, "storage"), (None, "file")])
def test_what_cannot_be_kept(free: int | None, kind: str) -> None:
    files = PretendFiles()
    files.free = free
    digest = DIGEST if free else "sha256:nonsense"
    messages = told(lambda tab: tab.keep(of_ollama(files, DATA, digest)), files)
    error = next(m for m in messages if m["type"] == "error")
    assert error["kind"] == kind
    assert "keep" in error


def test_how_much_the_gpu_gives() -> None:
    async def ask(tab: Tab) -> None:
        await tab.room(1 << 20)
        await tab.load(BUNDLED, None, "auto")
        await tab.room(1 << 30)

    first, second = [m["nbytes"] for m in told(ask) if m["type"] == "room"]
    assert (first, second) == (1 << 20, 1 << 30)


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.engine.opening.machine_free_nbytes", lambda: 1000)
    message = told(lambda tab: tab.load(BUNDLED, None, "auto"))[-1]
    assert (message["type"], message["kind"]) == ("error", "memory")


def test_a_source_is_a_model_natively_too() -> None:
    with Gemma.load(BytesSource(DATA, "bytes.gguf"), "cpu") as model:
        assert model.name == "bytes.gguf"
    for wrong in (5, [1], b"GGUF"):
        with pytest.raises(InputError, match="is no model: give an Ollama name"):
            Gemma.load(wrong)  # type: ignore[arg-type]
