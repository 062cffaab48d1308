"""A model that can be loaded: its name, its files, and the memory that it will take."""

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from webgemma.engine.memory_budget import MemoryBudget
from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.lora.loading import Lora, fitted_adapters
from webgemma.models import BUNDLED_PATH, FoundModel, find_model, with_draft
from webgemma.server.ollama_models import ModelEntry

DEMO = "demo"  # the bundled model

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """A model that can be loaded, or one of its adapters under a name of its own."""

    name: str
    entry: ModelEntry
    found: FoundModel
    adapter: str = ""  # a path, or "path:scale"
    base: "Offered | None" = None  # the model that applies the adapter

    @property
    def key(self) -> Key:
        """What differs once another file is behind the name."""
        return self.name, self.found.path, self.entry.digest

    def memory_budget(self, options: dict[str, Any], slots: int | None = None) -> MemoryBudget:
        """Return what it will take with these options of `Gemma.load`; this opens its file.

        `slots` counts where the options do not say how many; the CPU has one."""
        slots = 1 if options.get("device") == "cpu" else options.get("slots") or slots or 1
        with ExitStack() as opened:
            gguf = opened.enter_context(self.found.open())
            config = Config.from_gguf(gguf)
            context = self.found.defaults().choose_context(config, options.get("context"))
            kv, drafter = options.get("kv", "f16"), None
            if draft := with_draft(self.found, options.get("draft")).draft():
                file = opened.enter_context(draft.open())
                drafter = file, drafter_config(file, config)
            return MemoryBudget.of(gguf, config, context, kv, slots=slots, drafter=drafter)

    def check_lora(self, lora: Lora) -> None:
        """Raise InputError or GgufError for adapters that are not there, or of another model."""
        if lora:
            with self.found.open() as gguf:
                fitted_adapters(lora, Config.from_gguf(gguf))


def offered_adapter(text: str, base: Offered) -> Offered:
    """Return an adapter that the command line gives as NAME=PATH or NAME=PATH:SCALE."""
    name, equals, path = text.partition("=")
    if not (equals and name.strip() and path) or name != "".join(name.split()):
        raise InputError(f"--adapter is {text!r}; it must be NAME=PATH or NAME=PATH:SCALE.")
    base.check_lora(path)
    entry = replace(base.entry, name=name)
    return replace(base, name=name, entry=entry, adapter=path, base=base)


def offered_model(model: str) -> Offered:
    """Return a model that the command line names; "-" is the bundled one."""
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
