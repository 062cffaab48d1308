"""Past one process and one machine, with Ray (the extra `ray`): batches of work, and replicas."""

from webgemma.distributed.jobs import BatchResult, batch

__all__ = ["BatchResult", "batch"]
