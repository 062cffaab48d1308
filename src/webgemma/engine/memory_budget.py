"""How much of a device's memory a model needs, and whether it fits."""

from dataclasses import dataclass

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
    cache_nbytes: int
    context: int
    memory_gb: float | None = None  # that may be used

    @classmethod
    def of(
        cls, gguf: Gguf, config: Config, context: int, kv: str, memory_gb: float | None = None
    ) -> "MemoryBudget":
        """Return the budget of a model with a context."""
        table, weights = weights_nbytes(gguf, config)
        cache = config.kv_nbytes(context, element_nbytes=ELEMENT_NBYTES[kv])
        return cls(gguf.name, weights, table, cache, context, memory_gb)

    def nbytes(self, table: TableLocation) -> int:
        """Return the bytes with the table on the device, or in the file on the host."""
        kept = self.table_nbytes if table == "device" else 0
        return self.weights_nbytes + self.cache_nbytes + kept

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
            f"{in_file if self.table_nbytes else ''} and {gigabytes(self.cache_nbytes)} for a "
            f"cache of {self.context} tokens, but {available}; use a smaller model or "
            "quantisation, or a shorter context.",
            self.nbytes("host"),
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
