"""Finding a model, by Ollama name, path or address, and the defaults that it comes with."""

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeGuard
from urllib.parse import unquote, urlsplit

from webgemma.engine.memory_budget import MemoryBudget
from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gemma.config import Config
from webgemma.gguf.ollama import OllamaModel, OllamaStore
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource, FileSource, LoopSource, Source, user_path
from webgemma.settings import SETTINGS, Settings
from webgemma.sync import IN_BROWSER, has_event_loop, on_event_loop
from webgemma.text.chat import Size
from webgemma.values import real_number, shown, whole_number

if TYPE_CHECKING:
    from webgemma.packages import PackagedModel

BUNDLED = "the bundled model"
BUNDLED_PATH = Path(__file__).parent / "demo" / "webgemma-demo-Q8_0.gguf"
BUNDLED_SHA256 = "3d241a9963d54c7c4b5f0aaed35e9ee319044b8a133f950f24b86d1f6273e2d6"
DEFAULT_CONTEXT = 32768  # unless more is requested: the GPU allocates its cache at once
EMBEDDED_CONTEXT = 8192  # the same of embedding models, which read a text at once

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that exists: a file, perhaps with what Ollama's store says about it."""

    label: str
    path: Path | None  # None: `source` opens it
    ollama: OllamaModel | None = None
    source: Callable[[], Awaitable[Source]] | None = None
    mmproj: "FoundModel | None" = None
    drafter: "FoundModel | None" = None  # the named one
    without_drafter: bool = False
    gguf: Gguf | None = None  # it is open

    def projectors(self) -> "tuple[FoundModel, ...]":
        """Return the files of its encoders: the named one, else those of Ollama's manifest."""
        if self.mmproj is not None:
            return (self.mmproj,)
        paths = self.ollama.projectors if self.ollama else ()
        return tuple(FoundModel(path.name, path) for path in paths)

    def draft(self) -> "FoundModel | None":
        """Return the file of its drafter: the named one, else that of Ollama's manifest, if any."""
        if self.drafter is not None or self.without_drafter or self.ollama is None:
            return self.drafter
        path = self.ollama.draft
        return FoundModel(path.name, path) if path else None

    async def aopen(self) -> Gguf:
        """Open its file, or its source, which may have to be awaited."""
        if self.gguf is not None:
            return self.gguf
        return self.open() if self.source is None else await Gguf.aopen(await self.source())

    def open(self) -> Gguf:
        """Open its file (and, of a split model, all of them)."""
        if self.path is None:
            raise needs_await(self.label)
        return Gguf.open(self.path)

    def chat_size(self, config: Config) -> Size:
        """Return the chat template's size: E2B and E4B, which have PLE, use the small one."""
        if config.generation == 3:
            return "gemma3"
        renderer = self.ollama.config.get("renderer") if self.ollama else None
        if renderer in ("gemma4-small", "gemma4-large"):
            return "small" if renderer == "gemma4-small" else "large"
        return "small" if config.ple else "large"

    def defaults(self) -> "ModelDefaults":
        """Return the settings, messages and context that an Ollama model comes with."""
        if self.ollama is None:
            return ModelDefaults({}, (), None)
        params = self.ollama.params
        settings: Any = {}
        for name, value in params.items():
            setting = SETTINGS.get(OLLAMA_NAMES.get(name, name))
            if setting is None or value is None:
                continue
            number = real_number(value)
            if setting.name in ("seed", "max_tokens") and number is not None and number < 0:
                settings[setting.name] = None  # negative means unset to Ollama
                continue
            try:
                settings[setting.name] = setting.nearest(value)
            except InputError as error:
                raise GgufError(
                    f"The params file of {self.label} has a wrong {name}: {error} "
                    "Create or pull the model again."
                ) from None
        system = self.ollama.system
        messages = [{"role": "system", "content": system}] if system else []
        context = params.get("num_ctx")
        return ModelDefaults(settings, (*messages, *self.ollama.messages), context)


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What holds unless a user says otherwise."""

    settings: Settings
    opening: tuple[Message, ...]  # messages before every chat
    context: object  # positions, as the file has it

    def choose_context(self, config: Config, requested: int | None) -> int:
        """Return how many positions to allocate: as requested, the model's default, or usual."""
        if requested is None:
            default = whole_number(self.context)
            if default is not None and 1 <= default <= config.context:
                return default
            usual = EMBEDDED_CONTEXT if config.embedding else DEFAULT_CONTEXT
            return min(config.context, usual)
        positions = whole_number(requested)
        if positions is None or not 1 <= positions <= config.context:
            raise InputError(
                f"A context of {shown(requested)} is not possible; "
                f"this model's is 1 to {config.context}."
            )
        return positions


# Settings that Ollama gives another name.
OLLAMA_NAMES = {
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "recent",
    "num_predict": "max_tokens",
}


def with_mmproj(
    found: FoundModel, mmproj: "str | os.PathLike[str] | Source | Any | None"
) -> FoundModel:
    """Return the model with the file of its encoders, which must exist."""
    return found if mmproj is None else replace(found, mmproj=_find_file(mmproj))


