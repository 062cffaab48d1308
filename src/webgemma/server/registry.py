"""The models that a server offers, by name: loaded when they are asked for.

A name from a request is compared with names and never becomes a path."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from webgemma.engine.interface import check_slots
from webgemma.errors import InputError, ModelNotFoundError
from webgemma.gguf.ollama import OllamaStore
from webgemma.gguf.reader import Gguf
from webgemma.models import FoundModel
from webgemma.server.engine import Engine
from webgemma.server.loading import LONGEST_SECONDS, Limits, LoadedModel, LoadedModels
from webgemma.server.offered import Offered, offered_adapter, offered_model
from webgemma.server.ollama_models import ModelEntry, Running, capabilities_of
from webgemma.server.protocol import RequestError

KEEP_SECONDS = 300.0  # that an idle model stays loaded, as Ollama's does
MAX_REQUESTS = 512  # that are served or wait, as Ollama has it


class Registry:
    """Models by name, of which some are in memory."""

    def __init__(
        self,
        models: Sequence[str] = (),
        *,
        adapters: Sequence[str] = (),
        keep_seconds: float = KEEP_SECONDS,
        max_loaded: int | None = None,
        memory_gb: float | None = None,
        store: OllamaStore | None = None,
        **options: Any,
    ) -> None:
        """Offer these models ("-": the bundled one) or, without any, the bundled one and those of
        Ollama's store. The options are those of `Gemma.load`. InputError, GgufError or
        ModelNotFoundError for a model that cannot be offered. `adapters` of the one model, as
        NAME=PATH or NAME=PATH:SCALE, are offered under names of their own.

        At most `max_loaded` models are in memory at once, which take at most `memory_gb` together
        (in 10**9 bytes); without either limit it is one model, as a GPU does not tell what of its
        memory is free. Where `memory_gb` does not hold the caches of all `slots`, a model gets as
        many as it holds."""
        check_slots(options.get("slots"))
        most = 1 if max_loaded is None and memory_gb is None else max_loaded
        limits = Limits(most, None if memory_gb is None else int(memory_gb * 1e9))
        self._store = None if models else store or OllamaStore()
        self._own: dict[str, Offered] = {}
        offers = [offered_model(model) for model in models or ["-"]]
        if options.get("draft") and len(models) != 1:
            raise InputError("A drafter belongs to one model: name that, and no other.")
        if models and any(options.get(name) for name in ("draft", "context", "lora")):
            for offered in offers:
                _check_options(offered, options)
        if adapters and len(models) != 1:
            raise InputError("Adapters belong to one model: name that, and no other.")
        for offered in offers + [offered_adapter(text, offers[0]) for text in adapters]:
            other = self._own.setdefault(_folded(offered.name), offered)
            if other is not offered:
                what = "adapters: choose another name" if offered.base else "models: rename a file"
                raise InputError(f"{offered.name} would name two of the {what}.")
        attached = {each.name: each.adapter for each in self._own.values() if each.base}
        self._loaded = LoadedModels(limits, keep_seconds, options, attached)
        self.requests = 0  # that are served or wait

    @property
    def is_loading(self) -> bool:
        """Whether the first model is being loaded."""
        return self._loaded.is_loading

    # What there is

    def entries(self) -> list[ModelEntry]:
        """Return all models; this reads Ollama's store."""
        entries = {_folded(offered.name): offered.entry for offered in self._own.values()}
        for model in self._store.list() if self._store else ():
            name = _folded(str(model.name))
            entries.setdefault(name, ModelEntry.of_store(model))
        return list(entries.values())

    def find(self, name: str) -> Offered:
        """Return a model; the empty name is that of the one used last, or the first. RequestError
        404 if there is none of this name."""
        if not name:
            loaded = self.loaded()
            return loaded[0].offered if loaded else next(iter(self._own.values()))
        if offered := self._own.get(_folded(name)):
            return offered
        if self._store is not None:
            with suppress(InputError, ModelNotFoundError):
                found = self._store.find(name)
                entry = ModelEntry.of_store(found, texts=True)
                label = str(found.name)
                return Offered(label, entry, FoundModel(label, found.path, found))
        raise RequestError(f"model '{name}' not found", 404, "model")

    async def afind(self, name: str) -> Offered:
        """Return a model; only Ollama's store, which is read, needs a thread."""
        if not name or _folded(name) in self._own:
            return self.find(name)
        return await asyncio.to_thread(self.find, name)

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

    def loaded(self) -> list[LoadedModel]:
        """Return the models in memory, those used last first."""
        return self._loaded.all()

    def memory_sentences(self) -> dict[str, str]:
        """Return what each model that was named takes, or why it cannot be loaded."""
        models = [each for each in self._own.values() if each.base is None]
        return {each.name: self._loaded.memory_sentence(each) for each in models}

    def is_in_memory(self, name: str) -> bool:
        """Return whether a model is loaded, or the one that an adapter belongs to."""
        offered = self._own.get(_folded(name))
        model = offered.base.name if offered and offered.base else name
        return any(_folded(each.offered.name) == _folded(model) for each in self.loaded())

    def loading(self) -> list[str]:
        """Return the names of models that somebody waits for."""
        return self._loaded.loading()

    def running(self) -> list[Running]:
        """Return the models in memory, as Ollama's API describes them."""
        return [_running(model) for model in self.loaded()]

    # Using one

    @asynccontextmanager
    async def use(self, name: str, keep_seconds: float | None = None) -> AsyncIterator[Engine]:
        """Give the engine of a model, which stays in memory meanwhile and for some time after."""
        if self.requests >= MAX_REQUESTS:
            raise RequestError("The server is busy, please try again: its queue is full.", 503)
        self.requests += 1
        try:
            offered = await self.afind(name)
            async with self._loaded.use(offered.base or offered, keep_seconds) as engine:
                yield engine
        finally:
            self.requests -= 1

    def adapter(self, name: str) -> str | None:
        """Return the adapter that a name stands for, as the engine of its model knows it."""
        offered = self._own.get(_folded(name))
        return offered.name if offered and offered.base else None

    async def unload(self, name: str) -> None:
        """Free a model now or, if it is in use, as soon as it is not."""
        offered = await self.afind(name)
        await self._loaded.unload((offered.base or offered).name)

    async def close(self) -> None:
        """Free what is loaded."""
        await self._loaded.close()


def _check_options(offered: Offered, options: dict[str, Any]) -> None:
    """Raise InputError for a context, a drafter or adapters that a model cannot have."""
    try:
        offered.memory_budget(options)
        offered.check_lora(options.get("lora"))
    except InputError as error:
        raise InputError(f"{offered.name} cannot be served: {error}") from None


def _folded(name: str) -> str:
    """Return a name as names are compared: in any case, and `latest` may be left out."""
    return name.lower().removesuffix(":latest")


def _running(model: LoadedModel) -> Running:
    assert model.engine is not None
    gemma, keeps = model.engine.model, model.keep_seconds <= LONGEST_SECONDS
    expires = time.time() + model.keep_seconds if model.users and keeps else model.expires
    return Running(model.offered.entry, gemma.memory_nbytes, gemma.context, expires)
