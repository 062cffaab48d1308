"""Calls of a WebGPU library: its objects, its answers, and its errors, raised where they arise.

wgpu-native and Dawn have the same C functions (webgpu.h); wgpu-py has declared them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import local
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from wgpu.backends.wgpu_native import ffi  # type: ignore[import-untyped]

from webgemma.device.forks import check_process, is_forked
from webgemma.errors import DeviceError, DeviceLostError

UNKNOWN_LENGTH = 2 * 0x7FFFFFFF  # a string view with more ends with a zero


def text(view: Any) -> str:
    """Return the text of a library's string."""
    if not view.data:
        return ""
    known = view.length <= UNKNOWN_LENGTH
    raw: bytes = ffi.string(view.data, view.length) if known else ffi.string(view.data)
    lines = raw.decode(errors="replace").splitlines()
    return "\n".join(line.rstrip() for line in lines)


def set_text(view: Any, value: str) -> Any:
    """Give a library a text; it must be kept as long as the library may read it."""
    kept = ffi.new("char[]", value.encode())
    view.data, view.length = kept, len(kept) - 1
    return kept


class Handle:
    """An object of a library, released when Python drops it."""

    __slots__ = ("_release", "raw")

    def __init__(self, raw: Any, release: Callable[[Any], None]) -> None:
        self.raw = raw
        self._release = release

    def __del__(self, is_forked: Callable[[], bool] = is_forked) -> None:
        if self.raw and not is_forked():
            self._release(self.raw)


class Answer(NamedTuple):
    """What a library answers to a request."""

    status: int
    raw: Any = None
    message: str = ""


_numbers = count(1)  # of requests and devices, as the library gives them back
_answers: dict[int, Answer] = {}  # by the number of the request
_devices: WeakValueDictionary[int, DeviceErrors] = WeakValueDictionary()
_here = local()  # .messages: this thread's errors; .interrupt: what a callback could not raise


def new_request(info: Any) -> int:
    """Number a request; `info` is its callback info."""
    number = next(_numbers)
    info.userdata1 = ffi.cast("void *", number)
    return number


def is_answered(number: int) -> bool:
    """Return whether a request has its answer."""
    return number in _answers


def take_answer(number: int) -> Answer:
    """Return the answer to a request, once; its status is 0 if there is none."""
    return _answers.pop(number, Answer(0))


def _keep(_type: type[BaseException], error: BaseException, traceback: TracebackType) -> None:
    """Finish a callback that was interrupted; `DeviceErrors.raised` raises the exception.

    Libraries call back inside a poll, where Ctrl-C is often noticed, and would drop it."""
    given = traceback.tb_frame.f_locals
    number = int(ffi.cast("intptr_t", given["number"]))
    if "status" in given:
        _answers[number] = Answer(given["status"], given.get("raw"))
    elif number in _devices:
        _devices[number].add("an error", lost="reason" in given)
    _here.interrupt = error


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", onerror=_keep)  # type: ignore[untyped-decorator]
def on_mapped(status: int, message: Any, number: Any, _: Any) -> None:
    """Store the answer about a buffer that was to be mapped."""
    _answers[int(ffi.cast("intptr_t", number))] = Answer(status, None, text(message))


@ffi.callback(  # type: ignore[untyped-decorator]
    "void(WGPURequestAdapterStatus, WGPUAdapter, WGPUStringView, void *, void *)", onerror=_keep
)
def on_adapter(status: int, raw: Any, message: Any, number: Any, _: Any) -> None:
    """Store the answer to a request for an adapter."""
    _answers[int(ffi.cast("intptr_t", number))] = Answer(status, raw, text(message))


@ffi.callback(  # type: ignore[untyped-decorator]
    "void(WGPURequestDeviceStatus, WGPUDevice, WGPUStringView, void *, void *)", onerror=_keep
)
def on_device(status: int, raw: Any, message: Any, number: Any, _: Any) -> None:
    """Store the answer to a request for a device."""
    _answers[int(ffi.cast("intptr_t", number))] = Answer(status, raw, text(message))


@ffi.callback(  # type: ignore[untyped-decorator]
    "void(WGPUDevice const *, WGPUErrorType, WGPUStringView, void *, void *)", onerror=_keep
)
def _on_error(_device: Any, _kind: int, message: Any, number: Any, _: Any) -> None:
    if errors := _devices.get(int(ffi.cast("intptr_t", number))):
        errors.add(text(message))


@ffi.callback(  # type: ignore[untyped-decorator]
    "void(WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView, void *, void *)", onerror=_keep
)
def _on_lost(_device: Any, reason: int, message: Any, number: Any, _: Any) -> None:
    if errors := _devices.get(int(ffi.cast("intptr_t", number))):
        errors.add(text(message) or str(reason), lost=True)


class _Refused(Exception):  # noqa: N818
    """The library has reported an error: `raised` knows which."""


class DeviceErrors:
    """The errors that a library reports about one device."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = next(_numbers)
        self._lost = False
        self._stray: list[str] = []  # reported while this thread was in no `raised` block
        _devices[self._number] = self

    def listen(self, descriptor: Any) -> None:
        """Have the library report the errors of a device that will be requested."""
        number = ffi.cast("void *", self._number)
        error, lost = descriptor.uncapturedErrorCallbackInfo, descriptor.deviceLostCallbackInfo
        error.callback, error.userdata1 = _on_error, number
        lost.callback, lost.userdata1 = _on_lost, number
        lost.mode = 3  # WGPUCallbackMode_AllowSpontaneous

    def add(self, message: str, *, lost: bool = False) -> None:
        """Store an error, for the thread that made the call."""
        self._lost |= lost or "device is lost" in message
        lines = [line for line in message.splitlines() if not line.startswith("    at ")]
        message = "\n".join(lines)  # without the places in Dawn's source
        messages = getattr(_here, "messages", None)
        (self._stray if messages is None else messages).append(message)

    @contextmanager
    def raised(self, otherwise: Callable[[str], DeviceError] | None = None) -> Iterator[None]:
        """Raise what the library reports within: a lost device, else by `otherwise`.

        Everything that calls the library does so here, or frees something."""
        check_process()
        outer, messages = getattr(_here, "messages", None), list[str]()
        _here.messages = messages
        try:
            yield
        except _Refused:
            pass
        finally:
            _here.messages = outer
        if interrupt := _here.__dict__.pop("interrupt", None):
            raise interrupt
        if self._stray:
            messages += self._stray
            self._stray.clear()
        if self._lost:
            raise DeviceLostError(
                f"{self._name} was lost: its driver was reset or the GPU was removed. "
                "Load the model again."
            )
        if messages:
            first = messages[0]
            raise otherwise(first) if otherwise else DeviceError(f"{self._name}: {first}")

    def made(self, raw: Any, release: Callable[[Any], None]) -> Handle:
        """Return what the library has made, unless it has reported an error; within `raised`."""
        handle = Handle(raw, release)
        if not raw:
            self.refuse("the library made nothing")
        if _here.messages:
            raise _Refused
        return handle

    def refuse(self, message: str) -> None:
        """Raise an error of our own; within `raised`."""
        _here.messages.append(message)
        raise _Refused
