"""Functions that the tests of files call inside the tab, in Pyodide's Python."""

import hashlib
import time
from typing import Any

import js
from pyodide.ffi import to_js

from webgemma import Gemma
from webgemma.device import aopen_device
from webgemma.engine.memory_budget import MemoryBudget
from webgemma.errors import WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.browser import BrowserSource, browser_files, open_address, open_file
from webgemma.gguf.opfs import CHUNK_NBYTES, OpfsStore, open_stored
from webgemma.gguf.reader import Gguf

GREEDY: dict[str, Any] = {"temperature": 0}


def address(name: str) -> str:
    """Return the address of a file on the test's server."""
    return js.URL.new(name, js.location.href).href


async def generated(model: Any, ids: list[int], count: int, **options: Any) -> list[int]:
    """Return the tokens that a model generates."""
    with await Gemma.aload(model, "gpu", kv="f32", **options) as gemma:
        pieces = gemma.agenerate(ids, max_tokens=count, **GREEDY)
        return [piece.token async for piece in pieces]


async def blob(name: str) -> Any:
    """Return a File, as a user chooses it."""
    bytes_ = await (await js.fetch(name)).arrayBuffer()
    return js.File.new(to_js([bytes_]), name)


async def from_everywhere(name: str, ids: list[int], count: int) -> list[list[int]]:
    """Return the tokens of a model from an address, from a server without ranges, and a File."""
    sources = [address(name), address(f"whole-{name}"), await blob(name)]
    return [await generated(source, ids, count) for source in sources]


async def from_storage(name: str, ids: list[int], count: int) -> Any:
    """Return the tokens of a stored model, with its table on the GPU and in the file."""
    store = OpfsStore()
    for model in await store.list():
        await store.delete(model.id)
    source = await open_address(address(name))
    data = await source.read(0, source.nbytes)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    model = await store.store(source, "mine", digest)
    gguf = await Gguf.aopen(await store.open(model.id))
    config = Config.from_gguf(gguf)
    budget = MemoryBudget.of(gguf, config, config.context, kv="f32")
    found, on_host = [], []
    for location in ("device", "host"):
        source, gb = await store.open(model.id), budget.nbytes(location) / 1e9
        with await Gemma.aload(source, "gpu", kv="f32", memory_gb=gb) as gemma:
            pieces = gemma.agenerate(ids, max_tokens=count, **GREEDY)
            found.append([piece.token async for piece in pieces])
            on_host.append(gemma._engine._session.model.table is not None)
    return found, on_host


async def saved(name: str, ids: list[int], count: int) -> list[list[int]]:
    """Return tokens, and those of another model that restored the saved conversation."""
    found = []
    with await Gemma.aload(address(name), "gpu", kv="f32") as gemma:
        found.append([p.token async for p in gemma.agenerate(ids, max_tokens=count, **GREEDY)])
        with await open_stored("conversation", "wb") as file:
            await gemma.asave(file)
    with await Gemma.aload(address(name), "gpu", kv="f32") as gemma:
        with await open_stored("conversation", "rb") as file:
            restored = await gemma.arestore(file)
        assert restored == [*ids, *found[0]][: len(restored)]
        found.append([p.token async for p in gemma.agenerate(ids, max_tokens=count, **GREEDY)])
    return found


async def mistake(kind: str, name: str) -> str:
    """Return the error of a mistake with a file."""
    try:
        if kind == "missing":
            await Gemma.aload(address("nothing.gguf"))
        elif kind == "no server":
            await Gemma.aload("http://127.0.0.1:9/x.gguf")
        elif kind == "no model":
            await Gemma.aload(js.File.new(to_js(["GIF89a"]), "image.gif"))
        elif kind == "wrong digest":
            await OpfsStore().store(await open_address(address(name)), "mine", "sha256:" + "0" * 64)
        elif kind == "no such file":
            await open_stored("nothing", "rb")
    except WebgemmaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


def heap_nbytes() -> int:
    """Return the size of Python's memory."""
    import pyodide_js

    return int(pyodide_js._module.HEAPU8.length)


async def large(nbytes: int) -> dict[str, Any]:
    """Send a file of so many bytes to the GPU, as a chosen one and as a stored one.

    Return how far Python's memory grows, and the speeds."""
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
        start, total = time.perf_counter(), 0
        for at in range(0, nbytes, CHUNK_NBYTES):
            data = await source.raw(at, CHUNK_NBYTES)
            device.write(target, data)
            total += len(data)
            if at % (8 * CHUNK_NBYTES) == 0:
                await device.read(target, 0, 4).bytes()
        await device.read(target, 0, 4).bytes()
        rates.append(total / (time.perf_counter() - start) / 1e9)
        source.close()
    device.close()
    await folder.removeEntry("large")
    return {"grown": heap_nbytes() - before, "total": total, "gb_per_second": rates}
