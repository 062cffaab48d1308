"""WebGPU in a browser: Python in Pyodide drives replay.js."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyodide.ffi import JsException, to_js  # type: ignore[import-not-found]

from webgemma.device.interface import Buffer, Kernel, Limits, MatrixShape, Plan
from webgemma.device.subgroups import shuffles
from webgemma.device.trials import matrix_products
from webgemma.errors import DeviceError, DeviceLostError, DeviceMemoryError
from webgemma.javascript import script

NO_GPU = (
    "This browser offers no GPU: use a browser with WebGPU (a current Chrome, Edge, Safari or "
    "Firefox), switch hardware acceleration on, and open the page over https or from localhost."
)


@dataclass(frozen=True, slots=True)
class BrowserPipeline:
    """A compute pipeline and what it binds."""

    raw: Any
    kinds: str


async def open_browser(*, software: bool = True) -> BrowserDevice:
    """Open the browser's GPU; without `software`, one that is this machine's CPU does not count."""
    device = await _open(with_matrices=True)
    if device.software and not software:
        device.close()
        raise DeviceError(f"The only GPU of this browser is the CPU ({device.name}).")
    if device.matrix_shapes:
        device = await _with_right_matrices(device)
    if "subgroups" in device.features:
        device.features |= {"enable-subgroups"}
        device.features |= await shuffles(device)
    return device


async def _open(*, with_matrices: bool) -> BrowserDevice:
    try:
        gpu = await script(__package__, "replay.js", "openWebgemmaGpu")(with_matrices)
    except JsException as error:
        raise DeviceError(f"{NO_GPU} The browser reports: {error.message}") from error
    if gpu is None:
        raise DeviceError(NO_GPU)
    return BrowserDevice(gpu)


async def _with_right_matrices(device: BrowserDevice) -> BrowserDevice:
    """Return a device with the matrix shapes whose products are right.

    A device on which a trial fails cannot be used any more: then another one is opened."""
    shapes = await matrix_products(device)
    try:
        device.check()
    except DeviceError:
        device.close()
        return await _open(with_matrices=False)
    device.matrix_shapes = shapes
    if shapes:
        device.features |= {"subgroup-matrix"}
    return device


class BrowserDevice:
    """The `Gpu` of replay.js as a Device.

    A browser reports errors late: at the next call, or when bytes are awaited."""

    recording_seconds = 0.0  # no other thread records

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.name = f"{gpu.name} (WebGPU)"
        self.software: bool = gpu.software
        self.unified = False  # browsers do not report it
        numbers = gpu.matrixShapes.to_py()
        shapes = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        self.matrix_shapes: tuple[MatrixShape, ...] = tuple(MatrixShape(*shape) for shape in shapes)
        smallest, largest = gpu.subgroupSizes.to_py()
        self.subgroup_sizes: tuple[int, int] = (smallest, largest)
        self.features = frozenset(gpu.features.split())
        if gpu.vendor != "apple":
            self.features |= {"packed-dots"}
        self.limits = Limits(
            binding_nbytes=gpu.limits.maxStorageBufferBindingSize,
            buffer_nbytes=gpu.limits.maxBufferSize,
            workgroup_nbytes=gpu.limits.maxComputeWorkgroupStorageSize,
            workgroup_threads=gpu.limits.maxComputeInvocationsPerWorkgroup,
            grid=gpu.limits.maxComputeWorkgroupsPerDimension,
        )
        self.nbytes = 0  # of the buffers that are not freed
        self._pipelines: dict[Kernel, BrowserPipeline] = {}

    def buffer(self, nbytes: int, label: str = "") -> Buffer:
        """Allocate a buffer, zero at first; its size is rounded up to 16 bytes."""
        nbytes += -nbytes % 16
        if nbytes > self.limits.buffer_nbytes:
            raise DeviceMemoryError(
                f"The GPU has no {nbytes} bytes for {label} in one buffer.", self.nbytes
            )
        with self.errors():
            raw = self._gpu.buffer(nbytes, label, self.nbytes)
        self.nbytes += nbytes
        return Buffer(raw, nbytes)

    def write(self, buffer: Buffer, data: Any, offset: int = 0) -> None:
        """Copy bytes (a multiple of four), Python's or a JavaScript array, into a buffer."""
        with self.errors():
            self._gpu.write(buffer.raw, offset, data)

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> BrowserReading:
        """Start reading bytes as they are when all submitted work is done."""
        size = buffer.nbytes - offset if nbytes is None else nbytes
        with self.errors():
            return BrowserReading(self, self._gpu.run(to_js([]), buffer.raw, offset, size))

    def copy(
        self, source: Buffer, target: Buffer, nbytes: int, at: int = 0, target_at: int = 0
    ) -> None:
        """Copy bytes of a buffer, from `at` on, into another one, to `target_at`."""
        with self.errors():
            self._gpu.copy(source.raw, at, target.raw, target_at, nbytes)

    def pipeline(self, kernel: Kernel) -> BrowserPipeline:
        """Compile a kernel in the background, the same one only once."""
        pipeline = self._pipelines.get(kernel)
        if pipeline is None:
            kinds = " ".join(kernel.bindings)
            with self.errors():
                raw = self._gpu.pipeline(kernel.name, kernel.wgsl, kinds)
            pipeline = self._pipelines[kernel] = BrowserPipeline(raw, kinds)
        return pipeline

    async def compiled(self) -> None:
        """Wait until every requested kernel is compiled."""
        with self.errors():
            await self._gpu.compiled()

    def bind(self, pipeline: Any, buffers: Sequence[tuple[Buffer, int, int]]) -> Any:
        """Return a bind group over parts of buffers."""
        parts = [x for buffer, offset, nbytes in buffers for x in (buffer.raw, offset, nbytes)]
        with self.errors():
            return self._gpu.bind(pipeline.kinds, *parts)

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None = None) -> BrowserReading | None:
        """Submit the plan and, with it, reading some bytes."""
        if plan.ready is None:
            plan.ready = to_js(
                [x for d in plan.dispatches for x in (d.pipeline.raw, d.group, *d.grid)]
            )
        with self.errors():
            if read is None:
                self._gpu.run(plan.ready)
                return None
            buffer, offset, nbytes = read
            return BrowserReading(self, self._gpu.run(plan.ready, buffer.raw, offset, nbytes))

    def retire(self, plan: Plan) -> None:
        """Release JavaScript's form of a plan that will not run again."""
        plan.ready = None

    def free(self, buffer: Buffer) -> None:
        """Free a buffer at once."""
        buffer.raw.destroy()
        self.nbytes -= buffer.nbytes

    def close(self) -> None:
        """Close the device."""
        self._pipelines.clear()
        self._gpu.close()

    def check(self) -> None:
        """Raise DeviceError if something has gone wrong."""
        with self.errors():
            self._gpu.check()

    async def lost(self) -> DeviceLostError:
        """Wait until the device is lost, which is not when it is closed; return the error."""
        return self._loss(await self._gpu.lost)

    def _loss(self, reason: str) -> DeviceLostError:
        return DeviceLostError(
            f"{self.name} was lost: its driver was reset or the browser removed it ({reason}). "
            "Load the model again."
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate the browser's errors."""
        try:
            yield
        except JsException as error:
            if error.name == "lost":
                raise self._loss(error.message) from error
            if error.name == "memory":
                why = f"The GPU has no {error.message} beside {error.held}."
                raise DeviceMemoryError(why, error.held) from error
            raise DeviceError(f"{self.name}: {error.message}") from error


class BrowserReading:
    """Bytes on their way: the object with their promise that replay.js returns."""

    __slots__ = ("_device", "_reading")

    def __init__(self, device: BrowserDevice, reading: Any) -> None:
        self._device = device
        self._reading = reading

    async def bytes(self) -> bytes:
        """Wait for them; errors from before they were copied are raised here."""
        with self._device.errors():
            data = await self._reading.bytes
        self._device.check()
        result: bytes = data.to_bytes()
        return result
