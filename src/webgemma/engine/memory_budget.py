"""How much of a device's memory a model needs, and whether it fits."""

from dataclasses import dataclass, replace

from webgemma.engine.slots import LARGEST_CHUNK
from webgemma.errors import DeviceMemoryError
from webgemma.gemma.config import Config
from webgemma.gemma.kv_cache import ELEMENT_NBYTES
from webgemma.gemma.weights import TableLocation, weights_nbytes
from webgemma.gguf.reader import Gguf


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a model needs of a device's memory; a step works in some hundred megabytes more."""

    name: str
    weights_nbytes: int  # without the table of per-layer embeddings
    table_nbytes: int
    cache_nbytes: int  # of one conversation
    context: int
    memory_gb: float | None = None  # that may be used
    slots: int = 1  # conversations that have a cache each

    @classmethod
    def of(
        cls,
        gguf: Gguf,
        config: Config,
        context: int,
        kv: str,
        memory_gb: float | None = None,
        slots: int = 1,
        drafter: tuple[Gguf, Config] | None = None,
    ) -> "MemoryBudget":
        """Return the budget of a model with a context for each of some conversations."""
        table, weights = weights_nbytes(gguf, config)
        if drafter:
            weights += sum(weights_nbytes(*drafter))
        slots = 1 if config.diffusion or config.embedding else slots
        # Several slots are allocated for the largest image; one slot only if there is an image.
        chunk = {"chunk": LARGEST_CHUNK} if slots > 1 and config.bidirectional_images else {}
        cache = config.kv_nbytes(context, element_nbytes=ELEMENT_NBYTES[kv], **chunk)
        return cls(gguf.name, weights, table, cache, context, memory_gb, slots)

    def nbytes(self, table: TableLocation) -> int:
        """Return the bytes with the table on the device, or in the file on the host."""
        kept = self.table_nbytes if table == "device" else 0
        return self.weights_nbytes + self.slots * self.cache_nbytes + kept

    def fitting(self, nbytes: int, table: TableLocation) -> "MemoryBudget":
        """Return the budget with as many slots as so many bytes hold: at least one, never more."""
        room = nbytes - replace(self, slots=0).nbytes(table)
        return replace(self, slots=max(1, min(self.slots, room // max(1, self.cache_nbytes))))

    def table_location(self) -> TableLocation:
        """Return where memory_gb leaves the table; DeviceMemoryError if the rest is too much."""
        if self.memory_gb is None or self.nbytes("device") <= self.memory_gb * 1e9:
            return "device"
        if self.nbytes("host") > self.memory_gb * 1e9:
            raise self.refusal(f"memory_gb={self.memory_gb:g}")
        return "host"

    def refusal(self, available: str) -> DeviceMemoryError:
        """Return the error for a model that does not fit: what it needs, what there is."""
        in_file = f" (and {gigabytes(self.table_nbytes)} left in the file)"
        return DeviceMemoryError(
            f"{self.name} needs {gigabytes(self.weights_nbytes)} for weights"
            f"{in_file if self.table_nbytes else ''} and {self._caches()}, but {available}",
            self.nbytes("host"),
            f"use a smaller model or quantisation, {'fewer slots, ' * (self.slots > 1)}or a "
            "shorter context",
        )

    def described(self, table: TableLocation = "device", *, most: bool = False) -> str:
        """Return what weights and conversations take, in words, or (`most`) may take."""
        kept = self.table_nbytes if table == "device" else 0
        up_to = "up to " * (most and self.slots > 1)
        return f"{gigabytes(self.weights_nbytes + kept)} for weights and {up_to}{self._caches()}"

    def _caches(self) -> str:
        one = gigabytes(self.cache_nbytes)
        if self.slots == 1:
            return f"{one} for a cache of {self.context} tokens"
        together = gigabytes(self.slots * self.cache_nbytes)
        return (
            f"{together} for {self.slots} conversations at once (slots), each with a cache of "
            f"{self.context} tokens ({one})"
        )


def free_host_nbytes() -> int | None:
    """Return the memory that programs can still allocate, where the system reports it: Linux."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def gigabytes(nbytes: int) -> str:
    """Format a number of bytes."""
    return f"{nbytes / 1e9:.3g} GB"
