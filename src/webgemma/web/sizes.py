"""How much of a GPU's memory a model takes, from the header of its file."""

import time
from dataclasses import dataclass
from pathlib import Path

from webgemma.engine.opening import gpu_needs
from webgemma.errors import WebgemmaError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import FileSource
from webgemma.sync import run_sync

LIST_SECONDS = 1.0  # for the headers of one list; what is left waits for the next


@dataclass(frozen=True, slots=True)
class GpuSize:
    """With the usual context; None where it is not known."""

    nbytes: int | None = None  # with all of it on the GPU
    least_nbytes: int | None = None  # with what may stay in the file left there
    problem: str | None = None  # why no model can be made of the file


class GpuSizes:
    """The sizes of blobs, each header read once."""

    def __init__(self) -> None:
        self._known: dict[str, GpuSize] = {}  # by digest
        self._deadline = 0.0

    def begin(self) -> None:
        """A list begins: it may wait so long for headers in all."""
        self._deadline = time.monotonic() + LIST_SECONDS

    def of(self, digest: str, path: Path, name: str) -> GpuSize:
        """The size of a blob, unless the time for this list is over."""
        if digest not in self._known and time.monotonic() < self._deadline:
            self._known[digest] = gpu_size(path, name)
        return self._known.get(digest, GpuSize())


def gpu_size(path: Path, name: str) -> GpuSize:
    """What the file at `path` takes, or why nothing can be made of it."""
    try:
        source = FileSource(path)
        source.name = name  # a blob's own name tells people nothing
        with run_sync(Gguf.aopen(source)) as gguf:
            return GpuSize(*gpu_needs(gguf))
    except WebgemmaError as error:
        return GpuSize(problem=str(error))
