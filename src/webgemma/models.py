"""Where a model is: an Ollama name, a path, or nothing for the bundled one."""

import os
from dataclasses import dataclass
from pathlib import Path

from webgemma.blocking import finish
from webgemma.errors import InputError, ModelNotFoundError
from webgemma.gguf.ollama import OllamaModel, OllamaStore
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource, Source
from webgemma.standin import standin_gguf

BUNDLED = "the bundled model"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that exists: a file, perhaps with what Ollama's store says about it."""

    label: str
    path: Path | None  # None: the bundled one
    ollama: OllamaModel | None = None
    source: Source | None = None  # instead of a path: what else can be read

    async def aopen(self) -> Gguf:
        """As `open`; a source may make us wait."""
        return self.open() if self.source is None else await Gguf.aopen(self.source)

    def open(self) -> Gguf:
        """Open its file (and, of a split model, all of them)."""
        if self.path is None:
            return finish(Gguf.aopen(BytesSource(standin_gguf(), BUNDLED)))
        return Gguf.open(self.path)


def find_model(
    model: str | os.PathLike[str] | Source | None, store: OllamaStore | None = None
) -> FoundModel:
    """The model that a user means; ModelNotFoundError says what there is instead."""
    if model is None:
        return FoundModel(BUNDLED, None)
    if not isinstance(model, str | os.PathLike):
        if not all(hasattr(model, part) for part in ("name", "nbytes", "read")):
            raise InputError(
                f"{model!r} is no model: give an Ollama name, a path, or a Source to read from."
            )
        return FoundModel(model.name, None, source=model)
    path = Path(model).expanduser()
    if path.is_file():
        return FoundModel(path.name, path)
    if not isinstance(model, str) or _looks_like_a_path(model):
        folder = path if path.is_dir() else path.parent
        what = f"{path} is a folder." if path.is_dir() else f"There is no file {path}."
        raise ModelNotFoundError(what + _models_in(folder))
    found = (store or OllamaStore()).find(model)
    return FoundModel(str(found.name), found.path, found)


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
