"""Opening a device: the best GPU of this machine, a named one, or the browser's."""

from webgemma.device.interface import Device
from webgemma.errors import DeviceError
from webgemma.sync import IN_BROWSER


def open_device(gpu: str | None = None, *, software: bool = True) -> Device:
    """Open the best GPU of this machine, or the one whose name contains `gpu`.

    Without `software`, a GPU that is this machine's CPU does not count."""
    try:
        from webgemma.device.native import NativeDevice, describe, list_gpus
    except ImportError as error:
        raise DeviceError(f"WebGPU is not installed ({error}): run `pip install wgpu`.") from error
    available = list_gpus()
    found = [a for a in available if software or a.info["adapter_type"] != "CPU"]
    if gpu is not None:
        found = [a for a in found if gpu.lower() in describe(a).lower()]
    if not found:
        wanted = f" named {gpu!r}" if gpu else ""
        names = ", ".join(map(describe, available)) or "none at all"
        raise DeviceError(f"There is no GPU{wanted} on this machine; WebGPU finds: {names}.")
    return NativeDevice(found[0])


async def aopen_device(gpu: str | None = None, *, software: bool = True) -> Device:
    """Open a device natively or in a browser, which has one GPU and opens it asynchronously."""
    if IN_BROWSER:
        from webgemma.device.browser import open_browser

        return await open_browser(software=software)
    return open_device(gpu, software=software)
