"""What the tests of files have run inside the tab, by Pyodide's Python."""

import hashlib
import time
from typing import Any

import js
from pyodide.ffi import to_js

from webgemma import Gemma
from webgemma.device import aopen_device
from webgemma.engine.opening import EngineOptions, Needs
from webgemma.errors import WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.browser import BrowserSource, browser_files, open_address, open_file
from webgemma.gguf.opfs import CHUNK_NBYTES, OpfsStore, open_stored
from webgemma.gguf.reader import Gguf

GREEDY: dict[str, Any] = {"temperature": 0}


def address(name: str) -> str:
    """Of a file that the test's server has."""
    return js.URL.new(name, js.location.href).href


async def written(model: Any, ids: list[int], count: int, **options: Any) -> list[int]:
    """The tokens that a model writes."""
    with await Gemma.aload(model, "gpu", kv="f32", **options) as gemma:
        pieces = gemma.agenerate(ids, max_tokens=count, **GREEDY)
        return [piece.token async for piece in pieces]


async def blob(name: str) -> Any:
    """A File as a user would have chosen it."""
    bytes_ = await (await js.fetch(name)).arrayBuffer()
    return js.File.new(to_js([bytes_]), name)


async def from_everywhere(name: str, ids: list[int], count: int) -> list[list[int]]:
    """The tokens of a model at an address, at one whose server sends no parts, and of a File."""
    sources = [address(name), address(f"whole-{name}"), await blob(name)]
    return [await written(source, ids, count) for source in sources]


async def from_storage(name: str, ids: list[int], count: int) -> Any:
    """The tokens of a stored model, with its table on the GPU and in the file."""
    store = OpfsStore()
    for model in await store.list():
        await store.forget(model.id)
    source = await open_address(address(name))
    data = await source.read(0, source.nbytes)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    model = await store.keep(source, "mine", digest)
    gguf = await Gguf.aopen(await store.open(model.id))
    config = Config.from_gguf(gguf)
    needs = Needs.of(gguf, config, config.context, EngineOptions(kv="f32"))
    found, places = [], []
    for place in ("device", "host"):
        source, gb = await store.open(model.id), needs.nbytes(place) / 1e9
        with await Gemma.aload(source, "gpu", kv="f32", memory_gb=gb) as gemma:
            pieces = gemma.agenerate(ids, max_tokens=count, **GREEDY)
            found.append([piece.token async for piece in pieces])
            places.append(gemma._engine._session.model.table is not None)
    return found, places


async def saved(name: str, ids: list[int], count: int) -> list[list[int]]:
    """Tokens, and those after the conversation was stored and taken up by another model."""
    found = []
    with await Gemma.aload(address(name), "gpu", kv="f32") as gemma:
        found.append([p.token async for p in gemma.agenerate(ids, max_tokens=count, **GREEDY)])
        with await open_stored("talk", "wb") as file:
            await gemma.asave(file)
    with await Gemma.aload(address(name), "gpu", kv="f32") as gemma:
        with await open_stored("talk", "rb") as file:
            kept = await gemma.arestore(file)
        assert kept == [*ids, *found[0]][: len(kept)]
        found.append([p.token async for p in gemma.agenerate(ids, max_tokens=count, **GREEDY)])
    return found


async def mistake(kind: str, name: str) -> str:
    """The sentence for something that goes wrong with a file."""
    try:
        if kind == "missing":
            await Gemma.aload(address("nothing.gguf"))
        elif kind == "no server":
            await Gemma.aload("http://127.0.0.1:9/x.gguf")
        elif kind == "no model":
            await Gemma.aload(js.File.new(to_js(["GIF89a"]), "picture.gif"))
        elif kind == "wrong digest":
            await OpfsStore().keep(await open_address(address(name)), "mine", "sha256:" + "0" * 64)
        elif kind == "no such file":
            await open_stored("nothing", "rb")
    except WebgemmaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


def heap_nbytes() -> int:
    """All memory that Python has."""
    import pyodide_js

    return int(pyodide_js._module.HEAPU8.length)


async def large(nbytes: int) -> dict[str, Any]:
    """A file of so many bytes, read as a chosen one and as a stored one and sent to the GPU: how
    far Python's memory grows, and how fast it goes."""
    folder = await js.navigator.storage.getDirectory()
    entry = await folder.getFileHandle("large", create=True)
    handle = await entry.createSyncAccessHandle()
    handle.truncate(nbytes)  # sparse
    handle.close()
    device = await aopen_device()
    target = device.buffer(CHUNK_NBYTES, "chunk")
    before, rates = heap_nbytes(), []
    for source in (
        await open_file(entry),
        BrowserSource(await browser_files().stored("large", False)),
    ):
        begun, total = time.perf_counter(), 0
        for at in range(0, nbytes, CHUNK_NBYTES):
            data = await source.raw(at, CHUNK_NBYTES)
            device.write(target, data)
            total += len(data)
            if at % (8 * CHUNK_NBYTES) == 0:
                await device.read(target, 0, 4).bytes()
        await device.read(target, 0, 4).bytes()
        rates.append(total / (time.perf_counter() - begun) / 1e9)
        source.close()
    device.close()
    await folder.removeEntry("large")
    return {"grown": heap_nbytes() - before, "total": total, "gb_per_second": rates}
