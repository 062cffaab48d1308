"""What bench/tab.py has timed inside the tab, by Pyodide's Python."""

import statistics
import time
from typing import Any

from inside import COUNT, opened
from inside_files import large

from webgemma.device import Kernel
from webgemma.graph import Recorder, Tensor

rates = large


async def submitting(dispatches: int, rounds: int) -> dict[str, Any]:
    """How long the host takes to submit a plan of so many dispatches, and its result to come."""
    device = await opened()
    total = Tensor((4,), 16, device.buffer(16, "total"))
    recorder = Recorder(device)
    for _ in range(dispatches):
        recorder.call(Kernel("count", COUNT, ("uniform", "write")), (1,), [1], total)
    plan = recorder.plan()
    submits, waits = [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        reading = device.run(plan, (total.buffer, 0, 4))
        submitted = time.perf_counter()
        assert reading is not None
        await reading.bytes()
        submits.append(submitted - begun)
        waits.append(time.perf_counter() - submitted)
    device.close()
    return {
        "submit_ms": statistics.median(submits) * 1e3,
        "submit_best_ms": min(submits) * 1e3,
        "wait_ms": statistics.median(waits) * 1e3,
    }
