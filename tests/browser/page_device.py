"""A Device whose GPU is Chromium's: what tests of kernels compute natively, they compute there.

What is asked for waits in a list and crosses to the page when bytes are read."""

import atexit
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from browser.chromium import launched
from browser.serving import serving

import webgemma.device
from webgemma.device import Buffer, Kernel, Limits, Plan
from webgemma.device.subgroups import shuffles
from webgemma.sync import run_sync

REPLAY = Path(webgemma.device.__file__).parent / "replay.js"
AT_ONCE = 500  # commands that wait at most
INLINE_NBYTES = 1 << 16  # more bytes are fetched: playwright takes minutes over long arguments

Thing = dict[str, int]


class Wire:
    """Sends commands to the page and brings bytes back."""

    def __init__(self, page: Any, served: dict[str, bytes | Path]) -> None:
        self.page = page
        self._served = served
        self._numbers = count()
        self._waiting: list[tuple[int, str, tuple[Any, ...]]] = []

    def send(self, method: str, *given: Any) -> Thing:
        """Ask for something; gives what stands for the result."""
        number = next(self._numbers)
        self._waiting.append((number, method, given))
        if len(self._waiting) > AT_ONCE:
            self.flush()
        return {"thing": number}

    def flush(self) -> None:
        """Have everything done that was asked for."""
        waiting, self._waiting = self._waiting, []
        self.page.evaluate("(commands) => perform(commands)", waiting)
        for name in [name for name in self._served if name.startswith("bytes/")]:
            del self._served[name]

    def given(self, data: Any) -> dict[str, str]:
        """What stands for bytes in a command."""
        if len(data) <= INLINE_NBYTES:
            return {"base64": b64encode(data).decode()}
        name = f"bytes/{next(self._numbers)}"
        self._served[name] = bytes(data)
        return {"address": name}

    def read(self, thing: Thing) -> bytes:
        """The bytes that a run has promised."""
        self.flush()
        return b64decode(self.page.evaluate("(number) => read(number)", thing["thing"]))


@cache
def wire() -> Wire:
    """One page for all tests."""
    stack = ExitStack()
    atexit.register(stack.close)
    served: dict[str, bytes | Path] = {"replay.js": REPLAY}
    origin = stack.enter_context(serving(served))
    page = stack.enter_context(launched()).new_page()
    page.goto(f"{origin}/device.html")
    page.wait_for_function("document.title == 'ready'")
    return Wire(page, served)


class PageReading:
    """Bytes on their way."""

    def __init__(self, wire: Wire, thing: Thing) -> None:
        self._wire = wire
        self._thing = thing

    async def bytes(self) -> bytes:
        """Wait for them."""
        return self._wire.read(self._thing)


class PageDevice:
    """replay.js in a page, without some features if asked."""

    recording_seconds = 0.0
    unified = False
    matrix_shapes = ()
    subgroup_sizes = (0, 0)

    def __init__(self, without: frozenset[str] = frozenset()) -> None:
        self._wire = wire()
        facts = self._wire.page.evaluate("() => facts()")
        self.name, self.software = facts["name"], facts["software"]
        self.features = frozenset(facts["features"].split()) | {"packed-dots"}
        self.features -= without
        limits = facts["limits"]
        self.limits = Limits(
            binding_nbytes=limits["maxStorageBufferBindingSize"],
            buffer_nbytes=limits["maxBufferSize"],
            workgroup_nbytes=limits["maxComputeWorkgroupStorageSize"],
            workgroup_threads=limits["maxComputeInvocationsPerWorkgroup"],
            grid=limits["maxComputeWorkgroupsPerDimension"],
        )
        self._pipelines: dict[Kernel, tuple[Thing, str]] = {}
        self.nbytes = 0
        if "subgroups" in self.features:
            self.features |= {"enable-subgroups"}
            self.features |= run_sync(shuffles(self)) - without

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        nbytes += -nbytes % 16
        self.nbytes += nbytes
        return Buffer(self._wire.send("buffer", nbytes, label, 0), nbytes)

    def write(self, buffer: Buffer, data: Any, offset: int = 0) -> None:
        self._wire.send("write", buffer.raw, offset, self._wire.given(data))

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> PageReading:
        size = buffer.nbytes - offset if nbytes is None else nbytes
        return PageReading(self._wire, self._wire.send("run", [], buffer.raw, offset, size))

    def copy(
        self, source: Buffer, target: Buffer, nbytes: int, at: int = 0, target_at: int = 0
    ) -> None:
        self._wire.send("copy", source.raw, at, target.raw, target_at, nbytes)

    def pipeline(self, kernel: Kernel) -> tuple[Thing, str]:
        if kernel not in self._pipelines:
            kinds = " ".join(kernel.bindings)
            made = self._wire.send("pipeline", kernel.name, kernel.wgsl, kinds)
            self._pipelines[kernel] = made, kinds
        return self._pipelines[kernel]

    async def compiled(self) -> None:
        """The page waits for it itself."""

    def bind(self, pipeline: Any, buffers: Sequence[tuple[Buffer, int, int]]) -> Thing:
        parts = [each for buffer, *where in buffers for each in (buffer.raw, *where)]
        return self._wire.send("bind", pipeline[1], *parts)

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> PageReading | None:
        if plan.ready is None:
            calls = [(d.pipeline[0], d.group, *d.grid) for d in plan.dispatches]
            plan.ready = self._wire.send("keep", [each for call in calls for each in call])
        if read is None:
            self._wire.send("run", plan.ready)
            return None
        buffer, offset, nbytes = read
        thing = self._wire.send("run", plan.ready, buffer.raw, offset, nbytes)
        return PageReading(self._wire, thing)

    def retire(self, plan: Plan) -> None:
        plan.ready = None

    def free(self, buffer: Buffer) -> None:
        self.nbytes -= buffer.nbytes
        self._wire.send("destroy", buffer.raw)

    def close(self) -> None:
        """The page is everybody's."""
