"""The GPUs of this machine, as wgpu-native and Dawn find them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from webgemma.device.dawn import Dawn
from webgemma.device.forks import check_process, mark_opened
from webgemma.device.library import ORDER, Adapter, Library
from webgemma.device.wgpu_native import WgpuNative
from webgemma.errors import DeviceError

LIBRARIES: dict[str, Callable[[], Library]] = {WgpuNative.key: WgpuNative, Dawn.key: Dawn}


@cache
def _opened(key: str) -> Library:
    return LIBRARIES[key]()


def list_gpus(key: str) -> list[Adapter]:
    """Return the GPUs that a library finds, the fastest kind first, software last.

    DeviceError if the library is not installed or cannot be used."""
    check_process()
    mark_opened()
    with _runtime_folder():
        return _opened(key).adapters()


def list_one(key: str) -> tuple[list[Adapter], list[str]]:
    """Return the GPUs that a library finds, and why there are no more, in sentences."""
    found = list_gpus(key)
    return found, _opened(key).problems(found)


def list_all() -> tuple[list[Adapter], list[str]]:
    """Return the GPUs of all libraries, the best one first, and why there are no more.

    Dawn is better where it reaches the matrix units of a GPU, else wgpu-native is."""
    every: list[Adapter] = []
    sentences = []
    for key in LIBRARIES:
        try:
            found, problems = list_one(key)
        except DeviceError as error:
            check_process()
            sentences.append(str(error))
        else:
            every += found
            sentences += problems
    return sorted(every, key=_rank), sentences


def _rank(gpu: Adapter) -> tuple[int, int]:
    dawn = isinstance(gpu.library, Dawn)
    matrices = dawn and bool(gpu.matrix_shapes) and not gpu.software
    return ORDER.index(gpu.kind), 0 if matrices else 1 + dawn


@contextmanager
def _runtime_folder() -> Iterator[None]:
    """Name a folder in XDG_RUNTIME_DIR, while GPUs are searched for.

    Without one, as in containers and notebooks, Wayland's library prints an error for each driver
    that looks for a display."""
    name = "XDG_RUNTIME_DIR"
    before = os.environ.get(name)
    if sys.platform != "linux" or (before or "").startswith("/"):
        yield
        return
    os.environ[name] = tempfile.gettempdir()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
