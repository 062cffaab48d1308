"""How many objects a WebGPU library keeps for us, on all devices."""

import gc
from collections import Counter
from typing import Any

from wgpu.backends.wgpu_native import ffi, lib

from helpers.gpu import LIBRARY
from webgemma.device.calls import Handle
from webgemma.device.listing import _opened

_alive: Counter[str] = Counter()
_init, _del = Handle.__init__, Handle.__del__


def _kind(handle: Handle) -> str:
    """Return "Buffer" for a WGPUBuffer."""
    return ffi.typeof(handle.raw).cname.removeprefix("struct WGPU").removesuffix("Impl *")


def _counted_init(self: Handle, raw: Any, release: Any) -> None:
    _init(self, raw, release)
    _alive[_kind(self)] += 1


def _counted_del(self: Handle) -> None:
    _alive[_kind(self)] -= 1
    _del(self)


Handle.__init__, Handle.__del__ = _counted_init, _counted_del  # type: ignore[method-assign]


def object_counts() -> dict[str, int]:
    """Return how many buffers, pipelines, bind groups, … are alive.

    Dawn does not count them: those that Python has not released."""
    gc.collect()
    if LIBRARY == "dawn":
        return dict(_alive)
    report = ffi.new("WGPUGlobalReport *")
    lib.wgpuGenerateReport(_opened("wgpu").instance, report)
    kinds = [name for name in dir(report.hub) if name != "nextInChain"]
    return {
        kind[0].upper() + kind[1:-1]: getattr(report.hub, kind).numKeptFromUser for kind in kinds
    }
