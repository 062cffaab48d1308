"""The embedding model of `webgemma index` and `ask`: found by name, loaded when it is needed."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Self

from webgemma.api import Gemma
from webgemma.cli.options import Device
from webgemma.cli.reply import note
from webgemma.cli.terminal import bytes_bar
from webgemma.embeddings import Texts
from webgemma.gemma.config import Config
from webgemma.models import FoundModel, find_model, needs_await
from webgemma.progress import Progress
from webgemma.search.embedding import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT = "embeddinggemma"
SAMPLES, SAMPLE_NBYTES = 64, 1 << 16  # of a file, for its fingerprint


class ModelEmbedder:
    """A model that embeds texts; its fingerprint is known before it is loaded."""

    def __init__(
        self,
        name: str,
        device: Device,
        gpu: str | None,
        *,
        quiet: bool,
        before_loading: Callable[[], None] = lambda: None,
    ) -> None:
        """Find the model; ModelNotFoundError if there is none of this name.

        `before_loading` is called before a bar shows that it is loaded, unless it is `quiet`."""
        found = find_model(name)
        if found.path is None:
            raise needs_await(found.label)
        self.name = name if found.ollama else str(found.path.resolve())  # from any folder
        self.fingerprint = file_fingerprint(found.path)
        self._found = found
        self._device, self._gpu, self._quiet = device, gpu, quiet
        self._before_loading = before_loading
        self._gemma: Gemma | None = None
        self._has_noted = False

    def embed(
        self, texts: Sequence[str], task: Task, size: int, progress: Progress
    ) -> "NDArray[np.float32]":
        """Return a unit vector for each text: [texts, size]."""
        model = self._loaded()
        with _noted() as notes:  # of texts that are cut
            vectors = model.embed(texts, task=task, size=size, progress=progress)
        if not self._has_noted:  # once: there may be thousands
            _print(notes)
            self._has_noted = bool(notes)
        return vectors

    def close(self) -> None:
        """Free what the model holds."""
        if self._gemma is not None:
            self._gemma.close()
            self._gemma = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loaded(self) -> Gemma:
        if self._gemma is None:
            check_embeds(self._found)
            self._before_loading()
            bar = nullcontext() if self._quiet else bytes_bar("loading")
            with _noted() as notes, bar as show:
                self._gemma = Gemma.load(
                    self.name, self._device.value, gpu=self._gpu, progress=show
                )
            _print(notes)
        return self._gemma


@contextmanager
def _noted() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        yield notes


def _print(notes: Sequence[warnings.WarningMessage]) -> None:
    for warning in notes:
        note(str(warning.message))


def check_embeds(found: FoundModel, size: int | None = None) -> Config:
    """Return what a model's file says of it; InputError if it does not embed so."""
    with found.open() as gguf:
        config = Config.from_gguf(gguf)
    Texts(found.label, config, None, config.context).size(size)
    return config


def file_fingerprint(path: Path) -> str:
    """Return a digest of a file's size and of samples all over it, which takes a moment."""
    nbytes = path.stat().st_size
    digest = hashlib.sha256(f"{nbytes}\n".encode())
    last = max(0, nbytes - SAMPLE_NBYTES)
    with path.open("rb") as file:
        for at in range(SAMPLES + 1):
            file.seek(last * at // SAMPLES)
            digest.update(file.read(SAMPLE_NBYTES))
    return digest.hexdigest()
