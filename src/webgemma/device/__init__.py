"""The GPU: the Device protocol, implemented natively, in a browser, and without a GPU."""

from webgemma.device.interface import (
    Buffer,
    Device,
    Dispatch,
    Kernel,
    Limits,
    MatrixShape,
    Plan,
    Reading,
)
from webgemma.device.opening import aopen_device, open_device

__all__ = [
    "Buffer",
    "Device",
    "Dispatch",
    "Kernel",
    "Limits",
    "MatrixShape",
    "Plan",
    "Reading",
    "aopen_device",
    "open_device",
]
