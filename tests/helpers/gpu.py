"""The GPU of the tests: a device, and tensors from numpy and back."""

import copy
import os
from functools import cache

import numpy as np
from browser.chromium import SWIFTSHADER

from webgemma.device.library import Adapter
from webgemma.device.listing import list_gpus
from webgemma.device.native import NativeDevice
from webgemma.graph import Tensor
from webgemma.sync import run_sync

LIBRARY = os.environ.get("WEBGEMMA_GPU", "wgpu")
if LIBRARY == "dawn" and not {"VK_ICD_FILENAMES", "VK_DRIVER_FILES"} & set(os.environ):
    # Dawn refuses the software GPU of older Mesas. It may be hardware: name its driver then.
    os.environ["VK_ICD_FILENAMES"] = SWIFTSHADER


@cache
def device(without: frozenset[str] = frozenset()) -> NativeDevice:
    """Return the first GPU of this machine (CI has a software one), without some features.

    With WEBGEMMA_GPU=chromium it is Chromium's, with WEBGEMMA_GPU=dawn Dawn's."""
    if LIBRARY == "chromium":
        from browser.page_device import PageDevice

        return PageDevice(without)
    return NativeDevice(first_gpu(LIBRARY), without)


def first_gpu(library: str) -> Adapter:
    """Return the first GPU that a library finds."""
    return list_gpus(library)[0]


@cache
def hardware() -> NativeDevice:
    """Return the same device, for which work is divided as for a hardware GPU."""
    same = copy.copy(device())  # with its compiled kernels
    same.software = False
    return same


def put(values: np.ndarray, on: NativeDevice | None = None) -> Tensor:
    """Upload an array."""
    data = np.ascontiguousarray(values)
    buffer = (on or device()).buffer(data.nbytes, "test")
    (on or device()).write(buffer, data.tobytes() + bytes(-data.nbytes % 4))
    return Tensor(data.shape, data.nbytes, buffer)


def get(tensor: Tensor, dtype: type = np.float32, on: NativeDevice | None = None) -> np.ndarray:
    """Read the array of a tensor."""
    nbytes = tensor.nbytes + -tensor.nbytes % 4
    data = run_sync((on or device()).read(tensor.buffer, tensor.offset, nbytes).bytes())
    return np.frombuffer(data[: tensor.nbytes], dtype).reshape(tensor.shape)
