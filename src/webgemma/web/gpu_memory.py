"""GPU memory: how much a model needs, from the header of its file, and how much is free."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from webgemma.device import Device
from webgemma.errors import DeviceMemoryError, WebgemmaError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import FileSource
from webgemma.graph import BufferPool
from webgemma.models import gpu_nbytes
from webgemma.sync import run_sync

LIST_SECONDS = 1.0  # to read headers for one listing; the remaining ones are read for the next
PROBE_NBYTES = 256 << 20  # of one buffer that `free_nbytes` allocates


@dataclass(frozen=True, slots=True)
class GpuSize:
    """GPU memory of a model with the default context; None where it is unknown."""

    nbytes: int | None = None  # with all weights on the GPU
    min_nbytes: int | None = None  # with the weights that may stay in the file left there
    problem: str | None = None  # why the file cannot be loaded as a model


class GpuSizes:
    """The GPU sizes of blobs; each header is read once."""

    def __init__(self) -> None:
        self._sizes: dict[str, GpuSize] = {}  # by digest
        self._deadline = 0.0

    def start_listing(self) -> None:
        """Allow LIST_SECONDS from now for reading headers."""
        self._deadline = time.monotonic() + LIST_SECONDS

    def of(self, digest: str, path: Path, name: str) -> GpuSize:
        """Return the size of a blob; an unknown one after the deadline of this listing."""
        if digest not in self._sizes and time.monotonic() < self._deadline:
            self._sizes[digest] = gpu_size(path, name)
        return self._sizes.get(digest, GpuSize())


def gpu_size(path: Path, name: str) -> GpuSize:
    """Return what the model at `path` needs, or why it cannot be loaded."""
    try:
        source = FileSource(path)
        source.name = name  # messages name the model, not the blob's digest
        with run_sync(Gguf.aopen(source)) as gguf:
            return GpuSize(*gpu_nbytes(gguf))
    except WebgemmaError as error:
        return GpuSize(problem=str(error))


async def free_nbytes(device: Device, requested_nbytes: int) -> int:
    """Return how many of the requested bytes the device can allocate.

    WebGPU does not report free memory, so buffers are allocated until one fails, then freed."""
    free = 0
    with BufferPool(device) as memory, suppress(DeviceMemoryError):
        small = memory.buffer(16, "small")
        while free < requested_nbytes:
            memory.buffer(PROBE_NBYTES, "probe")
            await device.read(small, 0, 4).bytes()  # browsers report missing memory late
            free += PROBE_NBYTES
    return min(free, max(0, requested_nbytes))
