"""Command buffers of wgpu-native: recorded, submitted and awaited through its C functions.

wgpu-py's wrappers cost more than the work itself, and its poll thread blocks `submit` while it
waits for a buffer to be mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from threading import local
from time import monotonic, sleep, thread_time
from types import TracebackType
from typing import Any

import wgpu  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native import ffi, lib  # type: ignore[import-untyped]
from wgpu.backends.wgpu_native._api import libf  # type: ignore[import-untyped]

from webgemma.device.forks import check_process, is_forked
from webgemma.device.interface import Buffer, Plan
from webgemma.errors import DeviceError, DeviceLostError
from webgemma.sync import checkpoint

REUSED_STAGING_NBYTES = 1 << 16  # staging buffers up to this size are reused
MAP_TIMEOUT_SECONDS = 5.0
STAGING = wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ


_statuses: dict[int, int] = {}  # of buffers that were mapped, by the number of the request
_numbers = count(1)
_kept = local()  # .error: the exception that this thread's callback could not raise


def _keep(_type: type[BaseException], error: BaseException, traceback: TracebackType) -> None:
    """Finish a callback that was interrupted; the code that polls raises the exception."""
    given = traceback.tb_frame.f_locals
    _statuses[int(ffi.cast("intptr_t", given["number"]))] = given["status"]
    _kept.error = error


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", onerror=_keep)  # type: ignore[untyped-decorator]
def _mapped(status: int, _message: Any, number: Any, _: Any) -> None:
    """Store the status; the library calls this inside a poll, where Ctrl-C is often raised."""
    _statuses[int(ffi.cast("intptr_t", number))] = status


class Recording:
    """A plan as calls of the library, and a command buffer of it that was recorded ahead."""

    __slots__ = ("ahead", "calls", "dispatches", "runs")

    def __init__(self, plan: Plan) -> None:
        self.dispatches = plan.dispatches  # keeps alive what the calls point to
        self.calls = [
            (d.pipeline.raw._internal, d.group.raw._internal, *d.grid) for d in plan.dispatches
        ]
        self.runs = 0
        self.ahead: Future[Any] | None = None


class Commands:
    """The queue of one device."""

    def __init__(self, device: Any, name: str, *, ahead: bool) -> None:
        self._device = device
        self._ahead = ahead
        self.ahead_seconds = 0.0  # of work of the recording thread
        self._raw = device._internal
        self._queue = device.queue._internal
        self._name = name
        self._probe = device.create_buffer(size=4, usage=wgpu.BufferUsage.COPY_DST)
        self._thread = ThreadPoolExecutor(1, "webgemma-recorder")
        self._last: Future[Any] | None = None  # the last job of the recording thread
        self._staging: dict[int, list[Any]] = {}

    def run(self, plan: Plan, read: tuple[Buffer, int, int] | None) -> NativeReading | None:
        """Submit a plan and a copy of some bytes for the host.

        A plan never changes, so one that runs repeatedly is recorded by another thread while the
        GPU works on it."""
        recording = plan.ready
        if recording is None:
            recording = plan.ready = Recording(plan)
        ahead, recording.ahead = recording.ahead, None
        with self.errors():
            commands = self._record(recording) if ahead is None else ahead.result()
        reading = self._submit([commands], read)
        recording.runs += 1
        if self._ahead and plan.ahead and recording.runs > 1:
            recording.ahead = self._last = self._thread.submit(self._record_ahead, recording)
        return reading

    def retire(self, plan: Plan, usable: bool) -> None:
        """Retire a plan that will not run again; `usable` if all the buffers it uses still exist.

        The library never frees the device of a command buffer that is not submitted, so one that
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
                return
        lib.wgpuCommandBufferRelease(commands)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> NativeReading:
        """Start reading bytes as they are when all submitted work is done."""
        reading = self._submit([], (buffer, offset, nbytes))
        assert reading is not None
        return reading

    def copy(self, source: Any, at: int, target: Any, nbytes: int) -> Any:
        """Return a command buffer that copies between buffers of wgpu-py."""
        encoder = libf.wgpuDeviceCreateCommandEncoder(self._raw, ffi.NULL)
        libf.wgpuCommandEncoderCopyBufferToBuffer(
            encoder, source._internal, at, target._internal, 0, nbytes
        )
        return self._finish(encoder)

    def submit(self, commands: list[Any]) -> int:
        """Submit command buffers; return the submission's index, to wait for."""
        self.check()  # the library ends the process when something is submitted to a lost device
        index: int = libf.wgpuQueueSubmitForIndex(self._queue, len(commands), commands)
        for each in commands:
            lib.wgpuCommandBufferRelease(each)
        return index

    def check(self) -> None:
        """Raise DeviceError if the device is lost: an empty write fails then."""
        with self.errors():
            libf.wgpuQueueWriteBuffer(self._queue, self._probe._internal, 0, ffi.NULL, 0)

    def fetch(self, staging: Any, nbytes: int, index: int) -> bytes:
        """Return what a staging buffer holds when the submission with this index is done."""
        info, number = ffi.new("WGPUBufferMapCallbackInfo *"), next(_numbers)
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, _mapped
        info.userdata1 = ffi.cast("void *", number)
        submission = ffi.new("WGPUSubmissionIndex *", index)
        raw = staging._internal
        with self.errors():
            libf.wgpuBufferMapAsync(raw, lib.WGPUMapMode_Read, 0, nbytes, info[0])
            libf.wgpuDevicePoll(self._raw, True, submission)
            deadline = monotonic() + MAP_TIMEOUT_SECONDS
            while number not in _statuses and monotonic() < deadline:
                sleep(0)  # another thread's poll has the result and is about to store it
            if _statuses.pop(number, None) != lib.WGPUMapAsyncStatus_Success:
                raise DeviceError(f"{self._name} does not respond: it may have been lost.")
            data = bytes(ffi.buffer(lib.wgpuBufferGetConstMappedRange(raw, 0, nbytes), nbytes))
            libf.wgpuBufferUnmap(raw)
        if error := _kept.__dict__.pop("error", None):
            raise error
        return data

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

    @contextmanager
    def errors(
        self, otherwise: Callable[[wgpu.GPUError], DeviceError] | None = None
    ) -> Iterator[None]:
        """Translate the library's errors: a lost device, else by `otherwise`.

        Everything that calls the library does so here, or frees something."""
        check_process()
        try:
            yield
        except wgpu.GPUError as error:
            if "device is lost" in str(error):
                raise DeviceLostError(
                    f"{self._name} was lost: its driver was reset or the GPU was removed. "
                    "Load the model again."
                ) from error
            named = DeviceError(f"{self._name}: {error}")
            raise (otherwise(error) if otherwise else named) from error

    def _record_ahead(self, recording: Recording) -> Any:
        start = thread_time()
        try:
            return self._record(recording)
        finally:
            self.ahead_seconds += thread_time() - start

    def _record(self, recording: Recording) -> Any:
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        null = ffi.NULL
        encoder = libf.wgpuDeviceCreateCommandEncoder(self._raw, null)
        compute = libf.wgpuCommandEncoderBeginComputePass(encoder, null)
        for pipeline, group, x, y, z in recording.calls:
            set_pipeline(compute, pipeline)
            set_group(compute, 0, group, 0, null)
            dispatch(compute, x, y, z)
        libf.wgpuComputePassEncoderEnd(compute)
        lib.wgpuComputePassEncoderRelease(compute)
        return self._finish(encoder)

    def _finish(self, encoder: Any) -> Any:
        try:
            return libf.wgpuCommandEncoderFinish(encoder, ffi.NULL)
        finally:
            lib.wgpuCommandEncoderRelease(encoder)

    def _submit(
        self, commands: list[Any], read: tuple[Buffer, int, int] | None
    ) -> NativeReading | None:
        if read is None:
            self.submit(commands)
            return None
        buffer, offset, nbytes = read
        free = self._staging.setdefault(nbytes, [])
        with self.errors():
            staging = free.pop() if free else self._device.create_buffer(size=nbytes, usage=STAGING)
            commands.append(self.copy(buffer.raw, offset, staging, nbytes))
        return NativeReading(self, staging, nbytes, self.submit(commands), free)


class NativeReading:
    """Bytes on their way: waiting blocks, so the coroutine never suspends."""

    __slots__ = ("_commands", "_free", "_index", "_nbytes", "_staging")

    def __init__(
        self, commands: Commands, staging: Any, nbytes: int, index: int, free: list[Any]
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
            self._staging.destroy()
        return data