def with_draft(
    found: FoundModel, draft: "str | os.PathLike[str] | Source | Any | Literal[False] | None"
) -> FoundModel:
    """Return the model with the file of its drafter, which must exist; False: without any."""
    if draft is None:
        return found
    if draft is False:
        return replace(found, without_drafter=True)
    return replace(found, drafter=_find_file(draft))


def _find_file(file: "str | os.PathLike[str] | Source | Any") -> FoundModel:
    """Return a file that belongs to a model; a name is a path, never a model of Ollama's."""
    if isinstance(file, str | os.PathLike) and not is_address(file):
        path = user_path(file)
        if not path.is_file():
            raise ModelNotFoundError(f"There is no file {path}." + _models_in(path.parent))
        return FoundModel(path.name, path)
    return find_model(file)


def is_address(model: Any) -> TypeGuard[str]:
    """Return whether a model is on a web server."""
    return isinstance(model, str) and model.startswith(("http://", "https://"))


def needs_await(label: str) -> InputError:
    """Return the error for an address in plain code, which cannot wait for a server."""
    return InputError(
        f"{label} is on a server: `await Gemma.aload(…)` reads it there; in plain code, download "
        "it and name the file."
    )


def find_model(
    model: "str | os.PathLike[str] | Source | Any | None", store: OllamaStore | None = None
) -> FoundModel:
    """Return the model that a user names; ModelNotFoundError lists what there is instead."""
    if model is None:
        return FoundModel(BUNDLED, BUNDLED_PATH)
    if isinstance(model, FoundModel):
        return model
    if is_address(model):
        try:
            parts = urlsplit(model)
        except ValueError as error:
            raise InputError(f"{shown(model)} is not an address: {error}.") from None
        name = unquote(PurePosixPath(parts.path).name) or model
        return FoundModel(name, None, source=lambda: _open_address(model))
    if not isinstance(model, str | os.PathLike):
        return _find_source(model)
    path = user_path(model)
    if path.is_file():
        return FoundModel(path.name, path)
    if not isinstance(model, str) or _is_path(model):
        folder = path if path.is_dir() else path.parent
        what = f"{path} is a folder." if path.is_dir() else f"There is no file {path}."
        raise ModelNotFoundError(what + _models_in(folder))
    packaged = None if IN_BROWSER else _packaged(model)
    if packaged is not None and packaged.is_fetched:
        return FoundModel(packaged.name, packaged.path)
    try:
        found = (store or OllamaStore()).find(model)
    except ModelNotFoundError:
        if packaged is None:
            raise
        raise ModelNotFoundError(
            f"{packaged.title} is not on this machine yet: webgemma fetch {packaged.name}."
        ) from None
    return FoundModel(str(found.name), found.path, found)


def _packaged(name: str) -> "PackagedModel | None":
    """Return the model of packages that has this name."""
    from webgemma.packages import PACKAGED  # which a browser has no use for

    return PACKAGED.get(name)


def gpu_nbytes(gguf: Gguf) -> tuple[int, int]:
    """Return what a model takes of a GPU's memory with the default context.

    The second number leaves the table of per-layer embeddings in the file. GgufError if the model
    cannot run."""
    config = Config.from_gguf(gguf)
    context = min(config.context, DEFAULT_CONTEXT)
    budget = MemoryBudget.of(gguf, config, context, kv="f16")
    return budget.nbytes("device"), budget.nbytes("host")


def _find_source(model: Any) -> FoundModel:
    """Return a model that is not named: a Source or, in a browser, a File, Blob or handle."""
    if isinstance(model, Gguf):  # of the page, which has read the header
        return FoundModel(model.name, None, gguf=model)
    if all(hasattr(model, part) for part in ("name", "nbytes", "read")):
        suspends = not IN_BROWSER and not isinstance(model, FileSource | BytesSource)

        async def source() -> Source:
            return LoopSource(model) if suspends else model

        return FoundModel(model.name, None, source=source)
    if IN_BROWSER and (hasattr(model, "slice") or hasattr(model, "getFile")):
        from webgemma.gguf.browser import open_file

        return FoundModel(getattr(model, "name", "a file"), None, source=lambda: open_file(model))
    raise InputError(
        f"{shown(model)} is not a model: give an Ollama name, a path, an address, or a Source."
    )


async def _open_address(url: str) -> Source:
    if IN_BROWSER:
        from webgemma.gguf.browser import open_address

        return await open_address(url)
    if not has_event_loop():
        raise needs_await(url)
    from webgemma.gguf.http import HttpSource  # opening a local model does not need it

    return LoopSource(await on_event_loop(HttpSource.open(url)))


def _is_path(text: str) -> bool:
    return text.endswith(".gguf") or text.startswith((".", "/", "~")) or "\\" in text


def _models_in(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.glob("*.gguf"))
    except OSError:
        names = []
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f" That folder has: {shown}."
