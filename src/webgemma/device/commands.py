"""Command buffers: recorded, submitted and awaited."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import thread_time
from typing import Any

from wgpu.backends.wgpu_native import ffi  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import lib as constants

from webgemma.device.calls import DeviceErrors, Handle
from webgemma.device.forks import is_forked
from webgemma.device.interface import Buffer, Plan
from webgemma.device.library import Library
from webgemma.errors import DeviceError
from webgemma.sync import checkpoint

REUSED_STAGING_NBYTES = 1 << 16  # staging buffers up to this size are reused
STAGING = constants.WGPUBufferUsage_CopyDst | constants.WGPUBufferUsage_MapRead


class Recording:
    """A plan as calls of the library, and a command buffer of it that was recorded ahead."""

    __slots__ = ("ahead", "calls", "dispatches", "runs")

    def __init__(self, plan: Plan) -> None:
        self.dispatches = plan.dispatches  # keeps alive what the calls point to
        self.calls = [(d.pipeline.handle.raw, d.group.handle.raw, *d.grid) for d in plan.dispatches]
        self.runs = 0
        self.ahead: Future[Any] | None = None


class Commands:
    """The queue of one device."""

    def __init__(
        self, library: Library, device: Any, queue: Any, errors: DeviceErrors, *, ahead: bool
    ) -> None:
        self._library = library
        self._lib = library.lib
        self._device = device
        self._queue = queue
        self._errors = errors
        self._ahead = ahead
        self.ahead_seconds = 0.0  # of work of the recording thread
        with errors.raised():
            self._probe = self.new_buffer(4, constants.WGPUBufferUsage_CopyDst)
        self._thread = ThreadPoolExecutor(1, "webgemma-recorder")
        self._last: Future[Any] | None = None  # the last job of the recording thread
        self._staging: dict[int, list[Handle]] = {}

    def new_buffer(self, nbytes: int, usage: int, label: Any = None) -> Handle:
        """Return a buffer of the library; within `raised`."""
        descriptor = ffi.new("WGPUBufferDescriptor *")
        descriptor.size, descriptor.usage = nbytes, usage
        if label is not None:
            descriptor.label = label
        raw = self._lib.wgpuDeviceCreateBuffer(self._device, descriptor)
        return self._errors.made(raw, self._lib.wgpuBufferRelease)

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None) -> NativeReading | None:
        """Submit a plan and a copy of some bytes for the host.

        A plan never changes, so one that runs repeatedly is recorded by another thread while the
        GPU works on it."""
        recording = plan.ready
        if recording is None:
            recording = plan.ready = Recording(plan)
        ahead, recording.ahead = recording.ahead, None
        with self._errors.raised():
            commands = self._record(recording) if ahead is None else ahead.result()
        reading = self._submit([commands], read)
        recording.runs += 1
        if self._ahead and plan.ahead and recording.runs > 1:
            recording.ahead = self._last = self._thread.submit(self._record_ahead, recording)
        return reading

    def retire(self, plan: Plan, usable: bool) -> None:
        """Retire a plan that will not run again; `usable` if all the buffers it uses still exist.

        wgpu-native never frees the device of a command buffer that is not submitted, so one that
        was recorded ahead runs once more, unused."""
        recording, plan.ready = plan.ready, None
        if (
            is_forked()
            or recording is None
            or recording.ahead is None
            or recording.ahead.exception()
        ):
            return
        commands = recording.ahead.result()
        if usable:
            with suppress(DeviceError):  # the device is lost, with everything on it
                self.submit([commands])
        else:
            self._lib.wgpuCommandBufferRelease(commands)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> NativeReading:
        """Start reading bytes as they are when all submitted work is done."""
        reading = self._submit([], (buffer, offset, nbytes))
        assert reading is not None
        return reading

    def copy(self, source: Handle, at: int, target: Handle, nbytes: int, target_at: int = 0) -> Any:
        """Return a command buffer that copies between buffers; within `raised`."""
        encoder = self._lib.wgpuDeviceCreateCommandEncoder(self._device, ffi.NULL)
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(
            encoder, source.raw, at, target.raw, target_at, nbytes
        )
        return self._finish(encoder)

    def submit(self, commands: list[Any]) -> int:
        """Submit command buffers; return the submission's index, to wait for."""
        try:
            self.check()  # wgpu-native ends the process if something is submitted to a lost device
            with self._errors.raised():
                return self._library.submit(self._queue, commands)
        finally:
            for each in commands:
                self._lib.wgpuCommandBufferRelease(each)

    def check(self) -> None:
        """Raise DeviceError if the device is lost: an empty write fails then."""
        with self._errors.raised():
            self._lib.wgpuQueueWriteBuffer(self._queue, self._probe.raw, 0, ffi.NULL, 0)

    def fetch(self, staging: Handle, nbytes: int, index: int) -> bytes:
        """Return what a staging buffer holds when the submission with this index is done."""
        with self._errors.raised():
            if not self._library.map(self._device, staging.raw, nbytes, index):
                self._errors.refuse("it does not respond, and may have been lost.")
            mapped = self._lib.wgpuBufferGetConstMappedRange(staging.raw, 0, nbytes)
            data = bytes(ffi.buffer(mapped, nbytes))
            self._lib.wgpuBufferUnmap(staging.raw)
        return data

    def destroy(self, buffer: Handle) -> None:
        """Free the memory of a buffer at once."""
        self._lib.wgpuBufferDestroy(buffer.raw)

    def settle(self) -> None:
        """Wait for the recording thread, during whose work no buffer may be destroyed."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def close(self) -> None:
        """End the recording thread."""
        if not is_forked():
            self._thread.shutdown()
        self._staging.clear()

    def _record_ahead(self, recording: Recording) -> Any:
        start = thread_time()
        try:
            with self._errors.raised():
                return self._record(recording)
        finally:
            self.ahead_seconds += thread_time() - start

    def _record(self, recording: Recording) -> Any:
        lib, null = self._lib, ffi.NULL
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        encoder = lib.wgpuDeviceCreateCommandEncoder(self._device, null)
        compute = lib.wgpuCommandEncoderBeginComputePass(encoder, null)
        for pipeline, group, x, y, z in recording.calls:
            set_pipeline(compute, pipeline)
            set_group(compute, 0, group, 0, null)
            dispatch(compute, x, y, z)
        lib.wgpuComputePassEncoderEnd(compute)
        lib.wgpuComputePassEncoderRelease(compute)
        return self._finish(encoder)

    def _finish(self, encoder: Any) -> Any:
        try:
            return self._lib.wgpuCommandEncoderFinish(encoder, ffi.NULL)
        finally:
            self._lib.wgpuCommandEncoderRelease(encoder)

    def _submit(
        self, commands: list[Any], read: tuple[Buffer, int, int] | None
    ) -> NativeReading | None:
        if read is None:
            self.submit(commands)
            return None
        buffer, offset, nbytes = read
        free = self._staging.setdefault(nbytes, [])
        with self._errors.raised():
            staging = free.pop() if free else self.new_buffer(nbytes, STAGING)
            commands.append(self.copy(buffer.raw, offset, staging, nbytes))
        return NativeReading(self, staging, nbytes, self.submit(commands), free)


class NativeReading:
    """Bytes on their way: waiting blocks, so the coroutine never suspends."""

    __slots__ = ("_commands", "_free", "_index", "_nbytes", "_staging")

    def __init__(
        self, commands: Commands, staging: Handle, nbytes: int, index: int, free: list[Handle]
    ) -> None:
        self._commands = commands
        self._staging = staging
        self._nbytes = nbytes
        self._index = index
        self._free = free

    async def bytes(self) -> bytes:
        """Wait for them."""
        checkpoint()
        data = self._commands.fetch(self._staging, self._nbytes, self._index)
        if len(data) <= REUSED_STAGING_NBYTES:
            self._free.append(self._staging)
        else:
            self._commands.destroy(self._staging)
        return data
