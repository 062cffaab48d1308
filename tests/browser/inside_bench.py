"""Functions that bench/tab.py times inside the tab, in Pyodide's Python."""

import statistics
import time
from typing import Any

from inside import counting_plan, opened
from inside_files import large

from webgemma.graph import Tensor

rates = large


async def submitting(dispatches: int, rounds: int) -> dict[str, Any]:
    """Time submitting a plan of so many dispatches, and waiting for its result."""
    device = await opened()
    total = Tensor((4,), 16, device.buffer(16, "total"))
    plan = counting_plan(device, 1, total, dispatches)
    submits, waits = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        reading = device.run(plan, (total.buffer, 0, 4))
        submitted = time.perf_counter()
        assert reading is not None
        await reading.bytes()
        submits.append(submitted - start)
        waits.append(time.perf_counter() - submitted)
    device.close()
    return {
        "submit_ms": statistics.median(submits) * 1e3,
        "submit_best_ms": min(submits) * 1e3,
        "wait_ms": statistics.median(waits) * 1e3,
    }
