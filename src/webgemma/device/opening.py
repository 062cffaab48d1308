"""Opening a device: the best GPU of this machine, a named one, or the browser's."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from webgemma.device.interface import Device
from webgemma.device.trials import check_sums
from webgemma.errors import DeviceError
from webgemma.sync import IN_BROWSER, run_sync

if TYPE_CHECKING:
    from webgemma.device.library import Adapter

LIBRARIES = ("wgpu", "dawn")


def open_device(gpu: str | None = None, *, software: bool = True) -> Device:
    """Open the best GPU of this machine, or the one whose name contains `gpu`.

    `gpu` may also be "wgpu" or "dawn", for the best GPU of one library, or begin with "wgpu:" or
    "dawn:". Without it, a GPU that Dawn cannot open is opened by wgpu-native. Without `software`, a
    GPU that is this machine's CPU does not count."""
    found = find_gpus(gpu, software=software)
    while gpu is None and found[0].library.key == "dawn" and found[1:]:
        with suppress(DeviceError):  # `webgemma gpus` says why
            device = open_gpu(found[0])
            if device.matrix_shapes or found[0].kind != found[1].kind:
                return device
            device.close()  # its matrix units, the reason for Dawn, multiply wrongly
        found.pop(0)
    return open_gpu(found[0])


def find_gpus(gpu: str | None = None, *, software: bool = True) -> list[Adapter]:
    """Return the GPUs that `open_device` chooses from, the best one first; DeviceError for none."""
    library, _, name = (gpu or "").partition(":")
    if library.lower() in LIBRARIES:
        available, problems = _listing().list_one(library.lower())
    else:
        available, problems = list_all_gpus()
        name = gpu or ""
    found = [a for a in available if software or not a.software]
    found = [a for a in found if name.lower() in a.name.lower()]
    if not found:
        wanted = f" named {gpu!r}" if gpu else ""
        names = ", ".join(a.name for a in available) or "none at all"
        why = "".join(f" {problem}" for problem in problems) if gpu else ""
        raise DeviceError(f"There is no GPU{wanted} on this machine; WebGPU finds: {names}.{why}")
    return found


def list_all_gpus() -> tuple[list[Adapter], list[str]]:
    """Return the GPUs of all libraries, the best one first, and why there are no more."""
    found: tuple[list[Adapter], list[str]] = _listing().list_all()
    return found


def open_gpu(gpu: Adapter) -> Device:
    """Open one GPU, if it computes correctly."""
    from webgemma.device.native import NativeDevice

    device = NativeDevice(gpu)
    try:
        run_sync(check_sums(device))
    except DeviceError:
        device.close()
        raise
    return device


async def aopen_device(gpu: str | None = None, *, software: bool = True) -> Device:
    """Open a device natively or in a browser, which has one GPU and opens it asynchronously."""
    if IN_BROWSER:
        from webgemma.device.browser import open_browser

        return await open_browser(software=software)
    return open_device(gpu, software=software)


def _listing() -> Any:
    """Return the module that lists GPUs; DeviceError where wgpu-py is missing."""
    try:
        from webgemma.device import listing
    except ImportError as error:
        raise DeviceError(f"WebGPU is not installed ({error}): run `pip install wgpu`.") from error
    return listing
