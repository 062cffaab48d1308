"""Kernels: hand-written WGSL, linked from ops, weight formats and the providers of their slots."""

from webgemma.kernels.host_struct import HostStruct, Value, host_struct
from webgemma.kernels.linker import Linker, Program, link, unit
from webgemma.kernels.wgsl_file import WgslFile, names_in, read_file

__all__ = [
    "HostStruct",
    "Linker",
    "Program",
    "Value",
    "WgslFile",
    "host_struct",
    "link",
    "names_in",
    "read_file",
    "unit",
]
