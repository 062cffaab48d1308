"""The models that a server offers, by name: loaded when they are asked for, one at a time.

A name from a request is compared with names and never becomes a path."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from webgemma.api import Gemma
from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf.ollama import OllamaStore
from webgemma.gguf.reader import Gguf
from webgemma.models import BUNDLED_PATH, FoundModel, find_model
from webgemma.server.engine import Engine
from webgemma.server.ollama import FOREVER
from webgemma.server.ollama_models import ModelEntry, Running, capabilities_of
from webgemma.server.protocol import RequestError

DEMO = "demo"  # the bundled model
KEEP_SECONDS = 300.0  # that an idle model stays loaded, as Ollama's does
LONGEST_SECONDS = 1e9  # beyond, it is for ever
MAX_REQUESTS = 512  # that are served or wait, as Ollama has it


@dataclass(frozen=True, slots=True)
class Offered:
    """A model that can be loaded."""

    name: str
    entry: ModelEntry
    found: FoundModel

    @property
    def key(self) -> tuple[object, ...]:
        """What differs once another file is behind the name."""
        return self.name, self.found.path, self.entry.digest


@dataclass(slots=True)
class _Loaded:
    offered: Offered
    engine: Engine
    keep_seconds: float
    expires: float = FOREVER  # seconds since 1970, while nobody uses it
    users: int = 0


class Registry:
    """Models by name, of which at most one is in memory."""

    def __init__(
        self,
        models: Sequence[str] = (),
        *,
        keep_seconds: float = KEEP_SECONDS,
        store: OllamaStore | None = None,
        **options: Any,
    ) -> None:
        """Offer these models ("-": the bundled one) or, without any, the bundled one and those of
        Ollama's store. The options are those of `Gemma.load`. InputError, GgufError or
        ModelNotFoundError for a model that cannot be offered."""
        self.keep_seconds = keep_seconds
        self.is_loading = False
        self._options = options
        self._store = None if models else store or OllamaStore()
        self._own: dict[str, Offered] = {}
        for model in models or ["-"]:
            offered = _offered(model)
            other = self._own.setdefault(_folded(offered.name), offered)
            if other is not offered:
                raise InputError(
                    f"Two of the models would be named {offered.name}: rename one of the files."
                )
        self._loaded: _Loaded | None = None
        self._door = asyncio.Lock()  # first come, first served
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unloading: set[asyncio.Task[None]] = set()

    # What there is

    def entries(self) -> list[ModelEntry]:
        """Return all models; this reads Ollama's store."""
        entries = {_folded(offered.name): offered.entry for offered in self._own.values()}
        for model in self._store.list() if self._store else ():
            name = _folded(str(model.name))
            entries.setdefault(name, ModelEntry.of_store(model))
        return list(entries.values())

    def find(self, name: str) -> Offered:
        """Return a model; the empty name is that of the loaded or first one. RequestError 404 if
        there is none of this name."""
        if not name:
            return self._loaded.offered if self._loaded else next(iter(self._own.values()))
        if offered := self._own.get(_folded(name)):
            return offered
        if self._store is not None:
            with suppress(InputError, ModelNotFoundError):
                found = self._store.find(name)
                entry = ModelEntry.of_store(found, texts=True)
                label = str(found.name)
                return Offered(label, entry, FoundModel(label, found.path, found))
        raise RequestError(f"model '{name}' not found", 404, "model")

    def describe(self, name: str) -> tuple[ModelEntry, Gguf, list[str]]:
        """Return what there is to say of a model: this opens its files, the caller closes one."""
        offered = self.find(name)
        encoders = [projector.open() for projector in offered.found.projectors()]
        try:
            gguf = offered.found.open()
            return offered.entry, gguf, capabilities_of(gguf, encoders)
        finally:
            for encoder in encoders:
                encoder.close()

    def running(self) -> list[Running]:
        """Return the models in memory."""
        if self._loaded is None:
            return []
        model, loaded = self._loaded.engine.model, self._loaded
        entry, context = loaded.offered.entry, model.context
        keeps = loaded.keep_seconds <= LONGEST_SECONDS
        expires = time.time() + loaded.keep_seconds if loaded.users and keeps else loaded.expires
        return [Running(entry, model.memory_nbytes, context, expires)]

    # Using one

    @asynccontextmanager
    async def use(self, name: str, keep_seconds: float | None = None) -> AsyncIterator[Engine]:
        """Give the engine of a model, which stays in memory meanwhile and for some time after.

        Who asks for another model waits until nobody uses this one, and those who come later wait
        behind them."""
        if self._requests >= MAX_REQUESTS:
            raise RequestError("The server is busy, please try again: its queue is full.", 503)
        self._requests += 1
        async with AsyncExitStack() as stack:
            stack.callback(self._leave)
            async with self._door:
                loaded = await self._load(await asyncio.to_thread(self.find, name))
                loaded.users += 1
                self._idle.clear()
            stack.callback(self._release, loaded, keep_seconds)
            yield loaded.engine

    async def unload(self, name: str) -> None:
        """Free a model, as soon as nobody uses it."""
        offered = await asyncio.to_thread(self.find, name)
        async with self._door:
            if self._loaded and self._loaded.offered.name == offered.name:
                await self._free()

    async def close(self) -> None:
        """Free what is loaded, as soon as nobody uses it."""
        async with self._door:
            await self._free()

    def _leave(self) -> None:
        self._requests -= 1

    async def _load(self, offered: Offered) -> _Loaded:
        """Return the model, loaded; the caller has the door."""
        if self._loaded and self._loaded.offered.key == offered.key:
            self._cancel_timer()
            return self._loaded
        await self._free()
        self.is_loading = True
        try:
            model = await Gemma.aload(offered.found, **self._options)
        finally:
            self.is_loading = False
        self._loaded = _Loaded(offered, Engine(model), self.keep_seconds)
        return self._loaded

    async def _free(self) -> None:
        """Unload what is loaded, when nobody uses it; the caller has the door."""
        await self._idle.wait()
        self._cancel_timer()
        loaded, self._loaded = self._loaded, None
        if loaded:
            await asyncio.to_thread(loaded.engine.model.close)

    def _release(self, loaded: _Loaded, keep_seconds: float | None) -> None:
        loaded.users -= 1
        if keep_seconds is not None:
            loaded.keep_seconds = keep_seconds
        if loaded.users:
            return
        self._idle.set()
        loaded.expires = FOREVER
        if loaded.keep_seconds <= LONGEST_SECONDS:
            loaded.expires = time.time() + loaded.keep_seconds
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(loaded.keep_seconds, self._expire, loaded, loaded.expires)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _expire(self, loaded: _Loaded, expires: float) -> None:
        task = asyncio.get_running_loop().create_task(self._unload_unused(loaded, expires))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload_unused(self, loaded: _Loaded, expires: float) -> None:
        """Unload a model, unless it was used again meanwhile."""
        async with self._door:
            if self._loaded is loaded and not loaded.users and loaded.expires == expires:
                await self._free()


def _folded(name: str) -> str:
    """Return a name as names are compared: in any case, and `latest` may be left out."""
    return name.lower().removesuffix(":latest")


def _offered(model: str) -> Offered:
    """Return a model that the command line names."""
    found = find_model(None if model == "-" else model)
    if found.path is None:
        raise InputError(f"{model} is on another server: download it, and name the file.")
    if found.ollama:
        return Offered(found.label, ModelEntry.of_store(found.ollama, texts=True), found)
    name = DEMO if found.path == BUNDLED_PATH else found.path.stem
    with found.open() as gguf:
        if not gguf.tensors:
            raise GgufError(f"{found.path} has no weights.")
        status = os.stat(found.path)
        entry = ModelEntry.of_file(name, gguf, status.st_size, status.st_mtime)
    return Offered(name, entry, found)
