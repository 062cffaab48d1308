"""Where a model is: an Ollama name, a path, an address, or nothing for the bundled one."""

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit

from webgemma.errors import InputError, ModelNotFoundError
from webgemma.gguf.ollama import OllamaModel, OllamaStore
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import Source

BUNDLED = "the bundled model"
BUNDLED_PATH = Path(__file__).parent / "demo" / "webgemma-demo-Q8_0.gguf"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that exists: a file, perhaps with what Ollama's store says about it."""

    label: str
    path: Path | None  # None: it is what `source` opens
    ollama: OllamaModel | None = None
    source: Callable[[], Awaitable[Source]] | None = None
    mmproj: "FoundModel | None" = None

    def projectors(self) -> "tuple[FoundModel, ...]":
        """Files of its towers: the one that was named, else those of Ollama's manifest."""
        if self.mmproj is not None:
            return (self.mmproj,)
        paths = self.ollama.projectors if self.ollama else ()
        return tuple(FoundModel(path.name, path) for path in paths)

    async def aopen(self) -> Gguf:
        """As `open`; a source may make us wait."""
        return self.open() if self.source is None else await Gguf.aopen(await self.source())

    def open(self) -> Gguf:
        """Open its file (and, of a split model, all of them)."""
        if self.path is None:
            raise not_at_once(self.label)
        return Gguf.open(self.path)


def with_mmproj(
    found: FoundModel, mmproj: "str | os.PathLike[str] | Source | Any | None"
) -> FoundModel:
    """The model with the file of its towers, which must be there."""
    if mmproj is None:
        return found
    if isinstance(mmproj, str | os.PathLike) and not is_address(mmproj):
        path = Path(mmproj).expanduser()
        if not path.is_file():
            raise ModelNotFoundError(f"There is no file {path}." + _models_in(path.parent))
        return replace(found, mmproj=FoundModel(path.name, path))
    return replace(found, mmproj=find_model(mmproj))


def is_address(model: Any) -> TypeGuard[str]:
    """Whether a model is meant that is on a web server."""
    return isinstance(model, str) and model.startswith(("http://", "https://"))


def not_at_once(label: str) -> InputError:
    """The sentence for an address where nothing can wait for a server."""
    return InputError(
        f"{label} is on a server: `await Gemma.aload(…)` reads it there; here, download it and "
        "name the file."
    )


def find_model(
    model: "str | os.PathLike[str] | Source | Any | None", store: OllamaStore | None = None
) -> FoundModel:
    """The model that a user means; ModelNotFoundError says what there is instead."""
    if model is None:
        return FoundModel(BUNDLED, BUNDLED_PATH)
    if is_address(model):
        name = unquote(PurePosixPath(urlsplit(model).path).name) or model
        return FoundModel(name, None, source=lambda: _open_address(model))
    if not isinstance(model, str | os.PathLike):
        return _found_source(model)
    path = Path(model).expanduser()
    if path.is_file():
        return FoundModel(path.name, path)
    if not isinstance(model, str) or _looks_like_a_path(model):
        folder = path if path.is_dir() else path.parent
        what = f"{path} is a folder." if path.is_dir() else f"There is no file {path}."
        raise ModelNotFoundError(what + _models_in(folder))
    found = (store or OllamaStore()).find(model)
    return FoundModel(str(found.name), found.path, found)


def _found_source(model: Any) -> FoundModel:
    """Something else than a name: a Source, or in a browser a File, a Blob or a handle of one."""
    if all(hasattr(model, part) for part in ("name", "nbytes", "read")):

        async def source() -> Source:
            found: Source = model
            return found

        return FoundModel(model.name, None, source=source)
    if sys.platform == "emscripten" and (hasattr(model, "slice") or hasattr(model, "getFile")):
        from webgemma.gguf.browser import open_file

        return FoundModel(getattr(model, "name", "a file"), None, source=lambda: open_file(model))
    raise InputError(
        f"{model!r} is no model: give an Ollama name, a path, an address, or a Source to read from."
    )


async def _open_address(url: str) -> Source:
    if sys.platform == "emscripten":
        from webgemma.gguf.browser import open_address

        return await open_address(url)
    from webgemma.gguf.http import HttpSource

    return await HttpSource.open(url)


def _looks_like_a_path(text: str) -> bool:
    return text.endswith(".gguf") or text.startswith((".", "/", "~")) or "\\" in text


def _models_in(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.glob("*.gguf"))
    except OSError:
        names = []
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f" There: {shown}."
